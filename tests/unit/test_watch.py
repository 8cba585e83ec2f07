"""`--watch`: what is drawn again, where, and until when."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from smoe_mp import cli
from smoe_mp.errors import NoAnswer
from smoe_mp.watch import WatchCommand, watch


class Look:
    """Three looks, then the system is gone."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        if self.count > 3:
            raise NoAnswer("gone")
        return f"look {self.count}"


def terminal(out: io.StringIO) -> Console:
    size = {"width": 80, "height": 24}
    return Console(file=out, force_terminal=True, highlight=False, _environ={"TERM": "xterm"}, **size)


def test_into_a_pipe() -> None:
    out = io.StringIO()
    with pytest.raises(NoAnswer, match="gone"):
        watch(Look(), 0.001, Console(file=out))
    assert out.getvalue() == "look 1\nlook 2\nlook 3\n"


def test_on_a_terminal() -> None:
    """It has a screen of its own, and gives it back also when it ends by an error."""
    out = io.StringIO()
    with pytest.raises(NoAnswer, match="gone"):
        watch(Look(), 0.001, terminal(out))
    text = out.getvalue()
    assert text.startswith("\x1b[?1049h")
    assert text.index("look 1") < text.index("look 2") < text.index("look 3") < text.index("\x1b[?1049l")
    assert "every 0.001 s; Ctrl-C ends it" in text


def test_nothing_to_look_at() -> None:
    """What is wrong from the start is said without a screen."""
    look, out = Look(), io.StringIO()
    look.count = 3
    with pytest.raises(NoAnswer, match="gone"):
        watch(look, 0.001, terminal(out))
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "every_s"),
    [
        (["r"], None),
        (["r", "--watch"], 2.0),
        (["--watch", "r"], 2.0),
        (["--watch", "--json", "r"], 2.0),
        (["r", "--watch", "5"], 5.0),
        (["--watch", "0.5", "r"], 0.5),
        (["r", "--watch=3"], 3.0),
    ],
)
def test_the_number_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, words: list[str], every_s: float | None
) -> None:
    seen = {}

    def parsed(self: WatchCommand, ctx: object) -> None:
        seen.update(ctx.params)  # type: ignore[attr-defined]

    monkeypatch.setattr(WatchCommand, "invoke", parsed)
    monkeypatch.setattr(sys, "argv", ["smoe-mp", "status", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert (seen["name"], seen["every_s"]) == ("r", every_s)


def test_no_such_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["smoe-mp", "status", "r", "--watch", "0"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "--watch" in capsys.readouterr().err
