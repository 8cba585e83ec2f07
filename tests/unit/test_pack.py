"""`pack` to quantised vaults: the original's bytes, the scout file, every layout, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import BF16, Model, write_safetensors

from smoe_mp import pack as packing
from smoe_mp._native import lib
from smoe_mp.cli import main
from smoe_mp.errors import ConfigError, SmoeError, VaultError
from smoe_mp.pack import pack
from smoe_mp.quant import quantize_q2, quantize_q4
from smoe_mp.sources.dtypes import NUMPY
from smoe_mp.sources.smoe import open_smoe
from smoe_mp.sources.smoe_file import ENTRY_DTYPE

QUANTISE = {4: quantize_q4, 2: quantize_q2}


@pytest.fixture
def model() -> Model:
    return Model()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of `smoe-mp ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["smoe-mp", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def expected_blob(weights: dict[str, Any], bits: int) -> bytes:
    return b"".join(
        part.tobytes()
        for name in ("gate", "up", "down")
        for part in QUANTISE[bits](weights[name].astype(np.float32))
    )


def assert_holds(vault: Path, model: Model, bits: int = 4) -> None:
    """Every expert of the vault is the quantised one of the model."""
    opened, raw = open_smoe(vault), vault.read_bytes()
    assert [(x.layer, x.expert) for x in opened.experts] == list(model.weights)
    for expert in opened.experts:
        want = expected_blob(model.weights[expert.layer, expert.expert], bits)
        at = expert.extents[0].offset
        assert raw[at : at + expert.extents[0].length] == want.ljust(expert.extents[0].length, b"\0")


# --- the original's bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 2])
def test_vault_and_scout_file_are_the_originals_to_the_byte(bits: int, shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "qwen3-tiny.smoe"
    report = pack(shared / "vaults/qwen3-tiny", out, bits=bits)
    assert out.read_bytes() == (shared / f"vaults/qwen3-tiny.q{bits}.smoe").read_bytes()
    scout = tmp_path / "qwen3-tiny.scout.safetensors"
    assert scout.read_bytes() == (shared / "vaults/qwen3-tiny.scout.safetensors").read_bytes()
    assert sorted(os.listdir(tmp_path)) == [scout.name, out.name]
    assert (report.vault_bytes, report.scout_bytes) == (out.stat().st_size, scout.stat().st_size)
    assert (report.version, report.bits, report.experts, report.layers) == (2, bits, 24, 3)


def test_checksums_change_the_reserved_fields_and_nothing_else(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.smoe"
    pack(shared / "vaults/qwen3-tiny", out, checksums=True)
    vault, raw = open_smoe(out), bytearray(out.read_bytes())
    for index, expert in enumerate(vault.experts):
        e = expert.extents[0]
        blob = bytes(raw[e.offset : e.offset + e.length])
        assert expert.crc32c == lib.smoe_crc32c(0, blob, len(blob)) != 0
        at = 64 + index * ENTRY_DTYPE.itemsize + 44
        raw[at : at + 4] = bytes(4)
    assert raw == (shared / "vaults/qwen3-tiny.q4.smoe").read_bytes()


def test_threads_do_not_change_the_bytes(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model.per_expert(tmp_path / "m")
    made = []
    for threads in (1, 7):
        monkeypatch.setattr(packing, "cores", lambda n=threads: n)
        pack(source, tmp_path / f"{threads}.smoe", checksums=True)
        made.append((tmp_path / f"{threads}.smoe").read_bytes())
    assert made[0] == made[1]


# --- the scout file ----------------------------------------------------------------------------------------


def test_the_scout_file_is_what_the_library_writes(model: Model, tmp_path: Path) -> None:
    """Of all types, an empty one and names that JSON has to escape among them."""
    save = pytest.importorskip("safetensors.numpy").save
    rng = np.random.default_rng(5)
    theirs = ("U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64")
    theirs += ("F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "C64")
    more = {
        f"model.{place}.{name}": rng.integers(0, 2, 24, np.uint8)
        .view(np.bool_ if name == "BOOL" else NUMPY[name])
        .reshape(-1, 1)
        for place in ("b", "a")
        for name in theirs
    }
    more |= {'model."é\t': np.zeros(3, np.float32), "model.empty": np.zeros((0, 4), np.float32)}
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": array
        for (layer, expert), arrays in model.weights.items()
        for name, array in arrays.items()
    }
    source = model.folder(tmp_path / "m", "qwen3_moe", {**experts, **more})
    pack(source, tmp_path / "v.smoe")
    assert (tmp_path / "v.scout.safetensors").read_bytes() == save({**model.dense, **more})


def test_an_expert_that_no_layer_has_stays_with_the_rest(model: Model, tmp_path: Path) -> None:
    """Draft layers' experts are none of the model's; the engine that drafts finds them in the scout file."""
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": array
        for (layer, expert), arrays in model.weights.items()
        for name, array in arrays.items()
    }
    draft = {"model.layers.2.mlp.experts.0.gate_proj.weight": model.weights[0, 0]["gate"]}
    source = model.folder(tmp_path / "m", "qwen3_moe", {**experts, **draft})
    pack(source, tmp_path / "v.smoe")
    scout = (tmp_path / "v.scout.safetensors").read_bytes()
    header = json.loads(scout[8 : 8 + int.from_bytes(scout[:8], "little")])
    assert set(header) == {*model.dense, *draft}


# --- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["per_expert", "concatenated", "interleaved", "float8"])
@pytest.mark.parametrize("bits", [4, 2])
def test_every_layout_gives_the_same_matrices(layout: str, bits: int, model: Model, tmp_path: Path) -> None:
    source = getattr(model, layout)(tmp_path / "m")
    pack(source, tmp_path / "v.smoe", bits=bits)
    assert_holds(tmp_path / "v.smoe", model, bits)
    vault = open_smoe(tmp_path / "v.smoe")
    assert (vault.header.d_model, vault.header.vocab_size, vault.header.ffn_dim) == (128, 96, 128)
    assert vault.arch is not None
    assert (vault.arch.num_hidden_layers, vault.arch.moe_ffn_dim, vault.arch.moe_top_k) == (2, 64, 2)
    assert (vault.arch.num_kv_heads, vault.arch.head_dim) == (4, 32)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_every_float_type(dtype: str, tmp_path: Path) -> None:
    model = Model(dtype=NUMPY[dtype])
    pack(model.per_expert(tmp_path / "m"), tmp_path / "v.smoe")
    assert_holds(tmp_path / "v.smoe", model)


@pytest.mark.parametrize("layout", ["per_expert", "interleaved", "float8"])
def test_pieces_that_do_not_divide_the_rows(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 40 weights is no whole number of groups; a piece is eight rows, and the last one shorter."""
    monkeypatch.setattr("smoe_mp.weights.PIECE_WEIGHTS", 700)
    model = Model(hidden=40, width=72)
    pack(getattr(model, layout)(tmp_path / "m"), tmp_path / "v.smoe")
    assert_holds(tmp_path / "v.smoe", model)


