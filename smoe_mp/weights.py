"""From an expert's bytes, as a source has them, to the three float32 matrices that a quantised vault holds.

A source delivers tensors unchanged, with the family's rules in their names and tags.  `Matrix` applies those
rules: which tensor, which of its rows, in which type.  Weights come in pieces of about a million, each a
whole number of groups of 64, so that besides the bytes that were read little is in memory however large an
expert is.  What the rules do not cover is refused: a vault of wrongly ordered weights works, and talks
nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.quant import F32, GROUP_WEIGHTS
from smoe_mp.sources.base import Tensor
from smoe_mp.sources.dtypes import NUMPY

__all__ = ["Matrix", "matrices"]

PIECE_WEIGHTS = 1 << 20
FLOATS = ("BF16", "F16", "F32", "F64")

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of gate, up and down: rows `first`, `first + step`, ... of `tensor`, `rows` of them."""

    name: str
    tensor: Tensor
    rows: int
    cols: int
    first: int = 0
    step: int = 1

    def pieces(self, parts: Sequence[U8]) -> Iterator[F32]:
        """The matrix in row-major order as flat float32 arrays; `parts`: the expert's bytes by extent."""
        t = self.tensor
        raw = parts[t.part][t.offset : t.offset + t.nbytes].view(NUMPY[t.dtype]).reshape(-1, self.cols)
        chosen = raw[self.first :: self.step][: self.rows]
        whole = GROUP_WEIGHTS // gcd(self.cols, GROUP_WEIGHTS)  # rows that are a whole number of groups
        a_piece = max(PIECE_WEIGHTS // self.cols // whole, 1) * whole
        for row in range(0, self.rows, a_piece):
            yield _float32(chosen[row : row + a_piece], t.dtype)


def _float32(weights: npt.NDArray[np.generic], dtype: str) -> F32:
    """A flat float32 array of the weights, rounded only where they are float64."""
    if (
        dtype == "BF16"
    ):  # a bfloat16 is a float32's upper half; ml_dtypes' own conversion takes five times as long
        return (weights.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(-1)
    return weights.astype(np.float32).reshape(-1)


def matrices(path: Path, layout: Sequence[Tensor]) -> tuple[Matrix, Matrix, Matrix]:
    """Gate, up and down of experts of this layout.  VaultError, with `path`, where they cannot be had."""
    by_name = {t.name: t for t in layout}
    names = set(by_name)
    if names == {"gate", "up", "down"}:
        gate, up, down = (_whole(path, by_name[name]) for name in ("gate", "up", "down"))
        return gate, up, down
    raise VaultError(
        f"{path}: its experts have {', '.join(by_name)}; a quantised vault holds gate, up and down alone:"
        " pack it with --raw"
    )


def _whole(path: Path, t: Tensor) -> Matrix:
    if t.tag or t.dtype not in FLOATS or len(t.shape) != 2:
        tagged = f" ({t.tag})" if t.tag else ""
        raise VaultError(
            f"{path}: {t.name} is {t.dtype} of shape {t.shape}{tagged}; what can be quantised is a matrix of"
            f" {', '.join(FLOATS)}: pack it with --raw"
        )
    if prod(t.shape) % GROUP_WEIGHTS:
        raise VaultError(
            f"{path}: {t.name} of shape {t.shape} is not a whole number of groups of {GROUP_WEIGHTS} weights:"
            " pack it with --raw"
        )
    return Matrix(t.name, t, *t.shape)
