"""Block types made numbers by torch operations, on whatever device the bytes are: for GPUs.

    w = dequantize_blocks("Q4_K", raw.to("cuda"), (768, 2048), torch.bfloat16)

Quantised experts cross the bus as they are and become numbers where they are used.  The layouts are those of
csrc/dequant.c, whose table of types this uses, and each step is one rounded operation, as there, so the
float32 results are equal bit for bit (a NaN in a scale may come out as another NaN); other types are that,
rounded once.  On the CPU `smoe_mp.dequant` is many times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from smoe_mp import dequant, quant

__all__ = ["TYPES", "dequantize_blocks"]


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12)
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def dequantize_blocks(
    type_name: str,
    data: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights of one tensor: a new tensor of `shape` and `dtype`, on the device of `data`.

    `type_name`: one of `TYPES`.  `data`: the blocks, uint8, flat, of any device.  `scales`: where they lie
    apart, as for `smoe_mp.dequant.dequantize`, uint8, on the same device.  ValueError, with type, shape and
    figures, for what does not fit together.
    """
    key = (type_name, scales is not None)
    if key not in TYPES:
        names = ", ".join(sorted({name for name, _ in TYPES}))
        raise ValueError(
            f"{type_name}: no torch operations for it{' with scales' if key[1] else ''}: {names}"
        )
    shape = tuple(int(n) for n in shape)
    kind = dequant.TYPES[key]
    for what, given, wanted in (
        ("data", data, kind.data_nbytes(shape)),
        ("scales", scales, kind.scales_nbytes(shape) if scales is not None else 0),
    ):
        if given is not None and (given.dtype != torch.uint8 or given.numel() != wanted):
            raise ValueError(
                f"{type_name}, shape {shape}: {what} are {given.numel()} of {given.dtype}, and must be"
                f" {wanted} of torch.uint8"
            )
    if scales is not None:
        return _APART[type_name](data, scales, shape).to(dtype)
    return _INSIDE[type_name](data.view(-1, kind.nbytes)).view(shape).to(dtype)


# --- parts of blocks -------------------------------------------------------------------------------------


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A float16 at byte `at` of each block, as float32: (blocks, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(..., n) bytes to (..., 2, n): the low halves of all, then the high halves."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def _in_turn(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(n,) bytes to (n, 8 / bits) codes, the lowest bits first."""
    return torch.stack([codes >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)


@cache
def _table(which: str, device: torch.device) -> torch.Tensor:
    """Float32 by code."""
    if which == "half of e8m0":  # half the power of two that the byte stands for
        e = np.arange(256, dtype=np.uint32)
        bits = np.where(e < 2, np.uint32(0x0020_0000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << 23)
        values = bits.astype(np.uint32).view(np.float32)
    elif which == "iq4":
        values = np.array(_IQ4, np.float32)
    elif which == "e2m1 doubled":
        values = np.array(_E2M1_DOUBLED, np.float32)
    else:  # SMOE_Q4, SMOE_Q2
        bits_each = int(which)
        values = quant.decoding_table(bits_each)[: 1 << bits_each, 0].copy()
    return torch.from_numpy(values).to(device)


def _look_up(which: str, codes: torch.Tensor) -> torch.Tensor:
    return _table(which, codes.device)[codes.int()]


def _scales_of_6(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes, times d and dmin: (blocks, 8, 1) each."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((a & 63, (c & 15) | (a >> 6 << 4)), dim=1).float()
    least = torch.cat((b & 63, (c >> 4) | (b >> 6 << 4)), dim=1).float()
    return (_half(blocks, 0) * scale)[:, :, None], (_half(blocks, 2) * least)[:, :, None]


# --- scales inside the blocks ------------------------------------------------------------------------------


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).flatten(1).float() - 8) * _half(blocks, 0)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _scales_of_6(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return codes.float() * scale - least


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _scales_of_6(blocks)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = torch.stack([blocks[:, 16:48] >> g & 1 for g in range(8)], dim=1)
    return (codes | fifth << 4).float() * scale - least


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = torch.stack([blocks[:, 128:192].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    codes = (low | high << 4).reshape(-1, 16, 16).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes * scale[:, :, None]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _look_up("iq4", _nibbles(blocks[:, 2:]).flatten(1)) * _half(blocks, 0)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = blocks[:, 2:3].int() | blocks[:, 3:4].int() << 8
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1).int()
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    scale = _half(blocks, 0) * ((low | (high >> shifts & 3) << 4).float() - 32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(2)
    return _look_up("iq4", codes) * scale[:, :, None]


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    # A code 8 is 0 here, without a sign.
    return (_look_up("e2m1 doubled", _nibbles(blocks[:, 1:]).flatten(1)) + 0.0) * _look_up(
        "half of e8m0", blocks[:, :1]
    )


_INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

# --- scales apart -------------------------------------------------------------------------------------------


def _mxfp4_apart(data: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    scale = torch.where(scales == 255, torch.inf, _look_up("half of e8m0", scales))
    values = _look_up("e2m1 doubled", _in_turn(data, 4).reshape(-1, 32))
    return (values * scale[:, None]).view(shape)


def _smoe(bits: int) -> Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor]:
    def decode(data: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        values = _look_up(str(bits), _in_turn(data, bits)).flatten()
        group = dequant.TYPES[f"SMOE_Q{bits}", True].elements
        scale = scales.view(torch.float16).float().repeat_interleave(group)
        return (values * scale[: values.numel()]).view(shape)

    return decode


def _float8(name: str) -> Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor]:
    def decode(data: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        tile, columns = dequant.TYPES[name, True].tile, shape[-1]
        values = data.view(_FLOAT8[name]).float().view(-1, columns)
        scale = scales.view(torch.float32).view(-1, -(-columns // tile))
        wide = scale.repeat_interleave(tile, dim=0)[: len(values)].repeat_interleave(tile, dim=1)
        return (values * wide[:, :columns]).view(shape)

    return decode


_APART: dict[str, Callable[[torch.Tensor, torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "MXFP4": _mxfp4_apart,
    "SMOE_Q4": _smoe(4),
    "SMOE_Q2": _smoe(2),
    "F8_E4M3": _float8("F8_E4M3"),
    "F8_E5M2": _float8("F8_E5M2"),
}

#: The types, by name and by whether their scales lie apart.
TYPES = frozenset({(name, False) for name in _INSIDE} | {(name, True) for name in _APART})
