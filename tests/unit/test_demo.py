"""The demo's parts: how a turn is counted and shown, and the start and stop of a system.

The system itself is a stand-in here, a few lines of Python; the whole demo runs in the process tests.
"""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from rich.console import Console

from smoe_mp import models
from smoe_mp.demo import System, Turn, Writing, _Screen, hit_rate, printable, take_turn
from smoe_mp.engine import Engine, ResidentExperts
from smoe_mp.errors import SmoeError


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- a turn -----------------------------------------------------------------------------------------------


def test_a_turn_is_what_the_engine_writes() -> None:
    engine = Engine.open(models.TINY, ResidentExperts(models.TINY / "tiny.smoe"))
    lengths = []
    asked = Writing(b"import ", 3)
    turn = take_turn(engine, None, asked, lambda turn: lengths.append(len(turn.text)))
    right = list(engine.generate(b"import ", 3))
    assert lengths == [1, 2, 3]
    assert bytes(turn.text) == bytes(t.byte for t in right)
    assert [x.tobytes() for x in turn.logits] == [t.logits.tobytes() for t in right]
    assert turn.same_as(take_turn(engine, None, asked, lambda turn: None))
    assert "tokens/s" in turn.line()
    assert "hit rate" not in turn.line()  # there was no ring


def test_one_bit_of_one_logit_is_seen() -> None:
    logits = np.ones(4, np.float32)
    other = logits.copy()
    other.view(np.uint32)[2] += 1
    turn = Turn(bytearray(b"a"), [logits])
    assert turn.same_as(Turn(bytearray(b"a"), [logits.copy()]))
    assert not turn.same_as(Turn(bytearray(b"a"), [other]))
    assert not turn.same_as(Turn(bytearray(b"b"), [logits]))
    assert not turn.same_as(Turn(bytearray(b"a"), [logits, logits]))


def test_the_figures_of_a_turn() -> None:
    change = {"hits": 75, "joins": 5, "promoted": 5, "misses": 15, "wait_ns": 20_000_000}
    assert hit_rate(change) == 0.75
    assert hit_rate(dict.fromkeys(change, 0)) == 0
    line = Turn(bytearray(b"12345678"), [], 2.0, change).line()
    assert line == "8 tokens, 4.0 tokens/s, hit rate 75.0%, 2.50 ms of waiting a token"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_text_is_shown_whole_and_cannot_steer_the_terminal(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    turn = Turn()
    with _Screen(console).turn("# é ".encode()) as show:
        for byte in "[red]ö\nnext\x07\0".encode():
            turn.text.append(byte)
            show(turn)
    said = printed(console)
    assert "# é [red]ö\n" in said
    assert "next\ufffd" in said
    assert "\x07" not in said
    assert ("tokens/s" in said) == terminal


def test_what_is_printable() -> None:
    assert printable("a\tb\n\x1b[2Jé\0") == "a\tb\n\ufffd[2Jé"


# ---------------------------------------------------------------------------------------------- the system

SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("[bold]stopping", flush=True), sys.exit(3)))
print("starting", flush=True)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_program_that_cannot_be_started_is_named(console: Console) -> None:
    with (
        pytest.raises(SmoeError, match="cannot start /nonexistent: No such file"),
        System(["/nonexistent"], console),
    ):
        pass


def test_the_system_is_ready_inside_and_stopped_behind(console: Console) -> None:
    with System([sys.executable, "-c", SERVES], console) as system:
        assert system._process.poll() is None
        assert "ready" in printed(console)
    assert system._process.returncode == 3
    assert "starting" in printed(console)
    assert "[bold]stopping" in printed(console)


def test_the_system_is_stopped_when_the_block_fails(console: Console) -> None:
    system = System([sys.executable, "-c", SERVES], console)
    with pytest.raises(ZeroDivisionError), system:
        raise ZeroDivisionError
    assert system._process.returncode == 3


def test_a_system_that_ends_before_it_is_ready_is_an_error(console: Console) -> None:
    command = [sys.executable, "-c", "import sys; print('no space'); sys.exit(5)"]
    with pytest.raises(SmoeError, match="ended with status 5"), System(command, console):
        pass
    assert "no space" in printed(console)


def test_a_system_that_never_gets_ready_is_stopped(console: Console) -> None:
    silent = System([sys.executable, "-c", "import signal; signal.pause()"], console, ready_timeout_s=0.1)
    with pytest.raises(SmoeError, match="was not ready within"), silent:
        pass
    assert silent._process.returncode == -15


def test_a_line_that_only_contains_the_word_is_not_taken_for_ready(console: Console) -> None:
    command = [sys.executable, "-c", "print('workers: 8 ready')"]
    with pytest.raises(SmoeError, match="before it was ready"), System(command, console):
        pass
