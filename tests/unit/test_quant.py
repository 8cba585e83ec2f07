"""Quantisation: by the original's own results bit for bit, and by the format's text, weight by weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_mp.quant import F32, dequantize, packed_sizes, quantize_q2, quantize_q4
from smoe_mp.sources.smoe import open_smoe

REPO = Path(__file__).parents[2]
VAULTS = REPO.parent / "shared" / "vaults"
QUANTISE = {4: quantize_q4, 2: quantize_q2}

needs_vaults = pytest.mark.skipif(
    not VAULTS.is_dir(), reason="the original's vaults (../shared) are not here"
)


def bf16_tensors(path: Path) -> Iterator[tuple[str, F32]]:
    """The bfloat16 tensors of a safetensors file as float32: their bits are a float32's upper half."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, about in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__" and about["dtype"] == "BF16":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(about["shape"])


def same_bits(one: F32, other: F32) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def unpack(codes: npt.NDArray[np.uint8], bits: int) -> list[int]:
    return [(int(byte) >> shift) & ((1 << bits) - 1) for byte in codes for shift in range(0, 8, bits)]


@needs_vaults
@pytest.mark.parametrize("bits", [4, 2])
def test_dequantised_experts_equal_the_originals_bit_for_bit(bits: int) -> None:
    path = VAULTS / f"qwen3-tiny.q{bits}.smoe"
    vault, whole = open_smoe(path), np.fromfile(path, np.uint8)
    expected = np.load(VAULTS / f"qwen3-tiny.q{bits}.expected.npz")
    compared = 0
    for expert in vault.experts:
        blob = whole[expert.extents[0].offset :]
        tensors = {tensor.name: tensor for tensor in vault.layouts[expert.layout]}
        for name in ("gate", "up", "down"):
            codes, scales = tensors[name], tensors[f"{name}.scales"]
            got = dequantize(
                blob[codes.offset : codes.offset + codes.nbytes],
                blob[scales.offset : scales.offset + scales.nbytes].view(np.float16),
                codes.shape,
                bits,
            )
            assert same_bits(got, expected[f"{expert.layer}.{expert.expert}.{name}"])
            compared += 1
    assert compared == len(expected.files) == 72


@needs_vaults
@pytest.mark.parametrize("bits", [4, 2])
def test_quantised_checkpoint_equals_the_originals_vault_bit_for_bit(bits: int) -> None:
    path = VAULTS / f"qwen3-tiny.q{bits}.smoe"
    vault, whole = open_smoe(path), path.read_bytes()
    weights = dict(bf16_tensors(VAULTS / "qwen3-tiny" / "model.safetensors"))
    for index, expert in enumerate(vault.experts):
        prefix = f"model.layers.{expert.layer}.mlp.experts.{expert.expert}"
        blob = b"".join(
            part.tobytes()
            for name in ("gate", "up", "down")
            for part in QUANTISE[bits](weights[f"{prefix}.{name}_proj.weight"])
        )
        offset = expert.extents[0].offset
        assert len(blob) == vault.table["raw_size"][index]
        assert blob == whole[offset : offset + len(blob)]


def test_q4_codes_are_the_formats_formula() -> None:
    weights = np.random.default_rng(1).standard_normal(64 * 3, dtype=np.float32)
    codes, scales = quantize_q4(weights)
    got = unpack(codes, 4)
    for group in range(3):
        part = weights[group * 64 : group * 64 + 64]
        scale = np.abs(part).max()
        assert scales[group] == np.float16(scale)
        for weight, code in zip(part, got[group * 64 : group * 64 + 64], strict=True):
            exact = np.rint(weight / scale * np.float32(7.5) + np.float32(7.5))
            assert code == min(max(int(exact), 0), 15)


def test_q4_of_a_group_of_zeros_has_scale_one() -> None:
    codes, scales = quantize_q4(np.zeros(64, np.float32))
    assert scales.tolist() == [1.0]
    assert set(unpack(codes, 4)) == {8}  # 7.5 rounds half to even


def test_q2_of_a_group_of_zeros_comes_back_as_zeros() -> None:
    codes, scales = quantize_q2(np.zeros(64, np.float32))
    assert not dequantize(codes, scales, (64,), 2).any()


