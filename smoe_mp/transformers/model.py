"""A model class whose routed experts are never allocated.

`from_pretrained` builds the model on the meta device and then loads what parameters it finds.  The class made
here strips the experts' parameters at the end of its `__init__`, that is before anything has memory, and so
their tensors are not looked for.  What cannot be put in the parameters' place stops the load right there:
there is no way from here to a full load.

The class keeps the name and module of the family's own, by which transformers finds weight conversions, and
refuses what streamed experts cannot do: training, saving, another dtype, another device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from smoe_mp.errors import ModelError
from smoe_mp.ring import Ring
from smoe_mp.sources.base import ExpertTable, Source, Tensor
from smoe_mp.transformers.experts import IMPLEMENTATION, ExpertLayer, Stream, StreamedWeight, recipe_for

__all__ = ["bind", "ring_of", "streamed_class"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ROUTERS = ("gate", "router")


def streamed_class(cls: Any, source: Source) -> Any:
    """A subclass of the model class `cls` whose experts are those of `source`, to be bound to a ring."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        _strip(self, source)

    names = {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, **_overrides(cls)})


def bind(model: Any, ring: Ring, look_ahead: int = 0) -> None:
    """Let the experts of a model of `streamed_class` come from `ring`; `look_ahead`: how many of the next
    layer's are guessed.

    Parameters go on requiring gradients, although none can be had: torch.matmul chooses its kernel by that,
    and results would differ in their last bits from the resident model's.
    """
    model._smoe_stream.bind(ring)
    model._smoe_stream.look_ahead = look_ahead
    layers = [layer for _, layer in sorted(model._smoe_layers.items())]
    for layer, following in pairwise(layers):
        layer.next = following
    if ring.speculation_ranks or look_ahead:
        for layer in layers:
            _watch_router(model, layer)


def ring_of(model: Any) -> Ring:
    """The ring that a model of `load` has its experts from: for `stats()` and the like."""
    stream = getattr(model, "_smoe_stream", None)
    if stream is None:
        raise ModelError(f"{type(model).__name__}: not a model that smoe_mp.transformers.load gave")
    ring: Ring = stream.ring
    return ring


# --- stripping ---------------------------------------------------------------------------------------------


def _strip(model: Any, source: Source) -> None:
    """Put streamed weights in the place of the experts' parameters, each with its recipe."""
    experts = _Experts(source)
    stream, layers = Stream(), {}
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] == "experts" and "_experts_implementation" in _config_of(module):
            layer = _strip_module(stream, name, module, experts)
            layers[layer.number] = layer
    experts.check_layers(type(model).__name__, set(layers))
    model.__dict__["_smoe_stream"], model.__dict__["_smoe_layers"] = stream, layers
    stripped = {w.name for layer in layers.values() for w in layer.weights.values()}
    ignored = {re.escape(name) + "$" for name in stripped}
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | ignored


