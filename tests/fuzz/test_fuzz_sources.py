"""Fuzzing of what is parsed: safetensors headers, index files, config.json, manifests.

Valid files are changed, as bytes or as JSON (so that what comes out is still JSON and reaches the checks
behind the parser), and opened.  Whatever they hold: the model opens, and then every extent lies in its file
and the read plans can be made; or it is refused with a VaultError.  Nothing else may be raised, no case may
run for ever, and memory must stay in proportion to the files.

FUZZ_RUNS=N runs N cases of each kind (20 times as many of headers alone) instead of some; FUZZ_SEED=N begins
elsewhere, FUZZ_SECONDS=N takes so many seconds for each kind instead.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import random
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cases import cases, first_seed
from checkpoints import RECIPES, encode, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe_mp import tables
from smoe_mp.errors import VaultError
from smoe_mp.sources import open_source
from smoe_mp.sources.checkpoint import read_header
from smoe_mp.sources.manifest import write_manifest

RUNS = int(os.environ.get("FUZZ_RUNS", "100"))
SEED = first_seed(0)
#: A bound for what always ends.
LIMIT_S = 150
#: Every so often a case is run under tracemalloc, which makes it several times slower.
TRACED = 25
#: What a case may take: a JSON text becomes some tens of times larger when it is decoded.
BYTES_A_BYTE, BYTES_ANYWAY = 200, 4 << 20

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
)
VALUES: tuple[Any, ...] = (
    *NUMBERS, None, True, 0.5, 1e308, float("nan"), float("inf"), "", "F32", "F4", "BF16", "F8_E4M3",
    "x" * 300, "\0", "\ud800", "../x", "/", [], {}, [[]], [0, 0], [2**40, 2**40], {"dtype": "U8"},
)  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """A case that does not end fails the test."""

    def late(*_: object) -> None:
        raise AssertionError(f"a case ran for more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- changing ----------------------------------------------------------------------------------------------


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes other, gone, twice or moved."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, n = rng.randrange(len(out) + 1), rng.choice((1, 1, 2, 8, 64, 500))
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + n]
            case 2:
                out[at:at] = out[at : at + n]
            case 3:
                out[at:at] = rng.choice(
                    (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"-", b"9", b"e9", b"\xff")
                )
            case 4:
                out[at : at + n] = rng.randbytes(n)
    return bytes(out)


def _places(value: Any, found: list[tuple[Any, Any]]) -> None:
    """All (container, key) pairs of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        _places(value[key], found)


