"""Rings for tests of the client and of shared memory: made by `segments.create`, served by real workers.

    with serve(source, slots=8, workers=2) as served:
        with served.attach() as ring: ...

A `StampedSource` is a source of made-up experts on disk whose bytes are known; `Client` is another process
that takes experts on command and may be killed.  Run as a program, this file is that other process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import smoe_mp
from smoe_mp import segments
from smoe_mp.errors import SmoeError
from smoe_mp.sources.base import Expert, Extent, ModelFacts, SourceFile, Tensor

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
SHM = Path("/dev/shm")
LIMIT_S = 150  # a bound for what always happens, so that a fault ends the test; longer than a machine stands
PAGE = 4096
_numbers = itertools.count()


def ring_name() -> str:
    """A name that no other ring has."""
    return f"t{os.getpid()}-{next(_numbers)}"


def shm_of(name: str) -> list[str]:
    """What lies in /dev/shm of the ring `name`."""
    return sorted(p.name for p in SHM.iterdir() if p.name in (f"smoe.{name}", f"smoe.{name}.d"))


def until(condition: Callable[[], bool], what: str = "", limit_s: float = LIMIT_S) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what or condition}"
        time.sleep(0.002)


# --- other processes ------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    """A process's state by /proc: "S", "T", "Z", ...; "X" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def stop(pid: int) -> None:
    """SIGSTOP, and wait until the process has stopped: until then it may do some more."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T", "a stop")


def in_futex_sleep(pid: int) -> bool:
    """Whether the process's first thread sleeps in a futex, or was stopped there.  A worker does so for want
    of work only, and has then popped nothing that it has not served."""
    try:
        call = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()
    except OSError:
        return False
    futex, restarted = _SLEEPS.get(os.uname().machine, ("", ""))
    return call[0] == restarted or (call[0] == futex and int(call[2], 16) & 127 in _FUTEX_WAITS)


_SLEEPS = {"x86_64": ("202", "219"), "aarch64": ("98", "128")}  # futex; restart_syscall, behind a stop
_FUTEX_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; waking others is the same call


# --- sources ------------------------------------------------------------------------------------------


@dataclass
class StampedSource:
    """A `sources.base.Source` of made-up experts."""

    path: Path
    files: list[SourceFile]
    experts: list[Expert]
    layouts: list[tuple[Tensor, ...]]
    model: ModelFacts = field(default_factory=ModelFacts)
    format: str = "stamped"

    def expected(self, index: int) -> list[bytes]:
        """The bytes of an expert's parts, read from the files."""
        out = []
        for x in self.experts[index].extents:
            with self.files[x.file].path.open("rb") as f:
                f.seek(x.offset)
                out.append(f.read(x.length))
        return out

    def index(self, layer: int, expert: int) -> int:
        return next(i for i, x in enumerate(self.experts) if (x.layer, x.expert) == (layer, expert))

    def save(self, path: Path) -> Path:
        """Where everything lies, for another process: `load_expected` reads it."""
        rows = [
            [x.layer, x.expert, [[str(self.files[e.file].path), e.offset, e.length] for e in x.extents]]
            for x in self.experts
        ]
        path.write_text(json.dumps(rows))
        return path


def load_expected(path: Path) -> dict[tuple[int, int], list[npt.NDArray[np.uint8]]]:
    """(layer, expert) to the bytes of its parts, by a file that `save` wrote."""
    files: dict[str, bytes] = {}
    out = {}
    for layer, expert, extents in json.loads(path.read_text()):
        parts = []
        for name, offset, length in extents:
            if name not in files:
                files[name] = Path(name).read_bytes()
            parts.append(np.frombuffer(files[name], np.uint8, length, offset))
        out[layer, expert] = parts
    return out


def source_file(path: Path) -> SourceFile:
    st = path.stat()
    return SourceFile(path, st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, b"stamped-source-0")


