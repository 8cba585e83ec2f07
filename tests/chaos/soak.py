"""Soak: a real system under a mixed load for an hour, and whether anything of it grows.

    python tests/chaos/soak.py [--seconds N] [--seed S] [--json] [--plot FILE.png]

The system of chaos.py, with prewarm, metrics and a histogram, and clients of six kinds: one expert at a time,
batches, in waves (`as_ready`, `in_order`), guesses, demand over the control plane's socket, and one of all
ways that lives as long as the soak.  The others come and go, and are killed now and then, as are workers, the
prewarm process and that of the metrics; the number of workers changes, prewarm is steered, the popularity
saved, traces are recorded, the metrics scraped.  Each byte that a client gets is compared with the stamp.

What is looked at, and when it is a failure:

    memory       each second, of each process: what is its own (anonymous), resident, proportional.  A process
                 that lived for long is compared with itself, a quarter of its life at the begin with the last
                 one, behind a warm-up of a quarter: medians, as single looks jump.  Its own memory may not
                 have grown by more than GROWTH of its role, nor what is resident by more than that and
                 the ring, whose pages count there as they are touched.
    counts       at quiet looks, when all rest and the number of workers is the first one again: descriptors
                 and threads of each role, segments, files, children that nobody reaped.  All must be as they
                 were at the first look.  A few mappings more are let be: allocators map where they like.
    latency      of hits and of misses of one expert, median and 99th percentile, begin against end.  Told,
                 and no failure: a machine's other work changes it more than any fault of ours.

Exit status 1 with a line for each failure, which names process, measure, and the figures at begin and end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from chaos import COLUMNS, EXPERTS, LAYERS, LIMIT_S, Chaos, Client, PidHandle, Scribe, Seat, board, scratch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from smoe_mp import plots, runtime
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import (
    Busy,
    Command,
    Demand,
    Histogram,
    Idle,
    Prewarm,
    Speculate,
    Status,
    Workers,
)

SAMPLE_S = 1.0
LOOKS_LEAST, LOOKS_MOST = 4, 20  # quiet ones, over the whole
SETTLE_S = 5.0  # at a quiet look, for the counts to be those of the first
DEED_S = 2.0  # between two deeds, on average
LIFE_S = (5.0, 40.0)  # of a client that comes and goes
LIFE_LEAST = 24  # samples of a process that lived long enough to be compared with itself
MIB = 1 << 20
#: By how many bytes a process's own memory may have grown.  Python's allocator and glibc's take and keep
#: blocks of up to 1 MiB; a worker allocates nothing once it serves.
GROWTH = {
    "supervisor": 3 * MIB,
    "prewarm": 2 * MIB,
    "metrics": 3 * MIB,
    "client": 2 * MIB,
    "worker": MIB // 4,
}
SYSTEM_GROWTH = 8 * MIB  # of all but the clients: the sum of what is proportional, at quiet looks
MAPPINGS = 24  # as many more are no failure
RESTING = COLUMNS.index("resting")
STOP, REST = 1, 2  # what clients are told in the board's first column

# --- latencies ----------------------------------------------------------------------------------------

HITS, MISSES = range(2)
_STEPS, _FIRST_NS, _CELLS = 8, 256, 216  # buckets an octave, the first one's end, how many: up to 30 s


def latencies(folder: Path) -> npt.NDArray[np.int64]:
    """Counts by seat, hit or miss, and bucket: in a mapped file, as the board is."""
    return np.memmap(folder / "latencies", np.int64, "r+").reshape(-1, 2, _CELLS)


def bucket(ns: int) -> int:
    return min(max(0, int(np.log2(max(ns, 1) / _FIRST_NS) * _STEPS) + 1), _CELLS - 1)


def quantile_us(counts: npt.NDArray[np.int64], part: float) -> float:
    """The bucket's end below which `part` of what was counted lies; NaN where nothing was."""
    sums = np.cumsum(counts)
    if not sums[-1]:
        return float("nan")
    return float(_FIRST_NS / 1000 * 2 ** (int(np.searchsorted(sums, part * sums[-1])) / _STEPS))


# --- clients ------------------------------------------------------------------------------------------


