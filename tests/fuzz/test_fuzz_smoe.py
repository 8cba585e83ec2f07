"""`.smoe` vaults of every version that are damaged at random: opened, or refused, and nothing else.

What is opened is whole: every expert lies in the file, every tensor in its expert, no two overlap, and a
ring's tables can be made of it.  What is refused is so by VaultError, naming the file; neither takes memory
that the file's size does not pay for.  FUZZ_RUNS sets how many files are tried (some seconds' worth by
default), FUZZ_SEED the first of them; FUZZ_SECONDS goes on for so long instead; a failure names its seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import cases, first_seed
from models import Model

from smoe_mp import tables
from smoe_mp._native import lib
from smoe_mp.errors import VaultError
from smoe_mp.pack import pack
from smoe_mp.sources.dtypes import BITS
from smoe_mp.sources.smoe import SmoeVault
from smoe_mp.sources.smoe3 import DESCRIPTION_HEAD, RawVault, open_vault
from smoe_mp.vault_writer import VaultWriter

RUNS = int(os.environ.get("FUZZ_RUNS", "1500"))
SEED = first_seed(1)
MEASURED = 25  # one run of so many is held against its memory
MEMORY_LEAST = 4 << 20  # what Python and numpy take for any file
MEMORY_A_BYTE = 40  # an entry is 48 bytes of the file, and some 500 as an object

#: Numbers at which counts, offsets and products break.
EDGES = [0, 1, 2, 3, 4, 63, 64, 65, 255, 256, 4096, 16383, 16384, 16385, 32768, 65536, 1 << 20, (1 << 31) - 1]
EDGES += [1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 16384]
EDGES += [(1 << 64) - 1]
WORDS: list[Any] = [*EDGES, -1, 0.5, 1e300, "", "gate", "up.scales", "SMOE_Q4", "F16", "a\0b", None, True]
WORDS += [[], {}, [1, 2, 3, 4, 5], [[]]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Valid vaults: version 1, version 2 with checksums, version 3 of several kinds."""
    folder = tmp_path_factory.mktemp("corpus")
    model = Model(layers=2, experts=2)
    shapes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    one = folder / "1.smoe"
    with VaultWriter(
        one, list(model.weights), bits=2, shapes=shapes, d_model=128, vocab_size=9, ffn_dim=128
    ) as writer:
        for (layer, expert), weights in model.weights.items():
            writer.add(layer, expert, *(weights[name].astype(np.float32) for name in shapes))
    pack(model.per_expert(folder / "m"), folder / "2.smoe", checksums=True)
    pack(folder / "2.smoe", folder / "3.smoe", raw=True)
    pack(model.float8(folder / "f8"), folder / "4.smoe", raw=True)
    pack(Model(hidden=35, width=13).interleaved(folder / "gpt", bias=True), folder / "5.smoe", raw=True)
    return [(folder / f"{number}.smoe").read_bytes() for number in range(1, 6)]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes, mostly in header and tables; or in the description's text, its checksum right."""
    if raw[8] == 3 and rng.random() < 0.5:
        return redescribed(raw, rng)
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        near = min(len(out), 64 if rng.random() < 0.4 else 1600)
        at = rng.randrange(near if rng.random() < 0.95 else len(out)) if out else 0
        match rng.randrange(8):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if out else b""
            case 2 | 3:
                at = at // 4 * 4
                out[at : at + 8] = struct.pack("<Q", rng.choice(EDGES))
            case 4:
                at = at // 4 * 4
                out[at : at + 4] = struct.pack("<I", rng.choice(EDGES) & 0xFFFFFFFF)
            case 5:
                del out[at : at + rng.choice((1, 4, 48))]
            case 6:
                del out[rng.randrange(len(out) + 1) :]
            case _:
                other = rng.randrange(near or 1)
                size = rng.choice((4, 8, 44, 48))
                out[at : at + size] = out[other : other + size]
    return bytes(out)