def tagged(tag: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
    """Bytes of the expert number `tag` (below 255; 255 lies between them) at `offset` of a file.

    The windows of a read plan keep a byte's address modulo the page, so at one address of a slot any two
    experts have different bytes: a single foreign byte is seen, always.
    """
    noise = np.random.default_rng(1).integers(0, 256, PAGE, np.uint8)
    at = np.arange(offset, offset + length) % PAGE
    return noise[at] + np.uint8(tag)


def stamped_source(
    folder: Path,
    *,
    layers: int = 2,
    experts: int = 8,
    files: int = 3,
    parts: Sequence[int] = (1, 2, 3),
    lengths: tuple[int, int] = (3000, 21000),
    seed: int = 0,
    tags: bool = False,
) -> StampedSource:
    """Experts of 1 to 3 extents (`parts`, in turn) at odd offsets over several files.

    The bytes are random, so that a shifted byte is seen; with `tags` they are `tagged`, so that every
    foreign one is.
    """
    rng = np.random.default_rng(seed)
    blobs: list[list[npt.NDArray[np.uint8]]] = [[] for _ in range(files)]
    ends = [0] * files
    layouts: dict[tuple[Tensor, ...], int] = {}
    out = []

    def put(file: int, length: int, tag: int) -> None:
        data = tagged(tag, ends[file], length) if tags else rng.integers(0, 256, length, np.uint8)
        blobs[file].append(data)
        ends[file] += length

    for index, (layer, expert) in enumerate(itertools.product(range(layers), range(experts))):
        assert not tags or index < 255
        extents, tensors = [], []
        for part in range(parts[index % len(parts)]):
            file = (index + part // 2) % files  # two parts of three lie in one file, near each other
            put(file, int(rng.integers(1, 6000)), 255)
            length = int(rng.integers(*lengths)) | 1
            extents.append(Extent(file, ends[file], length))
            put(file, length, index)
            tensors.append(Tensor(f"p{part}", "U8", (length,), part, 0, length))
        layout = layouts.setdefault(tuple(tensors), len(layouts))
        out.append(Expert(layer, expert, tuple(extents), layout))
    paths = []
    folder.mkdir(exist_ok=True)
    for i, chunks in enumerate(blobs):
        path = folder / f"stamped-{i}.bin"
        path.write_bytes(b"".join(c.tobytes() for c in chunks))
        paths.append(path)
    return StampedSource(folder, [source_file(p) for p in paths], out, list(layouts))


def grid_source(path: Path, layers: int, experts: int, sizes: Sequence[int] = (16384,)) -> StampedSource:
    """Many small experts in one sparse file, of these sizes in turn; each starts with its index."""
    out: list[Expert] = []
    layouts: dict[tuple[Tensor, ...], int] = {}
    offset = 0
    with path.open("wb") as f:
        for index, (layer, expert) in enumerate(itertools.product(range(layers), range(experts))):
            size = sizes[index % len(sizes)]
            layout = layouts.setdefault((Tensor("t", "U8", (size,), 0, 0, size),), len(layouts))
            out.append(Expert(layer, expert, (Extent(0, offset, size),), layout))
            f.seek(offset)
            f.write(index.to_bytes(8, "little"))
            offset += size
        f.truncate(offset)
    return StampedSource(path, [source_file(path)], out, list(layouts))


# --- rings ---------------------------------------------------------------------------------------------


class Worker:
    """A real `smoe-worker`."""

    def __init__(self, name: str, number: int, creation: str, watch_fd: int) -> None:
        self._ready_fd, ready_write = os.pipe()
        argv = [str(segments.worker_program()), "--name", name, "--id", str(number), "--creation", creation]
        self.process = subprocess.Popen(
            [*argv, "--watch-fd", str(watch_fd), "--ready-fd", str(ready_write)],
            stdin=subprocess.DEVNULL,
            pass_fds=(watch_fd, ready_write),
            process_group=0,
        )
        os.close(ready_write)

    def wait_ready(self) -> None:
        ready = os.read(self._ready_fd, 1)
        os.close(self._ready_fd)
        assert ready == b"r", f"worker ended: {self.process.wait(LIMIT_S)}"

    def stop(self) -> None:
        """SIGSTOP it while it sleeps for want of work: not between its look at one queue and the other."""

        def stopped_asleep() -> bool:
            stop(self.process.pid)
            if in_futex_sleep(self.process.pid):
                return True
            self.go_on()
            return False

        until(stopped_asleep, "a worker asleep")

    def asleep(self) -> bool:
        """Whether it sleeps for want of work."""
        return state_of(self.process.pid) == "S" and in_futex_sleep(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Served:
    """A ring, its supervisor's view of it (`segments`) and its workers."""

    def __init__(self, made: segments.Segments, source: Any) -> None:
        self.name = made.name
        self.segments = made
        self.source = source
        self.workers: list[Worker] = []

    def attach(self, label: str = "", spin_us: int = 20) -> smoe_mp.Ring:
        return smoe_mp.attach(self.name, label, spin_us)

    def census(self) -> dict[str, int]:
        return self.segments.census()

    def counters(self) -> dict[str, int]:
        return self.segments.counters()

    def queues_are_empty(self) -> bool:
        return self.segments.queues() == {"demand": 0, "speculative": 0}

    def settle(self) -> None:
        """Wait until the workers have nothing left to do, so that no counter changes any more: a waiter whose
        read is late queues it once more, and the second entry is popped after the read."""
        until(lambda: self.queues_are_empty() and all(w.asleep() for w in self.workers), "workers asleep")

    def assert_quiet(self) -> None:
        """Invariants 4 and 7: nobody holds anything, nothing is under way, every slot has a state."""
        until(lambda: not (self.census()["queued"] or self.census()["reading"]), "an end of all reads")
        census = self.census()
        assert census["held"] == census["reserved"] == census["guesses"] == census["failed"] == 0, census
        assert sum(census[k] for k in ("empty", "ready", "consumed")) == self.segments.n_slots, census


@contextlib.contextmanager
def serve(source: Any, *, slots: int, workers: int = 1, name: str = "", **settings: Any) -> Iterator[Served]:
    """A ring of `source` with real workers; at the end it is stopped in order and nothing may be left."""
    settings.setdefault("read_deadline_ms", LIMIT_S * 1000)
    served = Served(segments.create(name or ring_name(), source, slots=slots, **settings), source)
    watch_read, watch_write = os.pipe()
    try:
        for i in range(workers):
            served.workers.append(Worker(served.name, i, served.segments.creation_hex, watch_read))
        for worker in served.workers:
            worker.wait_ready()
        yield served
        served.segments.set_state("stopping")
        for worker in served.workers:
            worker.go_on()
            assert worker.process.wait(LIMIT_S) == 0
    finally:
        for worker in served.workers:
            worker.process.kill()
            worker.process.wait()
        os.close(watch_read)
        os.close(watch_write)
        served.segments.remove()
    assert shm_of(served.name) == []


# --- another process ------------------------------------------------------------------------------------


class Client:
    """Another process that is attached to a ring and does as it is told; it answers line by line."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "client", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.id = self._answer()["id"]

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, op: str, **arguments: Any) -> None:
        """Give a command without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()

    def do(self, op: str, **arguments: Any) -> Any:
        """Give a command; its answer."""
        self.tell(op, **arguments)
        return self._answer()

    def answer(self) -> Any:
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def checksum(expert: smoe_mp.Expert) -> int:
    """CRC-32 over an expert's parts."""
    value = 0
    for part in expert.parts:
        value = zlib.crc32(part.data, value)
    return value


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def _client(name: str) -> None:
    """`Client`'s other half."""
    ring = smoe_mp.attach(name)
    batches: list[smoe_mp.Batch] = []
    phase = contextlib.ExitStack()
    _say({"id": ring.client_id})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            match order.pop("op"):
                case "phase":
                    phase.close()
                    phase.enter_context(ring.phase(**order))
                    _say(True)
                case "fetch":
                    batches.append(ring.fetch(**order))
                    _say([checksum(x) for x in batches[-1]])
                case "acquire":
                    batches.append(ring.acquire(**order))
                    _say(True)
                case "wait":
                    _say([checksum(x) for batch in batches for x in batch.wait()])
                case "claim":
                    batch = ring.claim_specific(**order)
                    batches += [batch] if batch else []
                    _say(batch is not None)
                case "speculate":
                    _say(ring.speculate(**order))
                case "release":
                    for batch in batches:
                        batch.release()
                    batches.clear()
                    _say(True)
                case "take_and_give_back":  # by turns with the others
                    with ring.fetch(**order) as batch:
                        answer = [checksum(x) for x in batch]
                    _say(answer)  # given back before the answer is there: the others look at the ring then
                case "as_ready":
                    _say(sorted([x.expert, checksum(x)] for x in ring.as_ready(**order)))
        except SmoeError as e:
            _say({"error": type(e).__name__, "message": str(e)})
    ring.close()


def _stress(name: str, expected_path: str, rounds: str, seed: str) -> None:
    """Random batches of 1 to 3, every byte of every expert checked, twice while it is held."""
    expected = load_expected(Path(expected_path))
    layers = sorted({layer for layer, _ in expected})
    rng = np.random.default_rng(int(seed))
    with smoe_mp.attach(name, f"stress {seed}") as ring:
        print("there", flush=True)
        sys.stdin.read()  # until all are
        for turn in range(int(rounds)):
            layer = int(rng.choice(layers))
            ids = [e for key, e in expected if key == layer]
            picked = rng.choice(ids, size=int(rng.integers(1, 4)), replace=False)
            how = turn % 4
            if how == 3:
                got = 0
                for expert in ring.as_ready(layer, picked):
                    _check(expert, expected)
                    got += 1
                assert got == len(picked)
                continue
            if how == 2:
                ring.speculate(layer, rng.choice(ids, size=2, replace=False))
            with ring.fetch(layer, picked) as batch:
                for expert in batch:
                    _check(expert, expected)
                os.sched_yield()
                for expert in batch:
                    _check(expert, expected)
                kept = batch[0].parts
            for part, right in zip(kept, expected[layer, int(picked[0])], strict=True):
                assert np.array_equal(part, right), "a view changed after its block"
            del kept, part  # who keeps views while asking for more may wait for ever on a small ring


def _check(expert: smoe_mp.Expert, expected: dict[tuple[int, int], list[npt.NDArray[np.uint8]]]) -> None:
    for i, (part, right) in enumerate(zip(expert.parts, expected[expert.layer, expert.expert], strict=True)):
        wrong = np.flatnonzero(part != right)
        assert not len(wrong), f"{expert!r} part {i}: {len(wrong)} foreign bytes from {wrong[0]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("client", "stress"))
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    {"client": _client, "stress": _stress}[given.role](*given.arguments)
