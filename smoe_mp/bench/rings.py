"""Rings for measuring: a flat source, real workers, and the native program that uses them.

    with flat_file(...) as path, bench_ring(FlatSource(path, 16384, 128), slots=64, workers=1) as ring:
        for line in native("hit", ring.name, "--rounds", 3): ...

A `FlatSource` is a file cut into experts of one size, all in layer 0.  What lies in memory (`memory_file`)
is for benchmarks that claim nothing of a disk.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smoe_mp import segments
from smoe_mp.errors import SmoeError
from smoe_mp.process import Child, Loop, WatchPipe, end_all
from smoe_mp.ring import Ring
from smoe_mp.sources.base import Expert, Extent, ModelFacts, Source, SourceFile, Tensor

READY_S = 60.0  # for workers to open the file
GRACE_S, TERM_S, KILL_S = 10.0, 5.0, 5.0
SETTLE_S = 0.2
IDLE_SHARE = 0.005  # of a core, and of each worker: they wake four times a second
MEMORY_FOLDER = Path("/dev/shm")

_numbers = itertools.count()


@dataclass(frozen=True)
class FlatSource:
    """`count` experts of `expert_bytes` bytes, one behind the other in the file `path`."""

    path: Path
    files: list[SourceFile]
    experts: list[Expert]
    layouts: list[tuple[Tensor, ...]]
    format: str = "bench"
    model: ModelFacts = field(default_factory=ModelFacts)


def flat_source(path: Path, expert_bytes: int, count: int, start: int = 0) -> FlatSource:
    """The experts of `path`, the first at offset `start`."""
    st = path.stat()
    whole = Tensor("bytes", "U8", (expert_bytes,), 0, 0, expert_bytes)
    return FlatSource(
        path,
        [SourceFile(path.absolute(), st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, bytes(16))],
        [Expert(0, i, (Extent(0, start + i * expert_bytes, expert_bytes),), 0) for i in range(count)],
        [(whole,)],
    )


@contextlib.contextmanager
def memory_file(size: int) -> Iterator[Path]:
    """A file of `size` zero bytes in memory, where there is such a place; it takes no room."""
    folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with tempfile.NamedTemporaryFile(prefix=f"smoe-bench-{os.getpid()}-", dir=folder) as file:
        file.truncate(size)
        yield Path(file.name)


def cpu_ns(pid: int) -> int:
    """CPU time (ns) that all threads of a process have used, by the scheduler's own count.

    SmoeError where the system does not tell."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    except (OSError, ValueError, IndexError) as error:
        raise SmoeError(
            f"/proc/{pid}/task/*/schedstat: {error}: this benchmark needs Linux with CONFIG_SCHED_INFO"
        ) from error


class BenchRing:
    """A ring that this process made and supervises, with its workers."""

    def __init__(self, made: segments.Segments, workers: list[Child], loop: Loop) -> None:
        self.name = made.name
        self.segments = made
        self._workers = workers
        self._loop = loop

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._workers]

    def workers_cpu_ns(self) -> int:
        return sum(cpu_ns(pid) for pid in self.pids)

    def settle(self) -> None:
        """Wait until the workers have nothing left to do: started, they map the ring.

        SmoeError if that does not end."""
        before, deadline = self.workers_cpu_ns(), time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self._loop.turn(SETTLE_S)
            now = self.workers_cpu_ns()
            if now - before < IDLE_SHARE * SETTLE_S * 1e9 * max(1, len(self._workers)):
                return
            before = now
        raise SmoeError(f"ring {self.name}: its workers were still busy after {READY_S:.0f} s")

    def check(self) -> None:
        """SmoeError if a worker has ended."""
        self._loop.turn(0)
        for child in self._workers:
            if child.exited:
                raise SmoeError(child.epitaph())


@contextlib.contextmanager
def bench_ring(
    source: Source, *, slots: int, workers: int, read_align: int = 4096, top_k: int = 0
) -> Iterator[BenchRing]:
    """A ring of this process on `source`, its `workers` processes ready."""
    name = f"bench-{os.getpid()}-{next(_numbers)}"
    with contextlib.ExitStack() as undo:
        made = segments.create(name, source, slots=slots, read_align=read_align, top_k=top_k)
        undo.callback(made.remove)
        loop, watch, children = Loop(), WatchPipe(), list[Child]()
        undo.callback(watch.close)
        undo.callback(_end, children, loop)
        undo.callback(made.set_state, "stopping")
        program = [str(segments.worker_program()), "--name", name, "--creation", made.creation_hex]
        for i in range(workers):
            argv = [*program, "--id", str(i)]
            children.append(Child(f"worker {i} of {name}", argv, watch, loop, lambda line: None))
        ring = BenchRing(made, children, loop)

        def settled() -> bool:
            return all(c.ready for c in children) or any(c.exited for c in children)

        if not loop.wait_until(settled, READY_S):
            raise SmoeError(f"ring {name}: its {workers} workers were not ready within {READY_S:.0f} s")
        ring.check()
        yield ring


def absent_first(ring: Ring, seed: int) -> list[int]:
    """All experts of a ring of some, in random order, those that are resident last: demanded in turn, again
    and again, each is a miss."""
    order = np.random.default_rng(seed).permutation(ring.experts).tolist()
    return sorted(order, key=lambda x: ring.resident(0, x))


def _end(children: list[Child], loop: Loop) -> None:
    end_all(children, loop, GRACE_S, TERM_S, KILL_S)
    for child in children:
        child.close()


def native(*arguments: object) -> Iterator[dict[str, Any]]:
    """Run `smoe-bench ARGUMENTS` and yield each line that it prints.  SmoeError where it fails."""
    command = [str(segments.installed("smoe-bench")), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                yield json.loads(line)
            said = process.stderr.read().strip()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise SmoeError(said or f"smoe-bench ended with status {process.returncode}: {' '.join(command)}")


def native_one(*arguments: object) -> dict[str, Any]:
    """The one line that `smoe-bench ARGUMENTS` prints."""
    (line,) = native(*arguments)
    return line