class Visitor(Client):
    """A client of one kind, that rests when it is told to and leaves after a while.  `stays`: it does not."""

    def __init__(self, name: str, folder: Path, seat: int, seed: str, *, stays: bool = False) -> None:
        super().__init__(name, folder, seat, seed)
        self.latencies = latencies(folder)[seat]
        self.end = float("inf") if stays else time.monotonic() + self.rng.uniform(*LIFE_S)

    def one(self) -> None:
        """One expert, timed: the only way to tell a hit's time from a miss's."""
        layer = self.rng.randrange(LAYERS)
        expert = self.rng.randrange(30 if self.rng.random() < 0.8 else EXPERTS)
        began = time.perf_counter_ns()
        with self.ring.fetch(layer, [expert]) as batch:
            took = time.perf_counter_ns() - began
            self.latencies[MISSES - batch.hits, bucket(took)] += 1
            self.count("demands")
            self.check(layer, expert, batch[0].raw, "one")

    def serve(self, *ways: Callable[[], None]) -> None:
        while self.row[0] != STOP and time.monotonic() < self.end:
            if self.row[0] == REST:
                self.rest()
                continue
            self.step_by(self.rng.choice(ways))
            time.sleep(self.rng.uniform(0, 0.03))  # as an engine computes
        self.rest()
        self.ring.close()

    def rest(self) -> None:
        self.check_kept()
        self.kept.clear()
        rest(self.row)


def rest(row: npt.NDArray[np.int64]) -> None:
    """As long as it is told to."""
    while row[0] == REST:
        row[RESTING] = 1
        time.sleep(0.01)
    row[RESTING] = 0


def stay(name: str, folder: Path, seat: int, seed: str) -> None:
    v = Visitor(name, folder, seat, seed, stays=True)
    v.serve(
        v.one, v.one, v.fetch, v.twice, v.as_ready, v.acquire_and_wait, v.claim, v.speculate, v.keep_views
    )


def one_by_one(name: str, folder: Path, seat: int, seed: str) -> None:
    v = Visitor(name, folder, seat, seed)
    v.serve(v.one)


def batches(name: str, folder: Path, seat: int, seed: str) -> None:
    v = Visitor(name, folder, seat, seed)
    v.serve(v.fetch, v.twice, v.keep_views, v.busy, v.walk_away)


def waves(name: str, folder: Path, seat: int, seed: str) -> None:
    v = Visitor(name, folder, seat, seed)
    v.serve(v.as_ready, v.acquire_and_wait)


def guesses(name: str, folder: Path, seat: int, seed: str) -> None:
    v = Visitor(name, folder, seat, seed)
    v.serve(v.speculate, v.speculate, v.claim, v.fetch)


def over_the_socket(name: str, folder: Path, seat: int, seed: str) -> None:
    """No client of the ring but for looking at what it demanded."""
    v = Visitor(name, folder, seat, seed)

    def ask() -> None:
        layer, ids = v.pick(6)
        pairs = [(layer, expert) for expert in ids]
        kind = v.rng.random()
        if kind < 0.6:
            done = control.call(Demand(experts=pairs))
            v.count("demands", len(pairs))
            assert not done.failed, done
        elif kind < 0.8:
            control.call(Speculate(experts=pairs))
        elif kind < 0.9:
            control.call(Busy(lease_ms=200))
        else:
            control.call(Idle())

    with ControlClient(name, timeout_ms=int(LIMIT_S * 1000)) as control:
        v.serve(ask, ask, v.claim)


def record_now_and_then(name: str, folder: Path, seat: int, seed: str) -> None:
    scribe = Scribe(name, folder, seat, seed)
    while scribe.row[0] != STOP:
        rest(scribe.row)
        if not scribe.row[0]:
            scribe.one()
            time.sleep(scribe.rng.uniform(0, 2))


# --- what is sampled ----------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Of one process at one moment: bytes and counts."""

    at_s: float
    anonymous: int
    resident: int
    proportional: int
    descriptors: int
    threads: int
    mappings: int


@dataclass
class Lived:
    """A process that was seen, and what of it."""

    role: str
    pid: int
    samples: list[Sample] = field(default_factory=list)


def look_at(pid: int, at_s: float) -> Sample:
    """OSError, or IndexError half-way, where it has ended."""
    folder = Path("/proc", str(pid))
    memory = dict(re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE))
    return Sample(
        at_s,
        int(memory["Anonymous"]) << 10,
        int(memory["Rss"]) << 10,
        int(memory["Pss"]) << 10,
        len(os.listdir(folder / "fd")),
        len(os.listdir(folder / "task")),
        (folder / "maps").read_bytes().count(b"\n"),
    )


