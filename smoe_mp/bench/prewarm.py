"""bench prewarm: the first turn after a start, with what earlier turns taught and without.

    popularity   the prewarm process loads by the counts that earlier turns left
    table order  it loads as many experts, as on a first boot: the first layers'
    none         no prewarm process: the ring is empty

The model is the small one that comes along, on real systems (`smoe-mp up`) that are started anew for every
turn, each with a copy of the same file of popularity.  Prompts are out of the middle of this package's own
modules, which the model never saw; those of the earlier turns are others.  A turn is timed from the demand of
its first expert; prewarming is over by then, as it is when the user types for long enough.

A prompt of some bytes wants other experts for each of them, so a long one wants nearly all of every layer,
more than the ring has: that is why prompts of several lengths are tried.  The first token's reads are those
of the prompt.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoe_mp import models, segments
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.io import Device, notes_on
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Status
from smoe_mp.engine import Engine
from smoe_mp.errors import ConfigError, SmoeError
from smoe_mp.launch import private_system
from smoe_mp.prewarm import budget
from smoe_mp.ring import attach
from smoe_mp.stats import KINDS

SLOTS = 256  # half of the experts
WORKERS = 4
PROMPTS = (8, 128)
EARLIER = 4
PREWARM_S = 60.0

POPULARITY, TABLE_ORDER, NONE = SIDES = ("popularity", "table order", "none")

WHAT = (
    "the first turn after a start of the small model: experts that were there, and reads before the first"
    " token, with prewarming by the popularity of earlier turns, with prewarming in table order, and without."
)


def texts() -> list[bytes]:
    """This package's modules, of which the model saw none, in an order that is always the same."""
    files = sorted(Path(models.__file__).parent.glob("*.py"))
    return [text for file in files if len(text := file.read_bytes()) > 2000]


@dataclass
class _Turns:
    """A side's turns with prompts of one length, one a round."""

    first_hits: list[float] = field(default_factory=list)  # percent of the experts of the first token
    first_reads: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)  # percent, of the whole turn
    reads: list[float] = field(default_factory=list)
    prewarmed: int = 0
    wanted: int = 0
    device: int | None = 0


