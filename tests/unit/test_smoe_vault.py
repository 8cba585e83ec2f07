"""`.smoe` vaults: the original's files, written again byte for byte; and each way of being damaged, refused.

`SMALL` is a vault made by the writer: 2 layers of 3 experts, (64, 64) tensors.  A damage is a change to its
bytes, and a test says which words and figures the refusal must have.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe_mp.errors import VaultError
from smoe_mp.partial import free_bytes, partial_of
from smoe_mp.sources.base import Extent
from smoe_mp.sources.smoe import (
    ARCH_DTYPE,
    DESCRIPTOR_DTYPE,
    ENTRY_DTYPE,
    HEADER_DTYPE,
    MAGIC,
    ArchBlock,
    SmoeVault,
    open_smoe,
)
from smoe_mp.vault_writer import VaultWriter

REPO = Path(__file__).parents[2]
VAULTS = REPO.parent / "shared" / "vaults"
needs_vaults = pytest.mark.skipif(
    not VAULTS.is_dir(), reason="the original's vaults (../shared) are not here"
)

SHAPES = {"gate": (64, 64), "up": (64, 64), "down": (64, 64)}
EXPERTS = [(layer, expert) for layer in range(2) for expert in range(3)]
ARCH = ArchBlock(
    flags=5,
    rope_theta=10000.0,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    moe_top_k=2,
    moe_ffn_dim=64,
    dense_ffn_dim=0,
    shared_expert_ffn_dim=0,
    activation=0,
    num_hidden_layers=2,
    rms_norm_eps=0.5,
    model_type="test",
)
RAW = 3 * (64 * 64 // 2 + 64 * 2)
ENTRY = 64
DESCRIPTOR = 64 + 48 * 6
ARCH_AT = 1152  # 64 + 180 * 6 = 1144, up to a multiple of 64
DATA_AT = 16384


def writer(path: Path, bits: int = 4, arch: ArchBlock | None = ARCH) -> VaultWriter:
    return VaultWriter(
        path, EXPERTS, bits=bits, shapes=SHAPES, d_model=64, vocab_size=10, ffn_dim=64, arch=arch
    )


def fill(out: VaultWriter, experts: list[tuple[int, int]] = EXPERTS) -> None:
    rng = np.random.default_rng(7)
    for layer, expert in experts:
        out.add(layer, expert, *(rng.standard_normal((64, 64), dtype=np.float32) for _ in range(3)))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "small.smoe"
    with writer(path) as out:
        fill(out)
    return path.read_bytes()


def refusal(path: Path, contents: bytes) -> str:
    path.write_bytes(contents)
    with pytest.raises(VaultError) as caught:
        open_smoe(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def checkpoint() -> dict[str, npt.NDArray[np.float32]]:
    """The tiny checkpoint's bfloat16 tensors as float32: their bits are a float32's upper half."""
    raw = (VAULTS / "qwen3-tiny" / "model.safetensors").read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    out: dict[str, npt.NDArray[np.float32]] = {}
    for name, about in json.loads(raw[8:data]).items():
        if about.get("dtype") == "BF16":
            begin, end = (data + offset for offset in about["data_offsets"])
            bits = np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16
            out[name] = bits.view(np.float32).reshape(about["shape"])
    return out


# ------------------------------------------------------------------------------------ the original's files


@needs_vaults
@pytest.mark.parametrize("bits", [4, 2])
def test_the_originals_vault_is_read(bits: int) -> None:
    path = VAULTS / f"qwen3-tiny.q{bits}.smoe"
    vault = open_smoe(path)
    assert (vault.header.version, vault.header.bits, len(vault.experts)) == (2, bits, 24)
    assert [(e.layer, e.expert) for e in vault.experts] == [(i // 8, i % 8) for i in range(24)]
    assert len(vault.layouts) == 1
    assert [(t.name, t.dtype, t.shape) for t in vault.layouts[0]] == [
        ("gate", f"SMOE_Q{bits}", (96, 128)),
        ("gate.scales", "F16", (192,)),
        ("up", f"SMOE_Q{bits}", (96, 128)),
        ("up.scales", "F16", (192,)),
        ("down", f"SMOE_Q{bits}", (128, 96)),
        ("down.scales", "F16", (192,)),
    ]
    last = vault.experts[-1].extents[0]
    assert last.offset + last.length == path.stat().st_size == vault.files[0].size
    assert vault.arch is not None
    assert vault.arch.flags == 1 | 2
    model = vault.model
    # The header's ffn_dim is 128, the rows of the first expert tensor by name, which is the down projection.
    assert (model.model_type, model.d_model, model.ffn_dim, model.top_k) == ("qwen3_moe", 128, 96, 2)


@needs_vaults
@pytest.mark.parametrize("bits", [4, 2])
def test_the_writer_gives_the_originals_bytes(bits: int, tmp_path: Path) -> None:
    original = VAULTS / f"qwen3-tiny.q{bits}.smoe"
    weights = checkpoint()
    names = {name: f"{name}_proj.weight" for name in ("gate", "up", "down")}
    first = "model.layers.0.mlp.experts.0."
    arch = ArchBlock(
        flags=3,
        rope_theta=1e6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        moe_top_k=2,
        moe_ffn_dim=96,
        dense_ffn_dim=192,
        shared_expert_ffn_dim=0,
        activation=0,
        num_hidden_layers=3,
        rms_norm_eps=1e-6,
        model_type="qwen3_moe",
    )
    vocab_size, d_model = weights["model.embed_tokens.weight"].shape
    experts = [(layer, expert) for layer in range(3) for expert in range(8)]
    shapes = {name: weights[first + tensor].shape for name, tensor in names.items()}
    with VaultWriter(
        tmp_path / "out.smoe",
        experts,
        bits=bits,
        shapes={name: (rows, cols) for name, (rows, cols) in shapes.items()},
        d_model=d_model,
        vocab_size=vocab_size,
        ffn_dim=weights[first + "down_proj.weight"].shape[0],
        arch=arch,
    ) as out:
        for layer, expert in experts:
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            out.add(layer, expert, *(weights[prefix + tensor] for tensor in names.values()))
    assert (tmp_path / "out.smoe").read_bytes() == original.read_bytes()


# ------------------------------------------------------------------------------------------ a sound vault


def test_a_written_vault_is_read_back(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.smoe"
    path.write_bytes(small)
    vault = open_smoe(path)
    assert vault.arch == ARCH
    assert [(e.layer, e.expert) for e in vault.experts] == EXPERTS
    assert [e.extents for e in vault.experts] == [(Extent(0, DATA_AT + 16384 * i, 16384),) for i in range(6)]
    assert vault.table["raw_size"].tolist() == [RAW] * 6
    assert vault.table["num_groups"].tolist() == [192] * 6
    assert not vault.table.flags.writeable
    file, status = vault.files[0], path.stat()
    assert (file.dev, file.ino, file.size) == (status.st_dev, status.st_ino, status.st_size)
    assert file.mtime_ns == status.st_mtime_ns


def test_the_digest_is_of_the_header_alone(small: bytes, tmp_path: Path) -> None:
    def digest(contents: bytes) -> bytes:
        path = tmp_path / "v.smoe"
        path.write_bytes(contents)
        return open_smoe(path).files[0].digest

    def with_byte(at: int) -> bytes:
        return small[:at] + bytes([small[at] ^ 1]) + small[at + 1 :]

    assert len(digest(small)) == 16
    assert digest(with_byte(DATA_AT)) == digest(small)
    assert digest(with_byte(DATA_AT - 1)) != digest(small)
    assert digest(with_byte(48)) != digest(small)  # d_model


def test_version_1_has_no_arch_block(tmp_path: Path) -> None:
    path = tmp_path / "one.smoe"
    with writer(path, arch=None) as out:
        fill(out)
    vault = open_smoe(path)
    assert (vault.header.version, vault.header.arch_offset, vault.arch) == (1, 0, None)
    assert (vault.model.model_type, vault.model.ffn_dim, vault.model.extra) == ("", 64, {})


def test_experts_of_two_shapes_have_two_layouts(small: bytes, tmp_path: Path) -> None:
    path, data = tmp_path / "two.smoe", bytearray(small)
    struct.pack_into("<II", data, DESCRIPTOR + 44 * 3 * 4 + 4, 32, 128)  # gate of entry 4: as many weights
    path.write_bytes(data)
    vault = open_smoe(path)
    assert [e.layout for e in vault.experts] == [0, 0, 0, 0, 1, 0]
    assert [layout[0].shape for layout in vault.layouts] == [(64, 64), (32, 128)]


def test_the_reserved_field_is_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "crc.smoe"
    seen: list[bytes] = []

    def checksum(blob: memoryview) -> int:
        seen.append(bytes(blob))
        return 0xF0000000 + len(seen)

    with VaultWriter(
        path, EXPERTS, bits=2, shapes=SHAPES, d_model=64, vocab_size=1, ffn_dim=64, checksum=checksum
    ) as out:
        fill(out)
    vault, data = open_smoe(path), path.read_bytes()
    assert [e.crc32c for e in vault.experts] == [0xF0000001 + i for i in range(6)]
    assert seen == [data[e.extents[0].offset :][: e.extents[0].length] for e in vault.experts]


def test_a_symbolic_link_is_followed(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(small)
    (tmp_path / "link").symlink_to("real")
    vault = open_smoe(tmp_path / "link")
    assert vault.files[0].ino == (tmp_path / "real").stat().st_ino


def test_a_relative_path_becomes_absolute_for_the_workers(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v.smoe").write_bytes(small)
    monkeypatch.chdir(tmp_path)
    assert open_smoe(Path("v.smoe")).files[0].path == tmp_path / "v.smoe"


# ------------------------------------------------------------------------------------------ no vault at all


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere.smoe")
    for name, said in {
        ".": "a folder",
        "pipe": "not a regular file",
        "dangling": "a symbolic link to nowhere.smoe, where there is no file",
        "absent": "no such file",
        "a\0b": "not a file name",
    }.items():
        with pytest.raises(VaultError, match=said):
            open_smoe(tmp_path / name)


def test_a_file_without_permission_names_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", no)
    with pytest.raises(VaultError, match=f"permission denied for uid {os.geteuid()}"):
        open_smoe(tmp_path / "v.smoe")


def test_an_error_while_reading_is_a_vault_error(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: object) -> int:
        raise OSError(5, "Input/output error")

    (tmp_path / "v.smoe").write_bytes(small)
    monkeypatch.setattr(os, "preadv", no)
    with pytest.raises(VaultError, match="errno 5"):
        open_smoe(tmp_path / "v.smoe")


def test_a_file_that_changes_while_it_is_read_is_refused(
    small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / "v.smoe", os.fstat, []

    def changing(fd: int) -> os.stat_result:
        calls.append(fd)
        if len(calls) == 2:
            os.utime(path, ns=(1, 1))
        return real(fd)

    path.write_bytes(small)
    monkeypatch.setattr(os, "fstat", changing)
    with pytest.raises(VaultError, match="changed while it was being opened"):
        open_smoe(path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 802816\n"


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "empty"),
        (LFS, f"a Git LFS pointer of {len(LFS)} bytes"),
        (b"GGUF" + bytes(100), "begins with 47 47 55 46 00 00 00 00"),
        (MAGIC[::-1] + bytes(56), "other byte order"),
        (bytes.fromhex("454f4d530100eade") + bytes(56), "other byte order"),
        (MAGIC + b"\0\0\0\2" + bytes(52), "version 33554432 is 2 in the other byte order"),
        (MAGIC + struct.pack("<I", 3) + bytes(52), "version 3 of the format"),
        (MAGIC + bytes(56), "version 0 of the format"),
        (MAGIC + bytes(9), "47 bytes are missing"),
        (MAGIC[:5], "59 bytes are missing"),
    ],
)
def test_a_file_that_is_no_vault_is_refused(contents: bytes, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path / "v.smoe", contents)


# -------------------------------------------------------------------------------- a vault that is damaged


class Damage(NamedTuple):
    """A number of the file, replaced: place, struct format, new value, and what the refusal says."""

    where: int
    fmt: str
    value: float | bytes
    said: str


def header(name: str, value: int, said: str) -> Damage:
    return Damage(_offset(HEADER_DTYPE, name), _format(HEADER_DTYPE, name), value, said)


def entry(index: int, name: str, value: int, said: str) -> Damage:
    return Damage(ENTRY + 48 * index + _offset(ENTRY_DTYPE, name), _format(ENTRY_DTYPE, name), value, said)


def tensor(index: int, number: int, name: str, value: int, said: str) -> Damage:
    at = DESCRIPTOR + 44 * (3 * index + number) + _offset(DESCRIPTOR_DTYPE, name)
    return Damage(at, _format(DESCRIPTOR_DTYPE, name), value, said)


def arch(name: str, fmt: str, value: float | bytes, said: str) -> Damage:
    return Damage(ARCH_AT + _offset(ARCH_DTYPE, name), fmt, value, said)


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    assert dtype.fields is not None
    return int(dtype.fields[name][1])


def _format(dtype: np.dtype[np.void], name: str) -> str:
    return "<" + {1: "B", 2: "H", 4: "I", 8: "Q"}[dtype[name].itemsize]


BIG = 2**64 - 16384
END = DATA_AT + 6 * 16384
DAMAGES = [
    header("num_moe_layers", 0, "num_moe_layers is 0"),
    header("max_experts_per_layer", 0, "max_experts_per_layer is 0"),
    header("total_experts", 0, "total_experts is 0"),
    header("total_experts", 2_097_152, "at most 2097151"),
    header("total_experts", 2**32 - 1, "at most 2097151"),
    header("total_experts", 7, "7 experts do not fit 2 layers of 3"),
    header("num_moe_layers", 1, "6 experts do not fit 1 layers of 3"),
    header("table_offset", 0, "table_offset 0"),
    header("table_offset", BIG, f"table_offset {BIG}"),
    header("data_offset", 16385, "data_offset 16385 is no multiple of 16384"),
    header("data_offset", BIG, f"data_offset {BIG} is past the end of the file"),
    header("data_offset", 0, "not between the end of the tables"),
    header("data_offset", 32768, "byte_offset 16384 lies before data_offset 32768"),
    header("group_size", 32, "group_size 32"),
    header("bits", 3, "3 bits"),
    header("bits", 2, "gate: 2048 bytes of codes"),
    header("arch_offset", ARCH_AT + 1, "no multiple of 64"),
    header("arch_offset", ARCH_AT - 64, "not between the end of the tables at 1144"),
    header("arch_offset", DATA_AT - 64, "not between"),
    header("arch_offset", 2**32 - 64, "not between"),
    header("arch_offset", ARCH_AT + 64, "not b'SARC'"),
    header("version", 1, "in version 1, which has no arch block"),
    header("num_moe_layers", 2**32 - 1, ""),
    entry(1, "layer_id", 1, "expert 1 of layer 1 is in the table twice, as entries 1 and 4"),
    entry(4, "layer_id", 2, "3 different layers"),
    entry(4, "layer_id", 2**32 - 1, "layer_id 4294967295"),
    entry(4, "expert_id", 3, "expert_id 3, but the header says 3"),
    entry(4, "expert_id", 2**32 - 1, "expert_id 4294967295"),
    entry(2, "byte_offset", DATA_AT + 1, "no multiple of 16384"),
    entry(2, "byte_offset", 0, "lies before data_offset"),
    entry(2, "byte_offset", DATA_AT, "entries 0 and 2 overlap"),
    entry(2, "byte_offset", END, "16384 bytes of the file are missing"),
    entry(2, "byte_offset", BIG, f"{BIG + 16384 - END} bytes of the file are missing"),
    entry(2, "padded_size", 32768, "entries 2 and 3 overlap"),
    entry(2, "padded_size", 16384 * 7, "of the file are missing"),
    entry(2, "padded_size", BIG, "of the file are missing"),
    entry(2, "padded_size", 0, "padded_size 0"),
    entry(2, "padded_size", 8192, "padded_size 8192"),
    entry(2, "raw_size", 16385, "raw_size 16385 with padded_size 16384"),
    entry(2, "raw_size", 0, "raw_size 0"),
    entry(2, "raw_size", RAW - 1, "down: scales bytes, 128 at 6400 of a blob of raw_size 6527"),
    entry(2, "group_size", 128, "group_size 128"),
    entry(2, "num_groups", 191, "num_groups 191, but its tensors have 192"),
    entry(2, "num_groups", BIG, "num_groups"),
    tensor(3, 0, "tensor_type", 1, "descriptor 0: tensor_type 1, must be 0 (gate)"),
    tensor(3, 2, "tensor_type", 3, "tensor_type 3, must be 2 (down)"),
    tensor(3, 1, "ndim", 3, "up: ndim 3"),
    tensor(3, 1, "rows", 0, "up: a shape of 0 x 64"),
    tensor(3, 1, "cols", 0, "up: a shape of 64 x 0"),
    tensor(3, 1, "rows", 65, "up: 2048 bytes of codes, but 65 x 64 weights"),
    tensor(3, 1, "rows", 2**32 - 1, "4294967295 x 64 weights"),
    tensor(3, 1, "packed_size", 2047, "up: 2047 bytes of codes"),
    tensor(3, 1, "packed_size", BIG, "bytes of codes"),
    tensor(3, 1, "scales_size", 130, "up: 130 bytes of scales for 64 groups"),
    tensor(3, 1, "scales_size", 2**63, "bytes of scales"),
    tensor(3, 1, "packed_offset", BIG, "up: packed bytes, 2048 at"),
    tensor(3, 1, "scales_offset", RAW - 127, "up: scales bytes, 128 at 6401"),
    tensor(3, 1, "packed_offset", 0, "overlap"),
    tensor(3, 1, "scales_offset", 2050, "overlap"),
    arch("magic", "4s", b"SARX", "not b'SARC'"),
    arch("block_version", "<I", 2, "block_version 2"),
    arch("block_size", "<I", 256, "block_size 256"),
    arch("rope_theta", "<f", float("nan"), "rope_theta is nan"),
    arch("rms_norm_eps", "<f", float("inf"), "rms_norm_eps is inf"),
    arch("moe_top_k", "<I", 4, "moe_top_k 4 of 3 experts"),
    arch("model_type", "24s", b"\x1b[2J", "no printable text"),
    arch("model_type", "24s", b"\xff", "no printable text"),
]
HARMLESS = [damage for damage in DAMAGES if not damage.said]


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d.said], ids=lambda d: f"{d.where}-{d.value}")
def test_a_damaged_number_is_refused_with_its_figures(damage: Damage, small: bytes, tmp_path: Path) -> None:
    data = bytearray(small)
    struct.pack_into(damage.fmt, data, damage.where, damage.value)
    assert damage.said in refusal(tmp_path / "v.smoe", bytes(data))


def test_a_large_count_of_layers_alone_allocates_nothing(small: bytes, tmp_path: Path) -> None:
    (damage,) = HARMLESS
    data = bytearray(small)
    struct.pack_into(damage.fmt, data, damage.where, damage.value)
    (tmp_path / "v.smoe").write_bytes(data)
    assert len(open_smoe(tmp_path / "v.smoe").experts) == 6


def test_more_experts_than_the_file_can_hold_are_refused_before_anything_is_allocated(
    small: bytes, tmp_path: Path
) -> None:
    data = bytearray(small)
    struct.pack_into("<III", data, 12, 2**20, 2, 2**20)
    need = 64 + 180 * 2**20 - len(small)
    assert f"{need} bytes are missing" in refusal(tmp_path / "v.smoe", bytes(data))


def test_a_header_region_without_bound_is_refused(small: bytes, tmp_path: Path) -> None:
    path, data = tmp_path / "v.smoe", bytearray(small)
    struct.pack_into("<Q", data, 32, 1 << 30)
    path.write_bytes(data)
    os.truncate(path, 2 << 30)  # sparse
    with pytest.raises(VaultError, match="bytes behind the end of the tables"):
        open_smoe(path)


@pytest.mark.parametrize("cut", [1, 4096, 16384, 16384 * 3 + 5, 16384 * 6])
def test_a_file_that_was_cut_names_the_missing_bytes(cut: int, small: bytes, tmp_path: Path) -> None:
    message = refusal(tmp_path / "v.smoe", small[:-cut])
    assert f"{cut} bytes of the file are missing" in message
    assert f"the file ends at {len(small) - cut}" in message


def test_a_refusal_names_the_first_expert_and_counts_the_rest(small: bytes, tmp_path: Path) -> None:
    message = refusal(tmp_path / "v.smoe", small[: -16384 * 2])
    assert "expert 1 of layer 1 (entry 4)" in message
    assert "and 1 more" in message


def test_blobs_may_lie_in_any_order(small: bytes, tmp_path: Path) -> None:
    path, data = tmp_path / "v.smoe", bytearray(small)
    for index in range(6):
        struct.pack_into("<Q", data, ENTRY + 48 * index + 8, DATA_AT + 16384 * (5 - index))
    path.write_bytes(data)
    assert open_smoe(path).experts[0].extents[0].offset == DATA_AT + 16384 * 5


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, ARCH_AT + 127),
    value=st.binary(min_size=1, max_size=8),
    cut=st.one_of(st.just(0), st.integers(0, END)),
)
def test_any_damage_is_refused_or_gives_extents_within_the_file(
    at: int, value: bytes, cut: int, small: bytes, tmp_path: Path
) -> None:
    data = bytearray(small)
    data[at : at + len(value)] = value
    path = tmp_path / "v.smoe"
    path.write_bytes(data[: len(data) - cut])
    try:
        vault = open_smoe(path)
    except VaultError:
        return
    assert_sound(vault, len(data) - cut)


def assert_sound(vault: SmoeVault, size: int) -> None:
    places = sorted((e.extents[0].offset, e.extents[0].length) for e in vault.experts)
    ends = [0, *(offset + length for offset, length in places)]
    assert all(end <= begin for end, (begin, _) in zip(ends, places, strict=False))
    assert ends[-1] <= size
    for expert, raw in zip(vault.experts, vault.table["raw_size"].tolist(), strict=True):
        for part in vault.layouts[expert.layout]:
            assert 0 < part.nbytes <= raw - part.offset


# -------------------------------------------------------------------------------------------- the writer


def test_nothing_is_in_the_vaults_place_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "v.smoe"
    path.write_bytes(b"old")
    out = writer(path)
    fill(out)
    assert path.read_bytes() == b"old"
    out.close()
    assert len(open_smoe(path).experts) == 6
    assert os.listdir(tmp_path) == ["v.smoe"]


def test_an_error_removes_what_was_written_and_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "v.smoe"
    path.write_bytes(b"old")
    with pytest.raises(VaultError, match="closed with a reason"), writer(path) as out:  # noqa: PT012
        fill(out, EXPERTS[:2])
        raise VaultError("closed with a reason")
    assert (os.listdir(tmp_path), path.read_bytes()) == (["v.smoe"], b"old")


def test_a_vault_with_experts_missing_is_not_finished(tmp_path: Path) -> None:
    with (
        pytest.raises(VaultError, match=r"4 of 6 experts were written; expert 1 of layer 1"),
        writer(tmp_path / "v.smoe") as out,
    ):
        fill(out, EXPERTS[:4])
    assert os.listdir(tmp_path) == []


def test_a_dead_writers_partial_file_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "v.smoe.partial").write_bytes(b"x" * 1_000_000)
    with writer(tmp_path / "v.smoe") as out:
        fill(out)
    assert os.listdir(tmp_path) == ["v.smoe"]
    assert len(open_smoe(tmp_path / "v.smoe").experts) == 6
    assert (tmp_path / "v.smoe").stat().st_size == END


def test_a_living_writers_partial_file_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / "v.smoe.partial"
    with partial.open("wb") as other:
        other.write(b"theirs")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(VaultError, match="another process is writing this vault"):
            writer(tmp_path / "v.smoe")
    assert partial.read_bytes() == b"theirs"


class Space(NamedTuple):
    f_bavail: int
    f_frsize: int


def test_what_killed_writers_left_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: Space(10, 4096))
    left = [partial_of(tmp_path / name) for name in ("v.smoe", "v.scout.safetensors")]
    assert free_bytes(tmp_path, left) == 40960
    for path in left:
        path.write_bytes(os.urandom(100_000))
    assert free_bytes(tmp_path, left) == 40960 + sum(path.stat().st_blocks * 512 for path in left)
    assert free_bytes(tmp_path, left) > 200_000


@pytest.mark.parametrize("refusal", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(refusal))
    with writer(tmp_path / "v.smoe") as out:
        fill(out)
    assert os.listdir(tmp_path) == ["v.smoe"]


@pytest.mark.parametrize(("module", "call"), [(os, "open"), (fcntl, "flock"), (os, "ftruncate")])
def test_the_call_that_failed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str
) -> None:
    with monkeypatch.context() as faulty:
        faulty.setattr(module, call, failing(errno.EIO))
        with pytest.raises(VaultError) as caught:
            writer(tmp_path / "v.smoe")
    assert str(caught.value) == f"{tmp_path}/v.smoe.partial: {call}: Input/output error (errno 5)"


def failing(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_too_little_space_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: Space(10, 4096))
    with pytest.raises(VaultError, match=f"needs {END} bytes, its file system has 40960 free"):
        writer(tmp_path / "v.smoe")
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_removes_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(VaultError, match=r"pwrite of 16384 bytes at 16384: No space left"),
        writer(tmp_path / "v.smoe") as out,
    ):
        fill(out)
    assert os.listdir(tmp_path) == []


def test_a_short_write_is_continued(small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[[int, memoryview, int], int] = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:5000], offset))
    with writer(tmp_path / "v.smoe") as out:
        fill(out)
    assert (tmp_path / "v.smoe").read_bytes() == small


def test_experts_out_of_order_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    right = np.zeros((64, 64), np.float32)
    codes, scales = np.zeros(2048, np.uint8), np.zeros(64, np.float16)
    out = writer(tmp_path / "v.smoe")
    with pytest.raises(VaultError, match=r"expert 1 of layer 0 was added where entry 0"):
        out.add(0, 1, right, right, right)
    with pytest.raises(VaultError, match=r"up of expert 0 of layer 0 has shape \(32, 128\)"):
        out.add(0, 0, right, right.reshape(32, 128), right)
    with pytest.raises(VaultError, match=r"down of expert 0 of layer 0: a weight is"):
        out.add(0, 0, right, right, right + np.float32(np.nan))
    with pytest.raises(VaultError, match=r"gate .* 2047 bytes of uint8, must be 2048"):
        out.add_packed(0, 0, (codes[1:], scales), (codes, scales), (codes, scales))
    fill(out)
    with pytest.raises(VaultError, match=r"all 6 experts are written"):
        out.add(2, 0, right, right, right)
    out.close()
    with pytest.raises(VaultError, match="closed"):
        out.add(2, 0, right, right, right)


@pytest.mark.parametrize(
    ("experts", "shapes", "arch", "said"),
    [
        ([], SHAPES, None, "0 experts"),
        ([(0, 0), (0, 0)], SHAPES, None, "twice"),
        ([(0, -1)], SHAPES, None, "not a grid"),
        ([(2**20, 2**20)], SHAPES, None, "not a grid"),
        ([(0, 0)], {**SHAPES, "up": (3, 5)}, None, "up of shape (3, 5)"),
        ([(0, 0)], SHAPES, replace(ARCH, model_type="x" * 25), "longer than 24 bytes"),
        ([(0, 0)], SHAPES, replace(ARCH, flags=2**32), "cannot hold"),
    ],
)
def test_what_a_vault_cannot_be_is_refused(experts, shapes, arch, said, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(VaultError) as caught:
        VaultWriter(
            tmp_path / "v", experts, bits=4, shapes=shapes, d_model=1, vocab_size=1, ffn_dim=1, arch=arch
        )
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(VaultError, match="the folder does not exist"):
        writer(tmp_path / "nowhere" / "v.smoe")
