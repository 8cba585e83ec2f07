"""docs/control.md is what the commands say, and the README's tour passes every file."""

from __future__ import annotations

from pathlib import Path

from smoe_mp.control.commands import COMMANDS
from smoe_mp.control.events import EVENTS
from smoe_mp.control.manual import manual

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs/control.md"


def test_the_file_is_the_newest() -> None:
    assert DOC.read_text() == manual(), "python -m smoe_mp.control.manual > docs/control.md"


def test_all_is_in_it() -> None:
    text = manual()
    for name in COMMANDS:
        assert f"\n## {name}\n" in text
    for event in EVENTS:
        assert f"{event}  " in text


def test_the_tour_of_the_code_passes_every_file() -> None:
    _, tour = (ROOT / "README.md").read_text().split("## A tour of the code")
    parts = [*(ROOT / "smoe_mp").glob("[!_]*.py"), *(ROOT / "csrc").glob("*.c")]
    parts += [p.parent for p in (ROOT / "smoe_mp").glob("[!_]*/__init__.py")]
    assert len(parts) > 80
    assert [p.name for p in parts if f"{p.name}`" not in tour and f"{p.name}/`" not in tour] == []
