"""One client of `bench replay`: a program that goes through a trace's requests as an engine would.

    python -m smoe_mp.bench.decoder

It takes a line of JSON for each thing to do, and writes one when it is done: first the `Spec`; then, as often
as wanted, one of

    empty      fill the ring with experts that no request names
    replay     the requests on the ring: of each layer demand the experts, and compute with each
    compute    the same computing alone, on bytes that are in memory
    read       the same reads alone: of each layer the experts that `replay` missed, by bare threads

An expert is demanded as `smoe_mp.transformers` does it: the experts of a layer in ascending order by
`Ring.in_order`, so that it is read while those before it are computed with; or by `Ring.as_ready`.  Computing
is a matrix-vector product over `rows` rows of float32: an expert's own bytes first, and what is wanted beyond
them out of a matrix of the process, larger than caches are, as an engine has its dense weights.

The reads alone go into the ring's own slots, of which it then has other bytes than it thinks; nobody looks.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

import smoe_mp
from smoe_mp import segments
from smoe_mp._native import lib
from smoe_mp.bench.lru import ExactLru, Key
from smoe_mp.platform import system
from smoe_mp.ring import Expert

#: Columns of the matrices, float32: a row has 4096 bytes.
COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
DENSE_BYTES = 256 << 20

#: What a client counts of its demands.
COUNTED = ("hits", "joins", "misses", "waits", "wait_ns")

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Request:
    """Experts of one layer, ascending."""

    layer: int
    experts: list[int]


@dataclass(frozen=True)
class Step:
    """What is done before the next token is known: a request for each layer.  `prompt`: of a prompt's rows,
    a request has the union."""

    prompt: bool
    requests: list[Request]


@dataclass(frozen=True)
class Spec:
    """`ring`: its name; `path`: the file, where expert e of layer l lies at place (l x `experts` + e) modulo
    `places`, `size` bytes each; `fillers`: of each layer, ids from `experts` on; `readers`: bare threads."""

    ring: str
    path: str
    size: int
    places: int
    experts: int
    fillers: int
    readers: int
    any_order: bool
    steps: list[Step]

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Spec:
        steps = [Step(s["prompt"], [Request(**r) for r in s["requests"]]) for s in plain["steps"]]
        return cls(**{**plain, "steps": steps})


class Work:
    """A matrix-vector product over so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._x = np.ones(COLUMNS, np.float32)
        self._dense: F32 = np.empty((0, COLUMNS), np.float32)
        self._at = 0

    def __call__(self, matrix: F32) -> None:
        own = min(self.rows, len(matrix))
        matrix[:own] @ self._x
        left = self.rows - own
        if left and not len(self._dense):
            self._dense = np.ones((DENSE_BYTES // ROW_BYTES, COLUMNS), np.float32)
        while left:
            part = self._dense[self._at : self._at + left]
            part @ self._x
            left -= len(part)
            self._at = (self._at + len(part)) % len(self._dense)


class BareReads:
    """Direct reads of the file into memory, several at once: by this thread and others."""

    def __init__(self, path: str, size: int, slots: Sequence[memoryview], threads: int) -> None:
        self._path, self._size, self._slots = path, size, slots
        self._jobs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads, self._fd, self._next = threads, -1, 0

    def _start(self) -> None:
        self._fd = self._open()
        for _ in range(self._threads - 1):
            threading.Thread(target=self._serve, daemon=True).start()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | system.O_DIRECT)

    def _serve(self) -> None:
        fd = self._open()
        while True:
            place, slot = self._jobs.get()
            try:
                self._one(fd, place, slot)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)

    def _one(self, fd: int, place: int, slot: int) -> None:
        got = os.preadv(fd, [self._slots[slot][: self._size]], place * self._size)
        if got != self._size:
            raise OSError(f"{self._path}: a read of {self._size} bytes gave {got}")

    def __call__(self, places: Sequence[int]) -> None:
        """Read them all.  OSError where one cannot be."""
        if not places:
            return
        if self._fd < 0:
            self._start()
        jobs = [(place, (self._next + i) % len(self._slots)) for i, place in enumerate(places)]
        self._next = (self._next + len(jobs)) % len(self._slots)
        for job in jobs[1:]:
            self._jobs.put(job)
        self._one(self._fd, *jobs[0])
        for _ in jobs[1:]:
            if (error := self._done.get()) is not None:
                raise error


