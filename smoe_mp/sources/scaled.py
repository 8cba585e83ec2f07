"""Float8 weights with scales beside them, to float32.

A checkpoint says in config.json how large a block of weights shares a scale; the word "block=ROWSxCOLUMNS" of
the scales' tag carries that to the client.  Without it only scales that leave no choice are applied: one for
the whole matrix, or a column of one a row.  The scale multiplies, whether it is called `weight_scale` or
`weight_scale_inv` (DeepSeek-V3's own inference/kernel.py, `weight_dequant`; compressed-tensors).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT8", "SCALE_SUFFIXES", "dequantize"]

#: Types of weights.  F8_E8M0 is none: it has exponents alone, and scales others.
FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
#: Behind a matrix's name, the name of its scales.
SCALE_SUFFIXES = (".weight_scale_inv", ".scale_inv", ".weight_scale", ".scale")

_BLOCK = re.compile(r"(?:^|,)block=(\d+)x(\d+)(?:,|$)")


def dequantize(codes: npt.NDArray[Any], scales: npt.NDArray[Any], tag: str) -> npt.NDArray[np.float32]:
    """`codes` times `scales`, as a new float32 array.  `tag`: the scales' tag.

    ValueError with the shapes where the scales do not fit, or where it is not known which is for what.
    """
    weights = codes.astype(np.float32)
    factors = scales.astype(np.float32)
    if factors.size == 1:
        weights *= factors.reshape(())
    elif match := _BLOCK.search(tag):
        _scale_blocks(weights, factors, int(match[1]), int(match[2]))
    elif weights.ndim == 2 and factors.shape == (weights.shape[0], 1):
        weights *= factors
    else:
        raise ValueError(
            f"its scales of shape {list(factors.shape)} for weights of shape {list(weights.shape)} do not say"
            " which weights they are for (config.json has no weight_block_size)"
        )
    return weights


def _scale_blocks(
    weights: npt.NDArray[np.float32], factors: npt.NDArray[np.float32], rows: int, columns: int
) -> None:
    """Multiply in place, a band of `rows` rows at a time."""
    if weights.ndim != 2:
        raise ValueError(f"block scales for weights of shape {list(weights.shape)}, which is no matrix")
    height, width = weights.shape
    wanted = -(-height // rows), -(-width // columns)
    if factors.shape != wanted:
        raise ValueError(
            f"its scales have shape {list(factors.shape)}; blocks of {rows} x {columns} in {height} x {width}"
            f" weights need {list(wanted)}"
        )
    for band, row in enumerate(range(0, height, rows)):
        weights[row : row + rows] *= np.repeat(factors[band], columns)[:width]
