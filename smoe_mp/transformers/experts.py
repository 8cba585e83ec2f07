"""The experts of one layer, streamed, under the family's own code.

transformers keeps the experts of a layer as stacked parameters, `gate_up_proj[expert]`, `down_proj[expert]`,
and lets a registered function run in place of the module's forward.  Ours runs that very forward (the
family's eager one: biases, clamps and gates come with it), with each parameter replaced by a
`StreamedWeight` whose `[expert]` is a view over the ring:

    router ──► top_k_index ──► Pass: demand what is wanted, in ascending order, in waves
                                 │
               eager forward ────┴─► gate_up_proj[e], down_proj[e] ──► views of e while e is held

The eager forward visits experts in ascending order and sums in that order, so experts are demanded in it: a
sum in bfloat16 depends on the order.  `Ring.in_order` holds at most half the ring, so a prompt may want more
experts than the ring has slots.

Which of an expert's tensors make a slice of a parameter is a `Recipe`.  The tags that the source gives
(docs/formats.md) must agree with the flags of the module's class: a shape says nothing of the order.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from smoe_mp import torch as views
from smoe_mp.errors import ModelError, RingError
from smoe_mp.ring import Expert, Ring, TensorInfo
from smoe_mp.sources.base import Tensor

__all__ = ["IMPLEMENTATION", "ExpertLayer", "Recipe", "Stream", "StreamedWeight", "recipe_for"]

#: The name under which transformers knows the function below.
IMPLEMENTATION = "smoe"

#: Rows of a router's output that guesses are made from: a batch of sequences at decode.
GUESS_ROWS = 8

#: What the names of MXFP4 blocks and of their scales end in.
BLOCKS, SCALES = ".blocks", ".scales"

#: A parameter's name to the projections that make it, as one tensor or row after row.
_PROJECTIONS = {
    "gate_up_proj": (("gate_up",), ("gate", "up")),
    "up_proj": (("up",),),
    "down_proj": (("down",),),
}


class Stream:
    """What the layers of one model share: the ring, and which pass runs in this thread."""

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self.threads = 1
        self.cache: Any = None  # an ExpertCache, where the model computes on a GPU
        self.decoding = False  # in the decoding stage of `generate`
        self.look_ahead = 0  # experts of the next layer that are guessed
        self.local = threading.local()

    @property
    def ring(self) -> Ring:
        if self._ring is None:
            raise ModelError("the model's experts are not bound to a ring: load it anew")
        return self._ring

    def bind(self, ring: Ring) -> None:
        self._ring = ring

    def __deepcopy__(self, memo: Any) -> Any:
        raise ModelError("a model with streamed experts cannot be copied: load it once more")

    __reduce_ex__ = __deepcopy__


# --- recipes -----------------------------------------------------------------------------------------------


#: The tensors of an expert that make a slice of a parameter: one, or several whose outputs follow each other.
Recipe = tuple[str, ...]


def recipe_for(module: Any, parameter: str, shape: Sequence[int], tensors: Mapping[str, Tensor]) -> Recipe:
    """What makes `parameter` of an experts module, whose slices have `shape`.

    `tensors`: an expert's, by name.  ModelError where one is missing, or of another order or shape.
    """
    stem = parameter.removesuffix("_bias")
    end = ".bias" if parameter != stem else ""
    for names in _PROJECTIONS.get(stem, ()):
        blocks, scales = (tensors.get(names[0] + suffix) for suffix in (BLOCKS, SCALES))
        if len(names) == 1 and not end and blocks is not None and scales is not None:
            _check_blocks(module, parameter, shape, blocks)
            return (blocks.name,)
        wanted = tuple(name + end for name in names)
        if all(name in tensors for name in wanted):
            found = [tensors[name] for name in wanted]
            _check_order(module, found, bias=bool(end))
            _check_shape(parameter, shape, found)
            return wanted
    raise ModelError(
        f"parameter {parameter} of the experts: no such tensor among {', '.join(tensors)}; the files are not"
        " those of this model"
    )


def _check_order(module: Any, found: Sequence[Tensor], *, bias: bool) -> None:
    """The elements stand as the module's code takes them; nothing is put into another order."""
    for t in found:
        words = set(t.tag.split(","))
        if "unknown" in words:
            raise ModelError(f"{t.name}: the order of its elements is not known for this model type")
        if not bias and ("transposed" in words) != bool(module.is_transposed):
            raise ModelError(f"{t.name} is {t.tag!r}, the model's code takes it the other way round")
        fused = t.name.startswith("gate_up")
        if fused and ("interleaved" in words) == bool(module.is_concatenated):
            raise ModelError(f"{t.name} is {t.tag!r}, the model's code has gate and up in another order")
    if len(found) > 1 and (module.is_transposed or not module.is_concatenated):
        names = " and ".join(t.name for t in found)
        raise ModelError(f"{names} lie apart, and the model's code takes them as columns or in turn")