@dataclass
class Seen:
    """What became of a request: its experts, whether each was a hit, and the tick that its slot had when the
    request was done."""

    layer: int
    experts: list[int]
    hits: list[bool]
    ticks: list[int]

    def in_order(self, experts: list[int]) -> Seen:
        """The same with its experts in another order."""
        at = {expert: i for i, expert in enumerate(self.experts)}
        order = [at[expert] for expert in experts]
        return Seen(self.layer, experts, [self.hits[i] for i in order], [self.ticks[i] for i in order])


class Check:
    """Holds all that this client asked the ring for against a simulation."""

    def __init__(self, ring: smoe_mp.Ring) -> None:
        self._ring = ring
        self._reference = ExactLru(ring.slots)
        self.checked = 0
        self.fault = ""

    def take(self, seen: Seen, *, bulk: bool, window: int) -> None:
        """The next request.  `bulk`: what it read is cold."""
        keys: list[Key] = [(seen.layer, e) for e in seen.experts]
        if bulk:
            right = self._reference.sweep(keys, window)
        else:
            right = self._reference.request(keys)
            self._reference.stamped([key for _, key in sorted(zip(seen.ticks, keys, strict=True))])
        self.checked += len(keys)
        if right != seen.hits and not self.fault:
            self.fault = (
                f"layer {seen.layer}, experts {seen.experts}: hits were {seen.hits}, exact LRU has {right}"
            )


@dataclass
class Pass:
    """What one replay took: `prompt_ns` and `token_ns` of each, `request_ns` of each request of the tokens,
    the counters' growth in prompts and in tokens, and how many requests were more than the ring keeps
    (`bulk`)."""

    prompt_ns: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    request_ns: list[int] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    bulk: int = 0


