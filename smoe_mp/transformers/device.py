"""The experts of one layer on a GPU: transformers' own grouped products, on the experts in use alone.

The resident model keeps all experts of a layer in one tensor and multiplies groups of rows with the experts
that they were routed to.  Here a tensor of the experts in use is made for each pass, out of a cache in GPU
memory (`smoe_mp.cuda`), and the same function runs on it, with the experts numbered anew: each row meets the
same weights in the same kernel, so the results are those of `experts_implementation="grouped_mm"`.

Which experts a token wants is known on the GPU first; asking for it waits for the GPU once a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from smoe_mp.cuda import ExpertCache, HeldExpert
from smoe_mp.errors import ModelError
from smoe_mp.torch_blocks import dequantize_blocks

__all__ = ["run_compact"]

KERNEL = "grouped_mm"


class _Compact:
    """In the place of an experts module: the module, but with `weights` of the experts in use alone."""

    def __init__(self, module: Any, weights: Mapping[str, torch.Tensor], count: int) -> None:
        self.__dict__.update(weights)
        self.__dict__["_module"] = module
        self.__dict__["num_experts"] = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_compact(layer: Any, module: Any, hidden: Any, index: Any, scores: Any) -> Any:
    """The experts' part of a layer: rows `hidden`, routed to the experts `index` with weights `scores`."""
    cache: ExpertCache = layer.stream.cache
    ids, renumbered = torch.unique(index, return_inverse=True)
    wanted: list[int] = ids.tolist()
    if wanted[-1] >= layer.n_experts or wanted[0] < 0:
        raise ModelError(
            f"{layer.name}: expert {wanted[-1]} of {layer.n_experts}: routed to others' experts?"
        )
    weights = {
        name: torch.empty((len(wanted), *w.shape[1:]), dtype=w.dtype, device=hidden.device)
        for name, w in layer.weights.items()
    }
    for start in range(0, len(wanted), cache.slots):
        with cache.hold(layer.number, wanted[start : start + cache.slots]) as held:
            for at, expert in enumerate(held, start):
                for name, weight in layer.weights.items():
                    _fill(weights[name][at], expert, weight)
    layer.guess(wanted, int(index.shape[-1]))
    run = ALL_EXPERTS_FUNCTIONS[KERNEL]
    return run(_Compact(module, weights, len(wanted)), hidden, renumbered.view_as(index), scores)


def _fill(out: torch.Tensor, expert: HeldExpert, weight: Any) -> None:
    """An expert's slice of a parameter, from the tensors that its recipe names."""
    names = weight.recipe
    if names[0].endswith(".blocks"):
        scales = expert.bytes_of(names[0].removesuffix("blocks") + "scales")
        shape = weight.shape[:0:-1]
        made = dequantize_blocks("MXFP4", expert.bytes_of(names[0]), shape, weight.dtype, scales=scales)
        out.copy_(made.t())
        return
    at = 0
    for name in names:
        part = expert.tensor(name, weight.dtype)
        out[at : at + len(part)].copy_(part)
        at += len(part)