def test_a_checkpoint_of_several_files(model: Model, tmp_path: Path) -> None:
    """Parts of an expert may be in different files."""
    source = model.per_expert(tmp_path / "m")
    whole = dict(model.dense)
    for (layer, expert), arrays in model.weights.items():
        for name, array in arrays.items():
            whole[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = array
    names = list(whole)
    (source / "model.safetensors").unlink()
    for part in range(2):
        file = source / f"model-{part + 1:05}-of-00002.safetensors"
        write_safetensors(file, {name: whole[name] for name in names[part::2]})
    pack(source, tmp_path / "v.smoe")
    assert_holds(tmp_path / "v.smoe", model)


# --- what is refused, and that nothing is left -------------------------------------------------------------


def refusal(source: Path, out: Path, kind: type[SmoeError] = VaultError, **options: Any) -> str:
    before = sorted(os.listdir(out.parent)) if out.parent.is_dir() else []
    with pytest.raises(kind) as caught:
        pack(source, out, **options)
    assert (sorted(os.listdir(out.parent)) if out.parent.is_dir() else []) == before
    return str(caught.value)


def test_biases_go_only_raw(model: Model, tmp_path: Path) -> None:
    said = refusal(model.interleaved(tmp_path / "m", bias=True), tmp_path / "v.smoe")
    assert "gate_up_bias" in said or "gate_up.bias" in said
    assert "pack it with --raw" in said


def test_an_order_that_is_not_known(model: Model, tmp_path: Path) -> None:
    source = model.per_expert(tmp_path / "m")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "nobody_knows"}
    (source / "config.json").write_text(json.dumps(config))
    assert "gate is BF16 of shape (64, 128), unknown" in refusal(source, tmp_path / "v.smoe")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the format knows SiLU alone"),
        ({"rope_theta": "much"}, "rope_theta is 'much', not a number"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1, not a whole number"),
        ({"head_dim": 2.5}, "head_dim is 2.5, not a whole number"),
    ],
)
def test_a_config_that_the_arch_block_cannot_hold(
    config: dict[str, Any], said: str, model: Model, tmp_path: Path
) -> None:
    source = model.per_expert(tmp_path / "m")
    whole = json.loads((source / "config.json").read_text()) | config
    (source / "config.json").write_text(json.dumps(whole))
    assert said in refusal(source, tmp_path / "v.smoe")


