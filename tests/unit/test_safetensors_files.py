"""safetensors headers and folders: what is read, and every refusal with its file, tensor and figures.

Field reports 4 (short shards), 5 (crafted headers), 7 (new types), 11 (which files), 12 (links, pointers).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import RECIPES, encode, make, write_safetensors

from smoe_mp.errors import VaultError
from smoe_mp.sources import open_source
from smoe_mp.sources.checkpoint import open_folder, read_header
from smoe_mp.sources.safetensors import open_safetensors

QWEN = RECIPES["qwen3_moe"]


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refused(path: Path, call: Callable[[Path], object], *words: str) -> str:
    with pytest.raises(VaultError) as caught:
        call(path)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message, message
    return message


def refused_header(tmp_path: Path, data: bytes, *words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    refused(path, read_header, *words)


# --- headers -----------------------------------------------------------------------------------------------


def test_places_types_and_shapes(tmp_path: Path) -> None:
    tensors = {
        "b": ("BF16", (2, 3), bytes(range(12))),
        "none": ("F32", (0, 7), b""),
        "a": ("F32", (), b"\1\2\3\4"),
    }
    path = write_safetensors(tmp_path / "m.safetensors", tensors, data_at=77)
    file = read_header(path)
    raw = path.read_bytes()
    assert set(file) == set(tensors)
    for name, (dtype, shape, data) in tensors.items():
        t = file[name]
        assert (t.dtype, t.shape, raw[t.offset : t.offset + t.nbytes]) == (dtype, shape, data)
    assert file["b"].offset % 4096 == 77
    assert (file.source.size, file.source.ino) == (len(raw), path.stat().st_ino)


def test_the_digest_covers_the_header_and_nothing_else(tmp_path: Path) -> None:
    one = write_safetensors(tmp_path / "a.safetensors", {"a": ("U8", (2,), b"12")})
    other_data = write_safetensors(tmp_path / "b.safetensors", {"a": ("U8", (2,), b"34")})
    other_name = write_safetensors(tmp_path / "c.safetensors", {"b": ("U8", (2,), b"12")})
    digests = [read_header(path).source.digest for path in (one, other_data, other_name)]
    assert digests[0] == digests[1] != digests[2]


def test_an_empty_checkpoint_file_has_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(encode({"__metadata__": {"format": "pt", "data_offsets": "data_offsets"}}, b""))
    assert len(read_header(path)) == 0


def test_field_report_5_header_length_of_2_to_the_63(tmp_path: Path) -> None:
    refused_header(tmp_path, (2**63).to_bytes(8, "little") + b"{}", "9223372036854775808 bytes", "100000000")


def test_field_report_5_header_longer_than_the_file(tmp_path: Path) -> None:
    refused_header(tmp_path, (50).to_bytes(8, "little") + b"{}", "50 bytes at 8", "48 bytes are missing")


@pytest.mark.parametrize("data", [b"[1, 2]", b'"text"', b"null", b" {}", b"\xff\xfe"])
def test_field_report_5_header_that_is_no_object(tmp_path: Path, data: bytes) -> None:
    refused_header(tmp_path, len(data).to_bytes(8, "little") + data, "no JSON object")


def test_field_report_5_reversed_offsets(tmp_path: Path) -> None:
    refused_header(tmp_path, encode({"t": entry(8, 4, [4])}, bytes(8)), "'t'", "[8, 4]")


def test_field_report_5_offsets_past_the_end(tmp_path: Path) -> None:
    refused_header(tmp_path, encode({"t": entry(0, 12)}, bytes(8), data_at=-1), "'t'", "4 bytes are missing")


def test_field_report_5_shape_larger_than_its_bytes(tmp_path: Path) -> None:
    refused_header(tmp_path, encode({"t": entry(0, 4, [1000, 1000])}, bytes(4)), "'t'", "4 bytes", "1000000")


@pytest.mark.parametrize("shape", [[2**32, 2**32 + 1], [2**63, 2], [2**62, 4, 2]])
def test_field_report_5_shape_whose_product_passes_2_to_the_64(tmp_path: Path, shape: list[int]) -> None:
    """Wrapped, the products are small numbers, 0 among them."""
    refused_header(tmp_path, encode({"t": entry(0, 0, shape)}, b""), "'t'", "0 bytes")


def test_field_report_5_overlap(tmp_path: Path) -> None:
    data = encode({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12))
    refused_header(tmp_path, data, "'a'", "'b'", "overlap", "ends at 8", "begins at 4")


def test_field_report_5_hole(tmp_path: Path) -> None:
    refused_header(
        tmp_path, encode({"a": entry(0, 8), "b": entry(16, 20)}, bytes(20)), "'b'", "hole of 8 bytes"
    )
    refused_header(tmp_path, encode({"a": entry(8, 16)}, bytes(16)), "'a'", "hole of 8 bytes")


def test_field_report_5_trailing_bytes(tmp_path: Path) -> None:
    refused_header(tmp_path, encode({"a": entry(0, 8)}, bytes(16)), "8 bytes behind the last tensor")


@pytest.mark.parametrize(
    "offsets",
    [[0], [0, 1, 2], [-1, 3], [0.5, 3], ["0", "3"], [None, 3], {}, 3, [0, 2**64], [0, 2**70], [True, 1]],
)
def test_offsets_are_two_natural_numbers(tmp_path: Path, offsets: object) -> None:
    refused_header(tmp_path, encode({"t": {"dtype": "U8", "shape": [3], "data_offsets": offsets}}, bytes(3)))


@pytest.mark.parametrize("shape", [[-3], [1.5], ["3"], 3, None, [None], [2**65]])
def test_a_shape_is_of_natural_numbers(tmp_path: Path, shape: object) -> None:
    refused_header(tmp_path, encode({"t": {"dtype": "U8", "shape": shape, "data_offsets": [0, 3]}}, bytes(3)))


def test_too_many_dimensions(tmp_path: Path) -> None:
    """Otherwise their product alone would take minutes."""
    refused_header(tmp_path, encode({"t": entry(0, 1, [2**62] * 10_000)}, b"1"), "'t'", "10000 dimensions")


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_entry_without_a_field(tmp_path: Path, missing: str) -> None:
    one = {key: value for key, value in entry(0, 3).items() if key != missing}
    refused_header(tmp_path, encode({"t": one}, bytes(3)), "'t'", missing)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": %s, "a": %s}',
        '{"a": %s, "b": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "data_offsets": [0, 0]}}',
        '{"a": %s, "__metadata__": {"x": "data_offsets"}, "a": %s}',
    ],
)
def test_a_name_that_stands_twice(tmp_path: Path, text: str) -> None:
    one = json.dumps(entry(0, 3))
    raw = (text % ((one,) * text.count("%s"))).encode()
    refused_header(tmp_path, len(raw).to_bytes(8, "little") + raw + bytes(3), "twice")


@pytest.mark.parametrize(
    "raw", [b"{" * 50_000, b'{"a":' * 50_000, b'{"a":[' + b"[" * 99_999, b'{"\xff": 1}', b'{"a": {}']
)
def test_json_that_is_none_or_too_deep(tmp_path: Path, raw: bytes) -> None:
    refused_header(tmp_path, len(raw).to_bytes(8, "little") + raw)


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_the_header_s_length(tmp_path: Path, size: int) -> None:
    refused_header(tmp_path, b"\x02\0\0\0\0\0\0\0{}"[:size], "bytes")


def test_field_report_7_types_that_are_new(tmp_path: Path) -> None:
    """F4 of shape [2, 8] in 8 bytes, F8_E8M0, and a type that nobody knows, on tensors of no expert."""
    extra = {
        "model.f4": ("F4", (2, 8), bytes(8)),
        "model.scales": ("F8_E8M0", (2, 1), bytes(2)),
        "model.norm.weight": ("F8_NEW", (3,), bytes(7)),
    }
    made = make(QWEN, tmp_path / "m")
    write_safetensors(made.folder / "model.safetensors", made.tensors | extra)
    assert len(open_safetensors(made.folder).experts) == len(made.expected)
    file, tensor = open_folder(made.folder)["model.norm.weight"]
    assert (file.path.name, tensor.dtype, tensor.nbytes) == ("model.safetensors", "F8_NEW", 7)


@pytest.mark.parametrize(("shape", "size"), [((2, 8), 16), ((2, 8), 7), ((3,), 1), ((3,), 2)])
def test_packed_types_have_their_size_too(tmp_path: Path, shape: tuple[int, ...], size: int) -> None:
    refused_header(tmp_path, encode({"t": entry(0, size, list(shape), "F4")}, bytes(size)), "'t'", "F4")


# --- files -------------------------------------------------------------------------------------------------


def test_field_report_12_a_git_lfs_pointer(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4987202208\n"
    (made.folder / "model.safetensors").write_bytes(pointer)
    message = refused(made.folder, open_safetensors, "model.safetensors", "Git LFS pointer", "git lfs pull")
    assert f"{len(pointer)} bytes" in message


def test_field_report_12_a_dangling_link(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    (made.folder / "blob").mkdir()
    shard = made.folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    refused(made.folder, open_safetensors, shard.name, "symbolic link to ../blobs/gone")


def test_links_are_followed(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub, where every file is one."""
    made = make(QWEN, tmp_path / "m", shards=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in made.folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(open_safetensors(snapshot).experts) == len(made.expected)


@pytest.mark.parametrize("what", ["folder", "fifo", "empty"])
def test_a_shard_that_is_no_file(tmp_path: Path, what: str) -> None:
    made = make(QWEN, tmp_path / "m")
    path = made.folder / "model.safetensors"
    path.unlink()
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "empty": path.touch}[what]()
    words = {"folder": "a folder", "fifo": "not a regular file", "empty": "0 bytes"}
    refused(made.folder, open_safetensors, path.name, words[what])


