"""docs/control.md is what the commands say, and its example runs."""

from __future__ import annotations

from pathlib import Path

from smoe_mp.control.commands import COMMANDS
from smoe_mp.control.events import EVENTS
from smoe_mp.control.manual import manual

DOC = Path(__file__).resolve().parents[2] / "docs/control.md"


def test_the_file_is_the_newest() -> None:
    assert DOC.read_text() == manual(), "python -m smoe_mp.control.manual > docs/control.md"


def test_all_is_in_it() -> None:
    text = manual()
    for name in COMMANDS:
        assert f"\n## {name}\n" in text
    for event in EVENTS:
        assert f"{event}  " in text