def test_a_weight_that_is_no_number_names_its_expert(model: Model, tmp_path: Path) -> None:
    model.weights[1, 2]["up"][3, 4] = np.nan
    said = refusal(model.per_expert(tmp_path / "m"), tmp_path / "v.smoe")
    assert "model.safetensors: up of expert 2 of layer 1: a weight is infinite, not a number" in said


def test_a_width_that_is_no_whole_number_of_groups(tmp_path: Path) -> None:
    said = refusal(Model(hidden=36, width=20).per_expert(tmp_path / "m"), tmp_path / "v.smoe")
    assert "gate of 20 x 36 weights is not a whole number of groups of 64" in said


@pytest.mark.parametrize("name", ["v-00001-of-00002.smoe", "v.gguf", "v", "model-1-of-9.smoe"])
def test_names_that_would_be_taken_for_something_else(name: str, model: Model, tmp_path: Path) -> None:
    refusal(model.per_expert(tmp_path / "m"), tmp_path / name, ConfigError)


def test_what_is_there_is_replaced_only_by_force(model: Model, tmp_path: Path) -> None:
    source, out = model.per_expert(tmp_path / "m"), tmp_path / "v.smoe"
    for there in (out, tmp_path / "v.scout.safetensors"):
        there.write_bytes(b"mine")
        assert f"{there}: is there already: --force replaces it" in refusal(source, out)
        assert there.read_bytes() == b"mine"
        pack(source, out, force=True)
        assert_holds(out, model)
        out.unlink()


def test_the_source_is_never_replaced(tmp_path: Path, shared: Path) -> None:
    out = Path(shutil.copy(shared / "vaults/qwen3-tiny.q4.smoe", tmp_path / "v.smoe"))
    assert "the source itself" in refusal(out, out, ConfigError, raw=True, force=True)


def test_a_vault_is_not_quantised_again(tmp_path: Path, shared: Path) -> None:
    said = refusal(shared / "vaults/qwen3-tiny.q4.smoe", tmp_path / "v.smoe")
    assert "a smoe source; what can be quantised is a safetensors checkpoint" in said


def test_too_little_space_is_said_before_anything_is_written(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "free_bytes", lambda *_: 100_000)
    source = model.per_expert(tmp_path / "m")
    for dry_run in (False, True):
        said = refusal(source, tmp_path / "v.smoe", dry_run=dry_run)
        assert "has 100000 free: " in said
        assert "bytes too few" in said


