"""Manifests: what they say, what is refused, and that one is never written over anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import Expert, ExpertTable, Extent, ModelFacts, PlainSource, SourceFile, Tensor
from smoe_mp.sources.manifest import open_manifest, write_manifest


def plain(**more: Any) -> dict[str, Any]:
    """A manifest of two experts of two parts in one file of 100 bytes."""
    layout = [
        {"name": "a", "dtype": "F32", "shape": [2, 2], "part": 0, "offset": 0, "bytes": 16},
        {"name": "b", "dtype": "MINE", "shape": [9], "part": 1, "offset": 3, "bytes": 5, "tag": "my order"},
    ]
    experts = [
        {"layer": 0, "expert": 0, "parts": [[0, 0, 16], [0, 16, 8]]},
        {"layer": 3, "expert": 1, "parts": [[0, 76, 16], [0, 92, 8]], "layout": 0, "crc32c": 7},
    ]
    base = {"format": "smoe-mp manifest", "version": 1, "files": [{"path": "data"}], "layouts": [layout]}
    return base | {"experts": experts} | more


def write(folder: Path, manifest: object) -> Path:
    (folder / "data").write_bytes(bytes(range(100)))
    path = folder / "manifest.json"
    path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    return path


def changed(place: str, value: Any) -> dict[str, Any]:
    """The plain manifest with another value at a place like "experts.1.parts.0"."""
    out = plain()
    inside: Any = out
    *path, last = [int(word) if word.isdigit() else word for word in place.split(".")]
    for key in path:
        inside = inside[key]
    inside[last] = value
    return out


def test_what_it_says(tmp_path: Path) -> None:
    model = {"model_type": "mine", "num_layers": 4, "top_k": 2, "extra": {"a": 0.5, "b": "c", "d": 3}}
    source = open_manifest(write(tmp_path, plain(model=model)))
    assert list(source.experts) == [
        Expert(0, 0, (Extent(0, 0, 16), Extent(0, 16, 8)), 0, 0),
        Expert(3, 1, (Extent(0, 76, 16), Extent(0, 92, 8)), 0, 7),
    ]
    assert source.layouts == (
        (Tensor("a", "F32", (2, 2), 0, 0, 16), Tensor("b", "MINE", (9,), 1, 3, 5, "my order")),
    )
    assert (source.files[0].path, source.files[0].size) == (tmp_path / "data", 100)
    assert source.model == ModelFacts("mine", 4, top_k=2, extra={"a": 0.5, "b": "c", "d": 3})


def test_paths_count_from_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, plain())
    deeper = tmp_path / "deeper"
    deeper.mkdir()
    monkeypatch.chdir(deeper)
    assert open_manifest(path).files[0].path == tmp_path / "data"
    assert open_manifest(Path("../manifest.json")).files[0].path.samefile(tmp_path / "data")
    absolute = deeper / "m.json"
    absolute.write_text(json.dumps(plain(files=[{"path": str(tmp_path / "data"), "size": 100}])))
    assert open_manifest(absolute).files[0].path == tmp_path / "data"


def test_the_digest_covers_the_manifest_and_the_file_s_start(tmp_path: Path) -> None:
    path = write(tmp_path, plain())
    first = open_manifest(path).files[0].digest
    path.write_text(path.read_text() + " ")
    second = open_manifest(path).files[0].digest
    (tmp_path / "data").write_bytes(bytes(100))
    assert len({first, second, open_manifest(path).files[0].digest}) == 3


def test_parts_may_overlap(tmp_path: Path) -> None:
    """Between experts and in one: the ring only reads."""
    whole = plain()
    whole["experts"][1]["parts"] = [[0, 0, 16], [0, 8, 8]]
    assert len(open_manifest(write(tmp_path, whole)).experts) == 2


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("format", "other", ["'other'", "smoe-mp manifest"]),
        ("version", 2, ["version 2"]),
        ("version", "1", ["version"]),
        ("surprise", 1, ["surprise"]),
        ("experts.0.surprise", 1, ["surprise"]),
        ("experts", [], ["0 experts"]),
        ("experts.1.layer", 0, []),
        ("experts.1.layer", -1, ["layer"]),
        ("experts.1.layer", 2**24, ["grid"]),
        ("experts.1.layer", 2**31, ["layer"]),
        ("experts.1.expert", 2**25, ["grid"]),
        ("experts.1.layout", 1, ["expert 1 of layer 3", "layout 1", "there are 1"]),
        ("experts.1.crc32c", 2**32, ["crc32c"]),
        ("experts.1.parts", [], ["expert 1 of layer 3", "no parts"]),
        ("experts.1.parts", [[0, 0, 16]], ["expert 1 of layer 3", "'b'", "part 1", "1 parts"]),
        ("experts.1.parts.0", [1, 0, 16], ["expert 1 of layer 3, part 0", "file 1", "1 files"]),
        ("experts.1.parts.0", [0, 85, 16], ["expert 1 of layer 3, part 0", "1 bytes are missing", "100"]),
        ("experts.1.parts.1", [0, 200, 8], ["part 1", "108 bytes are missing"]),
        ("experts.1.parts.0", [0, 2**62, 2**62], ["part 0", "missing"]),
        ("experts.1.parts.0", [0, 0, 0], ["part 0", "0 bytes"]),
        ("experts.1.parts.0", [0, 0, 15], ["expert 1 of layer 3", "'a'", "16 bytes at 0 of part 0", "15"]),
        ("experts.1.parts.0", [0, 0], ["parts"]),
        ("experts.1.parts.0", [0, 0, 2**63], ["parts"]),
        ("layouts.0.0.bytes", 12, ["layout 0", "'a'", "12 bytes", "128 bits"]),
        ("layouts.0.0.shape", [2**40, 2**40], ["layout 0", "'a'"]),
        ("layouts.0.0.shape", [1, 1, 1, 2, 2], ["shape"]),
        ("layouts.0.0.name", "b", ["2 tensors", "'b'"]),
        ("layouts.0.0.name", "", ["name"]),
        ("layouts.0.0.name", "a\0b", ["NUL"]),
        ("layouts.0.1.offset", 2**62, ["'b'"]),
        ("layouts.0.1.part", 7, ["'b'", "part 7"]),
        ("files", [], ["file 0", "0 files"]),
        ("files.0.path", "gone", ["gone"]),
        ("files.0.path", "a\0b", ["a\\x00b"]),
        ("files.0.path", ".", ["folder"]),
        ("files.0.size", 99, ["100 bytes", "says 99"]),
    ],
)
def test_what_does_not_add_up_is_refused(tmp_path: Path, place: str, value: Any, words: list[str]) -> None:
    manifest = changed(place, value)
    if (place, value) == ("experts.1.layer", 0):
        manifest["experts"][1]["expert"], words = 0, ["expert 0 of layer 0", "twice"]
    path = write(tmp_path, manifest)
    with pytest.raises(VaultError) as caught:
        open_manifest(path)
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"format": "smoe-mp manifest"}'])
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    with pytest.raises(VaultError, match=r"manifest\.json"):
        open_manifest(write(tmp_path, text))


def source_of(path: Path) -> PlainSource:
    status = path.stat()
    file = SourceFile(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, bytes(16))
    experts = ExpertTable.of([Expert(0, 0, (Extent(0, 1, 2),), 0)])
    return PlainSource("test", path, (file,), experts, ((Tensor("a", "U8", (2,), 0, 0, 2),),), ModelFacts())


def test_written_paths_are_relative_below_the_manifest_and_absolute_elsewhere(tmp_path: Path) -> None:
    data = tmp_path / "model" / "data"
    data.parent.mkdir()
    data.write_bytes(b"123")
    (tmp_path / "elsewhere").mkdir()
    for out, said in ((tmp_path / "m.json", "model/data"), (tmp_path / "elsewhere" / "m.json", str(data))):
        write_manifest(source_of(data), out)
        assert json.loads(out.read_text())["files"] == [{"path": said, "size": 3}]
        assert list(open_manifest(out).experts) == list(source_of(data).experts)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"123")
    with pytest.raises(VaultError, match="left as it is"):
        write_manifest(source_of(data), data)
    assert data.read_bytes() == b"123"
    with pytest.raises(VaultError, match="no/m"):
        write_manifest(source_of(data), tmp_path / "no" / "m.json")


def test_a_name_that_is_no_text_cannot_be_written(tmp_path: Path) -> None:
    """JSON has no place for a file name that is not UTF-8."""
    data = tmp_path / "data-\udcff"
    data.write_bytes(b"123")
    with pytest.raises(VaultError, match="UTF-8"):
        write_manifest(source_of(data), tmp_path / "m.json")
    assert not (tmp_path / "m.json").exists()


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    example = text.partition("```json\n")[2].partition("```")[0]
    (tmp_path / "experts.bin").write_bytes(bytes(16640))
    source = open_manifest(write(tmp_path, example))
    assert [t.name for t in source.layouts[0]] == ["gate", "down"]
