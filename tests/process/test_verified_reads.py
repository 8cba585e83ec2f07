"""`[vault] verify = true`: what does not match its checksum reaches nobody; everything else goes on.

And version-3 vaults through a real ring: each tensor's bytes are the source's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from models import Model
from systems import Up, smoe_mp

import smoe_mp as smoe
from smoe_mp._native import lib
from smoe_mp.errors import ExpertReadError
from smoe_mp.pack import pack
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source

VERIFY = "vault.verify = true\nprewarm.enabled = false\n"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q.smoe (Q4 with checksums) and r.smoe (version 3) of 2 layers of 4 experts."""
    folder = tmp_path_factory.mktemp("packed")
    pack(Model().per_expert(folder / "m"), folder / "q.smoe", checksums=True)
    pack(folder / "m", folder / "r.smoe", raw=True)
    return folder


def tensor_bytes(source: Source, index: int) -> dict[str, bytes]:
    """A plain read of an expert's tensors."""
    expert = source.experts[index]
    out = {}
    for t in source.layouts[expert.layout]:
        e = expert.extents[t.part]
        with source.files[e.file].path.open("rb") as f:
            f.seek(e.offset + t.offset)
            out[t.name] = f.read(t.nbytes)
    return out


@pytest.mark.parametrize("name", ["q.smoe", "r.smoe"])
def test_a_flipped_bit_fails_that_demand_only(name: str, packed: Path, tmp_path: Path, up: Up) -> None:
    vault = Path(shutil.copy(packed / name, tmp_path))
    bad = open_source(vault).experts[5]
    extent = bad.extents[0]
    raw = bytearray(vault.read_bytes())
    raw[extent.offset + 77] ^= 4
    vault.write_bytes(raw)
    blob = bytes(raw[extent.offset : extent.offset + extent.length])
    found = lib.smoe_crc32c(0, blob, len(blob))
    system = up(vault=vault, more=VERIFY)
    with smoe.attach(system.name) as ring:
        with ring.fetch(1, [0]) as batch:
            assert not batch[0].hit
        for _ in range(2):
            with pytest.raises(ExpertReadError) as caught:
                ring.fetch(1, [1])
            error = caught.value
            assert (error.layer, error.expert, error.path) == (1, 1, str(vault))
            assert (error.offset, error.wanted, error.got) == (extent.offset, bad.crc32c, found)
            assert error.os_error == lib.SMOE_READ_CHECKSUM
            for part in (f"{found:08x}", f"{bad.crc32c:08x}", "expert 1 of layer 1", str(vault), "verify"):
                assert part in str(error)
        with ring.fetch(1, [0]) as batch:
            assert batch[0].hit
        with ring.fetch(0, [0, 1, 2, 3]) as batch:
            assert len(batch) == 4
        counters = system.look().counters
        assert (counters["checksum_errors"], counters["checked_reads"]) == (2, 7)
        assert (counters["failed_reads"], counters["reads"]) == (2, 5)
    done = smoe_mp("verify", vault)
    assert done.returncode == 1
    assert f"BAD: expert 1 of layer 1: {vault} at {extent.offset}: CRC-32C {found:08x}" in done.stdout


def test_without_it_nothing_is_checked(packed: Path, tmp_path: Path, up: Up) -> None:
    vault = Path(shutil.copy(packed / "r.smoe", tmp_path))
    system = up(vault=vault, more="prewarm.enabled = false\n")
    with smoe.attach(system.name) as ring:
        ring.fetch(0, [0]).release()
        assert system.look().counters["checked_reads"] == 0


def test_status_says_so(packed: Path, tmp_path: Path, up: Up) -> None:
    vault = Path(shutil.copy(packed / "r.smoe", tmp_path))
    system = up(vault=vault, more=VERIFY)
    status = system.status()
    assert (status["vault"]["checksums"], status["vault"]["verify"]) == (8, True)
    assert not [w for w in status["warnings"] if "checksum" in w]
    assert "8 of 8 experts have one; each read is held against it" in smoe_mp("status", system.name).stdout


def test_a_vault_without_checksums_warns(up: Up) -> None:
    system = up(more=VERIFY)
    (warning,) = [w for w in system.look().warnings if "checksum" in w]
    assert "vault.verify = true, but 24 of 24 experts have no checksum" in warning
    assert "--checksums" in warning
    with smoe.attach(system.name) as ring:
        ring.fetch(0, [0]).release()
        assert system.look().counters["checked_reads"] == 0


@pytest.mark.parametrize("layout", ["per_expert", "concatenated", "interleaved", "float8"])
def test_unchanged_weights_through_a_ring(layout: str, tmp_path: Path, up: Up) -> None:
    """Of odd sizes: a tensor ends where no alignment would have it end."""
    folder = getattr(Model(hidden=35, width=13), layout)(tmp_path / "m")
    pack(folder, tmp_path / "v.smoe", raw=True)
    source = open_source(folder)
    system = up(vault=tmp_path / "v.smoe", more=VERIFY)
    with smoe.attach(system.name) as ring:
        for index, x in enumerate(source.experts):
            wanted = tensor_bytes(source, index)
            with ring.fetch(x.layer, [x.expert]) as batch:
                expert = batch[0]
                assert set(expert.tensors) == set(wanted)
                blob = expert.raw
                for t in open_source(tmp_path / "v.smoe").layouts[0]:
                    assert blob[t.offset : t.offset + t.nbytes].tobytes() == wanted[t.name]
                    assert (blob.ctypes.data + t.offset) % 64 == 0
                for name, raw in wanted.items():
                    view = expert[name]
                    assert isinstance(view, np.ndarray)
                    assert view.tobytes() == raw
        assert system.look().counters["checksum_errors"] == 0