def test_a_failing_write_leaves_what_was_there(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = model.per_expert(tmp_path / "m"), tmp_path / "v.smoe"
    out.write_bytes(b"old")
    real, calls = os.pwrite, iter(range(100))

    def full(fd: int, data: memoryview, offset: int) -> int:
        if next(calls) == 6:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left on device (errno 28)" in refusal(source, out, force=True)
    assert out.read_bytes() == b"old"


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_sync_that_fails_leaves_what_was_there(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, raw: bool
) -> None:
    source, out = model.per_expert(tmp_path / "m"), tmp_path / "v.smoe"
    scout = tmp_path / "v.scout.safetensors"
    out.write_bytes(b"old vault")
    scout.write_bytes(b"old scout")
    real, calls = os.fsync, iter(range(100))

    def full(fd: int) -> None:
        if next(calls) == failing:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    assert ": fsync: Input/output error (errno 5)" in refusal(source, out, force=True, raw=raw)
    assert (out.read_bytes(), scout.read_bytes()) == (b"old vault", b"old scout")
    assert sorted(os.listdir(tmp_path)) == ["m", "v.scout.safetensors", "v.smoe"]


def test_a_source_that_changes_meanwhile_is_no_vault(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model.per_expert(tmp_path / "m")
    real = packing.run_all

    def meddle(*arguments: Any) -> None:
        real(*arguments)
        os.utime(source / "model.safetensors")

    monkeypatch.setattr(packing, "run_all", meddle)
    assert "replaced or changed while it was being read" in refusal(source, tmp_path / "v.smoe")


# --- the command -------------------------------------------------------------------------------------------


def test_dry_run_writes_nothing_and_says_all(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = model.per_expert(tmp_path / "m"), tmp_path / "v.smoe"
    assert run(monkeypatch, "pack", source, out, "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert os.listdir(tmp_path) == ["m"]
    assert run(monkeypatch, "pack", source, out, "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert (said["vault_bytes"], said["scout_bytes"]) == (
        out.stat().st_size,
        (tmp_path / "v.scout.safetensors").stat().st_size,
    )
    changing = ("dry_run", "seconds", "free_bytes")
    assert {k: v for k, v in said.items() if k not in changing} == {
        k: v for k, v in done.items() if k not in changing
    }
    assert (said["dry_run"], done["dry_run"]) == (True, False)


def test_the_commands_words(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = model.per_expert(tmp_path / "m"), tmp_path / "v.smoe"
    assert run(monkeypatch, "pack", source, out, "--bits", "2") == 0
    said = capsys.readouterr().out
    assert f"{out}: written: version 2, 2 bits a weight, without checksums, 8 experts in 2 layers" in said
    assert f"{tmp_path / 'v.scout.safetensors'}: written: " in said
    for wrong in (("--bits", "3"), ("--raw", "--bits", "4")):
        assert run(monkeypatch, "pack", source, out, *wrong) == 2
        assert "--bits" in capsys.readouterr().err
    assert run(monkeypatch, "pack", source, out) == 3
    assert "--force replaces it" in capsys.readouterr().err


def test_bfloat16_is_widened_exactly() -> None:
    every = np.arange(65536, dtype=np.uint16).view(BF16)
    from smoe_mp.weights import _float32  # noqa: PLC0415

    assert _float32(every, "BF16").tobytes() == every.astype(np.float32).tobytes()


def test_a_name_that_is_too_long_and_a_folder_in_the_way(model: Model, tmp_path: Path) -> None:
    source = model.per_expert(tmp_path / "m")
    assert "File name too long" in refusal(source, tmp_path / ("v" * 300 + ".smoe"))
    (tmp_path / "v.smoe").mkdir()
    assert "a folder is in the way" in refusal(source, tmp_path / "v.smoe", force=True)
    assert "no such file" in refusal(tmp_path / "nothing", tmp_path / "w.smoe").lower()
    assert "nowhere: statvfs: No such file" in refusal(source, tmp_path / "nowhere" / "v.smoe")
