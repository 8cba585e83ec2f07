"""From an expert's bytes, as a source has them, to the three float32 matrices that a quantised vault holds.

A source delivers tensors unchanged, with the family's rules in their names and tags.  `Matrix` applies those
rules: which tensor, which of its rows, in which type.  Weights come in pieces of about a million, each a
whole number of groups of 64, so that besides the bytes that were read little is in memory however large an
expert is.  What the rules do not cover is refused: a vault of wrongly ordered weights works, and talks
nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.quant import F32, GROUP_WEIGHTS
from smoe_mp.sources.base import Tensor
from smoe_mp.sources.dtypes import NUMPY

__all__ = ["Matrix", "matrices"]

PIECE_WEIGHTS = 1 << 20
FLOATS = ("BF16", "F16", "F32", "F64")
#: Types that a factor a block makes weights of, and what the factors of a tensor are called.
SCALED = ("F8_E4M3", "F8_E5M2")
SCALES = ".weight_scale_inv"

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of gate, up and down, as rows of outputs: rows `first`, `first + step`, ... of `tensor`, `rows` of
    them, after transposing it where `transposed`.  `scales`: one factor a block of `block` weights of the
    tensor."""

    name: str
    tensor: Tensor
    rows: int
    cols: int
    first: int = 0
    step: int = 1
    transposed: bool = False
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    def pieces(self, parts: Sequence[U8]) -> Iterator[F32]:
        """The matrix in row-major order as flat float32 arrays; `parts`: the expert's bytes by extent."""
        chosen = _array(self.tensor, parts)
        chosen = (chosen.T if self.transposed else chosen)[self.first :: self.step][: self.rows]
        whole = GROUP_WEIGHTS // gcd(self.cols, GROUP_WEIGHTS)  # rows that are a whole number of groups
        a_piece = max(PIECE_WEIGHTS // self.cols // whole, 1) * whole
        for row in range(0, self.rows, a_piece):
            piece = _float32(chosen[row : row + a_piece], self.tensor.dtype)
            if self.scales is not None:
                piece *= self._factors(self.scales, parts, row, len(piece))
            yield piece.reshape(-1)

    def _factors(self, scales: Tensor, parts: Sequence[U8], row: int, rows: int) -> F32:
        """The factor of each weight of some rows; the tensor is not transposed."""
        down, across = self.block
        first = self.first + row * self.step
        blocks = np.arange(first, first + rows * self.step, self.step) // down
        wide = _float32(_array(scales, parts), scales.dtype)[blocks]
        factors: F32 = np.repeat(wide, across, axis=1)[:, : self.cols]
        return factors


def _array(t: Tensor, parts: Sequence[U8]) -> npt.NDArray[Any]:
    """The tensor over the bytes of its part."""
    return parts[t.part][t.offset : t.offset + t.nbytes].view(NUMPY[t.dtype]).reshape(t.shape)


def _float32(weights: npt.NDArray[Any], dtype: str) -> F32:
    """A float32 array of the weights, rounded only where they are float64."""
    if dtype == "BF16":  # a float32's upper half; ml_dtypes' own conversion is several times slower
        return (weights.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return weights.astype(np.float32)


def matrices(path: Path, layout: Sequence[Tensor]) -> tuple[Matrix, Matrix, Matrix]:
    """Gate, up and down of experts of this layout.  VaultError, with `path`, where they cannot be had."""
    by_name = {t.name: t for t in layout}
    fused = "gate_up" in by_name
    stored = ("gate_up", "down") if fused else ("gate", "up", "down")
    rest = set(by_name) - set(stored) - {name + SCALES for name in stored}
    if rest or not set(stored) <= set(by_name):
        raise VaultError(
            f"{path}: its experts have {', '.join(by_name)}; a quantised vault holds gate, up and down alone:"
            " pack it with --raw"
        )
    found = [_matrix(path, by_name[name], by_name.get(name + SCALES)) for name in stored]
    gate, up, down = (*_halves(path, found[0]), found[1]) if fused else found
    for matrix in (gate, up, down):
        if matrix.rows * matrix.cols % GROUP_WEIGHTS:
            raise VaultError(
                f"{path}: {matrix.name} of {matrix.rows} x {matrix.cols} weights is not a whole number of"
                f" groups of {GROUP_WEIGHTS}: pack it with --raw"
            )
    return gate, up, down


def _matrix(path: Path, t: Tensor, scales: Tensor | None) -> Matrix:
    """The whole of a tensor."""
    orientation = t.tag.split(",")[0]
    kinds = FLOATS if scales is None else SCALED
    if orientation not in ("linear", "transposed") or t.dtype not in kinds or len(t.shape) != 2:
        raise VaultError(
            f"{path}: {t.name} is {t.dtype} of shape {t.shape}, {t.tag or 'of unknown order'}; what can be"
            f" quantised is a matrix of {', '.join(FLOATS)}, or of float8 with a factor a block: pack it with"
            " --raw"
        )
    transposed = orientation == "transposed"
    rows, cols = reversed(t.shape) if transposed else t.shape
    if scales is None:
        return Matrix(t.name, t, rows, cols, transposed=transposed)
    if transposed:
        raise VaultError(f"{path}: {t.name} is transposed and has {scales.name}: pack it with --raw")
    return Matrix(t.name, t, rows, cols, scales=scales, block=_block(path, t, scales))


def _block(path: Path, t: Tensor, scales: Tensor) -> tuple[int, int]:
    """How many rows and columns one factor is for, by the factors' tag."""
    word = next((w for w in scales.tag.split(",") if w.startswith("block=")), "")
    down, _, across = word.removeprefix("block=").partition("x")
    if down.isdecimal() and across.isdecimal() and scales.dtype in FLOATS and int(down) and int(across):
        block = int(down), int(across)
        if scales.shape == tuple(-(-n // b) for n, b in zip(t.shape, block, strict=True)):
            return block
    raise VaultError(
        f"{path}: {scales.name} is {scales.dtype} of shape {scales.shape} for {t.name} of shape {t.shape},"
        f" {word or 'and config.json gives no weight_block_size'}: not one factor a block: pack it with --raw"
    )


def _halves(path: Path, both: Matrix) -> tuple[Matrix, Matrix]:
    """Gate and up of a matrix that has both."""
    words = both.tensor.tag.split(",")
    half = both.rows // 2
    if both.rows % 2 or not {"concatenated", "interleaved"} & set(words):
        raise VaultError(
            f"{path}: gate_up of {both.rows} rows, {both.tensor.tag}: which of them are gate's is not known:"
            " pack it with --raw"
        )
    if "concatenated" in words:
        return replace(both, name="gate", rows=half), replace(both, name="up", rows=half, first=half)
    return (
        replace(both, name="gate", rows=half, step=2),
        replace(both, name="up", rows=half, first=1, step=2),
    )
