"""The dequantisers in C: the references' results bit for bit, in both of their forms, and every refusal.

Scales are any bits: infinite, NaN of both kinds, subnormal.  `DEQUANT_ROUNDS` asks for more random tensors of
each type than one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe_mp import quant
from smoe_mp.dequant import _DTYPES, MAX_THREADS, TYPES, BlockType, Dtype, _decode, dequantize

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

ROUNDS = int(os.environ.get("DEQUANT_ROUNDS", "1"))
EMBEDDED = [kind for kind in TYPES.values() if not kind.scale_nbytes and not kind.name.startswith("F8")]
BY_NAME = pytest.mark.parametrize("kind", EMBEDDED, ids=lambda kind: kind.name)
ALL = pytest.mark.parametrize("kind", TYPES.values(), ids=lambda k: k.name + "+" * (k.scale_nbytes > 0))
FORMS = pytest.mark.parametrize("plain", [False, True], ids=["here", "plain"])
DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")

# float16: zeros, subnormals, one, the largest, infinities, NaN quiet and signalling with both signs.
ODD_HALVES = np.array(
    [0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0xFD55],
    np.uint16,
)


def decode(
    kind: BlockType, data: U8, shape: tuple[int, ...], dtype: Dtype, *, plain: bool, scales: Any = None
) -> npt.NDArray[Any]:
    """One form of the decoder, into memory full of other bytes."""
    code, item = _DTYPES[dtype]
    out = np.full(shape, 0x5A, np.uint8).repeat(np.dtype(item).itemsize, axis=-1)
    factors = None if scales is None else scales.reshape(-1).view(np.uint8)
    _decode(kind, data.reshape(-1), factors, shape, out=out.reshape(-1), to=code, plain=plain)
    return out.view(item)


def rounded(weights: F32, dtype: Dtype) -> npt.NDArray[Any]:
    with np.errstate(all="ignore"):
        return weights.astype(_DTYPES[dtype][1])


def assert_same_bits(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = f"u{got.dtype.itemsize}"
    differ = np.argwhere(got.view(bits) != want.view(bits))
    assert not len(differ), (
        f"{len(differ)} differ, first at {differ[0]}: {got[tuple(differ[0])]!r} for "
        + repr(want[tuple(differ[0])])
    )


def by_gguf(kind: BlockType, data: U8) -> F32:
    with np.errstate(all="ignore"):
        return quants.dequantize(data, GGMLQuantizationType[kind.name])


def random_bytes(seed: int, *shape: int) -> U8:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def assert_as_gguf(kind: BlockType, data: U8, plain: bool) -> None:
    """`data`: rows of blocks."""
    want = by_gguf(kind, data)
    for dtype in DTYPES:
        assert_same_bits(decode(kind, data, want.shape, dtype, plain=plain), rounded(want, dtype))


# --- the table -----------------------------------------------------------------------------------------


@BY_NAME
def test_the_table_is_ggufs(kind: BlockType) -> None:
    assert (kind.elements, kind.nbytes) == GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]]


def test_the_table_has_what_experts_come_in() -> None:
    wanted = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 BF16 F16 F8_E4M3 F8_E5M2"
    assert {name for name, apart in TYPES if not apart} == set(wanted.split())
    assert {name for name, apart in TYPES if apart} == {"MXFP4", "SMOE_Q4", "SMOE_Q2", "F8_E4M3", "F8_E5M2"}
    assert [kind.number for kind in TYPES.values()] == list(range(len(TYPES)))


# --- the same bits -------------------------------------------------------------------------------------


@FORMS
@BY_NAME
def test_random_blocks(kind: BlockType, plain: bool) -> None:
    for seed in range(ROUNDS):
        assert_as_gguf(kind, random_bytes(seed, 24, 1024 // kind.elements * kind.nbytes), plain)


@FORMS
@BY_NAME
def test_blocks_whose_every_scale_is_odd(kind: BlockType, plain: bool) -> None:
    """Words of odd float16 at even and at odd places, so that each of a block's scales meets each of them."""
    words = np.random.default_rng(3).choice(ODD_HALVES, 24 * 1024 // kind.elements * kind.nbytes // 2 + 1)
    for first in (0, 1):
        data = words.view(np.uint8)[first : first + 24 * 1024 // kind.elements * kind.nbytes]
        assert_as_gguf(kind, data.reshape(24, -1).copy(), plain)


@FORMS
@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K", "Q4_K"])
def test_a_scale_and_a_minimum_that_are_both_odd(name: str, plain: bool) -> None:
    kind, n = TYPES[name, False], len(ODD_HALVES)
    data, at = random_bytes(4, n * n, kind.nbytes), 80 if name == "Q2_K" else 0
    data[:, at : at + 2] = np.repeat(ODD_HALVES, n).view(np.uint8).reshape(-1, 2)
    data[:, at + 2 : at + 4] = np.tile(ODD_HALVES, n).view(np.uint8).reshape(-1, 2)
    assert_as_gguf(kind, data, plain)


@FORMS
def test_every_float16_as_scale_and_as_weight(plain: bool) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    data = np.zeros((1 << 16, 34), np.uint8)
    data[:, :2], data[:, 2:4] = every, (1, 255)  # weights 1 and -1, then zeros
    assert_as_gguf(TYPES["Q8_0", False], data, plain)
    assert_as_gguf(TYPES["F16", False], every.reshape(1, -1), plain)
    assert_as_gguf(TYPES["BF16", False], every.reshape(1, -1), plain)


@FORMS
def test_every_e8m0_with_every_code(plain: bool) -> None:
    data = np.zeros((256, 17), np.uint8)
    data[:, 0], data[:, 1:] = np.arange(256), np.arange(16) * 0x11
    assert_as_gguf(TYPES["MXFP4", False], data, plain)


@FORMS
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("shape", [(3, 64), (5, 72), (1, 4), (7, 300), (1 << 16, 64)])
def test_smoe_quantisation(bits: int, shape: tuple[int, int], plain: bool) -> None:
    """Groups that run over rows' ends and a last one that is cut; every float16 as a scale."""
    kind, weights = TYPES[f"SMOE_Q{bits}", True], shape[0] * shape[1]
    codes = random_bytes(bits, weights * bits // 8)
    scales = np.arange(-(-weights // 64), dtype=np.uint16).view(np.float16)
    if len(scales) < 1 << 16:
        scales = np.resize(ODD_HALVES, len(scales)).view(np.float16)
    with np.errstate(all="ignore"):
        want = quant.dequantize(codes, scales, shape, bits)
    for dtype in DTYPES:
        assert_same_bits(decode(kind, codes, shape, dtype, plain=plain, scales=scales), rounded(want, dtype))


def e2m1_times_e8m0(data: U8, scales: U8) -> F32:
    """By the format's text: sign, two bits of exponent, one of mantissa; scales 2^(s - 127)."""
    size = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(-1, 32)
    values = np.where(codes > 7, -size[codes & 7], size[codes & 7])
    with np.errstate(all="ignore"):
        powers = np.ldexp(np.float64(1), scales.astype(int) - 127).astype(np.float32)
        return values.astype(np.float32) * powers.reshape(-1, 1)


@FORMS
def test_mxfp4_with_its_scales_apart(plain: bool) -> None:
    data, scales = random_bytes(5, 512, 16), np.repeat(np.arange(256, dtype=np.uint8), 2)
    data[::2] = np.arange(16) * 0x11
    want = e2m1_times_e8m0(data, scales).reshape(128, 128)
    for dtype in DTYPES:
        kind = TYPES["MXFP4", True]
        assert_same_bits(
            decode(kind, data, (128, 128), dtype, plain=plain, scales=scales), rounded(want, dtype)
        )


OF_TRANSFORMERS = """
import sys, numpy as np, torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
blocks, scales, out = sys.argv[1:]
made = convert_moe_packed_tensors(torch.from_numpy(np.load(blocks)), torch.from_numpy(np.load(scales)))
np.save(out, made.transpose(1, 2).contiguous().view(torch.uint16).numpy())
"""


@pytest.mark.slow
def test_mxfp4_is_transformers_own(tmp_path: Path) -> None:
    """In a process of its own, since torch brings threads along."""
    data, scales = random_bytes(6, 2, 8, 4, 16), random_bytes(7, 2, 8, 4) % 254
    paths = [str(tmp_path / name) for name in ("blocks.npy", "scales.npy", "out.npy")]
    np.save(paths[0], data)
    np.save(paths[1], scales)
    ran = subprocess.run(
        [sys.executable, "-c", OF_TRANSFORMERS, *paths], capture_output=True, text=True, check=False
    )
    if "ModuleNotFoundError" in ran.stderr:
        pytest.skip("transformers and torch are not here")
    assert ran.returncode == 0, ran.stderr
    got = dequantize("MXFP4", data, (2, 8, 128), scales=scales, dtype="bfloat16")
    assert_same_bits(got.view(np.uint16), np.load(paths[2]))


@FORMS
@pytest.mark.parametrize(
    ("name", "item"), [("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)]
)
def test_float8(name: str, item: npt.DTypeLike, plain: bool) -> None:
    every = np.arange(256, dtype=np.uint8)
    for length in (256, 255, 17, 1):
        want = every[-length:].view(item).astype(np.float32).reshape(1, -1)
        for dtype in DTYPES:
            got = decode(TYPES[name, False], every[-length:], (1, length), dtype, plain=plain)
            assert_same_bits(got, rounded(want, dtype))


@FORMS
@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 1), (129, 127), (3, 2500)])
def test_float8_in_tiles(name: str, shape: tuple[int, int], plain: bool) -> None:
    rows, columns = shape
    item = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[name]
    data, tiles = random_bytes(8, *shape), (-(-rows // 128), -(-columns // 128))
    scales = np.random.default_rng(9).standard_normal(tiles).astype(np.float32)
    with np.errstate(all="ignore"):
        spread = scales.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
        want = data.view(item).astype(np.float32) * spread
    for dtype in DTYPES:
        assert_same_bits(
            decode(TYPES[name, True], data, shape, dtype, plain=plain, scales=scales), rounded(want, dtype)
        )


def odd_floats() -> F32:
    """Every float16 and bfloat16, the halfway points between two, both sides of each, and random bits."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    widened = halves.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    around_half = (widened[:, None] + [0, 1, -1, 0xFFF, 0x1000, 0x1001]).reshape(-1)
    around_bfloat = ((halves.astype(np.int64) << 16)[:, None] + [0, 0x7FFF, 0x8000, 0x8001]).reshape(-1)
    drawn = np.random.default_rng(10).integers(0, 1 << 32, 1 << 15)
    bits = np.concatenate([around_half, around_bfloat, drawn]) & 0xFFFFFFFF
    with np.errstate(all="ignore"):  # a product, as what the decoder has is one: its NaN are quiet
        return bits.astype(np.uint32).view(np.float32) * np.float32(1)


@FORMS
def test_rounding_of_any_float(plain: bool) -> None:
    """A float8 of 1 times a scale is that scale; a tile's are the same, by sixteens and alone."""
    kind, floats = TYPES["F8_E4M3", True], odd_floats()
    for scales in np.array_split(floats, 40):
        data = np.full((1, 128 * (len(scales) - 1) + 17), 0x38, np.uint8)  # 1.0
        for dtype in DTYPES[1:]:
            got = decode(kind, data, data.shape, dtype, plain=plain, scales=scales)
            assert_same_bits(got[0, ::128].copy(), rounded(scales, dtype))
            assert_same_bits(got[0, 15::128].copy(), rounded(scales, dtype))
            assert_same_bits(got[0, -1:], rounded(scales[-1:], dtype))


@given(data=st.data())
@settings(max_examples=60 * ROUNDS, deadline=None)
def test_both_forms_agree(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(TYPES.values())))
    unit = 4 if kind.name.startswith("SMOE") else kind.elements
    shape = (data.draw(st.integers(1, 5)), unit * data.draw(st.integers(1, max(1, 5000 // unit))))
    seed, dtype = data.draw(st.integers(0, 1 << 30)), data.draw(st.sampled_from(DTYPES))
    blocks = random_bytes(seed, kind.data_nbytes(shape))
    scales = random_bytes(seed + 1, kind.scales_nbytes(shape)) if kind.scale_nbytes else None
    if scales is not None and kind.tile:  # of NaN times NaN, C leaves open which one comes out
        factors = scales.view(np.float32)
        factors[np.isnan(factors)] = np.inf
    one, other = (decode(kind, blocks, shape, dtype, plain=plain, scales=scales) for plain in (False, True))
    assert_same_bits(one, other)


# --- memory and threads ---------------------------------------------------------------------------------


def tensor(kind: BlockType, shape: tuple[int, ...]) -> tuple[U8, U8 | None]:
    apart = random_bytes(12, kind.scales_nbytes(shape)) if kind.scale_nbytes else None
    return random_bytes(11, kind.data_nbytes(shape)), apart


@ALL
def test_threads_change_nothing(kind: BlockType) -> None:
    shape = (5, 1280)
    data, scales = tensor(kind, shape)
    want = dequantize(kind.name, data, shape, scales=scales)
    for threads in (2, 3, 7, MAX_THREADS):
        for dtype in DTYPES:
            got = dequantize(kind.name, data, shape, scales=scales, threads=threads, dtype=dtype)
            assert_same_bits(got, rounded(want, dtype))


def test_more_threads_than_blocks() -> None:
    data, _ = tensor(TYPES["Q4_K", False], (1, 512))
    want = by_gguf(TYPES["Q4_K", False], data.reshape(1, -1))
    assert_same_bits(dequantize("Q4_K", data, (1, 512), threads=MAX_THREADS), want)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_no_thread_outlives_the_call_and_a_forked_child_may_call() -> None:
    data, _ = tensor(TYPES["Q8_0", False], (64, 256))
    before = len(list(Path("/proc/self/task").iterdir()))
    want = dequantize("Q8_0", data, (64, 256), threads=4)
    assert len(list(Path("/proc/self/task").iterdir())) == before
    child = os.fork()
    if not child:
        same = dequantize("Q8_0", data, (64, 256), threads=4).tobytes() == want.tobytes()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_calls_from_several_threads_at_once() -> None:
    data, _ = tensor(TYPES["Q6_K", False], (64, 1024))
    want = by_gguf(TYPES["Q6_K", False], data.reshape(64, -1))
    found: list[F32] = []
    threads = [
        threading.Thread(target=lambda: found.append(dequantize("Q6_K", data, (64, 1024), threads=2)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for got in found:
        assert_same_bits(got, want)


@ALL
def test_any_address_and_not_a_byte_beside(kind: BlockType) -> None:
    shape = (3, 256)
    data, scales = tensor(kind, shape)
    want = dequantize(kind.name, data, shape, scales=scales)
    moved = [
        np.concatenate([np.zeros(1, np.uint8), x])[1:] if x is not None else None for x in (data, scales)
    ]
    for part in moved:
        if part is not None:
            part.flags.writeable = False
    room = np.full(16 + want.nbytes + 16, 0xA5, np.uint8)
    got = dequantize(kind.name, moved[0], shape, scales=moved[1], out=room[16:-16])
    assert_same_bits(got, want)
    assert set(room[:16]) | set(room[-16:]) == {0xA5}


def test_out_may_be_many_things() -> None:
    data, _ = tensor(TYPES["Q4_0", False], (4, 64))
    want = rounded(by_gguf(TYPES["Q4_0", False], data.reshape(4, -1)), "bfloat16")
    memory = bytearray(512)
    outs: list[Any] = [
        np.empty((4, 64), ml_dtypes.bfloat16),
        np.empty((256,), ml_dtypes.bfloat16),
        np.empty((4, 64), np.uint16),
        np.empty((2, 256), np.uint8),
        memory,
        memoryview(memory),
    ]
    for out in outs:
        got = dequantize("Q4_0", data, (4, 64), out=out, dtype="bfloat16")
        assert got.shape == (4, 64)
        assert got.dtype in (ml_dtypes.bfloat16, np.uint16)
        assert np.shares_memory(got.view(np.uint8), np.frombuffer(out, np.uint8)) if out is memory else True
        assert (
            got.tobytes() == want.tobytes() == bytes(memoryview(np.asarray(out).view(np.uint8).reshape(-1)))
        )


def test_data_may_be_bytes_or_wider_items() -> None:
    data, _ = tensor(TYPES["Q4_0", False], (4, 64))
    want = dequantize("Q4_0", data, (4, 64))
    for given_as in (
        data.tobytes(),
        bytearray(data),
        memoryview(data),
        data.view(np.uint32),
        data.reshape(4, -1),
    ):
        assert_same_bits(dequantize("Q4_0", given_as, (4, 64)), want)


# --- refusals -------------------------------------------------------------------------------------------

BLOCKS = np.zeros(36, np.uint8)  # Q4_0, (1, 64)
READ_ONLY = np.zeros((1, 64), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("Q9_9", {}, r"no dequantiser for 'Q9_9': there are BF16, F16, .*SMOE_Q4"),
        ("Q4_0", {"scales": BLOCKS}, "Q4_0: takes no scales"),
        ("SMOE_Q4", {}, "SMOE_Q4: its scales lie apart: pass scales"),
        ("Q4_0", {"shape": (1, 33)}, r"Q4_0, shape \(1, 33\): 33 weights a row are no multiple of 32"),
        ("Q4_0", {"shape": (64, 1)}, r"shape \(64, 1\): 1 weights a row are no multiple of 32"),
        ("SMOE_Q2", {"shape": (1, 6), "scales": BLOCKS}, r"6 weights in all are no multiple of 4"),
        ("Q4_0", {"shape": ()}, r"shape \(\): wanted are 1 or more numbers"),
        ("Q4_0", {"shape": (0, 32)}, r"shape \(0, 32\): wanted"),
        ("Q4_0", {"shape": (-1, -32)}, r"shape \(-1, -32\): wanted"),
        ("Q4_0", {"shape": (1 << 40, 1 << 40)}, "shape .*: wanted"),
        ("Q4_0", {"shape": (1, 96)}, r"Q4_0, shape \(1, 96\): data has 36 bytes, but the shape needs 54"),
        ("Q4_0", {"data": BLOCKS[::2]}, "data is not contiguous"),
        ("Q4_0", {"data": 36}, r"data \(int\) is no contiguous buffer"),
        ("Q4_0", {"data": np.array([None])}, "data is not contiguous memory of numbers"),
        ("Q4_0", {"dtype": "float64"}, "dtype 'float64', but there are only float32, float16, bfloat16"),
        ("Q4_0", {"threads": 0}, "0 threads, but 1 to 64"),
        ("Q4_0", {"threads": 65}, "65 threads, but 1 to 64"),
        ("Q4_0", {"out": np.empty(63, np.float32)}, "out has 252 bytes, but float32 of that shape needs 256"),
        ("Q4_0", {"out": np.empty(64, np.int32)}, "out is int32, but wanted is float32"),
        ("Q4_0", {"out": np.empty(128, np.float32)[::2]}, "out is not contiguous"),
        ("Q4_0", {"out": READ_ONLY}, "out is read-only"),
        ("Q4_0", {"out": bytes(256)}, "out is read-only"),
        ("Q4_0", {"out": np.empty(257, np.uint8)[1:]}, "address that is no multiple of 4"),
        (
            "Q4_0",
            {"out": np.empty(64, np.uint16), "dtype": "float16"},
            "out is uint16, but wanted is float16",
        ),
        ("SMOE_Q4", {"shape": (9, 8), "scales": np.zeros(1, np.float16)}, "scales has 2 bytes, .* needs 4"),
        ("SMOE_Q4", {"shape": (9, 8), "scales": np.zeros(1, np.float32)}, "scales is float32, .* float16"),
        (
            "F8_E4M3",
            {"shape": (4, 9), "scales": np.zeros((1, 2), np.float32)},
            "scales has 8 bytes, .* needs 4",
        ),
    ],
)
def test_refusals(name: str, changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"data": BLOCKS, "shape": (1, 64)} | changed
    with pytest.raises(ValueError, match=message):
        dequantize(name, **arguments)


def test_out_over_the_input_is_refused() -> None:
    room = np.zeros(256, np.uint8)
    with pytest.raises(ValueError, match="out and data share memory"):
        dequantize("Q4_0", room[100:136], (1, 64), out=room)
    assert not room.any()
