"""The demonstration: a small trained model writes text, half of its experts in memory at most.

    start a system ──► turn 1 ──► the same with all experts in memory: equal? ──► turn 2 ──► stop the system

The model is the one that comes with smoe-mp (docs/model-card.md), run by `engine.py`; the ring has half as
many slots as the model has experts.  Turn 1 finds a ring that is all but empty.  Turn 2 is another request:
what it finds is what the ring kept and what the prewarm process loaded by popularity meanwhile.  The
popularity is kept in a folder of the demo's own, so that each run begins the same.

The run with all experts in memory comes after the first and not beside it: with two at once the BLAS library
could split its sums differently.
"""

from __future__ import annotations

import codecs
import contextlib
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from smoe_mp import config, models
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Status
from smoe_mp.engine import F32, Engine, ResidentExperts
from smoe_mp.errors import SmoeError
from smoe_mp.ring import Ring, attach
from smoe_mp.runtime import human_bytes
from smoe_mp.stats import KINDS

__all__ = ["System", "Turn", "Writing", "run_demo"]

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
PREWARM_TIMEOUT_S = 10.0
VAULT = models.TINY / "tiny.smoe"
PROMPT = 'class LineReader:\n    """Reads lines from'
SECOND_PROMPT = "import unittest\n\n\nclass Test"
#: Tokens at the beginning of a turn whose hit rate is shown beside the whole turn's.
EARLY = 8
REFRESH_S = 0.1


# ------------------------------------------------------------------------------------------------- a turn


@dataclass(frozen=True, slots=True)
class Writing:
    """What a turn is asked for: up to `count` tokens behind `prompt`."""

    prompt: bytes
    count: int
    temperature: float = 0.0
    seed: int = 0


class _Meter:
    """What a ring's counters changed by since it was made; without a ring nothing ever does."""

    def __init__(self, ring: Ring | None) -> None:
        self._ring = ring
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        if self._ring is None:
            return dict.fromkeys((*KINDS, "guess_hits", "wait_ns", "reads", "device_bytes"), 0)
        stats = self._ring.stats()
        mine = {key: stats["client"][key] for key in (*KINDS, "guess_hits", "wait_ns")}
        return mine | {key: stats[key] for key in ("reads", "device_bytes")}

    def change(self) -> dict[str, int]:
        return {key: value - self._before[key] for key, value in self._now().items()}


def hit_rate(change: Mapping[str, int]) -> float:
    """Of the experts demanded, how many were there; 0 where none was."""
    return change["hits"] / max(1, sum(change[key] for key in KINDS))


@dataclass(slots=True)
class Turn:
    """A request that was served: its text, its logits, and what the ring's counters changed by, in the whole
    turn and in its first `EARLY` tokens (the prompt is the work of the first)."""

    text: bytearray = field(default_factory=bytearray)
    logits: list[F32] = field(default_factory=list)
    seconds: float = 0.0
    change: dict[str, int] = field(default_factory=dict)
    early: dict[str, int] = field(default_factory=dict)

    def same_as(self, other: Turn) -> bool:
        """Whether text and all logits are the same, to the bit."""
        return self.text == other.text and [x.tobytes() for x in self.logits] == [
            x.tobytes() for x in other.logits
        ]

    def line(self) -> str:
        """Tokens a second, hit rate, wait."""
        tokens = max(1, len(self.text))
        line = f"{len(self.text)} tokens, {tokens / max(self.seconds, 1e-9):.1f} tokens/s"
        if not self.change.get("hits", 0) + self.change.get("misses", 0):
            return line
        return (
            f"{line}, hit rate {hit_rate(self.change):.1%}, {self.change['wait_ns'] / 1e6 / tokens:.2f} ms of"
            f" waiting a token"
        )


def take_turn(engine: Engine, ring: Ring | None, asked: Writing, show: Callable[[Turn], None]) -> Turn:
    """Have the engine write; `show` is called with the turn so far after each token."""
    turn, meter, began = Turn(), _Meter(ring), time.perf_counter()
    looked = -REFRESH_S
    for token in engine.generate(asked.prompt, asked.count, asked.temperature, asked.seed):
        turn.text.append(token.byte)
        turn.logits.append(token.logits)
        turn.seconds = time.perf_counter() - began
        if len(turn.text) == EARLY:
            turn.early = meter.change()
        if turn.seconds - looked >= REFRESH_S:
            turn.change, looked = meter.change(), turn.seconds
        show(turn)
    turn.change = meter.change()
    turn.early = turn.early or turn.change
    return turn


