"""The two quantisations of `.smoe` vaults, both ways.

Format (the original system's, described in docs/): the tensor is flattened row-major and cut into groups
of 64 weights; each group has one float16 scale; codes are packed low bits first.

    Q4   2 codes a byte   weight = (code - 7.5) / 7.5 x scale   scale = absmax of the group, 1 where it is 0
    Q2   4 codes a byte   weight = (code - 1.5) / 1.5 x scale   scale = best of absmax x linspace(0.1, 1, 64)

The result must equal the original's bit for bit, so every step is a float32 step in the original's order.
Encoding is done in C (csrc/quant.c): of Q2's 64 candidates each costs a dozen passes over the weights in
numpy, ten times as long, and holds the interpreter's lock in between, where packing wants all cores.

Decoding needs no arithmetic but one multiplication: a byte stands for 2 or 4 weights before scaling, and
these are looked up together in a table of 256 rows.  A tensor is decoded in blocks that stay in a core's own
cache, each through all steps before the next one begins.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from smoe_mp._native import ffi, lib

__all__ = ["GROUP_WEIGHTS", "dequantize", "packed_sizes", "quantize_q2", "quantize_q4"]

GROUP_WEIGHTS = 64

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
U8 = npt.NDArray[np.uint8]

_HALF_RANGE = {4: np.float32(7.5), 2: np.float32(1.5)}
_DECODE_BLOCK_BYTES = 1 << 16
_Q2_CANDIDATES = np.linspace(0.1, 1.0, 64, dtype=np.float32)


def decoding_table(bits: int) -> F32:
    """Row b: the weights that byte b stands for, before scaling; shape (256, 8 / bits)."""
    half = _HALF_RANGE[bits]
    byte = np.arange(256)
    codes = np.stack([(byte >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], axis=1)
    return (codes.astype(np.float32) - half) / half


# A row as one number of its size, so that one look-up moves all its weights: 2 x float32 is the size of a
# float64, 4 x float32 that of a complex128.  The numbers are only ever copied.
_ROWS: dict[int, npt.NDArray[np.float64] | npt.NDArray[np.complex128]] = {
    4: decoding_table(4).view(np.float64).reshape(256),
    2: decoding_table(2).view(np.complex128).reshape(256),
}


def packed_sizes(elements: int, bits: int) -> tuple[int, int]:
    """Bytes of codes and bytes of scales of a tensor of `elements` weights at `bits` (2 or 4) a weight.

    A last group of fewer than 64 weights has a scale too.  ValueError where the codes do not fill whole
    bytes or `bits` is another number.
    """
    if bits not in _HALF_RANGE:
        raise ValueError(f"{bits} bits a weight: only 2 and 4 exist")
    if elements <= 0 or elements * bits % 8:
        raise ValueError(f"{elements} weights of {bits} bits do not fill whole bytes")
    return elements * bits // 8, -(-elements // GROUP_WEIGHTS) * 2


def dequantize(codes: U8, scales: F16, shape: tuple[int, ...], bits: int) -> F32:
    """The weights of one quantised tensor: a new float32 array of `shape`, row-major.

    `codes`: uint8, prod(shape) x bits / 8 of them; `scales`: float16, one for each 64 weights begun.  Both
    may be read-only and at any address.  `bits`: 4 (Q4) or 2 (Q2) of the `.smoe` format.  Equal bit for
    bit to the original's own dequantiser.  ValueError where the numbers do not fit together.
    """
    elements = prod(shape)
    codes_bytes, scales_bytes = packed_sizes(elements, bits)
    if codes.dtype != np.uint8 or codes.size != codes_bytes:
        raise ValueError(
            f"codes: {codes.size} of {codes.dtype}, but shape {shape} needs {codes_bytes} of uint8"
        )
    if scales.dtype != np.float16 or scales.size * 2 != scales_bytes:
        raise ValueError(
            f"scales: {scales.size} of {scales.dtype}, but shape {shape} needs {scales_bytes // 2} of float16"
        )
    codes, scale = codes.reshape(-1), scales.reshape(-1).astype(np.float32)
    rows = _ROWS[bits]
    weights_a_byte = 8 // bits
    weights = np.empty(elements, np.float32)
    as_rows = weights.view(rows.dtype)
    whole = elements // GROUP_WEIGHTS
    groups = weights[: whole * GROUP_WEIGHTS].reshape(whole, GROUP_WEIGHTS)
    # `take` converts its indices: a buffer for them, used again, is twice as fast as one allocated per call.
    indices = np.empty(min(_DECODE_BLOCK_BYTES, codes.size), np.intp)
    for start in range(0, codes.size, _DECODE_BLOCK_BYTES):
        block = codes[start : start + _DECODE_BLOCK_BYTES]
        index = indices[: block.size]
        index[:] = block
        # A byte is always within the table; "clip" only spares the copy that "raise" makes of `out`.
        np.take(rows, index, out=as_rows[start : start + block.size], mode="clip")
        first = start * weights_a_byte // GROUP_WEIGHTS
        last = min((start + block.size) * weights_a_byte // GROUP_WEIGHTS, whole)
        groups[first:last] *= scale[first:last, None]
    if elements % GROUP_WEIGHTS:
        weights[whole * GROUP_WEIGHTS :] *= scale[whole]
    return weights.reshape(shape)


def quantize_q4(weights: F32) -> tuple[U8, F16]:
    """Codes (uint8, 2 weights each, low nibble first) and scales (float16, one for 64 weights), both flat.

    `weights`: float32 of any shape, a multiple of 64 of them.  By the `.smoe` format's Q4: the codes are
    computed with the float32 scale, the stored one is rounded.  ValueError for other types or sizes and for
    weights that are not finite or exceed float16.
    """
    return _quantize(weights, 4)


def quantize_q2(weights: F32) -> tuple[U8, F16]:
    """Codes (uint8, 4 weights each, low bits first) and scales (float16, one for 64 weights), both flat.

    `weights`: float32 of any shape, a multiple of 64 of them.  By the `.smoe` format's Q2: of 64 candidate
    scales the one with the least squared error, the first of equals.  A group of zeros has scale 0 and
    comes back as zeros.  ValueError as for `quantize_q4`.
    """
    return _quantize(weights, 2)


def _quantize(weights: F32, bits: int) -> tuple[U8, F16]:
    if weights.dtype != np.float32:
        raise ValueError(f"weights are {weights.dtype}, not float32")
    if weights.size == 0 or weights.size % GROUP_WEIGHTS:
        raise ValueError(f"{weights.size} weights are not a whole number of groups of {GROUP_WEIGHTS}")
    flat = np.ascontiguousarray(weights).reshape(-1)
    groups = flat.size // GROUP_WEIGHTS
    codes = np.empty(flat.size * bits // 8, np.uint8)
    scales = np.empty(groups, np.float32)
    code = lib.smoe_quantize(
        ffi.from_buffer("float[]", flat),
        groups,
        bits,
        ffi.from_buffer("float[]", _Q2_CANDIDATES),
        ffi.from_buffer("unsigned char[]", codes),
        ffi.from_buffer("float[]", scales),
    )
    if code < 0:
        raise ValueError("a weight is infinite, not a number, or too large for a float16 scale (65504)")
    return codes, scales.astype(np.float16)