def _check_blocks(module: Any, parameter: str, shape: Sequence[int], blocks: Tensor) -> None:
    """MXFP4: output by output, 32 inputs a block, for code that takes the matrix transposed."""
    words = set(blocks.tag.split(","))
    order = "linear" in words and bool(module.is_transposed)
    fused = blocks.name.startswith("gate_up")
    if not order or (fused and ("interleaved" in words) == bool(module.is_concatenated)):
        raise ModelError(f"{blocks.name} is {blocks.tag!r}, the model's code has another order")
    made = [2 * prod(blocks.shape[1:]), blocks.shape[0]]
    if made != list(shape):
        raise ModelError(
            f"{blocks.name}: makes a matrix of {made}, the model's {parameter} has {list(shape)}: the files"
            " are not those of this model"
        )


def _check_shape(parameter: str, shape: Sequence[int], found: Sequence[Tensor]) -> None:
    shapes = [t.shape for t in found]
    alike = all(s and s[1:] == shapes[0][1:] for s in shapes)
    made = [sum(s[0] for s in shapes), *shapes[0][1:]] if alike else []
    if made != list(shape):
        raise ModelError(
            f"{', '.join(t.name for t in found)}: makes a slice of shape {made}, the model's {parameter} has"
            f" {list(shape)}: the files are not those of this model"
        )


# --- weights -----------------------------------------------------------------------------------------------


class Rows:
    """Rows of one weight that lie in two places: `linear(x, Rows)` is one linear after the other.

    Each output is the same product of a row with x, so nothing has to be copied together.  Whatever else is
    done with it sees the rows copied together.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = tuple(parts)

    def joined(self) -> torch.Tensor:
        return torch.cat(self.parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.joined(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is functional.linear and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return torch.cat([functional.linear(args[0], part) for part in args[1].parts], dim=-1)
        args = [a.joined() if isinstance(a, cls) else a for a in args]
        return function(*args, **{k: v.joined() if isinstance(v, cls) else v for k, v in kwargs.items()})


class StreamedWeight:
    """In the place of a stacked parameter: `weight[e]` is the slice of expert e, for as long as a pass holds
    that expert.  `shape` and `dtype` are the parameter's; there is no memory behind it."""

    ndim: int
    device = torch.device("cpu")

    def __init__(self, layer: ExpertLayer, name: str, parameter: Any) -> None:
        self.layer = layer
        self.name = name
        self.shape = tuple(parameter.shape)
        self.dtype = parameter.dtype
        self.ndim = len(self.shape)
        self.recipe: Recipe = ()
        self._places: dict[int, TensorInfo | None] = {}  # by expert, of the ring that `_ring` is
        self._ring: Ring | None = None

    def place_of(self, expert: Expert) -> TensorInfo | None:
        """Where the slice lies as floating-point numbers in one piece; None: it does not."""
        if self._ring is not self.layer.stream.ring:
            self._ring, self._places = self.layer.stream.ring, {}
        try:
            return self._places[expert.expert]
        except KeyError:
            found = self._places[expert.expert] = adjacent(expert.tensors, self.recipe)
            return found

    def __repr__(self) -> str:
        return f"<StreamedWeight {self.name} {list(self.shape)} {self.dtype}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._misused(f".{name}")

    def __getitem__(self, expert: Any) -> Any:
        if isinstance(expert, slice | tuple | list) or (torch.is_tensor(expert) and expert.ndim):
            raise self._misused("[several]")
        return _slice(self.layer.expert_of_pass(int(expert)), self)

    def _misused(self, how: str) -> ModelError:
        return ModelError(
            f"{self.name}{how}: these experts are streamed, and only the family's eager code runs on them"
            f" (experts_implementation={IMPLEMENTATION!r})"
        )


def _slice(expert: Expert, weight: StreamedWeight) -> Any:
    names, threads = weight.recipe, weight.layer.stream.threads
    if names[0].endswith(BLOCKS):
        return _mxfp4(expert, names[0], weight)
    if (place := weight.place_of(expert)) is not None:
        made = views.over(expert, place)
        return made if made.dtype == weight.dtype else made.to(weight.dtype)
    parts = [views.dequantize(expert, name, weight.dtype, threads=threads) for name in names]
    if len(parts) == 1:
        return parts[0]
    return Rows(parts) if len(weight.shape) == 3 else torch.cat(parts)