class _Screen:
    """Shows a turn as it is written: whole lines for good, the last one and the figures live below.  What is
    no terminal gets the text at once, when it is finished."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def turn(self, prompt: bytes) -> Iterator[Callable[[Turn], None]]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        line = Text.assemble((printable(decoder.decode(prompt)), "dim"))
        seen = 0
        if not self._console.is_terminal:
            turns = [Turn()]
            yield turns.append
            self._console.print(line + Text(printable(decoder.decode(bytes(turns[-1].text)))), soft_wrap=True)
            return
        with Live(console=self._console, auto_refresh=False) as live:

            def show(turn: Turn) -> None:
                nonlocal line, seen
                line.append(printable(decoder.decode(bytes(turn.text[seen:]))))
                seen = len(turn.text)
                *whole, line = line.split("\n", allow_blank=True)
                for one in whole:
                    live.console.print(one)
                live.update(Group(line, Text(turn.line(), style="bold cyan")), refresh=True)

            yield show
            live.update(line, refresh=True)


def printable(text: str) -> str:
    """Text that cannot steer a terminal; the document's end is nothing to see."""
    return "".join(c if c.isprintable() or c in "\n\t" else "" if c == "\0" else "\ufffd" for c in text)


# ---------------------------------------------------------------------------------------------- the system


class System:
    """A `smoe-mp up` in a process of its own, from its start to its end.

    `command`: program and arguments; it must print a line that begins with "ready" once it serves.  Its lines
    are shown dimmed.  A context manager: ready inside, stopped behind it.  SmoeError, with the exit status
    or the time waited, where it does not get ready.
    """

    def __init__(self, command: Sequence[str], console: Console, ready_timeout_s: float = READY_TIMEOUT_S):
        self._command = list(command)
        self._console = console
        self._ready_timeout_s = ready_timeout_s

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise SmoeError(f"cannot start {self._command[0]}: {error.strerror}") from error
        self._is_ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # To the end, not only until it is ready: a full pipe would stop it.
        self._reader = threading.Thread(target=self._show_lines, name="demo-output", daemon=True)
        self._reader.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask the system to stop by SIGTERM and wait for its end; its exit status, negative for a signal."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._console.print(f"the system did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM: killed")
            self._process.kill()
            status = self._process.wait()
        # Not for ever: a child of the system that lives on would keep the pipe open.
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def _show_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for raw in lines:
                line = raw.decode("utf-8", "replace").rstrip()
                with contextlib.suppress(
                    OSError, SystemExit
                ):  # nobody sees them: the system is read all the same
                    self._console.print(f"[dim]  {escape(line)}[/dim]", highlight=False)
                if line.lstrip().startswith("ready"):
                    self._is_ready.put(True)
        self._is_ready.put(False)

    def _wait_ready(self) -> None:
        try:
            ready = self._is_ready.get(timeout=self._ready_timeout_s)
        except queue.Empty:
            raise SmoeError(
                f"the system was not ready within {self._ready_timeout_s:.0f} s: {' '.join(self._command)}"
            ) from None
        if not ready:
            status = self._process.wait()
            raise SmoeError(
                f"the system ended with status {status} before it was ready: {' '.join(self._command)}"
            )


@contextlib.contextmanager
def _system(config_path: Path, console: Console) -> Iterator[str]:
    """A system on the model, by the configuration at `config_path`; its ring's name."""
    name = f"demo-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="smoe-demo-") as folder:
        own = {"name": name, "vault.path": str(VAULT), "prewarm.histogram": f"{folder}/popularity.bin"}
        own |= {"log.level": "info", "log.format": "text"}  # its lines are read
        path = Path(folder) / "demo.toml"
        path.write_text(config.render(config.load(config_path, own)), encoding="utf-8")
        with System([sys.executable, "-m", "smoe_mp", "up", str(path)], console):
            yield name


# ------------------------------------------------------------------------------------------------ the demo


