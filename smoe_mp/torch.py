"""An expert's tensors as torch tensors over the ring (the extra `smoe-mp[torch]`).

    import smoe_mp, smoe_mp.torch
    with smoe_mp.attach("demo") as ring, ring.fetch(3, [7]) as batch:
        gate = smoe_mp.torch.tensor(batch[0], "gate")                      a view: no copy
        mine = smoe_mp.torch.tensor(batch[0], "gate", copy=True)           memory of one's own
        w = smoe_mp.torch.dequantize(batch[0], "gate", torch.bfloat16)     any type, as numbers

A view carries a hold of its own on the slot, which ends when the last tensor over it is gone; so it is right
for as long as it can be seen, also behind the batch's block.  torch knows no read-only memory: it warns of it
where it learns of it, and writes all the same.  The ring is mapped read-only, so a write into a view is a
segmentation fault of this process and harms nobody else.  `copy=True` is for those who write: `add_`, `out=`,
an optimiser.

torch takes any memory as elements of any type, but its kernels expect an element at a multiple of its size,
and its float32 products differ in their last bits between addresses that differ modulo 16.  Read plans see to
both (tables.py); a tensor for which they could not is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from smoe_mp import dequant, torch_blocks
from smoe_mp._held import View
from smoe_mp.errors import RingError
from smoe_mp.ring import Expert, TensorInfo
from smoe_mp.sources.dtypes import BITS
from smoe_mp.sources.scaled import FLOAT8, SCALE_SUFFIXES
from smoe_mp.tables import alignment_of

__all__ = ["DTYPES", "decode", "dequantize", "over", "scales_of", "tensor", "tensors"]

#: torch's type of each of safetensors' names.  What is packed, or not known, is seen as its bytes.
DTYPES: dict[str, Any] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "uint8",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, attribute)
}  # fmt: skip

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
#: What dequant.c writes, and the type of the numpy view of such memory.
_TARGETS: dict[Any, tuple[dequant.Dtype, Any]] = {
    torch.float32: ("float32", torch.float32),
    torch.float16: ("float16", torch.float16),
    torch.bfloat16: ("bfloat16", torch.uint16),
}


def tensor(expert: Expert, name: str, *, copy: bool = False) -> torch.Tensor:
    """The tensor `name` of a held expert, of its type and shape; what is packed as flat uint8.

    A view over the ring, not to be written to, or with `copy` memory of its own.  KeyError names what
    tensors there are; RingError where the expert is not held.
    """
    made = over(expert, _info(expert, name))
    return made.clone() if copy else made


def tensors(expert: Expert, *, copy: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a held expert by name, as `tensor` gives them."""
    return {name: tensor(expert, name, copy=copy) for name in expert.tensors}