def test_q2_takes_the_first_candidate_of_least_error() -> None:
    rng = np.random.default_rng(2)
    # More groups than one block, so that the seam between blocks is crossed.
    groups = rng.standard_normal((600, 64), dtype=np.float32) * rng.random((600, 1), dtype=np.float32)
    _, scales = quantize_q2(groups)
    candidates = np.abs(groups).max(axis=1, keepdims=True) * np.linspace(0.1, 1.0, 64, dtype=np.float32)
    # All 64 at once, as the format's text has it; small enough here.
    ratio = groups[:, None, :] / candidates[:, :, None]
    codes = np.clip(np.rint(ratio * np.float32(1.5) + np.float32(1.5)), 0, 3)
    weights = (codes - np.float32(1.5)) / np.float32(1.5) * candidates[:, :, None]
    best = ((weights - groups[:, None, :]) ** 2).sum(axis=2).argmin(axis=1)
    assert np.array_equal(scales, candidates[np.arange(600), best].astype(np.float16))
    assert len(set(best.tolist())) > 5


@pytest.mark.parametrize("bits", [4, 2])
def test_large_tensors_equal_the_formula_across_blocks(bits: int) -> None:
    rng = np.random.default_rng(3)
    shape = (100, 64 * 50)  # 320 000 weights: several blocks, the last one not full
    size, _ = packed_sizes(320_000, bits)
    codes = rng.integers(0, 256, size, np.uint8)
    scales = rng.random(5000).astype(np.float16)
    half = np.float32((1 << bits) - 1) / np.float32(2)
    numbers = np.array(unpack(codes, bits), np.float32).reshape(5000, 64)
    expected = ((numbers - half) / half * scales.astype(np.float32)[:, None]).reshape(shape)
    assert same_bits(dequantize(codes, scales, shape, bits), expected)


def test_a_last_group_that_is_not_full_has_its_own_scale() -> None:
    codes = np.full(35, 0xFF, np.uint8)
    got = dequantize(codes, np.array([2, 3], np.float16), (7, 10), 4).reshape(-1)
    assert got[:64].tolist() == [2.0] * 64
    assert got[64:].tolist() == [3.0] * 6


def test_the_result_is_new_and_the_input_may_be_readonly_and_unaligned() -> None:
    raw = bytes(range(1, 1 + 32 + 3 + 2))
    codes = np.frombuffer(raw, np.uint8, 32, 1)
    scales = np.frombuffer(raw, np.float16, 1, 33)
    assert not scales.flags.aligned
    got = dequantize(codes, scales, (8, 8), 4)
    got[:] = 0
    assert codes.tobytes() == raw[1:33]
    assert same_bits(dequantize(codes, scales, (8, 8), 4), dequantize(codes.copy(), scales.copy(), (8, 8), 4))


@settings(max_examples=50, deadline=None)
@given(
    bits=st.sampled_from([4, 2]),
    groups=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(1e-3, 1e3),
)
def test_the_error_is_within_half_a_step_for_q4_and_the_largest_weight_for_q2(
    bits: int, groups: int, seed: int, scale: float
) -> None:
    weights = np.random.default_rng(seed).standard_normal((groups, 64), dtype=np.float32) * np.float32(scale)
    got = dequantize(*QUANTISE[bits](weights), weights.shape, bits)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    step = largest / (7.5 if bits == 4 else 1.5)
    bound = step / 2 if bits == 4 else largest  # Q2 may clip
    assert (np.abs(got - weights) <= bound + largest * 1e-3).all()


@pytest.mark.parametrize("quantise", [quantize_q4, quantize_q2])
@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (np.zeros(63, np.float32), "63 weights"),
        (np.zeros(0, np.float32), "0 weights"),
        (np.zeros(64, np.float64), "float64"),
        (np.full(64, np.nan, np.float32), "not a number"),
        (np.array([np.inf] + [0] * 63, np.float32), "infinite"),
        (np.array([-70000] + [0] * 63, np.float32), "65504"),
    ],
)
def test_weights_that_the_format_cannot_hold_are_refused(quantise, weights, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        quantise(weights)


def test_sizes_that_do_not_fit_are_refused() -> None:
    codes, scales = np.zeros(32, np.uint8), np.zeros(1, np.float16)
    with pytest.raises(ValueError, match="needs 64 of uint8"):
        dequantize(codes, scales, (2, 64), 4)
    with pytest.raises(ValueError, match="needs 1 of float16"):
        dequantize(codes, np.zeros(2, np.float16), (64,), 4)
    with pytest.raises(ValueError, match="only 2 and 4"):
        dequantize(codes, scales, (64,), 3)
    with pytest.raises(ValueError, match="whole bytes"):
        packed_sizes(3, 2)
