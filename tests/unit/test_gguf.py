"""GGUF: real files as gguf-py reads them, splits, and each way of being damaged, refused with its figures."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguffiles import (
    ARRAY,
    BOOL,
    F32,
    I32,
    NUMBERS,
    STRING,
    U8,
    U16,
    U32,
    U64,
    HandMade,
    HandTensor,
    text,
    write_model,
)

from smoe_mp.errors import ConfigError, VaultError
from smoe_mp.sources import open_source
from smoe_mp.sources.gguf import GgufModel, dequantize, open_gguf
from smoe_mp.sources.gguf_file import BLOCKS, TYPE_NAMES, GgufArray, read_gguf

MIXED = ({"gate": "Q4_0", "up": "Q4_0", "down": "Q8_0"}, {"gate": "Q8_0", "up": "Q5_1", "down": "F16"})


def part_bytes(model: GgufModel, index: int) -> dict[str, bytes]:
    """The bytes of an expert's tensors by name, read from the files."""
    expert = model.experts[index]
    out = {}
    for tensor in model.layouts[expert.layout]:
        extent = expert.extents[tensor.part]
        raw = model.files[extent.file].path.read_bytes()
        out[tensor.name] = raw[extent.offset : extent.offset + extent.length]
    return out


def as_gguf_py_reads(files: list[Path]) -> dict[str, np.ndarray]:
    return {t.name: t.data for file in files for t in gguf.GGUFReader(file).tensors}


def refused(made: HandMade, folder: Path, *words: str) -> None:
    path = made.write(folder / "made.gguf")
    with pytest.raises(VaultError) as refusal:
        open_gguf(path)
    for word in (str(path), *words):
        assert word in str(refusal.value)


# --- real files ------------------------------------------------------------------------------------------


