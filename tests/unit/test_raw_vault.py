"""Version-3 vaults: every tensor's bytes are the source's, at the promised places; and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from models import Model
from support import StampedSource, stamped_source

from smoe_mp import inspect as inspecting
from smoe_mp._native import lib
from smoe_mp.errors import VaultError
from smoe_mp.pack import pack
from smoe_mp.raw_writer import RawWriter, lay_out
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source, Tensor
from smoe_mp.sources.smoe import open_smoe
from smoe_mp.sources.smoe3 import DESCRIPTION_HEAD, RawVault, open_raw, open_vault
from smoe_mp.sources.smoe_file import ENTRY_DTYPE, HEADER_DTYPE

LAYOUTS = ("per_expert", "concatenated", "interleaved", "float8")


def tensors_of(source: Source) -> dict[tuple[int, int], dict[str, tuple[Tensor, bytes]]]:
    """(layer, expert) to its tensors by name, each with its bytes as they are in the files."""
    raw = [file.path.read_bytes() for file in source.files]
    out = {}
    for x in source.experts:
        found = {}
        for t in source.layouts[x.layout]:
            e = x.extents[t.part]
            found[t.name] = t, raw[e.file][e.offset + t.offset : e.offset + t.offset + t.nbytes]
        out[x.layer, x.expert] = found
    return out


def assert_same_tensors(one: Source, other: Source) -> None:
    wanted, got = tensors_of(one), tensors_of(other)
    assert list(wanted) == list(got)
    for pair, tensors in wanted.items():
        assert set(tensors) == set(got[pair])
        for name, (tensor, raw) in tensors.items():
            copy, copied = got[pair][name]
            assert (copy.dtype, copy.shape, copy.tag) == (tensor.dtype, tensor.shape, tensor.tag)
            assert copied == raw


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_weight_is_changed(layout: str, tmp_path: Path) -> None:
    source = getattr(Model(), layout)(tmp_path / "m")
    pack(source, tmp_path / "v.smoe", raw=True)
    vault = open_source(tmp_path / "v.smoe")
    assert isinstance(vault, RawVault)
    assert_same_tensors(open_source(source), vault)
    assert vault.model == open_source(source).model
    assert (vault.origin.format, vault.origin.scout) == ("safetensors", "v.scout.safetensors")
    assert [file.name for file in vault.origin.files] == ["model.safetensors"]


def test_biases_and_odd_sizes_are_kept(tmp_path: Path) -> None:
    source = Model(hidden=35, width=13).interleaved(tmp_path / "m", bias=True)
    pack(source, tmp_path / "v.smoe", raw=True)
    vault = open_raw(tmp_path / "v.smoe")
    assert_same_tensors(open_source(source), vault)
    assert len(vault.layouts[0]) == 4


def test_places(tmp_path: Path) -> None:
    """Blobs on 16384, tensors on 64, gate and up one behind the other; the rest is zeros; checksums hold."""
    pack(Model(hidden=72, width=40).float8(tmp_path / "m"), tmp_path / "v.smoe", raw=True)
    vault, raw = open_raw(tmp_path / "v.smoe"), (tmp_path / "v.smoe").read_bytes()
    for x in vault.experts:
        (extent,) = x.extents
        blob = bytearray(raw[extent.offset : extent.offset + extent.length])
        assert extent.offset % 16384 == extent.length % 16384 == 0
        assert lib.smoe_crc32c(0, bytes(blob), len(blob)) == x.crc32c != 0
        tensors = vault.layouts[x.layout]
        assert all(t.offset % 64 == 0 for t in tensors)
        assert [t.name for t in tensors[:2]] == ["gate", "up"]
        assert tensors[1].offset == tensors[0].nbytes == 40 * 72
        for t in tensors:
            blob[t.offset : t.offset + t.nbytes] = bytes(t.nbytes)
        assert not any(blob)


def test_gate_and_up_come_first_whatever_the_order() -> None:
    names = ("down", "down.bias", "up", "gate", "gate.bias")
    tensors = [Tensor(name, "U8", (65,), part, 0, 65) for part, name in enumerate(names)]
    records = lay_out(tensors)
    assert [r.name for r in records] == ["gate", "up", "down", "down.bias", "gate.bias"]
    assert [r.offset for r in records] == [0, 128, 256, 384, 512]


def test_a_vault_is_packed_again_with_the_same_blobs(shared: Path, tmp_path: Path) -> None:
    """Also a quantised one: the codes and scales are tensors like any other."""
    vault = shared / "vaults/qwen3-tiny.q4.smoe"
    pack(vault, tmp_path / "a.smoe", raw=True)
    assert_same_tensors(open_source(vault), open_source(tmp_path / "a.smoe"))
    assert not (tmp_path / "a.scout.safetensors").exists()
    pack(tmp_path / "a.smoe", tmp_path / "b.smoe", raw=True)
    assert_same_tensors(open_source(vault), open_source(tmp_path / "b.smoe"))


def test_experts_of_many_extents_files_and_layouts(source: StampedSource, tmp_path: Path) -> None:
    out = tmp_path / "v.smoe"
    with RawWriter(out, source) as writer:
        writer.begin()
        wanted = tensors_of(source)
        for index in reversed(range(len(source.experts))):
            x = source.experts[index]
            blob = bytearray(int(writer.table["padded_size"][index]))
            for record in writer.records[x.layout]:
                raw = wanted[x.layer, x.expert][record.name][1]
                blob[record.offset : record.offset + len(raw)] = raw
            writer.write_blob(index, blob)
    assert_same_tensors(source, open_raw(out))


def test_older_readers_refuse_it_by_its_version(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.smoe").write_bytes(small)
    with pytest.raises(VaultError, match=r"version 3 of the format"):
        open_smoe(tmp_path / "v.smoe")
    assert isinstance(open_vault(tmp_path / "v.smoe"), RawVault)


def test_inspect_says_what_it_is(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.smoe").write_bytes(small)
    about = inspecting.summary(open_source(tmp_path / "v.smoe"))
    assert about["smoe"]["version"] == 3
    assert about["smoe"]["origin"]["format"] == "safetensors"
    assert about["checksums"] == about["experts"] == 4
    json.dumps(about)


# --- damaged files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    pack(Model(layers=2, experts=2).float8(folder / "m"), folder / "v.smoe", raw=True)
    return (folder / "v.smoe").read_bytes()


def refusal(path: Path, contents: bytes) -> str:
    path.write_bytes(contents)
    with pytest.raises(VaultError) as caught:
        open_vault(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def with_header(raw: bytes, **fields: int) -> bytes:
    out = bytearray(raw)
    header = np.frombuffer(out, HEADER_DTYPE, 1)
    for name, value in fields.items():
        header[name] = value
    return bytes(out)


def with_entry(raw: bytes, index: int, **fields: int) -> bytes:
    out = bytearray(raw)
    table = np.frombuffer(out, ENTRY_DTYPE, 4, 64)
    for name, value in fields.items():
        table[name][index] = value
    return bytes(out)


def described(raw: bytes, change: Callable[[Any], Any]) -> bytes:
    """The vault with another description, its length and checksum right."""
    at = int(np.frombuffer(raw, HEADER_DTYPE, 1)["arch_offset"][0])
    _, _, length = DESCRIPTION_HEAD.unpack_from(raw, at)
    start = at + DESCRIPTION_HEAD.size
    changed = change(json.loads(raw[start : start + length]))
    text = changed if isinstance(changed, bytes) else msgspec.json.encode(changed)
    data = int(np.frombuffer(raw, HEADER_DTYPE, 1)["data_offset"][0])
    head = DESCRIPTION_HEAD.pack(b"SV3D", lib.smoe_crc32c(0, text, len(text)), len(text))
    return raw[:at] + (head + text).ljust(data - at, b"\0") + raw[data:]


def tensor(number: int, **fields: Any) -> Callable[[Any], Any]:
    def change(d: Any) -> Any:
        d["layouts"][0][number].update(fields)
        return d

    return change


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 4}, "version 4"),
        ({"group_size": 64}, "group_size 64 and bits 0, 0 and 0 in version 3"),
        ({"bits": 4}, "bits 4"),
        ({"num_moe_layers": 0}, "num_moe_layers is 0"),
        ({"total_experts": 5}, "5 experts do not fit 2 layers of 2"),
        ({"total_experts": 3_000_000}, "3000000 experts, at most"),
        ({"table_offset": 128}, "table_offset 128"),
        ({"data_offset": 16385}, "no multiple of 16384"),
        ({"data_offset": 1 << 40}, "past the end of the file"),
        ({"arch_offset": 65}, "description at 65, no multiple of 64"),
        ({"arch_offset": 64}, "not between the end of the table"),
        ({"arch_offset": 16384}, "not between the end of the table"),
        ({"arch_offset": 2**32 - 64}, "not between the end of the table"),
        ({"arch_offset": 8192}, "not b'SV3D'"),
        ({"d_model": 129}, "d_model 129, but the description says 128"),
    ],
)
def test_a_damaged_header(fields: dict[str, int], said: str, small: bytes, tmp_path: Path) -> None:
    assert said in refusal(tmp_path / "v.smoe", with_header(small, **fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"group_size": 1}, "layout 1, but the description has 1"),
        ({"num_groups": 1}, "num_groups 1, 0 in version 3"),
        ({"raw_size": 1}, "raw_size 1, but its layout's tensors end at"),
        ({"padded_size": 16384}, "raw_size"),
        ({"padded_size": 100}, "no multiple of 16384"),
        ({"byte_offset": 5}, "no multiple of 16384"),
        ({"byte_offset": 0}, "lies before data_offset"),
        ({"byte_offset": 2**64 - 16384}, "bytes of the file are missing"),
        ({"byte_offset": 16384}, "overlap"),
        ({"layer_id": 0, "expert_id": 0}, "in the table twice"),
        ({"expert_id": 2}, "expert_id 2"),
    ],
)
def test_a_damaged_entry(fields: dict[str, int], said: str, small: bytes, tmp_path: Path) -> None:
    refused = refusal(tmp_path / "v.smoe", with_entry(small, 3, **fields))
    assert said in refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: b"[]", "Expected `object`, got `array`"),
        (lambda d: b"{", "Input data was truncated"),
        (lambda d: b"\xff\xfe", "malformed"),
        (lambda d: b'{"layouts":' + b"[" * 3000, "description at"),
        (lambda d: {**d, "layouts": []}, "length >= 1"),
        (lambda d: {**d, "layouts": [[]]}, "layout 0: 0 tensors"),
        (lambda d: {**d, "model": {"d_model": -1}}, "`int` >= 0"),
        (lambda d: {k: v for k, v in d.items() if k != "origin"}, "missing required field `origin`"),
        (tensor(0, name=""), "length >= 1"),
        (tensor(0, name="up"), "6 tensors with 5 names"),
        (tensor(0, name="a\0b"), "no printable text"),
        (tensor(0, tag="\x1b[2J"), "no printable text"),
        (tensor(0, offset=-64), "`int` >= 0"),
        (tensor(0, offset=2**63), "`int` <= "),
        (tensor(0, offset=32), "offset 32 is no multiple of 64"),
        (tensor(1, offset=64), "'gate' and 'up' overlap"),
        (tensor(0, nbytes=0), "`int` >= 1"),
        (tensor(0, nbytes=100), "100 bytes, but 8192 elements of F8_E4M3 are 65536 bits"),
        (tensor(0, shape=[2**53] * 4), "elements of F8_E4M3"),
        (tensor(0, shape=[1] * 5), "length <= 4"),
        (tensor(0, shape=[0]), "`int` >= 1"),
        (tensor(0, dtype="SMOE_Q4"), "bytes of codes and 0 of scales (none)"),
        (tensor(0, dtype="SMOE_Q4", shape=[7]), "do not fill whole bytes"),
    ],
)
def test_a_damaged_description(change: Callable[[Any], Any], said: str, small: bytes, tmp_path: Path) -> None:
    assert said in refusal(tmp_path / "v.smoe", described(small, change))


def test_keys_that_a_later_release_adds_are_passed_over(small: bytes, tmp_path: Path) -> None:
    def add(d: Any) -> Any:
        for where in (d, d["layouts"][0][0], d["model"], d["origin"], d["origin"]["files"][0]):
            where["later"] = {"of": ["any", "kind"]}
        return d

    for name, raw in (("old.smoe", small), ("new.smoe", described(small, add))):
        (tmp_path / name).write_bytes(raw)
    old, new = open_raw(tmp_path / "old.smoe"), open_raw(tmp_path / "new.smoe")
    assert (new.layouts, new.model, new.origin) == (old.layouts, old.model, old.origin)


def test_a_changed_byte_of_the_description_is_seen_by_its_checksum(small: bytes, tmp_path: Path) -> None:
    at = small.index(b'"gate"')
    changed = small[:at] + b'"gete"' + small[at + 6 :]
    assert "CRC-32C" in refusal(tmp_path / "v.smoe", changed)


def test_a_description_longer_than_its_room(small: bytes, tmp_path: Path) -> None:
    at = int(np.frombuffer(small, HEADER_DTYPE, 1)["arch_offset"][0])
    for length in (16384, 2**64 - 1):
        changed = bytearray(small)
        changed[at + 8 : at + 16] = length.to_bytes(8, "little")
        assert f"{length} bytes, but data_offset 16384 leaves" in refusal(tmp_path / "v.smoe", changed)


@pytest.mark.parametrize("cut", [1, 4096, 16384, 100_000])
def test_a_file_that_was_cut_short(cut: int, small: bytes, tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path / "v.smoe", small[:-cut])


def test_a_file_cut_in_its_tables(small: bytes, tmp_path: Path) -> None:
    for length in (0, 8, 63, 64, 100, 256, 300, 16383):
        refusal(tmp_path / "v.smoe", small[:length])


def test_what_a_later_writer_adds_is_passed_over(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "v.smoe").write_bytes(described(small, lambda d: {**d, "new": [1]}))
    assert len(open_raw(tmp_path / "v.smoe").experts) == 4


# --- the writer --------------------------------------------------------------------------------------------


def writer(source: Source, path: Path) -> RawWriter:
    made = RawWriter(path, source)
    made.begin()
    return made


def test_experts_that_are_missing_or_wrong_are_refused(source: StampedSource, tmp_path: Path) -> None:
    out = writer(source, tmp_path / "v.smoe")
    sizes: Sequence[int] = out.table["padded_size"].tolist()
    with pytest.raises(VaultError, match=f"entry 1: 5 bytes, must be {sizes[1]}"):
        out.write_blob(1, bytearray(5))
    out.write_blob(0, bytearray(sizes[0]))
    with pytest.raises(VaultError, match=r"1 of 16 experts were written; expert 1 of layer 0 is the first"):
        out.close()
    with pytest.raises(VaultError, match="this writer is closed"):
        out.write_blob(0, bytearray(sizes[0]))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("v.")]


def test_nothing_is_touched_before_it_begins(source: StampedSource, tmp_path: Path) -> None:
    made = RawWriter(tmp_path / "v.smoe", source)
    assert made.file_size > 0
    made.close()
    made.abort()
    assert not [name for name in os.listdir(tmp_path) if name.startswith("v.")]


def test_numbers_that_the_header_cannot_hold_count_as_not_known(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s")
    object.__setattr__(source.model, "vocab_size", 2**40)
    out = writer(source, tmp_path / "v.smoe")
    for index, size in enumerate(out.table["padded_size"].tolist()):
        out.write_blob(index, bytearray(size))
    out.close()
    assert open_raw(tmp_path / "v.smoe").model.vocab_size == 0


# --- from GGUF ---------------------------------------------------------------------------------------------


def test_gguf_blocks_biases_and_scales_are_kept(tmp_path: Path) -> None:
    """Of mixed types, in two files; what is no expert stays there, and the vault says where."""
    gguffiles = pytest.importorskip("gguffiles")
    types = (
        {"gate": "Q4_0", "up": "Q4_0", "down": "Q8_0"},
        {"gate": "Q5_1", "up": "F16", "down": "BF16"},
    )
    files = gguffiles.write_model(
        tmp_path / "m.gguf", types, biases=True, scales=True, dense_layers=1, tensors_a_part=12
    )
    assert len(files) > 1
    report = pack(files[0], tmp_path / "v.smoe", raw=True)
    vault = open_raw(tmp_path / "v.smoe")
    assert_same_tensors(open_source(files[0]), vault)
    assert (report.scout, vault.origin.scout, vault.origin.format) == ("", "", "gguf")
    assert [file.name for file in vault.origin.files] == [file.name for file in files]
    assert [file.bytes for file in vault.origin.files] == [file.stat().st_size for file in files]
    assert len(vault.layouts) == 2
    assert {t.dtype for layout in vault.layouts for t in layout} >= {"Q4_0", "Q8_0", "Q5_1", "F16", "BF16"}