@dataclass(frozen=True)
class Growth:
    """How much a process's memory grew in its life: medians of a quarter at the begin and at the end."""

    role: str
    pid: int
    measure: str
    lived_s: float
    begin: int
    end: int
    bound: int

    @property
    def failure(self) -> str:
        """A sentence where it is more than may be."""
        if self.end - self.begin <= self.bound:
            return ""
        return (
            f"{self.role} (pid {self.pid}): {self.measure} memory grew in {self.lived_s:.0f} s from"
            f" {self.begin} to {self.end} bytes, by {self.end - self.begin}; at most {self.bound} may be"
        )


def growths(life: Lived, ring_bytes: int) -> list[Growth]:
    """None of a process that did not live for long."""
    if len(life.samples) < LIFE_LEAST:
        return []
    settled = life.samples[len(life.samples) // 4 :]
    part = len(settled) // 4
    grown = []
    for measure, more in (("anonymous", 0), ("resident", ring_bytes)):
        values = np.array([getattr(sample, measure) for sample in settled], np.int64)
        begin, end = (int(np.median(v)) for v in (values[:part], values[-part:]))
        lived_s = life.samples[-1].at_s - life.samples[0].at_s
        grown.append(Growth(life.role, life.pid, measure, lived_s, begin, end, GROWTH[life.role] + more))
    return grown


@dataclass(frozen=True)
class Look:
    """A quiet one.  `descriptors`, `threads`, `mappings`: by role; of workers, what each has."""

    at_s: float
    descriptors: dict[str, list[int]]
    threads: dict[str, list[int]]
    mappings: dict[str, list[int]]
    proportional_bytes: int
    segments: int
    segment_bytes: int
    files: list[str]
    zombies: int

    def differences(self, first: Look) -> Iterator[str]:
        """Sentences on what is not as it was at the first look."""
        for what in ("descriptors", "threads"):
            now, then = getattr(self, what), getattr(first, what)
            for role in sorted(now.keys() | then.keys()):
                if now.get(role) != then.get(role):
                    yield self._sentence(first, f"{role}: {what}", then.get(role), now.get(role))
        for role, counts in self.mappings.items():
            if max(counts) > max(first.mappings.get(role, counts)) + MAPPINGS:
                yield self._sentence(first, f"{role}: mappings", first.mappings[role], counts)
        if self.proportional_bytes > first.proportional_bytes + SYSTEM_GROWTH:
            what = "system: bytes of proportional memory"
            yield self._sentence(first, what, first.proportional_bytes, self.proportional_bytes)
        for what in ("segments", "segment_bytes", "files", "zombies"):
            if getattr(self, what) != getattr(first, what):
                yield self._sentence(first, f"system: {what}", getattr(first, what), getattr(self, what))

    def _sentence(self, first: Look, what: str, then: object, now: object) -> str:
        return f"{what} were {then} at {first.at_s:.0f} s and are {now} at {self.at_s:.0f} s"


# --- the soak -----------------------------------------------------------------------------------------


class Soak(Chaos):
    lives = (stay, one_by_one, batches, waves, guesses, over_the_socket)
    recorder_life = staticmethod(record_now_and_then)
    workers = 4
    known = ("latencies",)
    config = 'metrics.listen = "127.0.0.1:0"\n'

    def __init__(self, seconds: float, seed: int, folder: Path, tell: Callable[[float, str], None]) -> None:
        super().__init__(0, seed, DEED_S, folder)
        self.seconds, self.tell = seconds, tell
        self.seen: dict[int, Lived] = {}
        self.looks: list[Look] = []
        self.windows: list[tuple[float, npt.NDArray[np.int64]]] = []  # latencies counted up to a time
        self.commands = 0
        self.began = 0.0
        self.sample_due = 0.0
        self.scrapes = 0
        self.url = ""

    def prepare(self) -> None:
        super().prepare()
        np.zeros((len(self.seats) + 1, 2, _CELLS), np.int64).tofile(self.folder / "latencies")

    @property
    def at_s(self) -> float:
        return time.monotonic() - self.began

    # --- processes ---

    def family(self) -> dict[int, str]:
        """Role by pid: the supervisor, its children, and the client that stays."""
        assert self.up is not None
        found = {self.up.pid: "supervisor"}
        for pid in self.children():
            words = self.words(pid)
            for role, word in (("prewarm", b"smoe_mp.prewarm"), ("metrics", b"smoe_mp.metrics")):
                if word in words:
                    found[pid] = role
            if words[0].endswith(b"smoe-worker"):
                found[pid] = "worker"
        client = self.clients[0].process
        if client is not None and client.pid is not None and client.is_alive():
            found[client.pid] = "client"
        return found

    def children(self) -> list[int]:
        assert self.up is not None
        found: list[int] = []
        for task in Path(f"/proc/{self.up.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                found += map(int, (task / "children").read_text().split())
        return found

    @staticmethod
    def words(pid: int) -> list[bytes]:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return [b""]

    def zombies(self) -> int:
        count = 0
        for pid in self.children():
            with contextlib.suppress(OSError):
                count += Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        return count

    # --- sampling ---

    def pass_time(self, seconds: float) -> None:
        """As chaos does, with a sample where one is due."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            super().pass_time(min(left, 0.1))
            if time.monotonic() >= self.sample_due:
                self.sample_due = time.monotonic() + SAMPLE_S
                self.sample()

    def sample(self) -> None:
        for pid, role in self.family().items():
            with contextlib.suppress(OSError, KeyError):
                self.seen.setdefault(pid, Lived(role, pid)).samples.append(look_at(pid, self.at_s))
        self.windows.append((self.at_s, latencies(self.folder).sum(axis=0)))
        with contextlib.suppress(OSError):  # its process was killed just now
            urllib.request.urlopen(self.url, timeout=LIMIT_S).read()
            self.scrapes += 1
        done = self.rows_of_clients()[COLUMNS.index("demands")]
        self.tell(self.at_s, f"{done} demands, {sum(self.figures.kills.values())} kills")

    def quiet_look(self) -> None:
        """Have all rest, and count."""
        self.command_all(REST)
        self.change_workers(self.workers)
        self.wait(self.resting, "all rest, and all processes are there")
        nothing = ("held", "reserved", "queued", "reading", "failed", "guesses")
        self.wait(lambda: not any(self.eye.census()[key] for key in nothing), "a quiet ring")
        # Prewarm may have been killed while it saved the popularity; the next save takes what that leaves.
        self.ask(Histogram(action="save"))
        end = time.monotonic() + SETTLE_S  # a connection that was cut off is noticed later, and so on
        look = self.count()
        while time.monotonic() < end and not (self.looks and not [*look.differences(self.looks[0])]):
            self.pass_time(0.2)
            look = self.count()
        # No other one: what is there for a moment, as a file in the making, is no growth.
        self.looks.append(look)
        self.command_all(0)

    def command_all(self, what: int) -> None:
        board(self.folder)[: len(self.seats), 0] = what

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def passes() -> bool:
            self.pass_time(0.02)
            return condition()

        if not self.until(passes, what):
            raise SystemExit(f"never came: {what}")

    def resting(self) -> bool:
        roles = [*self.family().values()]
        wanted = {"worker": self.workers, "prewarm": 1, "metrics": 1, "client": 1}
        if any(roles.count(role) != n for role, n in wanted.items()) or self.zombies():
            return False
        return bool(board(self.folder)[: len(self.seats), RESTING].all())

    def count(self) -> Look:
        samples: dict[str, list[Sample]] = {}
        for pid, role in self.family().items():
            with contextlib.suppress(OSError, KeyError):
                samples.setdefault(role, []).append(look_at(pid, self.at_s))
        segments = [*Path("/dev/shm").glob(f"smoe.{self.name}*")]
        files = {path.name for folder in (self.folder, runtime.runtime_folder()) for path in folder.iterdir()}
        return Look(
            self.at_s,
            {role: sorted(s.descriptors for s in of) for role, of in samples.items()},
            {role: sorted(s.threads for s in of) for role, of in samples.items()},
            {role: sorted(s.mappings for s in of) for role, of in samples.items()},
            sum(s.proportional for role, of in samples.items() if role != "client" for s in of),
            len(segments),
            sum(path.stat().st_blocks * 512 for path in segments),
            sorted(files),
            self.zombies(),
        )

    # --- deeds ---

    def may_end(self, seat: Seat) -> bool:
        return seat.process is not None and seat.process.exitcode == 0 and seat.number != 0

    def victims(self, kind: str) -> list[int]:
        """Not the worker 0, which lives as long as the soak."""
        rows = self.eye.participants(kind)
        return [row["pid"] for row in rows if kind != "worker" or row["number"] != 0]

    def round(self) -> None:
        self.do_one(
            [
                (16, lambda: self.hurt_seat("client", self.rng.choice(self.clients[1:]), True)),
                (4, lambda: self.hurt_recorder(True)),
                (12, lambda: self.hurt_child("worker", True)),
                (4, lambda: self.hurt_child("worker", False)),
                (3, lambda: self.hurt_child("prewarm", True)),
                (2, self.kill_metrics),
                (8, lambda: self.ask(Workers(count=self.rng.randint(2, 2 * self.workers)))),
                (6, lambda: self.ask(Prewarm(action=self.rng.choice(("run", "pause", "resume"))))),
                (3, lambda: self.ask(Prewarm(action="trickle", trickle_ms=self.rng.randint(1, 20)))),
                (4, lambda: self.ask(Histogram(action="save"))),
                (4, lambda: self.ask(Status())),
            ]
        )

    def ask(self, command: Command[Any]) -> bool:
        with ControlClient(self.name, timeout_ms=int(LIMIT_S * 1000)) as control:
            control.call(command)
        self.commands += 1
        return True

    def kill_metrics(self) -> bool:
        for pid, role in self.family().items():
            if role == "metrics":
                with contextlib.suppress(ProcessLookupError), contextlib.closing(PidHandle(pid)) as victim:
                    victim.send(signal.SIGKILL)
                    self.killed("metrics")
                    return True
        return False

    # --- the whole ---

    def run(self) -> None:
        self.begin()
        self.url = re.findall("^metrics: (http.*)$", self.up_said(), re.MULTILINE)[0]
        self.began = time.monotonic()
        looks = max(LOOKS_LEAST, min(LOOKS_MOST, int(self.seconds / 60)))
        for look in range(looks):
            end = (look + 1) / looks * self.seconds
            while self.at_s < end:
                self.pass_time(min(self.rng.uniform(0, 2 * DEED_S), max(0.0, end - self.at_s)))
                if self.at_s < end:
                    self.round()
            self.wake_due(everyone=True)
            self.quiet_look()
        self.command_all(STOP)
        self.finish()

    def judge(self) -> None:
        super().judge()
        for growth in self.growths():
            if growth.failure:
                self.problem(growth.failure)
        for look in self.looks[1:]:
            for difference in look.differences(self.looks[0]):
                self.problem(difference)

    def growths(self) -> list[Growth]:
        return [growth for life in self.seen.values() for growth in growths(life, self.mapped_bytes())]

    def mapped_bytes(self) -> int:
        """What a process may come to have resident without owning it: the ring, and the stamps."""
        return self.looks[0].segment_bytes + (self.folder / "stamps.npy").stat().st_size

    # --- what is shown ---

    def latency(self) -> dict[str, dict[str, list[float]]]:
        """Median and 99th percentile in microseconds of hits and misses, in a quarter at the begin and at
        the end, as for memory."""
        settled = self.windows[len(self.windows) // 4 :]
        part = max(1, len(settled) // 4)
        spans = [(settled[0], settled[part - 1]), (settled[-part], settled[-1])]
        counts = [last[1] - first[1] for first, last in spans]
        return {
            name: {
                what: [quantile_us(c[kind], share) for c in counts]
                for what, share in (("median_us", 0.5), ("p99_us", 0.99))
            }
            for kind, name in ((HITS, "hit"), (MISSES, "miss"))
        }

    def worst(self) -> list[Growth]:
        """Of each role and measure the process that came nearest its bound."""
        by: dict[tuple[str, str], Growth] = {}
        for g in self.growths():
            key = g.role, g.measure
            if key not in by or g.end - g.begin > by[key].end - by[key].begin:
                by[key] = g
        return [by[key] for key in sorted(by)]

    def plain(self) -> dict[str, Any]:
        """The report as JSON has it."""
        rows = dict(zip(COLUMNS, map(int, self.rows_of_clients()), strict=True))
        return {
            "seconds": round(self.at_s, 1),
            "seed": self.seed,
            "clients": {key: rows[key] for key in COLUMNS if key not in ("stop", "resting", "records")},
            "kills": dict(self.figures.kills),
            "commands": self.commands,
            "scrapes": self.scrapes,
            "processes": len(self.seen),
            "memory": [asdict(growth) for growth in self.growths()],
            "looks": [asdict(look) for look in self.looks],
            "latency": self.latency(),
            "problems": self.figures.problems,
        }

    def show(self, console: Console) -> None:
        memory = Table("process", "pid", "memory", "lived s", "begin", "end", "growth", "bound", box=None)
        for g in self.worst():
            sizes = [f"{n / MIB:.2f}" for n in (g.begin, g.end, g.end - g.begin, g.bound)]
            memory.add_row(g.role, str(g.pid), g.measure, f"{g.lived_s:.0f}", *sizes)
        console.print(f"memory in MiB, of each role the process that grew most; {len(self.seen)} processes")
        console.print(memory)
        first, last = self.looks[0], self.looks[-1]
        counts = Table("count", f"at {first.at_s:.0f} s", f"at {last.at_s:.0f} s", box=None)
        for what in ("descriptors", "threads", "mappings"):
            for role, then in getattr(first, what).items():
                now = getattr(last, what).get(role, [])
                counts.add_row(f"{role}: {what}", *(" ".join(map(str, n)) for n in (then, now)))
        for what in ("proportional_bytes", "segments", "segment_bytes", "zombies"):
            counts.add_row(what, str(getattr(first, what)), str(getattr(last, what)))
        counts.add_row("files", str(len(first.files)), str(len(last.files)))
        console.print(f"counts, at the first and the last of {len(self.looks)} quiet looks")
        console.print(counts)
        times = Table("latency", "begin us", "end us", "drift", box=None)
        for name, figures in self.latency().items():
            for what, (begin, end) in figures.items():
                times.add_row(f"{name}: {what.removesuffix('_us')}", f"{begin:.1f}", f"{end:.1f}",
                              f"{end / begin - 1:+.0%}")  # fmt: skip
        console.print("latency of one expert; told, no failure")
        console.print(times)

    def draw(self, path: Path) -> None:
        """Memory, descriptors and latency over time."""
        picture = plots.figure(10, 12)
        own, resident, descriptors, times = picture.subplots(4, 1, sharex=True)
        colours = {role: f"C{number}" for number, role in enumerate(GROWTH)}
        for life in self.seen.values():
            at = [sample.at_s for sample in life.samples]
            for axes, measure, unit in (
                (own, "anonymous", MIB),
                (resident, "resident", MIB),
                (descriptors, "descriptors", 1),
            ):
                values = [getattr(sample, measure) / unit for sample in life.samples]
                axes.plot(at, values, color=colours[life.role], linewidth=0.8)
        for axes, label in (
            (own, "own memory, MiB"),
            (resident, "resident, MiB"),
            (descriptors, "descriptors"),
            (times, "one expert, us"),
        ):
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        own.legend([*(own.plot([], [], color=c)[0] for c in colours.values())], [*colours], fontsize="small")
        every = max(1, len(self.windows) // 100)
        windows = self.windows[::every]
        for kind, name in ((HITS, "hit"), (MISSES, "miss")):
            for share, label, style in ((0.5, "median", "-"), (0.99, "99th percentile", ":")):
                values = [quantile_us(b[1][kind] - a[1][kind], share) for a, b in pairwise(windows)]
                times.plot(
                    [at for at, _ in windows[1:]], values, style, color=f"C{kind}", label=f"{name}, {label}"
                )
        times.set_yscale("log")
        times.set_xlabel("s")
        times.legend(fontsize="small")
        plots.save(picture, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak: does anything grow under a mixed load?")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture (needs matplotlib)")
    parser.add_argument("--keep", action="store_true", help="leave the folder with the logs")
    args = parser.parse_args()
    if args.plot:
        plots.figure(1, 1)  # said before an hour has passed
    columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with (
        scratch("smoe-soak-", args.keep) as folder,
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("", total=args.seconds)
        soak = Soak(
            args.seconds, args.seed, folder,
            lambda done, text: bar.update(task, completed=min(done, args.seconds), description=text),
        )  # fmt: skip
        try:
            soak.run()
        finally:
            soak.tidy()
        bar.stop()
        if args.json:
            print(json.dumps(soak.plain(), indent=2))
        else:
            soak.print_report(soak.at_s)
            soak.show(Console())
        if args.plot:
            soak.draw(args.plot)
    return 1 if soak.figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
