"""What `inspect` says of a source, to programs and to people."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from smoe_mp import inspect
from smoe_mp.errors import IdError
from smoe_mp.sources.base import Expert, Extent, ModelFacts, SourceFile, Tensor
from smoe_mp.sources.smoe import SmoeVault, open_smoe
from smoe_mp.vault_writer import VaultWriter


@dataclass
class FakeSource:
    """Two layers, two files, an expert of two extents: what a split format gives."""

    path: Path = Path("/models/[red]fake[/red]")
    format: str = "fake"
    files: tuple[SourceFile, ...] = tuple(
        SourceFile(Path(f"/models/{i}"), 1, 2 + i, 1000 + i, 3, bytes(16)) for i in range(2)
    )
    experts: tuple[Expert, ...] = (
        Expert(0, 0, (Extent(0, 0, 10), Extent(1, 50, 20)), 0, 0xABC),
        Expert(0, 1, (Extent(0, 10, 10), Extent(1, 70, 20)), 0),
        Expert(3, 7, (Extent(0, 20, 5),), 1),
    )
    layouts: tuple[tuple[Tensor, ...], ...] = (
        (Tensor("gate", "BF16", (1, 5), 0, 0, 10), Tensor("down", "BF16", (5, 2), 1, 0, 20)),
        (Tensor("gate", "Q4_K", (1, 5), 0, 0, 5),),
    )
    model: ModelFacts = field(default_factory=lambda: ModelFacts(model_type="m", top_k=1, extra={"eps": 0.5}))


@pytest.fixture
def vault(tmp_path: Path) -> SmoeVault:
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    weights = [np.ones(shape, np.float32) for shape in shapes.values()]
    with VaultWriter(
        tmp_path / "v.smoe", [(0, 0), (1, 0)], bits=4, shapes=shapes, d_model=16, vocab_size=9, ffn_dim=16
    ) as out:
        out.add(0, 0, *weights)
        out.add(1, 0, *weights)
    return open_smoe(tmp_path / "v.smoe")


def rendered(source: FakeSource | SmoeVault, experts: bool) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    inspect.render(source, experts, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_summary_of_a_split_source() -> None:
    about = inspect.summary(FakeSource())
    assert json.loads(json.dumps(about)) == about
    assert (about["format"], about["experts"], about["layers"], about["checksums"]) == ("fake", 3, 2, 1)
    assert about["experts_per_layer"] == {"least": 1, "most": 2}
    assert about["expert_bytes"] == {"least": 5, "most": 30, "all": 65}
    assert [layout["experts"] for layout in about["layouts"]] == [2, 1]
    assert about["layouts"][0]["tensors"][1] == {
        "name": "down",
        "dtype": "BF16",
        "shape": [5, 2],
        "part": 1,
        "offset": 0,
        "bytes": 20,
    }
    assert [file["path"] for file in about["files"]] == ["/models/0", "/models/1"]
    assert about["files"][1]["header_digest"] == "00" * 16
    assert (about["model"]["model_type"], about["model"]["eps"]) == ("m", 0.5)
    assert "smoe" not in about


def test_summary_of_a_vault_has_the_formats_own_fields(vault: SmoeVault) -> None:
    about = inspect.summary(vault)
    assert json.loads(json.dumps(about)) == about
    assert (about["smoe"]["version"], about["smoe"]["bits"], about["smoe"]["data_offset"]) == (1, 4, 16384)
    assert about["model"]["ffn_dim"] == 8
    assert about["smoe"]["header_ffn_dim"] == 16
    assert about["files"][0]["header_digest"] == vault.files[0].digest.hex()


def test_experts_lists_every_extent() -> None:
    rows = inspect.experts(FakeSource())
    assert json.loads(json.dumps(rows)) == rows
    assert [(r["index"], r["layer"], r["expert"], r["bytes"]) for r in rows] == [
        (0, 0, 0, 30),
        (1, 0, 1, 30),
        (2, 3, 7, 5),
    ]
    assert [r["crc32c"] for r in rows] == ["00000abc", None, None]
    assert rows[0]["extents"] == [
        {"path": "/models/0", "offset": 0, "length": 10},
        {"path": "/models/1", "offset": 50, "length": 20},
    ]


def test_render_names_the_facts_the_files_and_the_tensors(vault: SmoeVault) -> None:
    text = rendered(vault, experts=False)
    for said in ("smoe version 1", "2 in 2 layers of 1", "SMOE_Q4", "gate.scales", "8 x 16", "d_model 16"):
        assert said in text
    assert str(vault.path) in text
    assert "extents" not in text


def test_render_lists_the_experts_when_asked() -> None:
    text = rendered(FakeSource(), experts=True)
    assert "0: 0 + 10, 1: 50 + 20" in text
    assert "00000abc" in text
    assert "layout 1: 1 experts" in text


def test_text_of_the_file_is_not_taken_for_markup() -> None:
    assert "/models/[red]fake[/red]" in rendered(FakeSource(), experts=False)


def test_one_expert_has_every_tensor_s_place_in_its_file() -> None:
    about = inspect.one_expert(FakeSource(), 0, 1)
    assert json.loads(json.dumps(about)) == about
    assert [(t["name"], t["path"], t["file_offset"]) for t in about["tensors"]] == [
        ("gate", "/models/0", 10),
        ("down", "/models/1", 70),
    ]
    console = Console(file=io.StringIO(), width=120)
    inspect.render_expert(about, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(word in text for word in ("expert 1 of layer 0", "/models/1", "down", "70"))


def test_an_expert_that_is_not_there() -> None:
    with pytest.raises(IdError, match="no expert 2 in layer 0"):
        inspect.one_expert(FakeSource(), 0, 2)


def test_a_tag_is_shown_where_there_is_one() -> None:
    source = FakeSource()
    source.layouts = (
        (Tensor("gate_up", "BF16", (1, 5), 0, 0, 10, "transposed,interleaved"),),
        source.layouts[1],
    )
    assert inspect.summary(source)["layouts"][0]["tensors"][0]["tag"] == "transposed,interleaved"
    assert "transposed,interleaved" in rendered(source, experts=False)