def change_json(rng: random.Random, value: Any) -> Any:
    """Some values other, gone, of another place, or under another name."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places: list[tuple[Any, Any]] = []
        _places(value, places)
        if not places:
            return value
        inside, key = rng.choice(places)
        other, other_key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                inside[key] = rng.choice(VALUES)
            case 1:
                del inside[key]
            case 2:
                inside[key] = copy.deepcopy(other[other_key])
            case 3 if isinstance(inside, dict):
                name = (
                    str(other_key) if rng.random() < 0.5 else f"{key}{rng.choice(('x', '.', '0', '9' * 12))}"
                )
                inside[name] = inside.pop(key)
            case 4 if type(inside[key]) is int:
                inside[key] += rng.choice((-1, 1, 8, -8, 4096, 2**32))
            case _:
                inside[key] = rng.choice(NUMBERS)
    return value


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


# --- opening -----------------------------------------------------------------------------------------------


def open_and_check(path: Path) -> bool:
    """Whether it opened; then it is whole."""
    try:
        source = open_source(path)
    except VaultError:
        return False
    for x in source.experts:
        for e in x.extents:
            assert 0 <= e.offset < e.offset + e.length <= source.files[e.file].size
        for t in source.layouts[x.layout]:
            assert t.offset + t.nbytes <= x.extents[t.part].length
            assert len(t.shape) <= 4
    assert tables.build(source).slot_bytes > 0
    return True


def run(folder: Path, path: Path, case: Callable[[random.Random], None], kind: int) -> None:
    """RUNS cases: `case` changes the model in `folder`, which is then opened by `path`."""
    opened = tried = 0
    with bounded():
        open_and_check(path)
    print(f"FUZZ_SEED={SEED}")
    for number in cases(RUNS):
        tried += 1
        rng = random.Random(f"{SEED} {kind} {number}")
        case(rng)
        size = sum(file.stat().st_size for file in folder.iterdir())
        traced = number % TRACED == 0
        if traced:
            gc.collect()
            tracemalloc.start()
        try:
            with bounded():
                opened += open_and_check(path)
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                assert peak < BYTES_A_BYTE * size + BYTES_ANYWAY, f"{peak} bytes for files of {size}"
        except BaseException:
            kept = Path(".fuzz", f"{SEED}-{kind}-{number}").absolute()
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            print(f"the case is kept in {kept}")
            raise
        finally:
            tracemalloc.stop()
    assert opened < tried, "nothing was ever refused"


@pytest.mark.timeout(0)
def test_safetensors_headers(tmp_path: Path) -> None:
    """The header alone, which is far quicker to try than a model: every place is inside, once."""
    made = make(RECIPES["rows and biases"], tmp_path / "m")
    path = made.folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    few = dict(list(header.items())[:4])
    size = sum(end - begin for begin, end in (entry["data_offsets"] for entry in few.values()))
    data = raw[8 + length : 8 + length + size]
    opened = tried = 0
    for number in cases(20 * RUNS):
        tried += 1
        rng = random.Random(f"{SEED} header {number}")
        if rng.random() < 0.7:
            out = encode(change_json(rng, few), data)
        else:
            out = change_bytes(rng, encode(few, data))
        path.write_bytes(out)
        try:
            with bounded():
                file = read_header(path)
        except VaultError:
            continue
        opened += 1
        spans = sorted((t.offset, t.offset + t.nbytes) for t in file.values())
        assert sum(end - begin for begin, end in spans) == len(out) - 8 - int.from_bytes(out[:8], "little")
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
        assert not spans or spans[-1][1] == len(out)
    assert 0 < opened < tried


MODELS = ("qwen3_moe", "deepseek_v3 float8", "gpt_oss mxfp4", "gemma4", "rows and biases", "nemotron_h")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", MODELS)
def test_safetensors_checkpoints(name: str, tmp_path: Path) -> None:
    made = make(RECIPES[name], tmp_path / "m", shards=2)
    shard = made.folder / "model-00001-of-00002.safetensors"
    index = made.folder / "model.safetensors.index.json"
    config = made.folder / "config.json"
    whole = {file: file.read_bytes() for file in (shard, index, config)}
    length = int.from_bytes(whole[shard][:8], "little")
    header, data = json.loads(whole[shard][8 : 8 + length]), whole[shard][8 + length :]
    changed: list[Path] = []

    def case(rng: random.Random) -> None:
        for file in changed:
            file.write_bytes(whole[file])
        changed[:] = [rng.choice((shard, shard, shard, index, config))]
        file = changed[0]
        if file is shard and rng.random() < 0.7:
            file.write_bytes(encode(change_json(rng, header), data))
        elif file is not shard and rng.random() < 0.7:
            file.write_bytes(dump(change_json(rng, json.loads(whole[file]))))
        else:
            file.write_bytes(change_bytes(rng, whole[file]))

    run(made.folder, made.folder, case, MODELS.index(name))


@pytest.mark.timeout(0)
def test_manifests(tmp_path: Path) -> None:
    made = make(RECIPES["qwen3_moe"], tmp_path / "m", shards=2)
    path = made.folder / "written.json"
    write_manifest(open_source(made.folder), path)
    raw = path.read_bytes()
    whole = json.loads(raw)

    def case(rng: random.Random) -> None:
        path.write_bytes(dump(change_json(rng, whole)) if rng.random() < 0.7 else change_bytes(rng, raw))

    run(made.folder, path, case, 100)


# --- from nothing ------------------------------------------------------------------------------------------

_scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
_json = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("U8", "F32", "BF16", "F4", "F8_NEW")) | st.text(max_size=4),
        "shape": st.lists(st.integers(0, 2**66), max_size=4) | _json,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | _json,
    }
)
_config = settings(
    max_examples=min(RUNS, 100_000),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0)
@_config
@given(
    header=st.dictionaries(st.text(max_size=12), _entry | _json, max_size=5) | _json,
    data=st.binary(max_size=40),
)
def test_headers_from_nothing(tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw = dump(header)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    try:
        file = read_header(path)
    except VaultError:
        return
    ends = [(t.offset, t.offset + t.nbytes) for t in file.values()]
    assert sum(end - begin for begin, end in ends) == len(data)
    assert all(8 + len(raw) <= begin <= end <= path.stat().st_size for begin, end in ends)


@pytest.mark.timeout(0)
@_config
@given(data=st.binary(max_size=200))
def test_files_from_nothing(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in ("fuzz.safetensors", "manifest.json", "fuzz.safetensors.index.json"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        with pytest.raises(VaultError):
            open_source(path)
        path.unlink()