class Decoder:
    """A client that does what `spec` says."""

    def __init__(self, spec: Spec, ring: smoe_mp.Ring) -> None:
        self.spec, self.ring = spec, ring
        self._native = ring._open().ptr
        # As transformers' eager code takes them, or as they come.
        self._ask: Callable[[int, list[int]], Generator[Expert, None, None]] = (
            ring.as_ready if spec.any_order else ring.in_order
        )
        memory = _data_segment(ring)
        whole = np.frombuffer(memory, np.float32, ring.slots * ring.slot_bytes // 4)
        self._matrices: Sequence[F32] = [
            slot[: spec.size // ROW_BYTES] for slot in whole.reshape(ring.slots, -1, COLUMNS)
        ]
        view = memoryview(memory)
        slots = [view[i * ring.slot_bytes : (i + 1) * ring.slot_bytes] for i in range(ring.slots)]
        self._reads = BareReads(spec.path, spec.size, slots, spec.readers)
        self._missed: list[list[int]] = []  # places of the file, of each request of each token
        self._turns: list[list[bool]] = []  # of the same, whether what is taken in each turn was missed
        self._check = Check(ring)

    def empty(self) -> dict[str, Any]:
        """Take every slot for an expert that no step names."""
        ids = list(range(self.spec.experts, self.spec.experts + self.spec.fillers))
        for layer in range(self.ring.experts // (self.spec.experts + self.spec.fillers)):
            with self.ring.fetch(layer, ids) as batch:
                seen = [(x._hold().slot, x.hit) for x in batch]
            self._check.take(self._seen(layer, ids, seen), bulk=False, window=len(ids))
        return {}

    def _seen(self, layer: int, experts: list[int], slots: Sequence[tuple[int, bool]]) -> Seen:
        ticks = [lib.smoe_slot_tick(self._native, slot) for slot, _ in slots]
        return Seen(layer, experts, [hit for _, hit in slots], ticks)

    def replay(self, rows: int) -> dict[str, Any]:
        work, found, log = Work(rows), Pass(), list[list[Seen]]()
        if rows:
            work(self._matrices[0])
        for step in self.spec.steps:
            counters = self._counters()
            with self.ring.phase("prefill" if step.prompt else "decode"):
                seen, marks = [], [time.perf_counter_ns()]
                for request in step.requests:
                    seen.append(self._request(request, work))
                    marks.append(time.perf_counter_ns())
            (found.prompt_ns if step.prompt else found.token_ns).append(marks[-1] - marks[0])
            if not step.prompt:
                found.request_ns += [after - before for before, after in pairwise(marks)]
            counted = found.prompts if step.prompt else found.tokens
            for key, value in self._counters().items():
                counted[key] += value - counters[key]
            log.append(seen)
        found.bulk = self._note(log)
        return {**asdict(found), "checked": self._check.checked, "fault": self._check.fault}

    def _request(self, request: Request, work: Work) -> Seen:
        experts, slots = [], []
        with closing(self._ask(request.layer, request.experts)) as landing:
            for expert in landing:
                hold = expert._hold()
                experts.append(expert.expert)
                slots.append((int(hold.slot), bool(hold.hit)))
                if work.rows:
                    work(expert.raw.view(np.float32).reshape(-1, COLUMNS))
        return self._seen(request.layer, experts, slots)

    def _counters(self) -> dict[str, int]:
        own = self.ring.stats()["client"]
        return {key: own[key] for key in COUNTED}

    def _note(self, log: list[list[Seen]]) -> int:
        """Keep what was missed, and hold the hits against the simulation.  How many requests were bulk."""
        self._missed, self._turns, n_bulk = [], [], 0
        for step, requests in zip(self.spec.steps, log, strict=True):
            for request, came in zip(step.requests, requests, strict=True):
                seen = came.in_order(request.experts)
                bulk, window = self.ring.waves(len(seen.experts))
                n_bulk += bulk
                self._check.take(seen, bulk=bulk, window=window)
                if not step.prompt:
                    self._missed.append(self._places(seen))
                    missed = [not hit for hit in seen.hits]
                    self._turns.append(sorted(missed) if self.spec.any_order else missed)
        return n_bulk

    def _places(self, seen: Seen) -> list[int]:
        """In the file, of what was missed."""
        missed = (e for e, hit in zip(seen.experts, seen.hits, strict=True) if not hit)
        return [(seen.layer * self.spec.experts + e) % self.spec.places for e in missed]

    def compute(self, rows: int) -> dict[str, Any]:
        """Of each request of each token the time (ns)."""
        work, slot, found = Work(rows), 0, []
        work(self._matrices[0])
        for step in self.spec.steps:
            for request in step.requests if not step.prompt else ():
                began = time.perf_counter_ns()
                for _ in request.experts:
                    work(self._matrices[slot])
                    slot = (slot + 1) % len(self._matrices)
                found.append(time.perf_counter_ns() - began)
        return {"request_ns": found}

    def read(self) -> dict[str, Any]:
        """Of each request of each token the time (ns); and `turns`: of its experts, in the order in which
        they are computed with, whether each was missed."""
        found = []
        for places in self._missed:
            began = time.perf_counter_ns()
            self._reads(places)
            found.append(time.perf_counter_ns() - began)
        return {"request_ns": found, "turns": self._turns}


def _data_segment(ring: smoe_mp.Ring) -> mmap.mmap:
    """The ring's slots, to be written too; clients' own maps are read-only."""
    segment = posix_ipc.SharedMemory(segments.segment_names(ring.name)[1])
    try:
        size = ring.slots * ring.slot_bytes
        return mmap.mmap(segment.fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        segment.close_fd()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    spec = Spec.of(json.loads(sys.stdin.readline()))
    with smoe_mp.attach(spec.ring, "bench replay") as ring:
        decoder = Decoder(spec, ring)
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            wanted = json.loads(line)
            print(json.dumps(getattr(decoder, wanted.pop("do"))(**wanted)), file=out, flush=True)


if __name__ == "__main__":
    main()
