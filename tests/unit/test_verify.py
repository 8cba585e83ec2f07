"""`verify`: every bad expert is named with its file and place, nothing good is, and nothing stops it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from models import BF16, Model
from support import StampedSource, stamped_source

from smoe_mp import reader as reading
from smoe_mp.cli import main
from smoe_mp.errors import VaultError
from smoe_mp.pack import pack
from smoe_mp.reader import SourceReader
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source
from smoe_mp.verify import Report, _first_not_finite, verify


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with q.smoe (Q4 with checksums), r.smoe (version 3) and their checkpoint, m."""
    folder = tmp_path_factory.mktemp("packed")
    pack(Model().per_expert(folder / "m"), folder / "q.smoe", checksums=True)
    pack(folder / "m", folder / "r.smoe", raw=True)
    return folder


def flip(path: Path, offset: int, value: int | None = None) -> None:
    """Change one byte: flip its lowest bit, or set it."""
    raw = bytearray(path.read_bytes())
    raw[offset] = raw[offset] ^ 1 if value is None else value
    path.write_bytes(raw)


def check(source: Path | Source) -> Report:
    return verify(open_source(source) if isinstance(source, Path) else source, shown=False)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["smoe-mp", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(("name", "checked"), [("q.smoe", 8), ("r.smoe", 8), ("m", 0)])
def test_what_is_whole_is_good(name: str, checked: int, packed: Path) -> None:
    source = open_source(packed / name)
    report = check(source)
    assert (report.experts, report.checked, report.bad) == (8, checked, [])
    assert report.bytes == sum(e.length for x in source.experts for e in x.extents)


def test_the_originals_vaults_are_good(shared: Path) -> None:
    for name in ("qwen3-tiny.q4.smoe", "qwen3-tiny.q2.smoe", "qwen3-tiny"):
        assert check(shared / "vaults" / name).bad == []


def test_experts_of_any_extents_are_read_as_they_are(tmp_path: Path) -> None:
    """At odd places, in several parts and files."""
    source = stamped_source(tmp_path / "s")
    raw = [file.path.read_bytes() for file in source.files]
    with SourceReader(source) as reader:
        for x in source.experts:
            wanted = [raw[e.file][e.offset : e.offset + e.length] for e in x.extents]
            assert [bytes(part) for part in reader.read(x.extents)] == wanted
    assert check(source).bytes == sum(e.length for x in source.experts for e in x.extents)


@pytest.mark.parametrize("name", ["q.smoe", "r.smoe"])
def test_a_flipped_bit_is_named_and_the_rest_goes_on(name: str, packed: Path, tmp_path: Path) -> None:
    vault = Path(shutil.copy(packed / name, tmp_path))
    extents = {(x.layer, x.expert): x.extents[0] for x in open_source(vault).experts}
    for pair in ((0, 2), (1, 3)):
        flip(vault, extents[pair].offset + 1000)
    report = check(vault)
    assert [(bad.layer, bad.expert) for bad in report.bad] == [(0, 2), (1, 3)]
    for bad in report.bad:
        assert (bad.path, bad.offset) == (str(vault), extents[bad.layer, bad.expert].offset)
        assert "CRC-32C" in bad.fault
    assert report.checked == 8


def test_padding_that_is_not_zero(shared: Path, packed: Path, tmp_path: Path) -> None:
    """Without a checksum it is all that shows; behind the tensors and, in version 3, between them."""
    vault = Path(shutil.copy(shared / "vaults/qwen3-tiny.q4.smoe", tmp_path))
    expert = open_source(vault).experts[5]
    end = max(t.offset + t.nbytes for t in open_source(vault).layouts[0])
    flip(vault, expert.extents[0].offset + end)
    (bad,) = check(vault).bad
    assert (bad.layer, bad.expert, bad.offset) == (0, 5, expert.extents[0].offset + end)
    assert bad.fault == f"byte {end} of the blob is padding and not zero"

    pack(Model(hidden=35, width=13).per_expert(tmp_path / "odd"), tmp_path / "o.smoe", raw=True)
    odd = open_source(tmp_path / "o.smoe")
    gate = odd.layouts[0][0]
    flip(tmp_path / "o.smoe", odd.experts[0].extents[0].offset + gate.nbytes)
    faults = [bad.fault for bad in check(tmp_path / "o.smoe").bad]
    assert f"byte {gate.nbytes} of the blob is padding and not zero" in faults
    assert len(faults) == 2


@pytest.mark.parametrize("bits", [0x7C, 0x7E, 0xFC, 0xFF])
def test_scales_that_are_no_numbers(bits: int, shared: Path, tmp_path: Path) -> None:
    vault = Path(shutil.copy(shared / "vaults/qwen3-tiny.q4.smoe", tmp_path))
    source = open_source(vault)
    scales = next(t for t in source.layouts[0] if t.name == "up.scales")
    at = source.experts[9].extents[0].offset + scales.offset + 2 * 7
    flip(vault, at + 1, bits)
    (bad,) = check(vault).bad
    assert (bad.layer, bad.expert, bad.offset) == (1, 1, at)
    assert bad.fault == "up.scales (F16) has an infinity or NaN, the first at byte 14: suspicious"


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_no_numbers(dtype: str, value: float, tmp_path: Path) -> None:
    """Anywhere in a tensor of several blocks."""
    kind = {"BF16": BF16, "F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
    model = Model(layers=1, hidden=640, width=448, dtype=np.dtype(kind))
    model.weights[0, 3]["down"][-1, -1] = value
    (bad,) = check(model.per_expert(tmp_path / "m")).bad
    place = (model.weights[0, 3]["down"].size - 1) * np.dtype(kind).itemsize
    assert (bad.layer, bad.expert) == (0, 3)
    assert bad.fault == f"down ({dtype}) has an infinity or NaN, the first at byte {place}: suspicious"
    raw = (tmp_path / "m/model.safetensors").read_bytes()
    assert raw[bad.offset : bad.offset + np.dtype(kind).itemsize] == np.array(value, kind).tobytes()


def test_largest_finite_numbers_are_good(tmp_path: Path) -> None:
    model = Model(layers=1)
    for place, weight in enumerate((3.3895e38, -3.3895e38, 1e-45, -0.0)):
        model.weights[0, 1]["gate"][0, place] = weight
    assert check(model.per_expert(tmp_path / "m")).bad == []


def test_bytes_that_cannot_be_read(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO for one expert, an early end for another: both are named, the others are read."""
    source = open_source(packed / "r.smoe")
    broken, short = (source.experts[i].extents[0].offset for i in (2, 6))
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == broken:
            raise OSError(5, "Input/output error")
        return 0 if offset == short else real(fd, buffers, offset)

    monkeypatch.setattr(reading.os, "preadv", preadv)
    report = check(source)
    assert [(bad.layer, bad.expert, bad.offset) for bad in report.bad] == [(0, 2, broken), (1, 2, short)]
    assert "Input/output error (errno 5)" in report.bad[0].fault
    assert "but the file ended after 0" in report.bad[1].fault


def test_short_reads_are_continued(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(
        reading.os,
        "preadv",
        lambda fd, b, offset: real(fd, [b[0][: max(len(b[0]) // 8192 * 4096, 4096)]], offset),
    )
    assert check(packed / "r.smoe").bad == []


def test_a_file_that_was_replaced_is_an_error(source: StampedSource) -> None:
    os.utime(source.files[0].path)
    with pytest.raises(VaultError, match="replaced or changed while it was being read"):
        check(source)


def test_the_command(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = Path(shutil.copy(packed / "r.smoe", tmp_path))
    assert run(monkeypatch, "verify", vault) == 0
    assert "8 of 8 checksums; all good" in capsys.readouterr().out
    extent = open_source(vault).experts[1].extents[0]
    flip(vault, extent.offset)
    assert run(monkeypatch, "verify", vault) == 1
    out = capsys.readouterr().out
    assert f"BAD: expert 1 of layer 0: {vault} at {extent.offset}: CRC-32C " in out
    assert "1 BAD" in out
    assert run(monkeypatch, "verify", vault, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [(bad["layer"], bad["expert"], bad["offset"]) for bad in report["bad"]] == [(0, 1, extent.offset)]
    assert run(monkeypatch, "verify", tmp_path / "nothing.smoe") == 3


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("F16", np.float16),
        ("BF16", BF16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_value_of_the_small_types(dtype: str, kind: type) -> None:
    """By numpy's own idea of what is finite; at any address, in blocks before and behind."""
    width = np.dtype(kind).itemsize
    every = np.arange(256**width, dtype=f"<u{width}")
    finite = np.isfinite(every.view(kind).astype(np.float32))
    good = every[finite]
    room = np.empty(10 + 3 * len(good) * width, np.uint8)
    raw = room[1 : 1 + 3 * len(good) * width]
    raw[:] = np.tile(good, 3).view(np.uint8)
    assert _first_not_finite(raw, dtype) is None
    for place, bad in enumerate(every[~finite][:500]):
        at = (place * 977) % (3 * len(good)) * width
        before = raw[at : at + width].copy()
        raw[at : at + width] = np.array([bad]).view(np.uint8)
        assert _first_not_finite(raw, dtype) == at
        raw[at : at + width] = before
