"""Chaos: a real system under random deaths, with clients that look at every byte.

    python tests/chaos/chaos.py [--rounds N] [--seed S]          rounds also by CHAOS_ROUNDS

`smoe-mp up` with 8 workers and prewarm serves a synthetic vault of 480 stamped experts from a ring of 200
slots.  Four client processes take experts in every way that there is, and compare each byte with the stamp.
Another process records what they ask for, in one trace after the other, and looks at each record.
A round is one SIGKILL or one SIGSTOP (with its SIGCONT a little later) of a client, the recorder, a worker,
the prewarm process, the supervisor, or of everything but the clients at once; in between the number of
workers changes.  Killed clients and recorders are started again by the harness, and so is a killed
supervisor: it has to adopt the ring.

What happens to whom follows from the seed; when it happens is up to the machine.

At the end all clients finish by themselves, and what has to hold is looked at: no wrong byte, no holder, no
reservation, the sum of states, nobody recording, every expert once more, and after `smoe-mp down` no segment,
no process, no socket and no temporary file.  Errors that clients may see: NoSupervisor while there was none,
and time-outs of a short limit of their own.  Everything else ends in exit status 1.

Clients are forks of the harness, so that one is there again at once; they attach by themselves.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import smoe_mp
from smoe_mp import runtime, segments, stats
from smoe_mp._native import ffi, lib, new_error
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Prewarm, Workers
from smoe_mp.errors import Busy, NoSupervisor, ReadTimeout, SmoeError
from smoe_mp.trace import DEMAND, KINDS, Recorder
from smoe_mp.vault_writer import VaultWriter

LAYERS, EXPERTS, SLOTS = 4, 120, 200
SHAPE, RAW = (64, 128), 13056  # of each of three Q4 tensors, and the bytes of all three
WORKERS, SEATS = 8, 4
DEADLINE_S = 60.0  # the ring's: longer than anything is stopped or down
SHORT_S = 0.5  # a client's own limit, now and then
STOP_S = (0.1, 1.2)
DOWN_S = (0.0, 1.0)
# Of workers, and of prewarm: one less than the crash loop's five in ten seconds, as counted by a supervisor
# that may hear of some deaths late.
DEATHS_MOST, DEATHS_S = 4, 15.0
PROBLEMS_MOST = 20
#: Of Python, of glibc's heap, and of how a child ended.
CRASHES = ("Traceback", "Fatal Python error", "corrupted", "double free", "SIGSEGV", "SIGABRT", "SIGBUS")
LIMIT_S = 150.0  # a bound for what always happens, so that a fault ends the run

# --- the vault ----------------------------------------------------------------------------------------


#: What tells a byte of one version of the vault from the same one of the other.
VERSIONS = (np.uint8(0), np.uint8(0x5A))


def stamps(version: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of every expert, by index."""
    rng = np.random.default_rng(2024)
    return rng.integers(0, 256, (LAYERS * EXPERTS, RAW), np.uint8) ^ VERSIONS[version]


def write_vault(path: Path, version: int = 0) -> None:
    pairs = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    shapes = dict.fromkeys(("gate", "up", "down"), SHAPE)
    codes = SHAPE[0] * SHAPE[1] // 2
    one = RAW // 3
    with VaultWriter(path, pairs, bits=4, shapes=shapes, d_model=128, vocab_size=1, ffn_dim=64) as writer:
        for pair, data in zip(pairs, stamps(version), strict=True):
            tensors = [data[k * one : (k + 1) * one] for k in range(3)]
            writer.add_packed(*pair, *((t[:codes], t[codes:].view(np.float16)) for t in tensors))


# --- what harness and clients share -------------------------------------------------------------------

# One row a seat, in a mapped file: a killed client's figures stay.
COLUMNS = (
    *("stop", "attaches", "steps", "demands", "bytes", "wrong", "views", "claims", "guesses", "records"),
    "resting",
)


def board(folder: Path) -> npt.NDArray[np.int64]:
    return np.memmap(folder / "board", np.int64, "r+").reshape(-1, len(COLUMNS))


# --- a client -----------------------------------------------------------------------------------------