def run(
    progress: Progress,
    *,
    quick: bool = False,
    prompts: Sequence[int] = (),
    slots: int = SLOTS,
    rounds: int = 0,
) -> Report:
    """Measure.  `prompts`: lengths in bytes; `slots`: of the ring; prewarming wants more than 128.

    ConfigError where direct reads of the model are refused, or the ring has no room for prewarming.
    """
    lengths = tuple(prompts) or (PROMPTS[:1] if quick else PROMPTS)
    rounds, count = rounds or (2 if quick else 8), 4 if quick else 64
    if not budget(slots):
        raise ConfigError(f"--slots {slots}: a ring is too small for prewarming with 128 slots or fewer")
    vault = models.TINY / "tiny.smoe"
    probe = segments.probe(vault)
    if probe.mode != "direct":
        raise ConfigError(
            f"{vault}: direct reads are refused here ({probe.reason}), so this would measure the page cache"
        )
    device = Device(vault)
    known = [text[len(text) // 2 :] for text in texts()]  # beginnings are all alike
    found = {(length, side): _Turns() for length in lengths for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="smoe-bench-") as name:
        folder = Path(name)
        learned = folder / "learned.bin"
        progress("earlier turns", 0, 1)
        _learn(learned, known[:EARLIER], count, slots)
        done, whole = 0, rounds * len(found)
        for at in range(rounds):
            text = known[EARLIER + at % (len(known) - EARLIER)]
            for length in lengths:
                for turn in range(len(SIDES)):
                    side = SIDES[(at + turn) % len(SIDES)]
                    progress(f"prompts of {length}, {side}", done, whole)
                    history = Path(shutil.copy(learned, folder / "popularity.bin"))
                    if side != POPULARITY:
                        history.unlink()
                    one = _Start(history, slots, prewarm=side != NONE)
                    one.turn(text[:length], count, device, found[length, side])
                    done += 1
        progress("turns", whole, whole)
    settings = {"prompts": list(lengths), "tokens": count, "slots": slots, "rounds": rounds}
    report = Report("prewarm", WHAT, {**settings, "workers": WORKERS, "earlier_turns": EARLIER})
    for length in lengths:
        _add_to(report, length, {side: found[length, side] for side in SIDES})
    report.notes += notes_on(device)
    return report


def _learn(path: Path, prompts: Sequence[bytes], count: int, slots: int) -> None:
    """Have earlier turns leave their popularity at `path`."""
    with _Start(path, slots, prewarm=False).system() as system, attach(system.name, "bench") as ring:
        engine = Engine.open(models.TINY, ring)
        for prompt in prompts:
            with ring.busy():
                for _ in engine.generate(prompt[:256], count):
                    pass
    if not path.is_file():
        raise SmoeError(f"{path}: the earlier turns left no popularity")


class _Start:
    """One start of a system, and the one turn that it serves."""

    def __init__(self, history: Path, slots: int, *, prewarm: bool) -> None:
        self._prewarm = prewarm
        self._slots = slots
        self._settings: dict[str, bool | int | str] = {
            "prewarm.histogram": str(history),
            "prewarm.enabled": prewarm,
        }

    def system(self) -> Any:
        return private_system(
            models.TINY / "tiny.smoe", slots=self._slots, workers=WORKERS, ranks=0, settings=self._settings
        )

    def turn(self, prompt: bytes, count: int, device: Device, found: _Turns) -> None:
        """Start, wait for the prewarm process, and write `count` tokens behind the prompt."""
        with self.system() as system:
            if self._prewarm:
                found.prewarmed += _wait_prewarmed(system.name)
            with attach(system.name, "bench") as ring, ring.busy():
                engine = Engine.open(models.TINY, ring)
                before, device_before = ring.stats(), device.bytes_read()
                began = time.perf_counter()
                tokens = engine.generate(prompt, count)
                next(tokens)
                found.first_ms.append((time.perf_counter() - began) * 1000)
                first = ring.stats()["client"]
                for _ in tokens:
                    pass
                after, device_after = ring.stats(), device.bytes_read()
        found.first_reads.append(float(first["misses"] + first["joins"] + first["promoted"]))
        found.first_hits.append(_percent(first))
        found.reads.append(float(after["reads"] - before["reads"]))
        found.hits.append(_percent(after["client"]))
        found.wanted += after["wanted_bytes"] - before["wanted_bytes"]
        known = None not in (found.device, device_before, device_after)
        found.device = found.device + device_after - device_before if known else None  # type: ignore[operator]


def _percent(counts: Mapping[str, int]) -> float:
    return 100 * counts["hits"] / sum(counts[kind] for kind in KINDS)


def _wait_prewarmed(name: str) -> int:
    """Until the pass is over and all that it asked for is read; how many experts that were.  SmoeError where
    it does not end."""
    deadline = time.monotonic() + PREWARM_S
    with ControlClient(name) as control:
        while time.monotonic() < deadline:
            status = control.call(Status())
            state, census = status.prewarm.state, status.ring.census
            if state == "idle" and census["queued"] == census["reading"] == 0:
                return int(status.prewarm.done)
            time.sleep(0.02)
    raise SmoeError(f"ring {name}: prewarming was not over after {PREWARM_S:.0f} s")


def _add_to(report: Report, length: int, sides: Mapping[str, _Turns]) -> None:
    where = f"prompts of {length} bytes"
    columns = {
        "hits, first token": ("%", "first_hits"),
        "reads, first token": ("reads", "first_reads"),
        "first token": ("ms", "first_ms"),
        "hits, turn": ("%", "hits"),
        "reads, turn": ("reads", "reads"),
    }
    for side, turns in sides.items():
        row = {
            column: Figure(f"{where}: {side}, {column}", unit, getattr(turns, attribute))
            for column, (unit, attribute) in columns.items()
        }
        report.sheets.setdefault(where, {})[side] = row
        report.figures += row.values()
        beside = (
            "unknown" if turns.device is None else f"{turns.device / max(1, turns.wanted):.3f} times that"
        )
        report.notes.append(
            f"{where}: {side}: {turns.prewarmed // len(turns.reads)} experts were loaded before the turn; in"
            f" it {turns.wanted} bytes were wanted, and the device read {beside}."
        )
    without = sides[NONE]
    for side in (POPULARITY, TABLE_ORDER):
        for column, attribute in (("reads, first token", "first_reads"), ("reads, turn", "reads"),
                                  ("time to the first token", "first_ms")):  # fmt: skip
            above, below = getattr(sides[side], attribute), getattr(without, attribute)
            if min(*above, *below) > 0:
                report.shares.append(Share(f"{where}: {column}: {side} / {NONE}", above, below))