def _mxfp4(expert: Expert, name: str, weight: StreamedWeight) -> torch.Tensor:
    """A matrix out of MXFP4 blocks and the scales beside them, in the memory order of transformers' own: its
    products with another would differ in their last bits."""
    blocks, scales = (expert.tensors[name.removesuffix(BLOCKS) + suffix] for suffix in (BLOCKS, SCALES))
    whole = TensorInfo(name, "MXFP4", weight.shape[:0:-1], blocks.offset, blocks.nbytes)
    made = views.decode(expert, whole, weight.dtype, scales=scales, threads=weight.layer.stream.threads)
    return made.t().contiguous()


def adjacent(tensors: Mapping[str, TensorInfo], names: Recipe) -> TensorInfo | None:
    """Floating-point tensors that lie one behind the other in the slot, as one; None where they do not."""
    infos = [tensors[name] for name in names if name in tensors]
    if len(infos) < len(names) or infos[0].dtype not in ("F32", "F16", "BF16"):
        return None
    first = infos[0]
    for one, next_one in pairwise(infos):
        if next_one.offset != one.offset + one.nbytes or next_one.dtype != first.dtype:
            return None
    shape = (sum(i.shape[0] for i in infos), *first.shape[1:])
    return TensorInfo(first.name, first.dtype, shape, first.offset, sum(i.nbytes for i in infos))


# --- a layer -----------------------------------------------------------------------------------------------