def dequantize(
    expert: Expert,
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    threads: int = 1,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The tensor `name` as numbers of `dtype` (float32, float16 or bfloat16) and its logical shape.

    A new tensor, but for a floating-point tensor that is of this dtype already: that is a view.  Block types
    go through `smoe_mp.dequant`, float8 through the scales that go with it; either is the float32 result,
    rounded once.  `threads`: for block types, 1 to 64.  `device`: another than the CPU gets the bytes as they
    are, where torch operations can make them numbers there (`smoe_mp.torch_blocks`), else the numbers.

    RingError, with the tensor and its type, for what cannot be made floating-point numbers.
    """
    info = _info(expert, name)
    if dtype not in _TARGETS:
        raise ValueError(f"dtype {dtype}: wanted is one of {', '.join(map(str, _TARGETS))}")
    if (device := torch.device(device)).type != "cpu":
        return _dequantize_there(expert, info, dtype, threads, device)
    if info.dtype in _FLOATS:
        return tensor(expert, name).to(dtype)
    if info.dtype in FLOAT8 or info.dtype in BITS:
        return _scaled(expert, info, dtype, threads)
    return decode(expert, info, dtype, scales=scales_of(expert.tensors, info), threads=threads)


def _dequantize_there(
    expert: Expert, info: TensorInfo, dtype: torch.dtype, threads: int, device: torch.device
) -> torch.Tensor:
    """`dequantize` for another device."""
    if info.dtype in _FLOATS:
        return tensor(expert, info.name).to(device).to(dtype)
    apart = scales_of(expert.tensors, info)
    if (info.dtype, apart is not None) not in torch_blocks.TYPES:
        return dequantize(expert, info.name, dtype, threads=threads).to(device)
    scales = None if apart is None else _bytes(expert, apart).to(device)
    return torch_blocks.dequantize_blocks(
        info.dtype, _bytes(expert, info).to(device), info.shape, dtype, scales=scales
    )


def _bytes(expert: Expert, info: TensorInfo) -> torch.Tensor:
    """The tensor's bytes, flat, over the ring."""
    return torch.frombuffer(_memory(expert, info), dtype=torch.uint8)


def scales_of(tensors: Mapping[str, TensorInfo], info: TensorInfo) -> TensorInfo | None:
    """The scales that `smoe_mp.dequant` takes beside a tensor of an expert with these `tensors`, if there are
    such."""
    if info.dtype.startswith("SMOE_"):
        return tensors[f"{info.name}.scales"]
    found = (tensors.get(info.name + end) for end in SCALE_SUFFIXES)
    scales = next((s for s in found if s is not None), None)
    tiled = scales is not None and scales.dtype == "F32" and "block=128x128" in scales.tag.split(",")
    return scales if tiled else None


def over(expert: Expert, info: TensorInfo) -> torch.Tensor:
    """The bytes that `info` describes, in a held expert's slot, as a tensor of its type and shape."""
    dtype = DTYPES.get(info.dtype, torch.uint8)
    shape = info.shape if info.dtype in DTYPES else (info.nbytes,)
    if not info.nbytes:
        return torch.empty(shape, dtype=dtype)
    memory = _memory(expert, info)
    if memory.address % max(alignment_of(info.dtype), dtype.itemsize):
        return torch.frombuffer(memory, dtype=torch.uint8).clone().view(dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _scaled(expert: Expert, info: TensorInfo, dtype: torch.dtype, threads: int) -> torch.Tensor:
    """Float8 with scales: in C where each is for 128 x 128 weights, else by numpy."""
    scales = scales_of(expert.tensors, info)
    if scales is None or (info.dtype, True) not in dequant.TYPES:
        return torch.from_numpy(expert.dequantize(info.name)).to(dtype)
    return decode(expert, info, dtype, scales=scales, threads=threads)


def decode(
    expert: Expert,
    info: TensorInfo,
    dtype: torch.dtype,
    *,
    scales: TensorInfo | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """A new tensor of `dtype` from the blocks that `info` describes, by `smoe_mp.dequant`.

    `scales` where they lie apart.
    """
    out = torch.empty(info.shape, dtype=dtype)
    into, seen_as = _TARGETS[dtype]
    try:
        dequant.dequantize(
            info.dtype,
            _memory(expert, info),
            info.shape,
            out=out.view(seen_as).numpy(),
            dtype=into,
            scales=None if scales is None else _memory(expert, scales),
            threads=threads,
        )
    except ValueError as error:
        raise RingError(f"{expert!r}: {info.name!r} cannot be made {dtype}: {error}") from error
    return out


def _info(expert: Expert, name: str) -> TensorInfo:
    known: dict[str, TensorInfo] = expert.tensors
    if name not in known:
        raise KeyError(f"{expert!r} has no {name!r}: {', '.join(known)}")
    return known[name]


def _memory(expert: Expert, info: TensorInfo) -> View:
    """The tensor's bytes over the ring, with a hold of their own: writable as far as torch can tell, so
    that it does not warn."""
    return expert.memory(info.offset, info.nbytes, writable=True)