def run_demo(config_path: Path, asked: Writing, console: Console) -> int:
    """Run the demonstration; 0 where streamed and resident agree in every bit, 1 where they do not.

    The configuration at `config_path` is used with the model that comes with smoe-mp and a ring name of this
    process.  Raises ConfigError or another SmoeError where something cannot be read or started.
    """
    with _system(config_path, console) as name, attach(name, "demo") as ring:
        engine = Engine.open(models.TINY, ring)
        _introduce(engine, ring, console)
        console.rule("turn 1, from the ring", align="left")
        first = _turn(engine, ring, asked, console)
        identical = _compare(first, asked, console)
        _wait_for_prewarm(name)
        second_asked = Writing(SECOND_PROMPT.encode(), asked.count, asked.temperature, asked.seed)
        console.rule("turn 2, another request", align="left")
        second = _turn(engine, ring, second_asked, console)
        _print_turns(first, second, ring, console)
    console.print("the system is stopped")
    return 0 if identical else 1


def _introduce(engine: Engine, ring: Ring, console: Console) -> None:
    c, total = engine.config, engine.config.num_hidden_layers * engine.config.num_experts
    console.print(
        f"model: {c.num_hidden_layers} layers of {c.num_experts} experts, {c.num_experts_per_tok} for each"
        f" token; a token is a byte; trained on Python's own library\n"
        f"vault: {VAULT.name}, {human_bytes(VAULT.stat().st_size)}: small, so that it can come along; direct"
        f" reads take it from the disk all the same\n"
        f"ring: {ring.slots} slots of {human_bytes(ring.slot_bytes)},"
        f" {ring.slots / total:.0%} of {total} experts",
        highlight=False,
    )


def _turn(engine: Engine, ring: Ring, asked: Writing, console: Console) -> Turn:
    with _Screen(console).turn(asked.prompt) as show, ring.busy():
        turn = take_turn(engine, ring, asked, show)
    console.print(f"[bold]{turn.line()}[/bold]", highlight=False)
    return turn


def _compare(streamed: Turn, asked: Writing, console: Console) -> bool:
    """Write the same with all experts in memory, and say whether it is the same."""
    console.rule("the same, all experts in memory", align="left")
    resident = take_turn(Engine.open(models.TINY, ResidentExperts(VAULT)), None, asked, lambda turn: None)
    console.print(f"[bold]{resident.line()}[/bold]", highlight=False)
    if streamed.same_as(resident):
        numbers = sum(x.size for x in resident.logits)
        console.print(
            f"[green]identical[/green]: the text, and all {numbers} logits bit for bit", highlight=False
        )
        return True
    pairs = zip(streamed.logits, resident.logits, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()), len(resident.logits))
    console.print(f"[red]NOT identical[/red]: the logits differ from token {first} on", highlight=False)
    return False


def _wait_for_prewarm(name: str) -> None:
    """Let the prewarm process finish its pass, as it would between two requests."""
    deadline = time.monotonic() + PREWARM_TIMEOUT_S
    with ControlClient(name) as control:
        while time.monotonic() < deadline:
            prewarm = control.call(Status()).prewarm
            if prewarm.state not in ("running", "resting: a client is busy"):
                return
            time.sleep(0.05)


def _print_turns(first: Turn, second: Turn, ring: Ring, console: Console) -> None:
    stats = ring.stats()
    console.rule("what the ring did", align="left")
    console.print(
        f"hit rate in the first {EARLY} tokens: {hit_rate(first.early):.1%} in turn 1,"
        f" [bold]{hit_rate(second.early):.1%} in turn 2[/bold];"
        f" whole turns: {hit_rate(first.change):.1%} and {hit_rate(second.change):.1%}\n"
        f"of turn 2's {second.change['hits']} hits {second.change['guess_hits']} were the first use of what"
        f" prewarm had loaded; the others are what the ring kept\n"
        f"read from the device: {human_bytes(stats['device_bytes'])} in {stats['reads']} reads, of them"
        f" {human_bytes(first.change['device_bytes'])} in turn 1 and"
        f" {human_bytes(second.change['device_bytes'])} in turn 2",
        highlight=False,
    )
    if modes := {mode for mode in stats["files"].values() if mode != "direct"}:
        console.print(
            f"[yellow]reads were not direct[/yellow] ({', '.join(sorted(modes))}): the vault's file system"
            " does not allow it, so bytes may have come from the page cache and the wait is not the drive's"
        )