class ExpertLayer:
    """The experts module of one layer: its streamed weights, and the pass that runs on it."""

    def __init__(self, stream: Stream, number: int, name: str) -> None:
        self.stream = stream
        self.number = number
        self.name = name
        self.weights: dict[str, StreamedWeight] = {}
        self.next: ExpertLayer | None = None
        self._router: Callable[[Any], Any] | None = None  # what it gives for hidden states, once it was seen

    @property
    def n_experts(self) -> int:
        first: StreamedWeight = next(iter(self.weights.values()))
        return int(first.shape[0])

    def expert_of_pass(self, expert: int) -> Expert:
        running: Pass | None = getattr(self.stream.local, "running", None)
        if running is None or running.layer is not self:
            raise ModelError(
                f"{self.name}: expert {expert} is wanted outside of a pass; these experts are streamed, and"
                f" only experts_implementation={IMPLEMENTATION!r} runs on them"
            )
        return running.expert(expert)

    def saw_router(self, router: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """The layer's router was called: for the guesses of the pass that follows, and of the one before the
        next."""
        if not args:
            return
        hidden, *rest = args
        self._router = lambda states: router.forward(states, *rest, **kwargs)  # not its hooks
        self.stream.local.hidden = self.number, hidden
        self.stream.local.scores = self.number, self._scores_of(output)

    def _scores_of(self, output: Any) -> Any:
        """What a router gave to each expert [rows, experts]; None where it tells that of the chosen alone."""
        parts = output if isinstance(output, tuple | list) else [output]
        for part in parts:
            if (
                isinstance(part, torch.Tensor)
                and part.is_floating_point()
                and part.shape[-1] == self.n_experts
            ):
                return part.reshape(-1, self.n_experts)
        return None

    def guesses(self, used: Sequence[int], top_k: int, ranks: int) -> list[int]:
        """Experts of the ranks behind the first `top_k`, best first."""
        layer, scores = getattr(self.stream.local, "scores", (None, None))
        self.stream.local.scores = None, None
        if layer != self.number or scores is None:
            return []
        rows = scores if len(scores) <= GUESS_ROWS else scores[-1:]
        order = rows.topk(min(self.n_experts, top_k + ranks)).indices[:, top_k:].t().flatten().tolist()
        return [e for e in dict.fromkeys(order) if e not in used]

    def guess(self, used: Sequence[int], top_k: int) -> None:
        """Behind the demand: a guess is read when no demand waits."""
        ring = self.stream.ring
        if (ranks := ring.speculation_ranks) and (guesses := self.guesses(used, top_k, ranks)):
            ring.speculate(self.number, guesses)

    def foretell(self) -> None:
        """Guess experts of the next layer: those that its router names for this layer's hidden states.

        A layer changes them little, so most are right (Eliseev and Mazur, arXiv 2312.17238).  Told when all
        of this layer's experts are there, so that no read of a guess is in the way of a demand.  Not of
        prompts, which want nearly all of a layer.
        """
        number, hidden = getattr(self.stream.local, "hidden", (None, None))
        to, n = self.next, self.stream.look_ahead
        if number != self.number or hidden is None or not n or to is None or to._router is None:
            return
        if hidden.numel() > GUESS_ROWS * hidden.shape[-1]:
            return
        with torch.no_grad():
            named = to._named(to._router(hidden), n)
        cache = self.stream.cache
        if guesses := [e for e in named if cache is None or (to.number, e) not in cache]:
            self.stream.ring.speculate(to.number, guesses)

    def _named(self, output: Any, n: int) -> list[int]:
        """The first `n` experts for each row of a router's output, the first of every row before the second:
        those that it chose (by more than the scores, in some families), then by scores."""
        parts = output if isinstance(output, tuple | list) else [output]
        chosen = [p for p in parts if isinstance(p, torch.Tensor) and p.dtype in (torch.int64, torch.int32)]
        ranked = [p.reshape(-1, p.shape[-1])[:, :n] for p in chosen[:1]]
        scores = self._scores_of(output)
        if scores is not None and not (ranked and ranked[0].shape[1] == n):
            ranked.append(scores.topk(min(n, self.n_experts)).indices)
        if not ranked:
            return []
        rows = torch.cat(ranked, dim=1)
        return list(dict.fromkeys(rows.t().flatten().tolist()))[: n * len(rows)]

    def run(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The family's eager forward on streamed weights."""
        hidden, index, weights = _arguments(args, kwargs)
        self._refuse_misuse(module, hidden, weights)
        if self.stream.cache is not None:
            device: Any = importlib.import_module("smoe_mp.transformers.device")
            return device.run_on_device(self, module, hidden, index, weights)
        wanted = sorted(e for e in set(index.unique().tolist()) if 0 <= e < self.n_experts)
        forward = type(module).forward
        eager = getattr(forward, "__wrapped__", forward)
        one = Pass(self, wanted, int(index.shape[-1]))
        with closing(one):
            self.stream.local.running = one
            try:
                return eager(module, *args, **kwargs)
            finally:
                self.stream.local.running = None

    def _refuse_misuse(self, module: Any, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        if module.training:
            raise ModelError(f"{self.name}: streamed experts cannot be trained: call model.eval()")
        if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
            raise ModelError(
                f"{self.name}: gradients are wanted, but autograd would keep views of experts whose slots are"
                " reused: run under torch.no_grad() or torch.inference_mode()"
            )
        own = torch.device("cpu") if self.stream.cache is None else self.stream.cache.device
        if hidden.device.type != own.type:
            raise ModelError(
                f"{self.name}: its experts come to {own}, and it was called on {hidden.device}: load it with"
                f" device={str(hidden.device)!r}"
            )


class Pass:
    """One run of a layer's experts: demands `wanted` (ascending) and gives them out in that order."""

    def __init__(self, layer: ExpertLayer, wanted: Sequence[int], top_k: int) -> None:
        self.layer = layer
        self._wanted, self._top_k = wanted, top_k
        self._waves = layer.stream.ring.in_order(layer.number, wanted)
        self._current: Expert | None = None
        self._foretold = False

    def expert(self, expert: int) -> Expert:
        first = self._current is None
        while self._current is None or self._current.expert < expert:
            try:
                self._current = next(self._waves)
            except StopIteration:
                raise self._out_of_order(expert) from None
        if first:
            self.layer.guess(self._wanted, self._top_k)
        if self._current.expert != expert:
            raise self._out_of_order(expert)
        if expert == self._wanted[-1] and not self._foretold:
            self._foretold = True
            self.layer.foretell()
        return self._current

    def close(self) -> None:
        self._waves.close()

    def _out_of_order(self, expert: int) -> RingError:
        return RingError(
            f"{self.layer.name}: the family's code wants expert {expert}, which is not the next of"
            f" {list(self._wanted)}: it does not visit experts in ascending order"
        )


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Hidden states, indices and weights, by whatever names the family gives them."""
    found = [*args, *kwargs.values()]
    if len(found) < 3:
        raise ModelError(f"the experts were called with {len(found)} arguments, not 3: another transformers?")
    return found[0], found[1], found[2]


def smoe_experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The registered function: in place of the forward of an experts module whose config asks for it."""
    layer: ExpertLayer | None = self.__dict__.get("_smoe_layer")
    if layer is None:
        raise ModelError(
            f"{type(self).__name__}: experts_implementation={IMPLEMENTATION!r} is for models that"
            " smoe_mp.transformers.load gave; choose another one"
        )
    return layer.run(self, args, kwargs)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, smoe_experts_forward)