class Client:
    """Takes experts at random until told to stop."""

    def __init__(self, name: str, folder: Path, seat: int, seed: str) -> None:
        self.rng = random.Random(seed)
        self.expected = np.load(folder / "stamps.npy", mmap_mode="r")
        self.row = board(folder)[seat]
        self.log = os.open(folder / f"client{seat}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.name, self.seat = name, seat
        self.kept: list[tuple[int, int, npt.NDArray[np.uint8]]] = []
        self.attach()

    def attach(self) -> None:
        spin_us = self.rng.choice((0, 20, 200))
        self.ring = smoe_mp.attach(self.name, f"chaos {self.seat}", spin_us=spin_us)
        self.count("attaches")

    def count(self, column: str, n: int = 1) -> None:
        self.row[COLUMNS.index(column)] += n

    def say(self, **what: Any) -> None:
        os.write(self.log, json.dumps(what).encode() + b"\n")  # one write: whole or not at all

    def check(self, layer: int, expert: int, raw: npt.NDArray[np.uint8], how: str) -> None:
        good = self.expected[layer * EXPERTS + expert]
        wrong = int(np.count_nonzero(raw[:RAW] != good)) + int(np.count_nonzero(raw[RAW:]))
        self.count("bytes", len(raw))
        if wrong or len(raw) < RAW:
            self.count("wrong", max(wrong, 1))
            self.say(wrong=wrong, layer=layer, expert=expert, how=how)

    def pick(self, most: int) -> tuple[int, list[int]]:
        """Some experts of a layer, popular ones more often."""
        rng = self.rng
        n = rng.randint(1, most)
        pool = range(30) if n <= 20 and rng.random() < 0.5 else range(EXPERTS)
        return rng.randrange(LAYERS), rng.sample(pool, n)

    def limit(self) -> float | None:
        return SHORT_S if self.rng.random() < 0.05 else None

    # each a way to take experts

    def fetch(self) -> None:
        layer, ids = self.pick(24)
        with self.ring.fetch(layer, ids, self.limit()) as batch:
            self.count("demands", len(ids))
            for expert in batch:
                self.check(layer, expert.expert, expert.raw, "fetch")

    def twice(self) -> None:
        layer, ids = self.pick(12)
        with self.ring.fetch(layer, ids) as one, self.ring.fetch(layer, ids[::-1]) as two:
            self.count("demands", 2 * len(ids))
            one.release()
            for expert in two:
                self.check(layer, expert.expert, expert.raw, "twice")

    def as_ready(self) -> None:
        layer, ids = self.pick(EXPERTS if self.rng.random() < 0.1 else 30)
        waves = self.rng.choice((self.ring.as_ready, self.ring.in_order))
        with contextlib.closing(waves(layer, ids, self.limit())) as experts:
            for n, expert in enumerate(experts):
                self.count("demands")
                self.check(layer, expert.expert, expert.raw, "as_ready")
                if n > 20 and self.rng.random() < 0.02:
                    break  # a caller that loses interest

    def acquire_and_wait(self) -> None:
        layer, ids = self.pick(16)
        with self.ring.acquire(layer, ids) as batch:
            self.speculate()
            batch.wait(self.limit())
            self.count("demands", len(ids))
            for expert in batch:
                self.check(layer, expert.expert, expert.raw, "acquire")

    def walk_away(self) -> None:
        layer, ids = self.pick(8)
        self.ring.acquire(layer, ids).release()  # the reads are under way and nobody waits
        self.count("demands", len(ids))

    def claim(self) -> None:
        layer, ids = self.pick(10)
        for expert in ids:
            batch = self.ring.claim_specific(layer, expert)
            if batch is not None:
                with batch:
                    self.count("claims")
                    self.check(layer, expert, batch[0].raw, "claim")

    def speculate(self) -> None:
        layer, ids = self.pick(30)
        self.count("guesses", self.ring.speculate(layer, ids))

    def keep_views(self) -> None:
        """Views outlive their batch; they are right as long as they are kept."""
        layer, ids = self.pick(4)
        with self.ring.fetch(layer, ids) as batch:
            self.count("demands", len(ids))
            self.kept += [(layer, expert.expert, expert.raw) for expert in batch]
        self.check_kept()
        self.rng.shuffle(self.kept)
        del self.kept[6:]

    def check_kept(self) -> None:
        for layer, expert, raw in self.kept:
            self.count("views")
            self.check(layer, expert, raw, "view")

    def busy(self) -> None:
        with self.ring.busy():
            for _ in range(self.rng.randint(1, 4)):
                self.fetch()

    def step(self) -> None:
        ways: list[Callable[[], None]] = [self.fetch, self.twice, self.as_ready, self.acquire_and_wait]
        ways += [self.walk_away, self.claim, self.speculate, self.keep_views, self.busy]
        self.step_by(self.rng.choices(ways, (6, 2, 4, 4, 1, 3, 2, 2, 2))[0])

    def step_by(self, way: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            way()
        except (Busy, NoSupervisor, ReadTimeout) as e:
            ended = time.monotonic()
            self.say(error=type(e).__name__, began=began, ended=ended, way=way.__name__, what=str(e))
        self.count("steps")

    def run(self) -> None:
        stop = self.row[0:1]
        while not stop[0]:
            self.step()
            if self.rng.random() < 0.2:
                time.sleep(self.rng.uniform(0, 0.01))  # as an engine computes
        self.check_kept()
        self.kept.clear()
        self.ring.close()

    def everything(self) -> None:
        """Every expert once, and a hit."""
        for layer in range(LAYERS):
            for expert in self.ring.as_ready(layer, range(EXPERTS)):
                self.count("demands")
                self.check(layer, expert.expert, expert.raw, "everything")
        with self.ring.fetch(LAYERS - 1, [EXPERTS - 1]) as batch:
            if not batch[0].hit:
                self.say(error="no hit", began=0, ended=0, way="everything", what="read twice")
        self.ring.close()


class Scribe:
    """Records one trace after the other until told to stop, and looks at every record."""

    def __init__(self, name: str, folder: Path, seat: int, seed: str) -> None:
        self.name, self.rng, self.row = name, random.Random(seed), board(folder)[seat]

    def run(self) -> None:
        while not self.row[0]:
            self.one()

    def one(self) -> None:
        end = time.monotonic() + self.rng.uniform(0.1, 2.0)
        with Recorder(self.name) as recorder:
            while not self.row[0] and time.monotonic() < end:
                recorder.poll()
                time.sleep(0.005)
        self.check(recorder)

    def check(self, recorder: Recorder) -> None:
        """Each record is one that a client or the prewarm process wrote: no part of it is another's."""
        trace = recorder.trace
        cells = np.concatenate([*recorder._cells, np.empty(0, np.uint64)])
        first = np.flatnonzero(cells >> np.uint64(12) & np.uint64(1))
        for record, (begin, end) in enumerate(itertools.pairwise([*first.tolist(), len(cells)])):
            experts = trace.entries(record)
            indices = (cells[begin + 2 : end] >> np.uint64(13) & np.uint64(0x1FFFFF)).astype(np.int64)
            kind, layer = int(trace.kind[record]), int(trace.layer[record])
            assert 0 < kind < len(KINDS), f"kind {kind}"
            assert trace.who[record] in (*range(32), 161), f"by {trace.who[record]}"
            assert (indices // EXPERTS == layer).all(), f"{KINDS[kind]} of layer {layer}: {indices}"
            assert kind != DEMAND or len(set(experts.tolist())) == len(experts) > 0, f"demand of {experts}"
        self.row[COLUMNS.index("attaches")] += 1
        self.row[COLUMNS.index("records")] += len(trace)


#: What a forked process does: of the ring NAME, with its files in a folder, at a seat, by a seed.
Life = Callable[[str, Path, int, str], None]


def take(name: str, folder: Path, seat: int, seed: str) -> None:
    Client(name, folder, seat, seed).run()


def take_everything(name: str, folder: Path, seat: int, seed: str) -> None:
    Client(name, folder, seat, seed).everything()


def record(name: str, folder: Path, seat: int, seed: str) -> None:
    Scribe(name, folder, seat, seed).run()


def live(life: Life, name: str, folder: Path, seat: int, seed: str) -> None:
    """A forked process from its begin to its end."""
    errors = os.open(folder / f"client{seat}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    try:
        life(name, folder, seat, seed)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


FORK = multiprocessing.get_context("fork")


# --- the harness --------------------------------------------------------------------------------------


@dataclass
class Eye:
    """An observer of the ring: it takes no id and is in nobody's way."""

    name: str
    ring: Any = None

    def open(self) -> None:
        out, error = ffi.new("smoe_ring **"), new_error()
        code = lib.smoe_attach(self.name.encode(), lib.SMOE_ROLE_OBSERVER, 0, b"", out, error)
        assert code == 0, f"observer: {code}"
        self.ring = out[0]

    def living(self, role: str) -> list[int]:
        return [row["pid"] for row in self.participants(role)]

    def participants(self, role: str) -> list[dict[str, Any]]:
        return [row for row in segments.participants(self.ring) if row["role"] == role and row["alive"]]

    def census(self) -> dict[str, int]:
        out = ffi.new("uint32_t[9]")
        lib.smoe_census(self.ring, out)
        return dict(zip(segments.CENSUS, list(out), strict=True))

    def counters(self) -> dict[str, int]:
        return stats.counters(self.ring, -1)

    def close(self) -> None:
        if self.ring is not None:
            lib.smoe_detach(self.ring)
            self.ring = None


@dataclass
class Span:
    """A time in which something was wrong: `ended` is infinite while it is."""

    kind: str
    began: float
    ended: float = float("inf")

    def touches(self, began: float, ended: float) -> bool:
        return began <= self.ended and ended >= self.began


@dataclass
class Seat:
    number: int
    life: Life
    process: multiprocessing.process.BaseProcess | None = None
    lives: int = 0
    condemned: bool = False  # killed by us, not reaped yet


@dataclass
class Stopped:
    """Somebody under SIGSTOP, and what ends it."""

    until: float
    pid: int
    resume: Callable[[], None]
    span: Span


@dataclass
class Figures:
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    stops: collections.Counter[str] = field(default_factory=collections.Counter)
    processes: int = 0  # killed
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    worker_changes: int = 0
    adoptions: int = 0
    failed_starts: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)


class PidHandle:
    """A process that is not our child, named for good: its pid may be somebody else's later."""

    def __init__(self, pid: int, name: str = "") -> None:
        """ProcessLookupError if it is not, or no longer, a process of the ring `name`."""
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        if name and name.encode() not in words:
            os.close(self.fd)
            raise ProcessLookupError(pid)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        os.close(self.fd)


class Chaos:
    lives: tuple[Life, ...] = (take,) * SEATS  # a client each
    recorder_life: Life = staticmethod(record)
    last_life: Life = staticmethod(take_everything)
    workers = WORKERS
    config = ""  # more of it
    never_said: tuple[str, ...] = (*CRASHES, "could not be adopted", "keep dying")
    known: tuple[str, ...] = ()  # files that may be left in the folder

    def __init__(self, rounds: int, seed: int, pace_s: float, folder: Path) -> None:
        self.rounds, self.seed, self.pace_s, self.folder = rounds, seed, pace_s, folder
        self.rng = random.Random(seed)
        self.name = f"chaos{os.getpid()}"
        self.eye = Eye(self.name)
        self.figures = Figures()
        self.clients = [Seat(number, life) for number, life in enumerate(self.lives)]
        self.recorder = Seat(len(self.clients), self.recorder_life)
        self.last = Seat(len(self.clients) + 1, self.last_life)
        self.seats = [*self.clients, self.recorder]
        self.stopped: list[Stopped] = []
        self.spans: list[Span] = []
        self.down: Span | None = None  # without a supervisor that is ready
        self.start_at = 0.0
        self.up: subprocess.Popen[bytes] | None = None
        self.up_log = folder / "up.log"
        self.up_from = 0  # where the log of the present start begins
        self.deaths: dict[str, list[float]] = {"worker": [], "prewarm": []}
        self.python = [sys.executable, "-m", "smoe_mp"]

    # --- the system ---

    def prepare(self) -> None:
        write_vault(self.folder / "v.smoe")
        np.save(self.folder / "stamps.npy", stamps())
        np.zeros((len(self.seats) + 1, len(COLUMNS)), np.int64).tofile(self.folder / "board")
        (self.folder / "c.toml").write_text(
            f'name = "{self.name}"\nvault.path = "v.smoe"\n'
            f"ring.slots = {SLOTS}\nworkers.count = {self.workers}\n"
            f"ring.read_deadline_ms = {int(DEADLINE_S * 1000)}\nprewarm.trickle_ms = 2\n{self.config}"
        )

    def begin_up(self) -> None:
        self.up_from = self.up_log.stat().st_size if self.up_log.exists() else 0
        with self.up_log.open("ab") as log:
            argv = self.command([*self.python, "up", str(self.folder / "c.toml")])
            self.up = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.deaths = {"worker": [], "prewarm": []}

    def command(self, argv: list[str]) -> list[str]:
        """The command that starts the system."""
        return argv

    def up_said(self) -> str:
        with self.up_log.open("rb") as log:
            log.seek(self.up_from)
            return log.read().decode(errors="replace")

    def mind_up(self) -> None:
        """Start the supervisor when it is due, and notice that it is ready."""
        if self.down is None:
            assert self.up is not None
            if self.up.poll() is not None:
                self.problem(f"the supervisor ended by itself: {self.up.returncode}: {self.up_said()[-500:]}")
                self.lose_up(time.monotonic(), 0)
            return
        if self.up is None:
            if time.monotonic() >= self.start_at:
                self.begin_up()
        elif self.up.poll() is not None:  # a worker that was killed during the start ends it
            self.figures.failed_starts += 1
            self.up, self.start_at = None, time.monotonic()
        elif "\nready: " in (said := self.up_said()):
            adopted = "ring: adopted" in said
            if self.eye.ring is not None and not adopted:
                if self.must_adopt():
                    self.problem(f"not adopted: {said}")
                self.eye.close()  # its ring is no more
                self.eye.open()
            self.figures.adoptions += adopted
            self.down.ended = time.monotonic()
            self.down = None

    def must_adopt(self) -> bool:
        """Whether a supervisor that starts now has to go on with the ring that is there."""
        return True

    def lose_up(self, since: float, after_s: float) -> None:
        """It was killed: from `since` on there is no supervisor, for `after_s` seconds from now at least."""
        assert self.up is not None
        self.up.wait()
        self.up = None
        if self.down is None:
            self.down = Span("no supervisor", since)
            self.spans.append(self.down)
        self.start_at = time.monotonic() + after_s

    def problem(self, what: str) -> None:
        print(f"PROBLEM: {what}", file=sys.stderr, flush=True)
        self.figures.problems.append(what)
        if len(self.figures.problems) == PROBLEMS_MOST:
            raise SystemExit("too many problems: given up")

    # --- clients ---

    def sit(self, seat: Seat) -> None:
        seat.lives += 1
        seed = f"{self.seed}/{seat.number}/{seat.lives}"
        seat.process = FORK.Process(target=live, args=(seat.life, self.name, self.folder, seat.number, seed))
        seat.process.start()
        seat.condemned = False

    def mind_clients(self) -> None:
        for seat in self.seats:
            if seat.process is None or seat.process.is_alive():
                continue
            if not seat.condemned and not self.may_end(seat):
                self.problem(f"client {seat.number} ended by itself: {seat.process.exitcode}")
            seat.process.close()
            self.sit(seat)

    def may_end(self, seat: Seat) -> bool:
        """Whether somebody whom nobody killed and who is to stay may have ended as it did."""
        return False

    # --- rounds ---

    def wake_due(self, everyone: bool = False) -> None:
        now = time.monotonic()
        for stop in [s for s in self.stopped if everyone or now >= s.until]:
            self.stopped.remove(stop)
            stop.resume()
            stop.span.ended = time.monotonic()

    def stop(self, kind: str, pid: int, send: Callable[[signal.Signals], None], close: Any = None) -> bool:
        if any(s.pid == pid for s in self.stopped):
            return False

        def resume() -> None:
            send(signal.SIGCONT)
            if close is not None:
                close()

        span = Span(f"{kind} stopped", time.monotonic())
        send(signal.SIGSTOP)
        self.spans.append(span)
        self.stopped.append(Stopped(time.monotonic() + self.rng.uniform(*STOP_S), pid, resume, span))
        self.figures.stops[kind] += 1
        return True

    def killed(self, kind: str) -> None:
        self.figures.kills[kind] += 1
        self.figures.processes += 1
        self.spans.append(Span(f"{kind} killed", time.monotonic(), time.monotonic()))

    def hurt_client(self, kill: bool) -> bool:
        return self.hurt_seat("client", self.rng.choice(self.clients), kill)

    def hurt_recorder(self, kill: bool) -> bool:
        return self.hurt_seat("recorder", self.recorder, kill)

    def hurt_seat(self, kind: str, seat: Seat, kill: bool) -> bool:
        process = seat.process
        if process is None or process.pid is None or not process.is_alive():
            return False
        if not kill:
            victim = PidHandle(process.pid)  # it may be killed and reaped before it is to go on
            if self.stop(kind, victim.pid, victim.send, victim.close):
                return True
            victim.close()
            return False
        seat.condemned = True
        process.kill()
        self.killed(kind)
        return True

    def hurt_child(self, kind: str, kill: bool) -> bool:
        """A worker or the prewarm process, by what the ring says of who lives."""
        pids = self.victims(kind)
        index = self.rng.random()
        if not pids or (kill and not self.may_die(kind)):
            return False
        try:
            victim = PidHandle(pids[int(index * len(pids))], self.name)
        except ProcessLookupError:
            return False
        if not kill:
            if self.stop(kind, victim.pid, victim.send, victim.close):
                return True
            victim.close()
            return False
        victim.send(signal.SIGKILL)
        victim.close()
        self.deaths[kind].append(time.monotonic())
        self.killed(kind)
        return True

    def may_die(self, kind: str) -> bool:
        """Whether there were few deaths of late: one more would be a crash loop, which is another test."""
        now = time.monotonic()
        recent = self.deaths[kind] = [t for t in self.deaths[kind] if now - t < DEATHS_S]
        return len(recent) < DEATHS_MOST

    def victims(self, kind: str) -> list[int]:
        return self.eye.living(kind)

    def hurt_supervisor(self, kill: bool) -> bool:
        after_s = self.rng.uniform(*DOWN_S)
        up = self.up
        if up is None or up.poll() is not None or (self.down is not None and self.rng.random() < 0.7):
            return False  # one that starts is hit less often, or nothing would ever be served
        if not kill:
            return self.down is None and self.stop("supervisor", up.pid, up.send_signal)
        since = time.monotonic()
        up.kill()
        self.lose_up(since, after_s)
        self.killed("supervisor")
        return True

    def hurt_all_but_clients(self, kill: bool) -> bool:
        if self.down is not None:
            return False
        pids = [*self.eye.living("worker"), *self.eye.living("prewarm")]
        assert self.up is not None
        since = time.monotonic()
        self.up.kill()
        self.figures.processes += 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                victim = PidHandle(pid, self.name)
                victim.send(signal.SIGKILL)
                victim.close()
                self.figures.processes += 1
        self.lose_up(since, self.rng.uniform(*DOWN_S))
        self.figures.processes -= 1  # a kill of many
        self.killed("all but clients")
        return True

    def round(self) -> None:
        deeds: list[tuple[int, Callable[[], bool]]] = [
            (30, lambda: self.hurt_client(True)),
            (8, lambda: self.hurt_client(False)),
            (6, lambda: self.hurt_recorder(True)),
            (3, lambda: self.hurt_recorder(False)),
            (20, lambda: self.hurt_child("worker", True)),
            (10, lambda: self.hurt_child("worker", False)),
            (6, lambda: self.hurt_child("prewarm", True)),
            (3, lambda: self.hurt_child("prewarm", False)),
            (8, lambda: self.hurt_supervisor(True)),
            (4, lambda: self.hurt_supervisor(False)),
            (2, lambda: self.hurt_all_but_clients(True)),
        ]
        if self.rng.random() < 0.1:
            self.change_workers(self.rng.randint(2, WORKERS + 4))
        self.do_one(deeds)

    def do_one(self, deeds: list[tuple[int, Callable[[], bool]]]) -> None:
        """One of the deeds, by their weights."""
        weights = [weight for weight, _ in deeds]
        while not self.rng.choices(deeds, weights)[0][1]():
            self.pass_time(0.02)  # nobody to hurt there just now

    def change_workers(self, count: int) -> None:
        with contextlib.suppress(SmoeError), ControlClient(self.name, timeout_ms=500) as control:
            control.call(Workers(count=count))
            self.figures.worker_changes += 1

    def pass_time(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self.wake_due()
            self.mind_up()
            self.mind_clients()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.01))

    def until(self, condition: Callable[[], bool], what: str) -> bool:
        end = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end:
                self.problem(f"never came: {what}: {self.eye.census() if self.eye.ring else ''}")
                return False
            time.sleep(0.01)
        return True

    # --- the whole ---

    def run(self) -> None:
        self.begin()
        for done in range(1, self.rounds + 1):
            self.pass_time(self.rng.uniform(0.2, 1.8) * self.pace_s)
            self.round()
            if done % 100 == 0:
                self.progress(done)
        self.finish()

    def begin(self) -> None:
        self.prepare()
        self.down = Span("first start", time.monotonic())
        self.begin_up()
        if not self.until(self._is_up, "the first start"):
            raise SystemExit(self.up_said())
        self.eye.open()
        for seat in self.seats:
            self.sit(seat)

    def _is_up(self) -> bool:
        self.mind_up()
        return self.down is None

    def progress(self, done: int) -> None:
        rows = self.rows_of_clients()
        figures = {c: int(rows[i]) for i, c in enumerate(COLUMNS)}
        print(f"{done} rounds: {dict(self.figures.kills)} {figures} {self.eye.census()}", flush=True)

    def rows_of_clients(self) -> npt.NDArray[np.int64]:
        """The board's columns, of all clients together."""
        rows = board(self.folder)
        return np.asarray(rows.sum(axis=0) - rows[self.recorder.number])

    def finish(self) -> None:
        self.wake_due(everyone=True)
        self.until(self._is_up, "the supervisor at the end")
        self.mind_clients()
        board(self.folder)[:, 0] = 1
        self.until(self._clients_ended, "clients end")
        for seat in self.seats:
            assert seat.process is not None
            if seat.process.is_alive():
                seat.process.kill()
            seat.process.join()
            if seat.process.exitcode != 0 and not seat.condemned:
                self.problem(f"client {seat.number} ended with {seat.process.exitcode}")
        self.check_quiet()
        self.sit(self.last)
        assert self.last.process is not None
        self.last.process.join(LIMIT_S)
        if self.last.process.exitcode != 0:
            self.problem(f"the last client failed: {self.last.process.exitcode}")
            self.last.process.kill()
            self.last.process.join()
        self.check_quiet()
        self.counters = self.eye.counters()
        self.end_system()
        self.judge()

    def _clients_ended(self) -> bool:
        return all(s.process is not None and not s.process.is_alive() for s in self.seats)

    def check_quiet(self) -> None:
        """Invariants 4 and 7, once nobody is left who could hold anything."""
        with ControlClient(self.name, timeout_ms=int(LIMIT_S * 1000)) as control:
            control.call(Prewarm(action="pause"))
        nothing = ("held", "reserved", "queued", "reading", "failed", "guesses")
        self.until(lambda: not any(self.eye.census()[k] for k in nothing), "nothing held, reserved, loading")
        census = self.eye.census()
        if sum(census[s] for s in segments.CENSUS[:6]) != SLOTS:
            self.problem(f"states do not add up: {census}")
        self.until(lambda: not lib.smoe_busy_clients(self.eye.ring), "nobody busy")  # the socket's: a lease
        assert self.up is not None
        if {*self.eye.living("client")} - {self.up.pid}:  # it is one itself, for demand over the socket
            self.problem("a client lives")
        self.until(lambda: not lib.smoe_tracing(self.eye.ring)[0], "nobody records")

    def end_system(self) -> None:
        self.eye.close()
        done = subprocess.run([*self.python, "down", self.name], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.problem(f"down: {done.stdout}{done.stderr}")
        assert self.up is not None
        try:
            code = self.up.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.up.kill()
            code = self.up.wait()
        if code != 0:
            self.problem(f"up ended with {code}: {self.up_said()[-500:]}")
        left = [str(p) for p in Path("/dev/shm").glob(f"smoe.{self.name}*")]
        left += [str(p) for p in runtime.runtime_folder().iterdir()]
        left += self.processes()
        known = {"v.smoe", "c.toml", "stamps.npy", "board", "up.log", "v.smoe.expert_freq.bin", *self.known}
        files = [p.name for p in self.folder.iterdir() if not p.name.startswith("client")]
        left += [name for name in files if name not in known]
        for what in left:
            self.problem(f"left behind: {what}")

    def processes(self) -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if self.name.encode() in words and int(entry.parent.name) != os.getpid():
                    found.append(f"{entry.parent.name}: {b' '.join(words).decode(errors='replace')}")
        return found

    # --- judging ---

    def reports(self) -> Iterator[dict[str, Any]]:
        for path in self.folder.glob("client*.log"):
            for line in path.read_text().splitlines():
                yield json.loads(line)

    def justified(self, report: dict[str, Any]) -> bool:
        """Whether the client may have seen this error."""
        began, ended = report["began"], report["ended"]
        spans = [s for s in self.spans if not s.kind.startswith("recorder")]  # nobody waits for that one
        if report["error"] == "NoSupervisor":
            return any(s.kind == "no supervisor" and s.touches(began, ended) for s in spans)
        # A short limit of the client's own: the machine itself may have stood for so long.  The ring's: only
        # a long series of deaths explains it.
        if ended - began < DEADLINE_S * 0.9:
            return True
        return any(min(s.ended, ended) - max(s.began, began) > DEADLINE_S / 2 for s in spans)

    def judge(self) -> None:
        for report in self.reports():
            if "wrong" in report:
                self.problem(f"wrong bytes: {report}")
                continue
            self.figures.errors[report["error"]] += 1
            if not self.justified(report):
                self.problem(f"unjustified: {report}")
        for path in self.folder.glob("client*.err"):
            text = path.read_text()
            if text:
                self.problem(f"{path.name}: {text[-1500:]}")
        for line in self.up_log.read_text().splitlines():
            if any(words in line for words in self.never_said):
                self.problem(f"up: {line}")

    def tidy(self) -> None:
        """Whatever happened: nothing of ours stays.  Each is ended by its own handle."""
        self.wake_due(everyone=True)
        for seat in self.seats:
            if seat.process is not None and seat.process.is_alive():
                seat.process.kill()
                seat.process.join()
        if self.up is not None and self.up.poll() is None:
            self.up.kill()
            self.up.wait()
        self.eye.close()
        for suffix in ("", ".d"):
            Path(f"/dev/shm/smoe.{self.name}{suffix}").unlink(missing_ok=True)

    def print_report(self, took_s: float) -> None:
        f, rows = self.figures, self.rows_of_clients()
        recorded = board(self.folder)[self.recorder.number]
        seen = {c: int(rows[i]) for i, c in enumerate(COLUMNS)}
        rounds = f"{self.rounds} rounds in " if self.rounds else ""
        print(f"{type(self).__name__.lower()}: seed {self.seed}, {rounds}{took_s:.0f} s")
        print(f"kills: {sum(f.kills.values())}: {listed(f.kills)}; {f.processes} processes")
        print(f"stops: {sum(f.stops.values())}: {listed(f.stops)}")
        print(
            f"supervisor: {f.adoptions} adoptions, {f.failed_starts} starts that failed;"
            f" {f.worker_changes} changes of the workers' number; {seen['attaches']} attaches"
        )
        print(
            f"clients: {seen['steps']} steps, {seen['demands']} demands, {seen['claims']} claims,"
            f" {seen['guesses']} guesses, {seen['views']} looks at kept views"
        )
        traces, records = (recorded[COLUMNS.index(column)] for column in ("attaches", "records"))
        print(f"recorder: {traces} traces of {records} records")
        if hasattr(self, "counters"):
            keys = ("hits", "misses", "joins", "promoted", "evictions", "reads", "requeued", "failed_reads")
            print("ring: " + ", ".join(f"{self.counters[k]} {k}" for k in keys))
        print(f"errors: {listed(f.errors) or 'none'}")
        print(f"bytes checked: {seen['bytes']}, wrong: {seen['wrong']}")
        print("FAILED" if f.problems or seen["wrong"] else "ok")


def listed(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))


@contextlib.contextmanager
def scratch(prefix: str, keep: bool) -> Iterator[Path]:
    """A folder for a run, its run-time folder in it; it stays after a failure, or where it is to be kept.

    From then on SIGTERM and SIGINT end this process in order, its system with it; a shell's background job
    would ignore the latter."""
    owner = os.getpid()

    def end(number: int, _frame: Any) -> None:
        if os.getpid() == owner:
            sys.exit(128 + number)
        os._exit(128 + number)  # a client, which may be killed at any moment

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    os.environ["SMOE_RUNTIME_DIR"] = str(folder / "client-run")
    (folder / "client-run").mkdir(mode=0o700)
    try:
        yield folder
    except BaseException:
        keep = True
        raise
    finally:
        if keep:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What the programs of rounds take alike; `rounds`: unless CHAOS_ROUNDS says otherwise."""
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("CHAOS_ROUNDS", rounds)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pace", type=float, default=0.3, help="seconds between rounds, on average")
    parser.add_argument("--keep", action="store_true", help="leave the folder with the logs")


def go_through(chaos: Chaos) -> None:
    """Run it, tidy up and report, whatever happens.  SystemExit where there were problems."""
    began = time.monotonic()
    try:
        chaos.run()
    finally:
        chaos.tidy()
        chaos.print_report(time.monotonic() - began)
    if chaos.figures.problems:
        raise SystemExit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos: random deaths under load.")
    add_options(parser, 60)
    args = parser.parse_args()
    with scratch("smoe-chaos-", args.keep) as folder:
        go_through(Chaos(args.rounds, args.seed, args.pace, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