def redescribed(raw: bytes, rng: random.Random) -> bytes:
    """Version 3 with other values in its description, or other bytes in its text."""
    (at,), (data,) = struct.unpack_from("<I", raw, 60), struct.unpack_from("<Q", raw, 32)
    _, _, length = DESCRIPTION_HEAD.unpack_from(raw, at)
    text = raw[at + DESCRIPTION_HEAD.size :][:length]
    if rng.random() < 0.3:
        damaged = bytearray(text)
        place = rng.randrange(len(damaged))
        damaged[place : place + rng.choice((0, 1, 5))] = rng.choice((b"", b"}", b"[[", b'"', b"\xff", b"9"))
        text = bytes(damaged)
    else:
        described = json.loads(text)
        for _ in range(rng.choice((1, 1, 2))):
            _change_one(described, rng)
        text = json.dumps(described).encode()
    head = DESCRIPTION_HEAD.pack(b"SV3D", lib.smoe_crc32c(0, text, len(text)), len(text))
    return raw[:at] + (head + text).ljust(data - at, b"\0") + raw[data:]


def _change_one(value: Any, rng: random.Random) -> None:
    """Walk down at random; change, remove or double what is found there."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.9:
            value = value[key]
            continue
        match rng.randrange(4):
            case 0:
                del value[key]
            case 1 if isinstance(value, list):
                value.append(value[key])
            case 2 if isinstance(value[key], int) and not isinstance(value[key], bool):
                value[key] += rng.choice((-64, -1, 1, 64, 1 << 60))
            case _:
                value[key] = rng.choice(WORDS)
        return


def check_whole(vault: SmoeVault | RawVault) -> None:
    size = vault.files[0].size
    assert 0 < len(vault.experts) == len({(x.layer, x.expert) for x in vault.experts})
    spans = []
    for x in vault.experts:
        (e,) = x.extents
        assert e.offset % 16384 == 0
        assert 0 < e.length <= size - e.offset
        spans.append((e.offset, e.offset + e.length))
        tensors = vault.layouts[x.layout]
        inner = sorted((t.offset, t.offset + t.nbytes) for t in tensors)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(inner))
        assert inner[-1][1] <= e.length
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for layout in vault.layouts:
        assert len({t.name for t in layout}) == len(layout)
        for t in layout:
            assert t.name
            assert "\0" not in t.name + t.dtype + t.tag
            if t.dtype in BITS:  # a view of its shape stays inside it
                assert prod(t.shape) * BITS[t.dtype] == t.nbytes * 8
    tables.build(vault)


def opened(path: Path, measured: bool) -> bool:
    """Open it; whether it could be."""
    if measured:
        tracemalloc.start()
    vault, words = None, ""
    try:
        vault = open_vault(path)
    except VaultError as refusal:
        words = str(refusal)
    finally:
        if measured:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= MEMORY_LEAST + MEMORY_A_BYTE * path.stat().st_size
    if vault is None:
        assert str(path) in words
        return False
    check_whole(vault)
    return True


def test_the_corpus_is_valid(corpus: list[bytes], tmp_path: Path) -> None:
    for raw in corpus:
        (tmp_path / "v.smoe").write_bytes(raw)
        assert opened(tmp_path / "v.smoe", measured=True)


@pytest.mark.timeout(0)
def test_damaged_vaults(corpus: list[bytes], tmp_path: Path) -> None:
    path, good, tried = tmp_path / "v.smoe", 0, 0
    for seed in cases(RUNS, SEED):
        rng = random.Random(seed)
        tried += 1
        path.write_bytes(mutated(rng.choice(corpus), rng))
        try:
            good += opened(path, measured=seed % MEASURED == 0)
        except BaseException as error:
            error.add_note(f"FUZZ_SEED={seed} FUZZ_RUNS=1")
            raise
    assert 0 < good < tried or tried < 100
