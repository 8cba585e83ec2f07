"""GGUF files that are damaged at random, or made up: opened, or refused, and nothing else.

What is opened is whole: every expert lies in its file.  What is refused is so by VaultError, and neither
takes memory that the file's size does not pay for.  FUZZ_RUNS sets how many files are tried (some seconds'
worth by default), FUZZ_SEED the first of them; FUZZ_SECONDS: for how long instead.  A failure
names its seed.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguffiles as g
import pytest
from cases import cases, first_seed
from gguffiles import HandMade, HandTensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe_mp import tables
from smoe_mp.errors import VaultError
from smoe_mp.sources.gguf import GgufModel, open_gguf
from smoe_mp.sources.gguf_file import ENTRIES_MAX, HEADER_BYTES_MAX

RUNS = int(os.environ.get("FUZZ_RUNS", "1500"))
SEED = first_seed(1)
MEASURED = 25  # one run of so many is held against its memory
MEMORY_LEAST = 4 << 20  # two windows of the header, and what Python takes for any file
MEMORY_A_BYTE = 40  # a tensor takes some 30 bytes of the file at least, and some 1000 as an object

#: Numbers at which counts, offsets and products break.
EDGES = [0, 1, 2, 7, 31, 32, 33, 255, 256, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
EDGES += [1 << 32, (1 << 53) + 1, (1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def corpus() -> list[bytes]:
    """Valid files of different kinds."""
    biased = HandMade(alignment=8)
    biased.pairs["general.alignment"] = (g.U32, 8)
    biased.tensors += [HandTensor(f"blk.{i}.ffn_{role}_exps.bias", (n, 3))
                       for i in (0, 1) for role, n in (("gate", 16), ("down", 32))]  # fmt: skip
    biased.tensors += [HandTensor(f"blk.{i}.ffn_up_exps.scale", (3,)) for i in (0, 1)]
    singles = HandMade(version=2)
    singles.tensors = [HandTensor(f"blk.{i}.ffn_{role}.{e}.weight", (32, 2), g.NUMBERS["Q4_0"])
                       for i in (0, 1) for role in g.ROLES for e in range(3)]  # fmt: skip
    odd = HandMade()
    odd.pairs["nested"] = (g.ARRAY, (g.ARRAY, [(g.U8, [1, 2]), (g.STRING, ["x", "yz"])]))
    odd.pairs["flags"] = (g.ARRAY, (g.BOOL, [True, False]))
    odd.tensors.insert(1, HandTensor("blk.0.attn_q.weight", (8, 8), 77, nbytes=96))
    return [made.bytes() for made in (HandMade(), biased, singles, odd)]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly in the header."""
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(min(len(out), 1500) if rng.random() < 0.9 else len(out)) if out else 0
        match rng.randrange(8):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if out else b""
            case 2:
                out[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
            case 3:
                out[at : at + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)
            case 4:
                del out[at : at + rng.choice((1, 4, 8, 33))]
            case 5:
                out[at:at] = out[at : at + rng.choice((1, 8, 40))]
            case 6:
                del out[at:]
            case _:
                other = rng.randrange(min(len(out), 1500) or 1)
                size = rng.choice((4, 8, 24))
                out[at : at + size] = out[other : other + size]
    return bytes(out)


def check_whole(model: GgufModel) -> None:
    """Every number of an opened model holds, and a ring's tables can be made of it."""
    assert 0 < len(model.experts) == len({(x.layer, x.expert) for x in model.experts})
    for expert in model.experts:
        for extent in expert.extents:
            assert 0 < extent.length <= model.files[extent.file].size - extent.offset
        for tensor in model.layouts[expert.layout]:
            assert tensor.offset + tensor.nbytes <= expert.extents[tensor.part].length
            assert all(size > 0 for size in tensor.shape)
    if len(model.experts) < 1000:
        tables.build(model)


def opened(path: Path, measured: bool) -> bool:
    """Open it; whether it could be."""
    if measured:
        tracemalloc.start()
    model, words = None, str(path.parent)
    try:
        model = open_gguf(path)
    except VaultError as refusal:
        words = str(refusal)
    finally:
        if measured:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= MEMORY_LEAST + MEMORY_A_BYTE * path.stat().st_size
    assert str(path.parent) in words
    if model is not None:
        check_whole(model)
    return model is not None


@pytest.mark.timeout(0)
def test_damaged_files(tmp_path: Path) -> None:
    valid = corpus()
    path, good, tried = tmp_path / "m.gguf", 0, 0
    for raw in valid:
        path.write_bytes(raw)
        assert opened(path, measured=True)
    for seed in cases(RUNS, SEED):
        rng = random.Random(seed)
        tried += 1
        path.write_bytes(mutated(rng.choice(valid), rng))
        try:
            good += opened(path, measured=seed % MEASURED == 0)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert tried // 50 < good < tried  # some damage does no harm, most does: both were tried


@pytest.mark.timeout(0)
def test_damaged_parts(tmp_path: Path) -> None:
    """One part of two is damaged, or both are."""
    whole = HandMade()
    names = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    valid = []
    for number in range(2):
        split = {"split.no": (g.U16, number), "split.count": (g.U16, 2), "split.tensors.count": (g.I32, 11)}
        pairs = {**(whole.pairs if number == 0 else {}), **split}
        valid.append(HandMade(pairs, whole.tensors[6 * number : 6 * number + 6]).bytes())
    for path, raw in zip(names, valid, strict=True):
        path.write_bytes(raw)
    assert opened(names[1], measured=True)
    good = tried = 0
    for seed in cases(RUNS // 4, SEED):
        rng = random.Random(seed)
        tried += 1
        for path, raw in zip(names, valid, strict=True):
            path.write_bytes(mutated(raw, rng) if rng.random() < 0.6 else raw)
        try:
            good += opened(rng.choice(names), measured=seed % MEASURED == 0)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert 0 < good < tried


numbers = st.sampled_from(EDGES) | st.integers(0, 200)
scalars: st.SearchStrategy[tuple[int, Any]] = st.one_of(
    st.tuples(st.just(g.U32), numbers.map(lambda n: n & 0xFFFFFFFF)),
    st.tuples(st.just(g.U64), numbers),
    st.tuples(st.just(g.I32), st.integers(-(1 << 31), (1 << 31) - 1)),
    st.tuples(st.just(g.STRING), st.text(max_size=12) | st.binary(max_size=12)),
    st.tuples(st.just(g.ARRAY), st.tuples(st.just(g.STRING), st.lists(st.text(max_size=5), max_size=4))),
)
keys = st.sampled_from([
    "general.architecture", "general.alignment", "qwen3moe.block_count", "qwen3moe.expert_count",
    "qwen3moe.nextn_predict_layers", "qwen3moe.leading_dense_block_count", "qwen3moe.expert_used_count",
    "split.no", "split.count", "split.tensors.count", "general.name",
]) | st.text(max_size=8)  # fmt: skip
names = st.from_regex(
    r"blk\.(0|1|2|99|01|999999999)\.ffn_(gate|up|down|gate_up|norm)(_exps|_chexps|\.[012])([._](weight|bias|scale))?",
    fullmatch=True,
) | st.text(max_size=10)
tensors = st.builds(
    HandTensor,
    names,
    st.lists(st.sampled_from([0, 1, 3, 32, 64]) | numbers, max_size=4).map(tuple),
    st.sampled_from([0, 1, 2, 8, 12, 30, 39, 77]),
    st.none() | st.just(0) | numbers,
    st.integers(0, 4000),
)


@settings(max_examples=max(RUNS // 100, 50), deadline=None, derandomize=SEED == 1,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    more=st.dictionaries(keys, scalars, max_size=4),
    kept=st.lists(st.integers(0, 10), max_size=11, unique=True),
    extra=st.lists(tensors, max_size=4),
    version=st.sampled_from([2, 3]),
)
def test_made_up_files(
    tmp_path: Path,
    more: dict[str, tuple[int, Any]],
    kept: list[int],
    extra: list[HandTensor],
    version: int,
) -> None:
    made = HandMade(version=version)
    made.pairs |= more
    made.tensors = [made.tensors[i] for i in kept if i < len(made.tensors)] + extra
    opened(made.write(tmp_path / "m.gguf"), measured=False)


def test_many_tensors(tmp_path: Path) -> None:
    """As small as they can be: what a tensor takes in memory, beside what it takes in the file."""
    made = HandMade()
    made.tensors += [HandTensor(f"{i:x}", (), 24) for i in range(ENTRIES_MAX // 16)]
    assert opened(made.write(tmp_path / "m.gguf"), measured=True)


def test_a_header_of_empty_strings(tmp_path: Path) -> None:
    """The slowest header for its size: it is walked once, and ends."""
    path = tmp_path / "m.gguf"
    count = HEADER_BYTES_MAX // 8 // 64
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + g.text("k")
    head += struct.pack("<IIQ", g.ARRAY, g.STRING, count)
    with path.open("wb") as f:
        f.write(head)
        f.truncate(len(head) + 8 * count)
    assert not opened(path, measured=True)
