"""Weights as floating-point numbers, out of the block types that experts come in.

    from smoe_mp.dequant import dequantize
    w = dequantize("Q4_K", raw, (768, 2048))                              a new float32 array
    dequantize("Q4_K", raw, (768, 2048), out=w, threads=2)                into memory that is there
    t = torch.empty(768, 2048, dtype=torch.bfloat16)
    dequantize("Q4_K", raw, (768, 2048), out=t.view(torch.uint16).numpy(), dtype="bfloat16")

The work is done in C (csrc/dequant.c), without the interpreter's lock.  float32 equals gguf-py's result bit
for bit, and `smoe_mp.quant.dequantize`'s for the types of `.smoe` vaults; float16 and bfloat16 are that
float32, rounded once to nearest even.  numpy itself has no bfloat16, and its bits as whole numbers would
compute to nonsense in silence, so a new array is of ml_dtypes' type; `out` may be uint16 too, as above,
since torch takes no array of that type.

`TYPES` is the table of types.  It is C's own; here are only the checks that let a caller read what was wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from smoe_mp._native import check_plain, ffi, lib, text

__all__ = ["MAX_THREADS", "TYPES", "BlockType", "Dtype", "dequantize"]

Dtype = Literal["float32", "float16", "bfloat16"]

MAX_THREADS = 64
_DTYPES: dict[str, tuple[int, npt.DTypeLike]] = {
    "float32": (lib.SMOE_TO_F32, np.float32),
    "float16": (lib.SMOE_TO_F16, np.float16),
    "bfloat16": (lib.SMOE_TO_BF16, ml_dtypes.bfloat16),
}
_MOST_WEIGHTS = 1 << 56


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type: `elements` weights a block of `nbytes`.

    `scale_nbytes` is 0 where the scales lie inside the blocks, else the size of one scale: one for each
    block, or, where `tile` is not 0, one for each `tile` x `tile` weights of a matrix.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    scale_nbytes: int
    tile: int

    def data_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor's blocks; ValueError where `shape` cannot be made of blocks."""
        weights = _weights_of(shape)
        across_rows = self.scale_nbytes and not self.tile
        whole = weights if across_rows else shape[-1]
        least = self.elements // self.nbytes or 1 if across_rows else self.elements
        if whole % least:
            raise ValueError(
                f"{self.name}, shape {tuple(shape)}: {whole} weights {'in all' if across_rows else 'a row'} "
                f"are no multiple of {least}"
            )
        return weights * self.nbytes // self.elements

    def scales_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor's scales, 0 where they are in its blocks.  Tiles and groups begun count full."""
        weights = _weights_of(shape)
        if self.tile:
            columns = shape[-1]
            return _ceil(weights // columns, self.tile) * _ceil(columns, self.tile) * self.scale_nbytes
        return _ceil(weights, self.elements) * self.scale_nbytes


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _weights_of(shape: Sequence[int]) -> int:
    if not shape or min(shape) <= 0 or prod(shape) > _MOST_WEIGHTS:
        raise ValueError(f"shape {tuple(shape)}: wanted are 1 or more numbers, all positive")
    return prod(shape)


def _read_types() -> dict[tuple[str, bool], BlockType]:
    found, number = {}, 0
    while row := lib.smoe_block_type_at(number):
        t = BlockType(number, text(row.name), row.elements, row.bytes, row.scale_bytes, row.tile)
        found[t.name, t.scale_nbytes > 0] = t
        number += 1
    return found


#: The types by name and by whether their scales lie apart from their blocks.
TYPES: dict[tuple[str, bool], BlockType] = _read_types()


def dequantize(
    type_name: str,
    data: Any,
    shape: Sequence[int],
    *,
    out: Any = None,
    dtype: Dtype = "float32",
    scales: Any = None,
    threads: int = 1,
) -> npt.NDArray[Any]:
    """The weights of one tensor, row-major: an array of `shape` and `dtype` (ml_dtypes' bfloat16).

    `type_name`: the format's own name, one of `TYPES`.
    `data`: the tensor's blocks, any contiguous buffer (bytes, a numpy array of any item, a view over the
    ring) at any address.
    `shape`: in weights.  A row must be whole blocks, but for SMOE_Q4 and SMOE_Q2, which are flat.
    `scales`: where they lie apart, by type: SMOE_Q4 and SMOE_Q2, float16, one for each 64 weights begun;
    MXFP4 as gpt_oss checkpoints have it (`_blocks` and `_scales`, bytes), one for each 32; F8_E4M3 and
    F8_E5M2, float32, one for each tile of 128 x 128 (`weight_scale_inv`), a stack being one tall matrix
    only where its matrices' rows are a multiple of 128.
    `out`: memory for the result, in place of a new array: a writable contiguous buffer of just the right
    size, of `dtype`, of bytes, or (bfloat16) of uint16, which shares nothing with the input.
    `threads`: 1 to 64; they live for the call only.

    Where `out` is given, the result is an array over its memory.  Equal bit for bit to gguf-py 0.19
    (`gguf.quants.dequantize`), `smoe_mp.quant.dequantize`, transformers (MXFP4 with scales, from
    `convert_moe_packed_tensors`, before it transposes) and ml_dtypes (float8).  ValueError, with type, shape
    and figures, for what does not fit together; then nothing has been written.
    """
    shape = tuple(operator.index(n) for n in shape)
    kind = _kind_of(type_name, scales is not None)
    where = f"{type_name}, shape {shape}"
    if dtype not in _DTYPES:
        raise ValueError(f"{where}: dtype {dtype!r}, but there are only {', '.join(_DTYPES)}")
    if not 1 <= operator.index(threads) <= MAX_THREADS:
        raise ValueError(f"{where}: {threads} threads, but 1 to {MAX_THREADS} are possible")
    blocks = _input(where, "data", data, kind.data_nbytes(shape), None)
    factors = None
    if scales is not None:
        factors = _input(where, "scales", scales, kind.scales_nbytes(shape), _SCALES[kind.scale_nbytes])
    result = _output(where, out, shape, dtype)
    flat = result.reshape(-1).view(np.uint8)
    for name, part in (("data", blocks), ("scales", factors)):
        if out is not None and part is not None and np.may_share_memory(flat, part):
            raise ValueError(f"{where}: out and {name} share memory")
    _decode(kind, blocks, factors, shape, out=flat, to=_DTYPES[dtype][0], threads=threads)
    return result


def _decode(
    kind: BlockType,
    blocks: npt.NDArray[np.uint8],
    factors: npt.NDArray[np.uint8] | None,
    shape: tuple[int, ...],
    *,
    out: npt.NDArray[np.uint8],
    to: int,
    threads: int = 1,
    plain: bool = False,
) -> None:
    """Sizes that were checked, to C.  `plain`: the form for any processor, for tests."""
    job = ffi.new("smoe_dequant_job *")
    job.type, job.to, job.threads, job.plain = kind.number, to, threads, plain
    job.rows, job.columns = prod(shape[:-1]), shape[-1]
    job.data, job.data_bytes = ffi.cast("void *", blocks.ctypes.data), blocks.size
    if factors is not None:
        job.scales, job.scales_bytes = ffi.cast("void *", factors.ctypes.data), factors.size
    job.out, job.out_bytes = ffi.cast("void *", out.ctypes.data), out.size
    check_plain(lib.smoe_dequantize(job), "none: smoe_dequantize")


def _kind_of(type_name: str, apart: bool) -> BlockType:
    kind = TYPES.get((type_name, apart))
    if kind is None:
        with_scales = (type_name, True) in TYPES
        if (type_name, not apart) in TYPES:
            raise ValueError(
                f"{type_name}: {'its scales lie apart: pass scales' if with_scales else 'takes no scales'}"
            )
        names = sorted({name for name, _ in TYPES})
        raise ValueError(f"no dequantiser for {type_name!r}: there are {', '.join(names)}")
    return kind


#: What the items of scales of so many bytes may be, by numpy's kind and size; bytes are always taken.
_SCALES: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.float16, 4: np.float32}