# --- folders -----------------------------------------------------------------------------------------------


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_field_report_4_every_short_shard_is_named_with_what_is_missing(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=4)
    cut(made.folder / "model-00002-of-00004.safetensors", 700)
    cut(made.folder / "model-00004-of-00004.safetensors", 1)
    message = refused(
        made.folder, open_safetensors, "00002-of-00004", "700 bytes are missing", "00004-of-00004"
    )
    assert ": 1 bytes are missing" in message
    assert "00001" not in message
    assert "00003" not in message


def test_field_report_4_the_last_expert_of_the_last_layer_is_cut(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert list(made.tensors)[-1] == name
    size = len(made.tensors[name][2])
    cut(made.folder / "model.safetensors", size)
    refused(made.folder, open_safetensors, repr(name), f"{size} bytes are missing")


def test_field_report_11_sub_folders_are_never_searched(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=3)
    shutil.copytree(made.folder, tmp_path / "copy")
    (tmp_path / "copy").rename(made.folder / "original")
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    (made.folder / ".hidden.safetensors").write_bytes(b"nonsense")
    source = open_safetensors(made.folder)
    assert {file.path.parent for file in source.files} == {made.folder}
    assert sum(file.size for file in source.files) == sum(
        f.stat().st_size for f in made.folder.glob("m*.safetensors")
    )


def test_field_report_11_a_missing_shard_is_named_with_the_expected_count(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=3)
    (made.folder / "model-00002-of-00003.safetensors").unlink()
    refused(
        made.folder, open_safetensors, "model-00002-of-00003.safetensors is missing", "3 files", "2 are there"
    )


def test_field_report_11_without_an_index_the_names_say_how_many_there_should_be(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=3)
    (made.folder / "model.safetensors.index.json").unlink()
    assert len(open_safetensors(made.folder).experts) == len(made.expected)
    (made.folder / "model-00003-of-00003.safetensors").unlink()
    refused(
        made.folder, open_safetensors, "model-00003-of-00003.safetensors is missing", "3 files", "2 are there"
    )


def test_field_report_11_the_index_decides(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    (made.folder / "consolidated.safetensors").write_bytes(b"another model's, and broken")
    assert len(open_safetensors(made.folder).files) == 2
    (made.folder / "model.safetensors.index.json").unlink()
    refused(made.folder, open_safetensors, "consolidated.safetensors")


@pytest.mark.parametrize("index", [True, False])
def test_field_report_11_a_tensor_in_two_files_is_refused(tmp_path: Path, index: bool) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    name = next(iter(made.tensors))
    if index:
        second = made.folder / "model-00002-of-00002.safetensors"
        names = list(made.tensors)[1::2]
        write_safetensors(second, {n: made.tensors[n] for n in [*names, name]})
    else:
        (made.folder / "model.safetensors.index.json").unlink()
        write_safetensors(made.folder / "other.safetensors", {name: made.tensors[name]})
    refused(made.folder, open_safetensors, repr(name), "is also in", "model-00001-of-00002.safetensors")


def test_a_tensor_that_the_index_places_wrongly(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    index = made.folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name = next(iter(whole["weight_map"]))
    whole["weight_map"][name] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(whole))
    refused(made.folder, open_safetensors, index.name, repr(name), "model-00002-of-00002")
    whole["weight_map"] = {"no.such.tensor": "model-00001-of-00002.safetensors"} | whole["weight_map"]
    index.write_text(json.dumps(whole))
    refused(made.folder, open_safetensors, "'no.such.tensor'")


@pytest.mark.parametrize(
    "file", ["../m/x.safetensors", "/etc/passwd", "", ".", "..", "a\0b", "sub/x.safetensors"]
)
def test_an_index_that_names_files_elsewhere(tmp_path: Path, file: str) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    index = made.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t": file}}))
    refused(made.folder, open_safetensors, index.name, repr(file))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}']
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    index = made.folder / "model.safetensors.index.json"
    index.write_text(text)
    refused(made.folder, open_safetensors, index.name)


def test_several_index_files(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    shutil.copy(made.folder / "model.safetensors.index.json", made.folder / "other.safetensors.index.json")
    assert len(open_safetensors(made.folder).files) == 2  # the usual name comes first
    (made.folder / "model.safetensors.index.json").rename(made.folder / "third.safetensors.index.json")
    refused(made.folder, open_safetensors, "several index files", "other.safetensors.index.json")
    assert len(open_safetensors(made.folder / "third.safetensors.index.json").files) == 2


# --- the one door ------------------------------------------------------------------------------------------


def test_open_source_knows_each_kind_by_its_name(tmp_path: Path, shared: Path) -> None:
    made = make(QWEN, tmp_path / "m", shards=2)
    index = made.folder / "model.safetensors.index.json"
    for path in (made.folder, made.folder / "config.json", index, str(index)):
        assert open_source(path).format == "safetensors"
    assert open_source(shared / "vaults/qwen3-tiny.q4.smoe").format == "smoe"


GONE = ("gone", "gone.safetensors", "config.json", "model-00001-of-00002.safetensors", "manifest.json")


@pytest.mark.parametrize("name", [*GONE, "model.safetensors.index.json", "a\0b", "a\0b.safetensors"])
def test_what_is_not_there_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(VaultError) as caught:
        open_source(tmp_path / name)
    assert name.replace("\0", "\\x00") in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    make(QWEN, tmp_path / "deeper" / "m")
    refused(tmp_path, open_source, "not searched", "manifest.json")
