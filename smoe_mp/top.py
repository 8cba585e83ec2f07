"""`smoe-mp top`: a running system, drawn in the terminal once a second.

Most of it is read from shared memory by an observer, which costs the system nothing; what only the supervisor
knows (health, files, settings) is asked for every few seconds.  A frame is a pure function of two samples
(`draw`), so that it can be tested without a terminal.  All is told by characters; colour only repeats it.

A token is what demands layers x top-k experts: so the wait per token is known without asking anybody what a
token is.  Of a model whose top-k is not known, the wait is told per demanded expert.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from smoe_mp.control.client import ControlClient, check_served
from smoe_mp.control.commands import Prewarm, Status, StatusResult, Workers
from smoe_mp.errors import NoAnswer, Refused, RingReplaced, SmoeError
from smoe_mp.observer import GUESS, HELD, STATE_NAMES, Observer
from smoe_mp.runtime import human_bytes, human_duration
from smoe_mp.segments import prewarm_words

WIDTH = 80
MAP_ROWS = 8
KEPT = 60  # samples of the sparkline
STATUS_EVERY_S = 5.0

#: What a cell of the map shows: character, style and word, the most telling first.
CELLS: tuple[tuple[str, str, str], ...] = (
    ("x", "bold red", "failed"),
    ("@", "bold cyan", "held"),
    ("r", "yellow", "reading"),
    ("g", "magenta", "guess"),
    ("q", "yellow", "queued"),
    ("o", "green", "ready"),
    ("-", "blue", "kept"),
    (".", "dim", "empty"),
)
_CELL = {word: n for n, (_, _, word) in enumerate(CELLS)}
_OF_STATE = {"empty": "empty", "queued": "queued", "reading": "reading", "ready": "ready", "consumed": "kept",
             "failed": "failed"}  # fmt: skip
_BARS = " ▁▂▃▄▅▆▇█"
_BARS_ASCII = " .:-=+*#@"


@dataclass(frozen=True)
class Sample:
    """What was seen at `time` (seconds, monotonic): see `Observer`."""

    time: float
    state: str
    states: npt.NDArray[np.uint8]
    counters: dict[str, int]
    queues: tuple[int, int]
    participants: list[dict[str, Any]]
    prewarm: tuple[int, int, int]  # state, done, goal
    reading: dict[int, tuple[int, int]]  # worker's number to the expert that it reads


def take(observer: Observer) -> Sample:
    """Look once."""
    seen = observer.participants()
    slots = {p["number"]: p["current_slot"] for p in seen if p["role"] == "worker"}
    experts = {n: observer.expert_in(slot) for n, slot in slots.items() if slot is not None}
    return Sample(
        time.monotonic(),
        observer.state,
        observer.states().copy(),
        observer.counters(),
        observer.queues(),
        seen,
        (observer.prewarm("state"), observer.prewarm("done"), observer.prewarm("goal")),
        {n: pair for n, pair in experts.items() if pair is not None},
    )


@dataclass
class View:
    """What is drawn beside a sample: the supervisor's last answer, and the waits so far (microseconds)."""

    name: str
    slot_bytes: int
    token_experts: int  # demanded by a token; 0: not known
    status: StatusResult | None = None
    note: str = ""
    waits: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))


