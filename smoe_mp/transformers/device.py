"""The experts of one layer on a GPU: transformers' own products, on the experts in use alone.

The resident model keeps all experts of a layer in one tensor.  Here they lie in slots of a cache in GPU
memory (`smoe_mp.cuda`), and the same functions of transformers run on them:

    grouped_mm    on a tensor of the experts in use, gathered for this pass and numbered anew
    batched_mm    in the decoding stage of `generate`, where stock transformers changes to it too: it gathers
                  each token's experts by itself, so it gets the cache's memory, seen as a stack of experts,
                  with slots in the place of expert numbers

Each row meets the same weights in the same kernel, so the results are those of a resident model with
`experts_implementation="grouped_mm"`.

What lies in a slot as the model wants it is gathered by one kernel; what is of another type, in blocks, or
in two places is made tensor by tensor, on the GPU.  Which experts a token wants is known on the GPU first;
asking for it waits for the GPU once a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from smoe_mp.cuda import ExpertCache, HeldExpert
from smoe_mp.errors import ModelError
from smoe_mp.torch import DTYPES
from smoe_mp.torch_blocks import dequantize_blocks
from smoe_mp.transformers.experts import BLOCKS, SCALES, adjacent

__all__ = ["run_on_device"]


class _Stacked:
    """In the place of an experts module: the module, but with `weights` of `count` experts of our choice."""

    def __init__(self, module: Any, weights: Mapping[str, torch.Tensor], count: int) -> None:
        self.__dict__.update(weights)
        self.__dict__["_module"] = module
        self.__dict__["num_experts"] = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_on_device(layer: Any, module: Any, hidden: Any, index: Any, scores: Any) -> Any:
    """The experts' part of a layer: rows `hidden` [rows, H], routed to the experts `index` [rows, k] with
    weights `scores` [rows, k]."""
    cache: ExpertCache = layer.stream.cache
    asked = index.cpu().numpy()  # waits for the GPU
    ids, inverse = np.unique(asked, return_inverse=True)
    wanted: list[int] = ids.tolist()
    if wanted[-1] >= layer.n_experts or wanted[0] < 0:
        raise ModelError(
            f"{layer.name}: expert {wanted[-1]} of {layer.n_experts}: routed to others' experts?"
        )
    inverse = inverse.reshape(asked.shape)
    decoding = layer.stream.decoding and len(wanted) <= cache.slots
    stacks = cache.stacks.get(layer.number, {})
    if decoding and stacks and None not in stacks.values() and layer.number not in cache.mixed:
        with cache.hold(layer.number, wanted) as held:
            if layer.number not in cache.mixed:
                layer.guess(wanted, asked.shape[-1])
                layer.foretell()
                places = np.array([expert.slot for expert in held])[inverse]
                return _run("batched_mm", _Stacked(module, stacks, cache.slots), hidden, places, scores)
    weights = _gathered(layer, cache, wanted, hidden.device)
    layer.guess(wanted, asked.shape[-1])
    layer.foretell()
    stacked = _Stacked(module, weights, len(wanted))
    return _run("batched_mm" if decoding else "grouped_mm", stacked, hidden, inverse, scores)


def _run(kernel: str, stacked: _Stacked, hidden: Any, index: Any, scores: Any) -> Any:
    return ALL_EXPERTS_FUNCTIONS[kernel](stacked, hidden, torch.from_numpy(index).to(hidden.device), scores)


def _gathered(layer: Any, cache: ExpertCache, wanted: Sequence[int], device: Any) -> dict[str, torch.Tensor]:
    """The layer's parameters [wanted, ...], of the experts `wanted` alone."""
    weights = {
        name: torch.empty((len(wanted), *w.shape[1:]), dtype=w.dtype, device=device)
        for name, w in layer.weights.items()
    }
    for start in range(0, len(wanted), cache.slots):
        with cache.hold(layer.number, wanted[start : start + cache.slots]) as held:
            if layer.number not in cache.stacks:
                cache.stacks[layer.number] = {n: _stack(cache, held[0], w) for n, w in layer.weights.items()}
            slots = torch.tensor([expert.slot for expert in held], device=device)
            for name, weight in layer.weights.items():
                part = weights[name][start : start + len(held)]
                stack = cache.stacks[layer.number][name]
                if stack is not None and layer.number not in cache.mixed:
                    torch.index_select(stack, 0, slots, out=part)
                    continue
                for out, expert in zip(part, held, strict=True):
                    _fill(out, expert, weight)
    return weights


def _stack(cache: ExpertCache, expert: HeldExpert, weight: Any) -> torch.Tensor | None:
    """A parameter of the layer over all slots of the cache, as a view; None where what `expert` has is no
    such parameter as it lies there, or slots do not begin at whole elements."""
    info = adjacent(expert.tensors, weight.recipe)
    size = weight.dtype.itemsize
    if info is None or DTYPES.get(info.dtype) != weight.dtype or info.shape != tuple(weight.shape[1:]):
        return None
    if info.offset % size or cache.memory.shape[1] % size:
        return None
    rows = cache.memory[:, info.offset : info.offset + info.nbytes].view(weight.dtype)
    return rows.unflatten(1, info.shape)


def _fill(out: torch.Tensor, expert: HeldExpert, weight: Any) -> None:
    """An expert's slice of a parameter, from the tensors that its recipe names."""
    names = weight.recipe
    if names[0].endswith(BLOCKS):
        scales = expert.bytes_of(names[0].removesuffix(BLOCKS) + SCALES)
        shape = weight.shape[:0:-1]
        made = dequantize_blocks("MXFP4", expert.bytes_of(names[0]), shape, weight.dtype, scales=scales)
        out.copy_(made.t())
        return
    at = 0
    for name in names:
        part = expert.tensor(name, weight.dtype)
        out[at : at + len(part)].copy_(part)
        at += len(part)