def _config_of(module: Any) -> Mapping[str, Any]:
    """The configuration by which a decorated experts module chooses its implementation; {}: there is none."""
    config = getattr(module, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    return {} if implementation is None else {"_experts_implementation": implementation}


def _strip_module(stream: Stream, name: str, module: Any, experts: _Experts) -> ExpertLayer:
    found = _LAYER.search(name)
    if found is None:
        raise ModelError(
            f"{name}: an experts module that is in no layer; this transformers is not known here"
        )
    if module.config._experts_implementation != IMPLEMENTATION:
        raise ModelError(
            f"{name}: its experts implementation is {module.config._experts_implementation!r}, not"
            f" {IMPLEMENTATION!r}: the hook did not take, and the experts would all be loaded"
        )
    layer = ExpertLayer(stream, int(found[1]), name)
    for parameter, value in list(module._parameters.items()):
        if value is None or value.ndim < 2:
            continue
        if not parameter.removesuffix("_bias").endswith("_proj"):
            raise ModelError(
                f"{name}.{parameter}: not known here, and its {list(value.shape)} would be allocated: another"
                " transformers than those of docs/transformers.md?"
            )
        if value.dtype not in _DTYPES:
            raise ModelError(
                f"{name}.{parameter}: {value.dtype}: wanted is one of {', '.join(map(str, _DTYPES))}"
            )
        weight = StreamedWeight(layer, f"{name}.{parameter}", value)
        weight.recipe = experts.recipe(layer.number, module, parameter, weight)
        layer.weights[parameter] = weight
        del module._parameters[parameter]
        module.__dict__[parameter] = weight
    if not layer.weights:
        raise ModelError(f"{name}: no parameters that could be streamed; this transformers is not known here")
    module.__dict__["_smoe_layer"] = layer
    module._is_hf_initialized = True  # there is nothing left of it to initialise
    return layer


class _Experts:
    """The source's experts by layer: how many, and of which layouts."""

    def __init__(self, source: Source) -> None:
        table = ExpertTable.of(source.experts)
        self._path = source.path
        self._layouts = source.layouts
        self._of_layer: dict[int, tuple[int, set[int]]] = {}
        for layer, layout in zip(table.layer.tolist(), table.layout.tolist(), strict=True):
            count, layouts = self._of_layer.get(layer, (0, set()))
            self._of_layer[layer] = count + 1, layouts | {layout}

    def recipe(self, layer: int, module: Any, parameter: str, weight: StreamedWeight) -> Any:
        count, layouts = self._of_layer.get(layer, (0, set()))
        if count != weight.shape[0]:
            raise ModelError(
                f"{self._path}: {count} experts in layer {layer}, the model's {weight.name} has"
                f" {weight.shape[0]}"
            )
        try:
            recipes = {
                recipe_for(module, parameter, weight.shape[1:], self._tensors(number)) for number in layouts
            }
        except ModelError as error:
            raise ModelError(f"{self._path}: layer {layer}: {error}") from None
        if len(recipes) > 1:
            raise ModelError(
                f"{self._path}: layer {layer}: its experts differ in what tensors make {parameter}"
            )
        return recipes.pop()

    def check_layers(self, name: str, found: set[int]) -> None:
        """Each layer of the source is one of the model's, and the other way round."""
        if not found:
            raise ModelError(
                f"{name}: no module of routed experts was found in it, so none can be kept out of memory"
            )
        if missing := sorted(set(self._of_layer) - found):
            raise ModelError(f"{self._path}: has experts in layer {missing[0]}, where {name} has none")

    def _tensors(self, layout: int) -> dict[str, Tensor]:
        return {t.name: t for t in self._layouts[layout]}


# --- guesses -----------------------------------------------------------------------------------------------


def _watch_router(model: Any, layer: ExpertLayer) -> None:
    """Have the layer told of what its router is given and gives."""
    parent = model.get_submodule(layer.name.rpartition(".")[0])
    for name in _ROUTERS:
        router = getattr(parent, name, None)
        if isinstance(router, torch.nn.Module):
            router.register_forward_hook(layer.saw_router, with_kwargs=True)


# --- what streamed experts cannot do -----------------------------------------------------------------------


def _overrides(cls: Any) -> dict[str, Callable[..., Any]]:
    """Methods in place of those of `cls`."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        ring, cache = self._smoe_stream.ring, self._smoe_stream.cache
        with ring.busy(), ring.phase(_phase_of(args, kwargs)):
            try:
                return cls.__call__(self, *args, **kwargs)
            finally:
                if cache is not None:
                    cache.synchronize()  # an idle model holds nothing of the ring

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._smoe_stream.ring.busy():
            return cls.generate(self, *args, **kwargs)

    def train(self: Any, mode: bool = True) -> Any:
        if mode:
            raise ModelError("streamed experts cannot be trained: they are read-only and not all in memory")
        return cls.train(self, mode)

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        _refuse_move(self, device, dtype)
        return cls.to(self, *args, **kwargs)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            "a model with streamed experts cannot be saved: it would be one without experts; the files that"
            " it was loaded from are the model"
        )

    def set_experts_implementation(self: Any, experts_implementation: Any) -> None:
        if experts_implementation != IMPLEMENTATION:
            raise ModelError(
                f"experts_implementation={experts_implementation!r}: streamed experts run with"
                f" {IMPLEMENTATION!r} alone"
            )

    @contextlib.contextmanager
    def _optimize_model_for_decode(self: Any) -> Iterator[None]:
        self._smoe_stream.decoding = self.device.type != "cpu"  # where stock changes the experts' kernel
        try:
            yield
        finally:
            self._smoe_stream.decoding = False

    made: dict[str, Callable[..., Any]] = {"train": train, "to": to, "__call__": __call__}
    made["set_experts_implementation"] = set_experts_implementation
    made |= {"save_pretrained": save_pretrained, "push_to_hub": save_pretrained}
    if hasattr(cls, "generate"):
        made["generate"] = generate
        made["_optimize_model_for_decode"] = _optimize_model_for_decode
    for name in ("float", "double", "half", "bfloat16"):
        made[name] = _cast(name)
    for name in ("cuda", "xpu", "ipu", "mps"):
        made[name] = _move(name)
    return made


def _phase_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A forward of several tokens of a sequence is prefill, of one decode."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    tokens = next((t for t in given if torch.is_tensor(t) and t.ndim > 1), None)
    if tokens is None:
        return "unsaid"
    return "prefill" if tokens.shape[1] > 1 else "decode"


def _cast(name: str) -> Callable[..., Any]:
    dtype = {"float": torch.float32, "double": torch.float64, "half": torch.float16}.get(name, torch.bfloat16)

    def cast(self: Any) -> Any:
        _refuse_move(self, None, dtype)
        return self

    return cast


def _move(device: str) -> Callable[..., Any]:
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(f"streamed experts are not moved: load the model with device={device!r}")

    return move


def _refuse_move(model: Any, device: Any, dtype: Any) -> None:
    if device is not None and device.type != model.device.type:
        raise ModelError(f"streamed experts are not moved: load the model with device={str(device)!r}")
    if dtype is not None and dtype != model.dtype:
        raise ModelError(
            f"the model is {model.dtype} and its experts come as that: load it with dtype={dtype} instead of"
            " changing it"
        )