def _input(
    where: str, name: str, given: Any, nbytes: int, item: npt.DTypeLike | None
) -> npt.NDArray[np.uint8]:
    """`given` as its bytes, without a copy; ValueError where there are not `nbytes` of them."""
    array = _as_array(where, name, given)
    if array.nbytes != nbytes:
        raise ValueError(f"{where}: {name} has {array.nbytes} bytes, but the shape needs {nbytes}")
    if item is not None and array.dtype not in (np.dtype(item), np.dtype(np.uint8)):
        raise ValueError(f"{where}: {name} is {array.dtype}, but wanted is {np.dtype(item)} or its bytes")
    return array.reshape(-1).view(np.uint8)


def _as_array(where: str, name: str, given: Any) -> npt.NDArray[Any]:
    """A buffer as a contiguous array over the same memory."""
    if isinstance(given, np.ndarray):
        array = given
    else:
        try:
            array = np.frombuffer(memoryview(given).cast("B"), np.uint8)
        except (TypeError, ValueError, BufferError) as e:
            raise ValueError(
                f"{where}: {name} ({type(given).__name__}) is no contiguous buffer of numbers: {e}"
            ) from None
    if not array.flags.c_contiguous or array.dtype.hasobject:
        raise ValueError(f"{where}: {name} is not contiguous memory of numbers: pass a copy")
    return array


def _output(where: str, out: Any, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """`out`, or a new array, as `shape` of the result's items."""
    item = np.dtype(_DTYPES[dtype][1])
    if out is None:
        return np.empty(shape, item)
    array, nbytes = _as_array(where, "out", out), prod(shape) * item.itemsize
    if not array.flags.writeable:
        raise ValueError(f"{where}: out is read-only")
    if array.nbytes != nbytes:
        raise ValueError(f"{where}: out has {array.nbytes} bytes, but {dtype} of that shape needs {nbytes}")
    alike = array.dtype == item or (dtype == "bfloat16" and array.dtype == np.uint16)
    if not alike and array.dtype.itemsize != 1:
        raise ValueError(f"{where}: out is {array.dtype}, but wanted is {item} or bytes")
    if array.ctypes.data % item.itemsize:
        raise ValueError(f"{where}: out starts at an address that is no multiple of {item.itemsize}")
    return (array if alike else array.reshape(-1).view(item)).reshape(shape)