def test_block_types_are_those_of_gguf_py() -> None:
    known = {kind.name: (kind.value, gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert known == {name: (number, BLOCKS[name]) for number, name in TYPE_NAMES.items()}


@pytest.mark.parametrize(("version", "alignment"), [(3, 32), (2, 32), (3, 256), (3, 4096), (3, 8)])
def test_experts_are_slices_of_the_stacks(tmp_path: Path, version: int, alignment: int) -> None:
    files = write_model(tmp_path / "m.gguf", MIXED, version=version, alignment=alignment, dense_layers=1)
    model = open_gguf(files[0])
    assert (model.parts[0].version, model.parts[0].alignment) == (version, alignment)
    read = as_gguf_py_reads(files)
    assert [(x.layer, x.expert) for x in model.experts] == [(i // 4 + 1, i % 4) for i in range(8)]
    for index, expert in enumerate(model.experts):
        for role, raw in part_bytes(model, index).items():
            stack = read[f"blk.{expert.layer}.ffn_{role}_exps.weight"]
            assert raw == stack[expert.expert].tobytes()


def test_shapes_types_and_facts(tmp_path: Path) -> None:
    (path,) = write_model(tmp_path / "m.gguf", MIXED, tokens=70)
    model = open_gguf(path)
    assert [[(t.name, t.dtype, t.shape) for t in layout] for layout in model.layouts] == [
        [("gate", "Q4_0", (32, 64)), ("up", "Q4_0", (32, 64)), ("down", "Q8_0", (64, 32))],
        [("gate", "Q8_0", (32, 64)), ("up", "Q5_1", (32, 64)), ("down", "F16", (64, 32))],
    ]
    m = model.model
    assert (m.model_type, m.num_layers, m.d_model, m.ffn_dim, m.vocab_size, m.top_k) == (
        "qwen3moe",
        2,
        64,
        32,
        70,
        2,
    )
    assert (m.extra["expert_count"], m.extra["name"]) == (4, "a small model")
    assert model.files[0].size == path.stat().st_size
    assert len(model.files[0].digest) == 16


def test_what_goes_with_an_expert_and_what_does_not(tmp_path: Path) -> None:
    """Biases and per-expert numbers do; shared experts, chunk experts, the experts' norm and a number for all
    do not."""
    made = HandMade()
    for layer in range(2):
        made.tensors += [
            HandTensor(f"blk.{layer}.ffn_gate_exps.bias", (16, 3)),
            HandTensor(f"blk.{layer}.ffn_down_exps.scale", (3,)),
            HandTensor(f"blk.{layer}.ffn_down_exps_input_scale", (3,)),
            HandTensor(f"blk.{layer}.ffn_up_exps.input_scale", (1,)),
            HandTensor(f"blk.{layer}.ffn_norm_exps.weight", (32,)),
            HandTensor(f"blk.{layer}.ffn_up_chexps.weight", (32, 16, 3)),
            HandTensor(f"blk.{layer}.ffn_up_shexp.weight", (32, 16)),
            HandTensor(f"blk.{layer}.exp_probs_b.bias", (3,)),
        ]
    model = open_gguf(made.write(tmp_path / "m.gguf"))
    (layout,) = model.layouts
    assert [(t.name, t.shape, t.nbytes) for t in layout[3:]] == [
        ("gate.bias", (16,), 64),
        ("down.input_scale", (1,), 4),
        ("down.scale", (1,), 4),
    ]
    assert [x.extents[5].offset for x in model.experts[:3]] == [
        model.parts[0].tensors["blk.0.ffn_down_exps.scale"].offset + 4 * i for i in range(3)
    ]


def test_gate_and_up_in_one_stack(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", [{"gate_up": "Q4_0", "down": "Q4_0"}] * 2, biases=True)
    assert [(t.name, t.shape, t.tag) for t in open_gguf(files[0]).layouts[0]] == [
        ("gate_up", (64, 64), "linear,concatenated"),
        ("down", (64, 32), "linear"),
        ("gate_up.bias", (64,), "concatenated"),
        ("down.bias", (64,), ""),
    ]


def test_experts_without_a_gate(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", [{"up": "Q4_0", "down": "Q4_0"}], arch="nemotron_h_moe")
    assert [t.name for t in open_gguf(tmp_path / "m.gguf").layouts[0]] == ["up", "down"]


def test_experts_one_by_one(tmp_path: Path) -> None:
    """As files of early 2024 have them."""
    made = HandMade()
    made.tensors = [
        HandTensor(f"blk.{layer}.ffn_{role}.{expert}.weight", (32, 8), NUMBERS["Q8_0"])
        for layer in range(2)
        for role in ("gate", "up", "down")
        for expert in (2, 0, 1)
    ]
    model = open_gguf(made.write(tmp_path / "m.gguf"))
    assert [(x.layer, x.expert) for x in model.experts] == [(i // 3, i % 3) for i in range(6)]
    for expert in model.experts:
        for role, extent in zip(("gate", "up", "down"), expert.extents, strict=True):
            tensor = model.parts[0].tensors[f"blk.{expert.layer}.ffn_{role}.{expert.expert}.weight"]
            assert (extent.offset, extent.length) == (tensor.offset, 8 * 34)
    missing = HandMade(tensors=[t for t in made.tensors if t.name != "blk.1.ffn_up.1.weight"])
    refused(missing, tmp_path, "blk.1.ffn_up.1.weight is missing")
    made.tensor("blk.1.ffn_up.1.weight").sizes = (32, 9)
    refused(made, tmp_path, "layer 1", "expert 1 are not like those of expert 0")
    made.tensor("blk.1.ffn_up.1.weight").name = "blk.1.ffn_up.7.weight"
    refused(made, tmp_path, "layer 1 has an expert 7", "expert_count is 3")


def test_layers_that_need_no_experts(tmp_path: Path) -> None:
    """Dense ones, ones without any feed-forward network, and draft layers that were left out."""
    made = HandMade()
    made.pairs |= {
        "qwen3moe.block_count": (U32, 5),
        "qwen3moe.nextn_predict_layers": (U32, 1),
        "qwen3moe.expert_count": (I32, 3),
    }
    made.tensors += [
        HandTensor("blk.2.attn_norm.weight", (32,)),
        HandTensor("blk.3.ffn_norm.weight", (32,)),
        HandTensor("blk.3.ffn_down.weight", (32, 16)),
    ]
    assert len(open_gguf(made.write(tmp_path / "m.gguf")).experts) == 6
    refused(made.without("blk.3.ffn_down.weight"), tmp_path, "blk.3.ffn_down_exps.weight is missing")
    refused(
        made.without("blk.3.ffn_norm.weight"), tmp_path, "blk.3.ffn_down_exps.weight is missing"
    )  # nothing of it is there


def test_metadata_is_kept_small(tmp_path: Path) -> None:
    made = HandMade()
    made.pairs |= {
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["ab"] * 1000)),
        "tokenizer.ggml.types": (ARRAY, (I32, [1] * 1000)),
        "few": (ARRAY, (I32, [7, -8])),
        "nested": (ARRAY, (ARRAY, [(U8, [1, 2]), (STRING, ["x"])])),
        "a.flag": (BOOL, True),
        "a.template": (STRING, "t" * 5000),
        "general.name": (STRING, b"not UTF-8: \xff"),
    }
    metadata = read_gguf(made.write(tmp_path / "m.gguf")).metadata
    assert metadata["tokenizer.ggml.merges"] == GgufArray(1000)
    assert metadata["tokenizer.ggml.types"] == GgufArray(1000)
    assert metadata["few"] == GgufArray(2, (7, -8))
    assert metadata["nested"] == GgufArray(2)
    assert metadata["a.flag"] is True
    assert metadata["a.template"] is None
    assert metadata["general.name"] == "not UTF-8: \ufffd"
    assert open_gguf(tmp_path / "m.gguf").model.vocab_size == 4


def test_a_header_longer_than_one_piece(tmp_path: Path) -> None:
    """Strings and numbers over the edges of what is read at a time."""
    made = HandMade()
    for number, length in enumerate((700_001, 3, 1_500_000)):
        made.pairs[f"words.{number}"] = (ARRAY, (STRING, ["x" * length, "", "y" * 1_000_003]))
        made.pairs[f"numbers.{number}"] = (ARRAY, (U64, [5] * 200_000))
    path = made.write(tmp_path / "m.gguf")
    file = read_gguf(path)
    raw = path.read_bytes()
    table_end = raw.rindex(b"blk.1.ffn_down_exps.weight") + len("blk.1.ffn_down_exps.weight") + 4 + 24 + 12
    assert file.identity.digest == hashlib.blake2b(raw[:table_end], digest_size=16).digest()
    assert file.data_offset == -(-table_end // 32) * 32
    assert len(open_gguf(path).experts) == 6


# --- split -----------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model in parts; gate and down of one expert are in different ones."""
    (tmp_path / "split").mkdir()
    files = write_model(tmp_path / "split/m.gguf", MIXED, tensors_a_part=4)
    assert [f.name for f in files] == [f"m-0000{i}-of-00004.gguf" for i in range(1, 5)]
    return files


def test_any_part_opens_a_split_model(split: list[Path]) -> None:
    whole = [open_gguf(path) for path in (*split, split[0].parent)]
    read = as_gguf_py_reads(split)
    for model in whole:
        assert [file.path for file in model.files] == split
        assert list(model.experts) == list(whole[0].experts)
        assert model.model == whole[0].model
    model = whole[0]
    assert any(len({extent.file for extent in x.extents}) > 1 for x in model.experts)
    for index, expert in enumerate(model.experts):
        for role, raw in part_bytes(model, index).items():
            assert raw == read[f"blk.{expert.layer}.ffn_{role}_exps.weight"][expert.expert].tobytes()


def test_a_missing_part_is_named(split: list[Path]) -> None:
    split[0].unlink()
    with pytest.raises(VaultError, match=r"one of 4 parts, of which 1 are missing: m-00001-of-00004\.gguf"):
        open_gguf(split[1])
    split[2].unlink()
    with pytest.raises(VaultError, match=r"2 are missing: m-00001-of-00004\.gguf, m-00003-of-00004\.gguf"):
        open_gguf(split[1])


def test_the_number_of_digits_is_the_names(split: list[Path]) -> None:
    for path in split:
        path.rename(path.with_name(path.name.replace("0000", "0")))
    assert len(open_gguf(split[0].with_name("m-03-of-04.gguf")).experts) == 8
    split[0].with_name("m-02-of-04.gguf").rename(split[1])
    with pytest.raises(VaultError, match=r"missing: m-02-of-04\.gguf"):
        open_gguf(split[0].with_name("m-03-of-04.gguf"))


def test_parts_with_wrong_names(split: list[Path]) -> None:
    plain = split[1].with_name("plain.gguf")
    shutil.copy(split[1], plain)
    with pytest.raises(VaultError, match=r"part 2 of 4, but not named like one.*NAME-00002-of-00004\.gguf"):
        open_gguf(plain)
    shutil.copy(split[1], split[2])
    with pytest.raises(VaultError, match=r"says part 2 of 4, its name part 3 of 4"):
        open_gguf(split[2])
    with pytest.raises(
        VaultError, match=r"m-00003-of-00004.gguf: split.no is 1 and split.count 4.*must be 2"
    ):
        open_gguf(split[0])


def test_a_part_of_another_model(split: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other/m.gguf", MIXED, tensors_a_part=4, scales=True)
    for number, path in enumerate(split):  # three of its six parts, made to look like four
        raw = other[number].read_bytes().replace(b"split.count\2\0\0\0\6\0", b"split.count\2\0\0\0\4\0")
        if number == 3:
            path.write_bytes(raw)
    with pytest.raises(VaultError, match=r"split.tensors.count says that the parts have \d+ tensors, they"):
        open_gguf(split[0])


def test_a_tensor_in_two_parts(split: list[Path]) -> None:
    raw = split[3].read_bytes()
    swapped = raw.replace(b"blk.1.ffn_down_exps.weight", b"blk.0.ffn_down_exps.weight")
    assert swapped != raw
    split[3].write_bytes(swapped)
    with pytest.raises(VaultError, match=r"blk.0.ffn_down_exps.weight is in m-00002-of-00004.gguf as well"):
        open_gguf(split[0])


@pytest.mark.parametrize("name", ["x-00001-of-00013.gguf", "x-00001-of-00001.gguf"])
def test_a_whole_file_that_is_named_like_a_part(tmp_path: Path, name: str) -> None:
    HandMade().write(tmp_path / name)
    assert len(open_gguf(tmp_path / name).experts) == 6
    made = HandMade()
    made.pairs["split.count"] = (U16, 1)
    assert len(open_gguf(made.write(tmp_path / name)).experts) == 6


def test_a_part_that_is_short(split: list[Path]) -> None:
    os.truncate(split[2], split[2].stat().st_size - 4096)
    with pytest.raises(VaultError, match=r"m-00003-of-00004\.gguf: .*: \d+ bytes are missing"):
        open_gguf(split[0])


def test_parts_that_are_links(split: list[Path], tmp_path: Path) -> None:
    """As in the cache of Hugging Face: the files themselves have names that say nothing."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(split):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(blobs / f"{number:064x}")
    model = open_gguf(split[2])
    assert [file.path for file in model.files] == split
    assert [file.ino for file in model.files] == [(blobs / f"{n:064x}").stat().st_ino for n in range(4)]
    (blobs / f"{1:064x}").unlink()
    with pytest.raises(VaultError, match=r"m-00002-of-00004\.gguf: a symbolic link to .*, where there is no"):
        open_gguf(split[2])


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(VaultError, match="no GGUF file"):
        open_gguf(tmp_path)
    HandMade().write(tmp_path / "m.gguf")
    HandMade().write(tmp_path / "mmproj-m.gguf")
    (tmp_path / "below").mkdir()
    HandMade().write(tmp_path / "below/n.gguf")
    assert open_gguf(tmp_path).path == tmp_path / "m.gguf"
    assert open_source(tmp_path / "m.gguf").format == "gguf"
    HandMade().write(tmp_path / "n.gguf")
    with pytest.raises(VaultError, match=r"2 GGUF models \(m.gguf, n.gguf\)"):
        open_gguf(tmp_path)


# --- refused ---------------------------------------------------------------------------------------------


def test_the_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 9, 12) + bytes(100))
    with pytest.raises(VaultError, match=r"3 in the other byte order \(big-endian\), which is not supp"):
        open_gguf(path)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for raw, words in {
        b"": "the file is empty",
        b"GG": "begins with 47 47, not 47 47 55 46",
        b"PK\3\4" + bytes(100): "begins with 50 4b 03 04",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "a Git LFS pointer",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "version 1 of the format",
        b"GGUF" + struct.pack("<IQQ", 4, 0, 0): "version 4 of the format",
        b"GGUF\3": "the version: 4 bytes at 4, but the file ends at 5: 3 bytes are missing",
    }.items():
        path.write_bytes(raw)
        with pytest.raises(VaultError, match=re.escape(words)):
            open_gguf(path)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(VaultError, match="a symbolic link to nowhere, where there is no file"):
        open_gguf(path)


def no_count(made: HandMade) -> None:
    made.tensor_count = 1 << 63


def many_pairs(made: HandMade) -> None:
    made.pair_count = 60_000


def one_pair_more(made: HandMade) -> None:
    made.pair_count = len(made.pairs) + 1


def long_key(made: HandMade) -> None:
    made.more_pairs, made.pair_count = struct.pack("<Q", 1 << 62), len(made.pairs) + 1


def long_text(made: HandMade) -> None:
    made.more_pairs = text("k") + struct.pack("<IQ", STRING, (1 << 64) - 1)
    made.pair_count = len(made.pairs) + 1


def long_array(made: HandMade) -> None:
    made.more_pairs = text("k") + struct.pack("<IIQ", ARRAY, F32, 1 << 62)
    made.pair_count = len(made.pairs) + 1


def long_string_array(made: HandMade) -> None:
    made.more_pairs = text("k") + struct.pack("<IIQ", ARRAY, STRING, (1 << 61) + 1)
    made.pair_count = len(made.pairs) + 1


def long_element(made: HandMade) -> None:
    made.more_pairs = text("k") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("x")
    made.more_pairs += struct.pack("<Q", (1 << 64) - 9)
    made.pair_count = len(made.pairs) + 1


def deep_arrays(made: HandMade) -> None:
    made.more_pairs = text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 40
    made.pair_count = len(made.pairs) + 1


def odd_type(made: HandMade) -> None:
    made.more_pairs, made.pair_count = text("k") + struct.pack("<I", 13), len(made.pairs) + 1


def key_twice(made: HandMade) -> None:
    made.more_pairs = text("general.name") + struct.pack("<I", STRING) + text("a")
    made.more_pairs *= 2
    made.pair_count = len(made.pairs) + 2


def alignment(value: object, kind: int = U32) -> Callable[[HandMade], None]:
    def damage(made: HandMade) -> None:
        made.pairs["general.alignment"] = (kind, value)

    return damage


def tensor(name: str, /, **changes: object) -> Callable[[HandMade], None]:
    def damage(made: HandMade) -> None:
        for key, it in changes.items():
            setattr(made.tensor(name), key, it)

    return damage


def cut(missing: int) -> Callable[[HandMade], None]:
    def damage(made: HandMade) -> None:
        made.missing = missing

    return damage


def pair(key: str, kind: int, it: object) -> Callable[[HandMade], None]:
    def damage(made: HandMade) -> None:
        made.pairs[key] = (kind, it)

    return damage


def without(*names: str) -> Callable[[HandMade], None]:
    def damage(made: HandMade) -> None:
        made.without(*names)

    return damage


EMBED, UP, DOWN = "token_embd.weight", "blk.0.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"
DAMAGES: dict[str, tuple[Callable[[HandMade], None], tuple[str, ...]]] = {
    "a count past all files": (no_count, ("9223372036854775808 tensors", "at most 65536")),
    "more pairs than bytes": (many_pairs, ("60000 key-value pairs take at least 780000 bytes",)),
    "one pair more than there is": (one_pair_more, ()),
    "a key past the end": (long_key, (f"a string of {1 << 62} bytes", "bytes are missing")),
    "a text past the end": (long_text, (f"k: a text of {(1 << 64) - 1} bytes", "are missing")),
    "an array past the end": (long_array, (f"k: an array of {1 << 62} elements", "are missing")),
    "an array of texts past the end": (long_string_array, (f"an array of {(1 << 61) + 1} elements",)),
    "an element past the end": (long_element, ("element 1, a string of", "are missing")),
    "arrays in arrays": (deep_arrays, ("more than 4 deep",)),
    "a value type that is none": (odd_type, ("k: value type 13, and there are 0 to 12",)),
    "a key twice": (key_twice, ("general.name is there twice",)),
    "alignment 0": (alignment(0), ("general.alignment is 0", "a power of two")),
    "alignment 48": (alignment(48), ("general.alignment is 48", "a power of two")),
    "alignment 2^31": (alignment(1 << 31), (f"general.alignment is {1 << 31}", "at most 1048576")),
    "alignment -32": (alignment(-32, I32), ("general.alignment is -32",)),
    "alignment a text": (alignment("32", STRING), ("general.alignment is '32'",)),
    "five dimensions": (tensor(EMBED, sizes=(2, 2, 2, 2, 2)), (f"{EMBED}: 5 dimensions",)),
    "a product past 2^63": (
        tensor(EMBED, sizes=(1 << 32, 1 << 32, 1 << 32), nbytes=0),
        (f"{EMBED}: {1 << 32} x {1 << 32} x {1 << 32} elements",),
    ),
    "a tensor past the end": (
        tensor(EMBED, sizes=(1 << 30, 4), nbytes=512),
        (f"{EMBED}: {1 << 34} bytes at", "bytes are missing"),
    ),
    "an offset past the end": (tensor(EMBED, offset=1 << 50), (f"{EMBED}: 512 bytes at", "are missing")),
    "an offset that wraps": (tensor(EMBED, offset=(1 << 64) - 32), (f"{EMBED}: 512 bytes at",)),
    "an odd offset": (
        tensor(EMBED, offset=16),
        (f"{EMBED}: its offset 16 is no multiple of the alignment 32",),
    ),
    "an overlap": (tensor(DOWN, offset=0), ("overlap",)),
    "half a block": (
        tensor(UP, sizes=(48, 16, 3), nbytes=3 * 16 * 51),
        (f"{UP}: rows of 48 elements are no whole number of Q8_0 blocks of 32",),
    ),
    "a tensor twice": (tensor(UP, name="blk.0.ffn_gate_exps.weight"), ("is there twice",)),
    "a name that is not UTF-8": (tensor(EMBED, name=b"\xff\xfe"), ("byte 0 of", "is not UTF-8")),
    "a name without end": (tensor(EMBED, name="n" * 2000), ("a string of 2000 bytes, at most 1024",)),
    "an unknown type of experts": (
        tensor(UP, type=77, nbytes=3 * 16 * 34),
        (f"{UP}: block type number 77 is not known",),
    ),
    "an empty stack": (tensor(UP, sizes=(32, 0, 3)), (f"{UP}: 32 x 0 x 3 elements: empty",)),
    "a flat stack": (tensor(UP, sizes=(32, 48)), (f"{UP}: 2 dimensions",)),
    "the last byte cut": (cut(1), (f"{DOWN}: 3072 bytes at", ": 1 bytes are missing")),
    "the last expert cut": (cut(1024), (f"{DOWN}: 3072 bytes at", ": 1024 bytes are missing")),
    "another number of experts": (
        pair("qwen3moe.expert_count", U32, 4),
        ("ffn_gate_exps.weight: 3 experts, but there are 4 (qwen3moe.expert_count)",),
    ),
    "a layer less": (
        pair("qwen3moe.block_count", U32, 3),
        ("blk.2.ffn_down_exps.weight is missing",),
    ),
    "layers without end": (
        pair("qwen3moe.block_count", U32, (1 << 32) - 1),
        ("blk.2.ffn_down_exps.weight is missing",),
    ),
    "a stack less": (without(DOWN), (f"{DOWN} is missing",)),
    "gates nowhere": (
        without("blk.0.ffn_gate_exps.weight", "blk.1.ffn_gate_exps.weight"),
        ("blk.0.ffn_gate_exps.weight is missing",),
    ),
    "a layer's experts less": (
        without(*(f"blk.1.ffn_{role}_exps.weight" for role in ("gate", "up", "down"))),
        ("blk.1.ffn_down_exps.weight is missing",),
    ),
    "no experts": (
        without(*(f"blk.{i}.ffn_{role}_exps.weight" for i in (0, 1) for role in ("gate", "up", "down"))),
        ("no tensors of experts", "expert_count is 3", "blk.0.ffn_down_exps.weight is missing"),
    ),
    "no architecture": (pair("general.architecture", U32, 5), ("general.architecture is missing",)),
    "layers too far": (
        tensor(UP, name="blk.99999999.ffn_up_exps.weight"),
        ("the last of them 99999999", "pairs of layer and expert can be served"),
    ),
}


def test_undamaged(tmp_path: Path) -> None:
    assert len(open_gguf(HandMade().write(tmp_path / "m.gguf")).experts) == 6


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(damage: str, tmp_path: Path) -> None:
    made = HandMade()
    change, words = DAMAGES[damage]
    change(made)
    refused(made, tmp_path, *words)


def test_one_bias_less(tmp_path: Path) -> None:
    made = HandMade()
    made.tensors.append(HandTensor("blk.0.ffn_up_exps.bias", (16, 3)))
    refused(made, tmp_path, "blk.1.ffn_up_exps.bias is missing")


def test_the_same_tensor_under_two_names(tmp_path: Path) -> None:
    made = HandMade()
    made.tensors += [
        HandTensor("blk.0.ffn_up_exps.scale", (3,)),
        HandTensor("blk.0.ffn_up_exps_scale", (3,)),
    ]
    refused(made, tmp_path, "layer 0 has a tensor of its experts under two names")


def test_an_unknown_type_elsewhere_stops_nothing(tmp_path: Path) -> None:
    made = HandMade()
    made.tensors[1:1] = [HandTensor("blk.0.attn_q.weight", (8, 8), 77, nbytes=96)]
    assert len(open_gguf(made.write(tmp_path / "m.gguf")).experts) == 6
    made.tensor("blk.0.attn_q.weight").offset = 0
    refused(made, tmp_path, "overlap")


def test_a_header_larger_than_is_accepted(tmp_path: Path) -> None:
    """A file with a hole of a terabyte that claims to be one array: nothing of it is read."""
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U8, 1 << 40)
    )
    os.truncate(path, 2 << 40)
    with pytest.raises(VaultError, match="make a header of more than 134217728 bytes"):
        open_gguf(path)


# --- dequantised -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4"])
def test_dequantize(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    block, size = BLOCKS[type_name]
    raw = np.random.default_rng(5).integers(0, 256, (4, 512 // block * size), np.uint8)
    with np.errstate(all="ignore"):  # any bytes: scales may be infinite
        out = dequantize(type_name, raw.ravel(), (2, 2, 512))
        want = gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(2, 2, 512)
    assert out.dtype == np.float32
    assert out.tobytes() == want.tobytes()
    assert not np.shares_memory(out, raw)
    assert out.flags.writeable


def test_dequantize_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VaultError, match="'Q9_Z' is none of GGUF's"):
        dequantize("Q9_Z", np.zeros(1, np.uint8), (1,))
    with pytest.raises(VaultError, match="Q8_0: 33 bytes for 1 x 32 elements, which take 34"):
        dequantize("Q8_0", np.zeros(33, np.uint8), (1, 32))
    with pytest.raises(VaultError, match="Q8_1: the installed package gguf cannot dequantise it"):
        dequantize("Q8_1", np.zeros(40, np.uint8), (1, 32))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'smoe-mp\[gguf\]'"):
        dequantize("Q8_0", np.zeros(34, np.uint8), (1, 32))