def cells(states: npt.NDArray[np.uint8], most: int) -> list[int]:
    """The map: at most `most` cells, each the most telling of its slots, as numbers of `CELLS`."""
    table = np.full(32, _CELL["empty"], np.uint8)
    for code in range(32):
        state = code & 7
        word = _OF_STATE[STATE_NAMES[state]] if state < len(STATE_NAMES) else "failed"
        if word in ("queued", "reading") and code & GUESS:
            word = "guess"
        elif word in ("ready", "kept") and code & HELD:
            word = "held"
        table[code] = _CELL[word]
    shown = table[states & 31]
    per_cell = -(-len(shown) // most)
    padded = np.full(-(-len(shown) // per_cell) * per_cell, len(CELLS) - 1, np.uint8)
    padded[: len(shown)] = shown
    found: list[int] = padded.reshape(-1, per_cell).min(axis=1).tolist()
    return found


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """A character a value, scaled to the largest; None (nothing was demanded) is a blank."""
    bars = _BARS_ASCII if ascii_only else _BARS
    most = max((v for v in values if v is not None), default=0.0)
    if most <= 0:
        return "".join(" " if v is None else bars[1] for v in values)
    return "".join(" " if v is None else bars[1 + round(v / most * (len(bars) - 2))] for v in values)


def draw(view: View, now: Sample, before: Sample, *, ascii_only: bool = False) -> Text:
    """A frame: lines of at most 80 columns."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for part in (
        _head(view, now),
        _map(view, now),
        _rates(view, now, before),
        _wait(view, ascii_only=ascii_only),
        _workers(view, now),
        _prewarm(now),
        _clients(now),
        _foot(view),
    ):
        for line in part:
            line.truncate(WIDTH, overflow="crop")
            text.append_text(line).append("\n")
    return text


def _line(markup: str) -> Text:
    return Text.from_markup(markup)


def _head(view: View, now: Sample) -> Iterator[Text]:
    status = view.status
    up = f", up {human_duration(status.uptime_s)}" if status else ""
    yield _line(f"[bold]{escape(view.name)}[/]  {now.state}{up}")
    if status is None:
        return
    if status.health != "ok":
        yield _line(f"[bold red]! {escape(status.health)}[/]")
    modes = sorted({f.mode for f in status.files})
    there = status.ring.resident_bytes
    memory = (
        f"{'?' if there is None else human_bytes(there)} of {human_bytes(status.ring.data_bytes)} in memory"
    )
    locked = ", locked" if status.ring.locked_bytes else ""
    yield _line(f"reads {', '.join(modes)}; {memory}{locked}; {escape(status.ring.pages)}")


def _map(view: View, now: Sample) -> Iterator[Text]:
    shown = cells(now.states, WIDTH * MAP_ROWS)
    per_cell = -(-len(now.states) // (WIDTH * MAP_ROWS))
    each = "a slot each" if per_cell == 1 else f"{per_cell} slots each"
    yield _line(f"[bold]ring[/]  {len(now.states)} slots of {human_bytes(view.slot_bytes)}, {each}")
    for start in range(0, len(shown), WIDTH):
        row = Text()
        for n in shown[start : start + WIDTH]:
            char, style, _ = CELLS[n]
            row.append(char, style)
        yield row
    census = np.bincount(cells(now.states, len(now.states)), minlength=len(CELLS))
    for half in (slice(0, 4), slice(4, 8)):
        legend = Text()
        for (char, style, word), count in zip(CELLS[half], census[half], strict=True):
            legend.append(char, style).append(f" {word} {count}".ljust(18))
        yield legend


def _rates(view: View, now: Sample, before: Sample) -> Iterator[Text]:
    seconds = max(now.time - before.time, 1e-9)

    def per_s(name: str) -> float:
        return (now.counters.get(name, 0) - before.counters.get(name, 0)) / seconds

    device, wanted = per_s("device_bytes"), per_s("wanted_bytes")
    demand, speculative = now.queues
    yield _line(
        f"[bold]reads[/] {device / 1e9:6.3f} GB/s from the device, {wanted / 1e9:6.3f} wanted,"
        f" {per_s('reads'):6.0f} experts/s"
    )
    yield _line(
        f"[bold]queues[/]  demand {demand}, speculative {speculative}; evictions {per_s('evictions'):.0f}/s,"
        f" errors {now.counters.get('failed_reads', 0)}"
    )
    yield _hits("now", {k: per_s(k) for k in ("hits", "joins", "promoted", "misses")}, "/s")
    yield _hits("in all", {k: now.counters.get(k, 0) for k in ("hits", "joins", "promoted", "misses")}, "")
    guesses, used = now.counters.get("guesses", 0), now.counters.get("guess_hits", 0)
    wasted = now.counters.get("guess_wasted", 0)
    yield _line(
        f"[bold]guesses[/] {guesses:,}: {used:,} used, {wasted:,} wasted,"
        f" {now.counters.get('guess_drops', 0):,} dropped"
    )


def _hits(when: str, of: dict[str, float], unit: str) -> Text:
    asked = sum(of.values())
    if not asked:
        return _line(f"[bold]hits {when:6}[/] nothing demanded")
    share = {k: v / asked for k, v in of.items()}
    return _line(
        f"[bold]hits {when:6}[/] {asked:,.0f}{unit}: {share['hits']:6.1%} resident,"
        f" {share['joins']:5.1%} joined, {share['promoted']:5.1%} promoted, {share['misses']:5.1%} missed"
    )


def _wait(view: View, *, ascii_only: bool) -> Iterator[Text]:
    last = next((w for w in reversed(view.waits) if w is not None), None)
    per = "token" if view.token_experts else "expert"
    figure = "none yet" if last is None else f"{last / 1000:.2f} ms"
    line = _line(f"[bold]wait/{per}[/] {figure:>10}  ")
    yield line.append(sparkline(view.waits, ascii_only=ascii_only), "cyan")


def _workers(view: View, now: Sample) -> Iterator[Text]:
    rows = sorted((p for p in now.participants if p["role"] == "worker"), key=lambda p: p["number"])
    yield _line(f"[bold]workers[/] {len(rows)}")
    items = []
    for p in rows:
        pair = now.reading.get(p["number"])
        doing = "idle" if pair is None else f"{pair[0]}:{pair[1]}"
        late = p["reading_s"]
        if pair is not None and late is not None and late >= 0.1:
            doing += f" {late:.1f}s"
        items.append(f"{p['number']:3d} {doing if p['alive'] else 'dead':10}")
    for start in range(0, min(len(items), 20), 5):
        yield _line(" ".join(items[start : start + 5]))
    if len(items) > 20:
        yield _line(f"    and {len(items) - 20} more")


def _prewarm(now: Sample) -> Iterator[Text]:
    state, done, goal = now.prewarm
    word, filled = prewarm_words(state), min(20, round(20 * done / goal)) if goal else 0
    yield _line(f"[bold]prewarm[/] {word}  |{'#' * filled}{'.' * (20 - filled)}| {done} of {goal}")


def _clients(now: Sample) -> Iterator[Text]:
    rows = [p for p in now.participants if p["role"] == "client"]
    yield _line(f"[bold]clients[/] {len(rows)}")
    for p in rows[:5]:
        dead = "" if p["alive"] else " (dead)"
        yield _line(
            f"{p['id']:3d} pid {p['pid']:<8d} {escape(p['label'])[:31]:31} {p['reserved']} slots{dead}"
        )
    if len(rows) > 5:
        yield _line(f"    and {len(rows) - 5} more")


def _foot(view: View) -> Iterator[Text]:
    if view.note:
        yield _line(f"[yellow]{escape(view.note)}[/]")
    yield _line("[dim]p pause or resume prewarm   + - workers   q quit[/]")


def wait_of(now: Sample, before: Sample, token_experts: int) -> float | None:
    """Microseconds that clients waited per token (or expert) between two samples; None: nothing demanded."""
    kinds = ("hits", "joins", "promoted", "misses")
    asked = sum(now.counters[k] - before.counters[k] for k in kinds)
    waited = now.counters["wait_ns"] - before.counters["wait_ns"]
    return waited / 1000 / (asked / (token_experts or 1)) if asked > 0 else None


class Top:
    """The running view of the ring `name`."""

    def __init__(self, name: str, observer: Observer, control: ControlClient) -> None:
        self._observer, self._control = observer, control
        self.view = View(name, observer.slot_bytes, observer.layers * observer.top_k)
        self._sample = self._before = take(observer)
        self._asked = -STATUS_EVERY_S
        self._paused: bool | None = None  # what was asked of the prewarm process, until it says so itself

    def step(self) -> None:
        """Look again.  Raises RingReplaced when the ring is gone."""
        self._before, self._sample = self._sample, take(self._observer)
        if self._sample.state == "gone":
            raise RingReplaced(f"ring {self.view.name}: it was removed")
        if self._paused == self._is_paused():
            self._paused = None
        self.view.waits.append(wait_of(self._sample, self._before, self.view.token_experts))
        if self._sample.time - self._asked >= STATUS_EVERY_S:
            self._asked = self._sample.time
            self._ask()

    def _is_paused(self) -> bool:
        return prewarm_words(self._sample.prewarm[0]) == "paused"

    def _ask(self) -> None:
        try:
            self.view.status = self._control.call(Status(memory=False))  # a look at all its pages takes long
        except NoAnswer:
            self.view.note = "the supervisor does not answer"

    def frame(self, *, ascii_only: bool) -> Text:
        """What is to be seen now."""
        return draw(self.view, self._sample, self._before, ascii_only=ascii_only)

    def key(self, key: str) -> bool:
        """Do what the key asks for; False: it is quit."""
        try:
            if key == "p":
                paused = self._is_paused() if self._paused is None else self._paused
                self._control.call(Prewarm(action="resume" if paused else "pause"))
                self._paused = not paused
                self.view.note = "prewarm goes on" if paused else "prewarm is paused"
            elif key in "+-":
                count = len(self._control.call(Status(memory=False)).workers)
                wanted = min(127, max(1, count + (1 if key == "+" else -1)))
                self._control.call(Workers(count=wanted))
                self.view.note = f"{wanted} workers from now on"
        except (NoAnswer, Refused) as error:
            self.view.note = str(error)
        return key not in "q\x03\x04"


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Keys one by one, not shown; None where stdin is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def run_top(name: str, every_s: float, frames: int = 0) -> None:
    """Draw until q or Ctrl-C; `frames`: that many frames, without a screen of their own, then end.

    Raises SmoeError where there is no such ring or it ends.
    """
    check_served(name)
    console = Console()
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    with Observer(name, "top") as observer, ControlClient(name) as control, _keys() as fd:
        top = Top(name, observer, control)
        time.sleep(min(every_s, 0.2) if frames else 0)
        top.step()
        if frames or not console.is_terminal:
            for left in range(max(frames, 1), 0, -1):
                console.print(top.frame(ascii_only=ascii_only))
                if left > 1:
                    time.sleep(every_s)
                    top.step()
            return
        with Live(top.frame(ascii_only=ascii_only), console=console, screen=True, auto_refresh=False) as live:
            while True:
                pressed = _wait_for_key(fd, every_s)
                if pressed and not top.key(pressed):
                    return
                top.step()
                live.update(top.frame(ascii_only=ascii_only), refresh=True)


def _wait_for_key(fd: int | None, limit_s: float) -> str:
    if fd is None:
        time.sleep(limit_s)
        return ""
    ready, _, _ = select.select([fd], [], [], limit_s)
    if not ready:
        return ""
    pressed = os.read(fd, 64)
    if not pressed:
        raise SmoeError("the terminal was closed")
    return pressed.decode(errors="replace")[:1]
