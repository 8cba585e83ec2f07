"""Float8 with scales, against sums made one by one in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from smoe_mp.sources import scaled


def codes(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(rows * 1000 + columns)
    return rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (5, 7), (8, 8), (1, 1), (9, 2)])
@pytest.mark.parametrize(("high", "wide"), [(2, 3), (4, 4), (128, 128), (1, 1)])
def test_blocks(rows: int, columns: int, high: int, wide: int) -> None:
    """Also where the last blocks are cut by the matrix's edge."""
    weights = codes(rows, columns)
    shape = -(-rows // high), -(-columns // wide)
    scales = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    got = scaled.dequantize(weights, scales, f"linear,block={high}x{wide}")
    assert got.dtype == np.float32
    for i in range(rows):
        for j in range(columns):
            wanted = np.float64(weights[i, j]) * np.float64(scales[i // high, j // wide])
            assert got[i, j] == np.float32(wanted)


def test_one_scale_and_one_a_row() -> None:
    weights = codes(3, 4)
    assert np.array_equal(
        scaled.dequantize(weights, np.array(2.5, np.float32), ""), weights.astype(np.float32) * 2.5
    )
    column = np.array([[1.0], [2.0], [4.0]], ml_dtypes.bfloat16)
    wanted = weights.astype(np.float32) * column.astype(np.float32)
    assert np.array_equal(scaled.dequantize(weights, column, ""), wanted)


@pytest.mark.parametrize(
    ("shape", "tag", "words"),
    [
        ((2, 2), "linear", r"\[2, 2\] for weights of shape \[4, 4\]"),
        ((4,), "", "do not say which"),
        ((2, 3), "block=2x2", r"need \[2, 2\]"),
        ((2, 2), "block=128x128,linear", r"need \[1, 1\]"),
        ((2, 2), "block=0x", "do not say which"),
    ],
)
def test_scales_that_do_not_fit(shape: tuple[int, ...], tag: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaled.dequantize(codes(4, 4), np.ones(shape, np.float32), tag)


def test_blocks_of_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="no matrix"):
        scaled.dequantize(codes(2, 2)[None], np.ones((1, 2), np.float32), "block=1x1")
