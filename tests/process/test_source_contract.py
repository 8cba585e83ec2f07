"""What every source must do, whatever its format: one suite over all builders of contract.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import BUILDERS, DAMAGES, REMAINDERS, Built, Damage
from support import serve
from systems import Up, smoe_mp
from typer.testing import CliRunner

import smoe_mp as package
from smoe_mp import inspect, tables
from smoe_mp.cli import app
from smoe_mp.errors import VaultError
from smoe_mp.ring import QuantizedTensor
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source
from smoe_mp.sources.manifest import write_manifest

every_format = pytest.mark.parametrize("name", BUILDERS)


def build(name: str, folder: Path, remainders: tuple[int, ...] = (0, 1)) -> Built:
    folder.mkdir(exist_ok=True)
    return BUILDERS[name](folder, remainders)


def plain_read(source: Source) -> Callable[[int, int, int], bytes]:
    """(file, offset, length) to the bytes, by nothing but `read`."""
    whole = [file.path.read_bytes() for file in source.files]
    return lambda file, offset, length: whole[file][offset : offset + length]


def check_expert(expert: Any, wanted: dict[str, bytes]) -> None:
    """Every tensor is there under its name, with its bytes, aligned, and cannot be written."""
    assert set(expert.tensors) == set(wanted)
    for name, data in wanted.items():
        view = expert[name]
        array = view.codes if isinstance(view, QuantizedTensor) else view
        assert array.tobytes() == data, (expert, name)
        assert array.flags.aligned
        assert not array.flags.writeable
        if array.dtype == np.float32:
            assert array.__array_interface__["data"][0] % 16 == 0


def inspected(built: Built, *arguments: str) -> str:
    """What `smoe-mp inspect` prints of it."""
    done = CliRunner().invoke(app, ["inspect", str(built.path), *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@every_format
def test_every_byte_at_every_remainder_through_a_ring(name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m", REMAINDERS)
    source = open_source(built.path)
    read = plain_read(source)
    assert {(x.layer, x.expert) for x in source.experts} == set(built.tensors)
    with serve(source, slots=8, workers=2) as served, served.attach() as ring:
        for x in source.experts:
            with ring.fetch(x.layer, [x.expert]) as batch:
                parts = [part.tobytes() for part in batch[0].parts]
                assert parts == [read(e.file, e.offset, e.length) for e in x.extents]
                check_expert(batch[0], built.tensors[x.layer, x.expert])
        served.assert_quiet()


@every_format
def test_a_whole_system_serves_it(name: str, up: Up, ring_name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m")
    system = up(vault=built.path, slots=4)
    with package.attach(ring_name) as ring:
        for (layer, expert), wanted in built.tensors.items():
            with ring.fetch(layer, [expert]) as batch:
                check_expert(batch[0], wanted)
    assert system.look().vault.format == open_source(built.path).format


@every_format
def test_files_are_known_by_what_they_are(name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m")
    source = open_source(built.path)
    assert {file.path for file in source.files} >= set(built.files)
    for file in source.files:
        status = os.stat(file.path)
        known = file.dev, file.ino, file.size, file.mtime_ns
        assert known == (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        assert file.path.is_absolute()
        assert len(file.digest) == 16


@every_format
def test_experts_and_tensors_keep_within_their_files_and_parts(name: str, tmp_path: Path) -> None:
    source = open_source(build(name, tmp_path / "m").path)
    for x in source.experts:
        for e in x.extents:
            assert 0 <= e.offset < e.offset + e.length <= source.files[e.file].size
        for t in source.layouts[x.layout]:
            assert 0 <= t.offset <= t.offset + t.nbytes <= x.extents[t.part].length
    assert len({(x.layer, x.expert) for x in source.experts}) == len(source.experts)
    assert {x.layout for x in source.experts} == set(range(len(source.layouts)))


@every_format
def test_opening_it_twice_gives_the_same(name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m")
    one, two = open_source(built.path), open_source(str(built.path))
    assert list(one.experts) == list(two.experts)
    assert (one.layouts, one.files, one.model) == (two.layouts, two.files, two.model)
    assert tables.build(one).windows.tobytes() == tables.build(two).windows.tobytes()


@every_format
def test_its_manifest_gives_the_same(name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m")
    out = built.path.with_name("written.json") if built.path.is_file() else built.path / "written.json"
    inspected(built, "--manifest", str(out))
    source, again = open_source(built.path), open_source(out)
    assert list(again.experts) == list(source.experts)
    assert (again.layouts, again.model) == (source.layouts, source.model)
    assert [file.path for file in again.files] == [file.path for file in source.files]
    with pytest.raises(VaultError, match="already"):
        write_manifest(source, out)


@every_format
def test_inspect_shows_it(name: str, tmp_path: Path) -> None:
    built = build(name, tmp_path / "m")
    about = json.loads(inspected(built, "--json"))
    source = open_source(built.path)
    assert about["experts"] == len(built.tensors) == len(about["expert_table"])
    (layer, expert), wanted = sorted(built.tensors.items())[-1]
    one = json.loads(inspected(built, "--expert", f"{layer}:{expert}", "--json"))
    assert {t["name"] for t in one["tensors"]} == set(wanted)
    for t in one["tensors"]:
        data = Path(t["path"]).read_bytes()[t["file_offset"] : t["file_offset"] + t["bytes"]]
        assert data == wanted[t["name"]]
    assert inspect.summary(source)["format"] == source.format
    for arguments in ((), ("--experts",), ("--expert", f"{layer}:{expert}")):
        assert all(tensor in inspected(built, *arguments) for tensor in wanted)


# --- damaged -----------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lfs_pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 42\n")


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


GENERAL = {
    cut: "missing",
    lfs_pointer: "Git LFS",
    dangling: "nowhere",
    folder: "folder",
    fifo: "regular file",
    lambda path: path.write_bytes(b""): "0 bytes",
}


def assert_refused(built: Built, *says: str) -> None:
    with pytest.raises(VaultError) as caught:
        open_source(built.path)
    message = str(caught.value)
    for word in says:
        assert word in message, message
    assert "\n" not in message


@every_format
@pytest.mark.parametrize("do", GENERAL, ids=["cut", "lfs", "dangling", "folder", "fifo", "empty"])
def test_a_file_that_is_not_what_it_should_be(name: str, do: Callable[[Path], None], tmp_path: Path) -> None:
    """Each of the model's files in turn, the others whole."""
    for number in range(len(build(name, tmp_path / "first").files)):
        built = build(name, tmp_path / str(number))
        path = built.files[number]
        do(path)
        said = GENERAL[do]
        if name == "manifest" and do is cut:
            said = "says"  # the size that the manifest gives
        assert_refused(built, path.name, said)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: f"{d.builder}: {d.name}")
def test_what_only_this_format_can_get_wrong(damage: Damage, tmp_path: Path) -> None:
    built = build(damage.builder, tmp_path / "m")
    damage.do(built)
    assert_refused(built, *damage.says)


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    built = build("safetensors", tmp_path / "m")
    cut(built.files[-1])
    done = smoe_mp("inspect", built.path)
    assert (done.returncode, done.stdout) == (3, "")
    assert built.files[-1].name in done.stderr
    assert "Traceback" not in done.stderr
