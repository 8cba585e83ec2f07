"""bench io: bytes a second through the ring, against the same reads by as many bare processes.

One side is a ring with N workers and a client that keeps batches of 8 random experts in flight, enough of
them that no worker ever waits for work; the other, N processes that do nothing but pread into the same
shared memory, the resting ring's data segment: how far the physical addresses of its pages run on decides
how many requests a read becomes, which made a factor of four between two segments.  Both read the same
kind of sequence: random experts, none again before a ring's worth of others, so that every one is a miss.
Further ways of asking the ring (`Asking`: one expert a call, several clients, from Python) are further sides,
with as much in flight.  Sides in turn, the one that begins changing from round to round.

All reads are direct (O_DIRECT), from a scratch file of allocated random bytes that was itself written
past the page cache.  Where direct reads are refused there is no benchmark.  The device's own count of
bytes read stands beside the bytes wanted; what lies below the device (a host's cache, a drive's) no
program can see from here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import smoe_mp
from smoe_mp import segments
from smoe_mp.bench import Figure, Progress, Report, Share, machine
from smoe_mp.bench.rings import BenchRing, absent_first, bench_ring, flat_source, native_one
from smoe_mp.bench.stats import Goal
from smoe_mp.errors import ConfigError, SegmentError, SmoeError
from smoe_mp.partial import free_bytes
from smoe_mp.platform import system
from smoe_mp.ring import Batch
from smoe_mp.runtime import human_bytes

MIB = 1 << 20
SIZES_MIB, SIZES_MIB_FULL = (9,), (1, 3, 9, 16)
WORKERS, WORKERS_FULL = (4, 16), (1, 2, 4, 8, 16, 32)
BATCH = 8
AT_LEAST = 0.98
CPU_AT_MOST = 1.3
JUDGED_MIB, JUDGED_WORKERS = (3, 9), (4, 16)
FILE_BYTES, FILE_BYTES_QUICK = 4 << 30, 128 << 20
SPARE_BYTES = 256 << 20  # left free on the file system
CHUNK = 16 * MIB

WHAT = (
    "bytes a second of random direct reads through the ring (all misses, workers always busy), over the same"
    " reads by as many bare processes into shared memory."
)


@dataclass(frozen=True)
class Asking:
    """How a ring is asked: by so many client processes together, so many experts a call, in C or from Python
    (one client)."""

    clients: int = 1
    batch: int = BATCH
    python: bool = False

    def __str__(self) -> str:
        words = ["from Python"] if self.python else []
        words += [f"{self.clients} clients"] if self.clients > 1 else []
        if self.batch != BATCH:
            words.append("one at a time" if self.batch == 1 else f"{self.batch} at a time")
        return ", ".join(["ring", *words])

    def flight(self, workers: int) -> int:
        """Calls in flight of each client, so that workers have work while the oldest call's last expert is
        awaited."""
        return -(-(batches(workers) * BATCH) // (self.batch * self.clients))

    def slots(self, workers: int) -> int:
        """Of a ring for them: what is in flight, and a batch to be evicted."""
        return self.clients * self.flight(workers) * self.batch + BATCH


PLAIN = Asking()
ASKING_FULL = (
    PLAIN,
    Asking(batch=1),
    Asking(clients=2),
    Asking(clients=4),
    Asking(python=True),
    Asking(python=True, batch=1),
)


def asked(clients: Sequence[int], batches: Sequence[int], *, python: bool) -> tuple[Asking, ...]:
    """All of these together; from Python one client."""
    in_c = [Asking(n, batch) for n in clients for batch in batches]
    return (*in_c, *(Asking(1, batch, True) for batch in batches if python))


@dataclass
class _Side:
    """One side of one setting, round by round."""

    gb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    wanted: int = 0
    device: int | None = 0

    def add(self, line: dict[str, Any], cpu_ns: int, device: int | None) -> None:
        self.gb_per_s.append(line["bytes"] / line["ns"])
        self.cpu_s_per_gb.append(cpu_ns / line["bytes"])
        self.wanted += line["bytes"]
        self.device = None if device is None or self.device is None else self.device + device


def run(
    progress: Progress,
    scratch: Path,
    *,
    quick: bool = False,
    sizes_mib: Sequence[int] | None = None,
    workers: Sequence[int] | None = None,
    asking: Sequence[Asking] = (PLAIN,),
) -> Report:
    """Measure, with a file in the folder `scratch` that is made once and kept."""
    rounds, run_s = (3, 0.3) if quick else (10, 2.0)
    sizes = sizes_mib or ((3,) if quick else SIZES_MIB)
    counts = workers or ((4,) if quick else WORKERS)
    smallest = FILE_BYTES_QUICK if quick else FILE_BYTES
    wanted = max(smallest, *(4 * a.slots(n) * size * MIB for n in counts for size in sizes for a in asking))
    path = scratch_file(scratch, wanted, progress)
    probe = direct_probe(path)
    device = Device(path)
    settings = {"sizes_mib": list(sizes), "workers": list(counts), "rounds": rounds, "run_s": run_s}
    settings |= {"asking": [str(a) for a in asking]}
    report = Report("io", WHAT, {**settings, "file": str(path), "fs": probe.fs, "device": device.name})
    settings_of = [(size, n) for size in sizes for n in counts]
    for at, (size, n) in enumerate(settings_of):
        m = _Measurement(path, device, size * MIB, n, asking)
        m.run(rounds, run_s, max(4096, probe.offset_align), _scaled(progress, m.where, at, len(settings_of)))
        m.add_to(report)
    report.notes += notes_on(device)
    return report


def _scaled(progress: Progress, what: str, at: int, settings: int) -> Progress:
    """Progress in one setting as progress in all."""
    return lambda _, done, total: progress(what, at * total + done, settings * total)


def slots_for(workers: int) -> int:
    """Slots of a ring for so many workers."""
    return PLAIN.slots(workers)


def batches(workers: int) -> int:
    """Batches in flight, so that workers have work while the oldest batch's last expert is awaited."""
    return -(-2 * workers // BATCH) + 1


class _Measurement:
    """One size of experts and number of workers: all sides, round by round."""

    def __init__(self, path: Path, device: Device, size: int, workers: int, asking: Sequence[Asking]) -> None:
        self.path, self.device, self.size, self.workers = path, device, size, workers
        self.where = f"{size // MIB} MiB, {workers} workers"
        self.slots = max(a.slots(workers) for a in asking)
        self.asking = asking
        self._reset()

    def _reset(self) -> None:
        self.rings, self.bare = {a: _Side() for a in self.asking}, _Side()

    def run(self, rounds: int, run_s: float, read_align: int, progress: Progress) -> None:
        """A round not counted, in which the speed is seen, from which a run's length (about `run_s` seconds)
        follows; then the rounds."""
        source = flat_source(self.path, self.size, self.path.stat().st_size // self.size)
        with bench_ring(source, slots=self.slots, workers=self.workers, read_align=read_align) as ring:
            least = 2 * self.slots
            progress("", 0, rounds + 1)
            ring.settle()  # as the bare processes map their memory before the clock starts
            for a in self.asking:
                self._through_ring(ring, a, 0, least)
            speed = self._run_bare(ring, 0, least)
            reads = max(least, int(speed * run_s / self.size)) // BATCH * BATCH
            self._reset()
            sides: list[Callable[[int, int], object]] = [
                *(partial(self._through_ring, ring, a) for a in self.asking),
                partial(self._run_bare, ring),
            ]
            for at in range(rounds):
                progress("", at + 1, rounds + 1)
                for i in range(len(sides)):
                    sides[(at + i) % len(sides)](1 + at * len(sides) + i, reads)
            progress("", rounds + 1, rounds + 1)
            mode = ring.segments.files()[0]["mode"]
        if mode != "direct":
            raise SmoeError(f"{self.path}: the workers read it in mode {mode}, not direct: no figures")

    def _through_ring(self, ring: BenchRing, a: Asking, seed: int, reads: int) -> None:
        before, cpu = self.device.bytes_read(), ring.workers_cpu_ns()
        flight, calls = a.flight(self.workers), reads // a.batch
        if a.python:
            line = _stream(ring.name, seed, calls=calls, batch=a.batch, flight=flight, size=self.size)
        else:
            line = native_one(
                *("stream", ring.name, "--reads", calls * a.batch, "--seed", seed, "--clients", a.clients),
                *("--batch", a.batch, "--batches", flight * a.clients),
            )
        cpu = ring.workers_cpu_ns() - cpu + line["cpu_ns"]
        ring.check()
        if line["hits"]:
            raise SmoeError(f"ring {ring.name}: {line['hits']} experts were hits where all should be read")
        self.rings[a].add(line, cpu, _since(self.device, before))

    def _run_bare(self, ring: BenchRing, seed: int, reads: int) -> float:
        """Returns the bytes a second."""
        before = self.device.bytes_read()
        line = native_one(
            *("bare", self.path, segments.segment_names(ring.name)[1]),
            *("--reads", reads, "--seed", seed, "--bytes", self.size),
            *("--slots", self.slots, "--processes", self.workers),
        )
        self.bare.add(line, line["cpu_ns"], _since(self.device, before))
        return self.bare.gb_per_s[-1] * 1e9

    def add_to(self, report: Report) -> None:
        judged = self.size // MIB in JUDGED_MIB and self.workers in JUDGED_WORKERS
        for name, side in ((f"{self.where}: bare", self.bare), *self._named()):
            report.figures.append(Figure(name, "GB/s", side.gb_per_s))
            report.figures.append(Figure(f"{name}, CPU", "s/GB", side.cpu_s_per_gb))
            device = "unknown" if side.device is None else f"{side.device / side.wanted:.3f} times that"
            report.notes.append(f"{name}: wanted {human_bytes(side.wanted)}; the device read {device}.")
            report.extra.setdefault("bytes", []).append(
                {"side": name, "wanted": side.wanted, "device": side.device}
            )
        for (name, side), a in zip(self._named(), self.asking, strict=True):
            rate = Goal("at least", AT_LEAST) if judged and a == PLAIN else None
            cpu = Goal("at most", CPU_AT_MOST) if a == PLAIN else None
            report.shares += [
                Share(f"{name} / bare, bytes/s", side.gb_per_s, self.bare.gb_per_s, rate),
                Share(f"{name} / bare, CPU", side.cpu_s_per_gb, self.bare.cpu_s_per_gb, cpu),
            ]

    def _named(self) -> list[tuple[str, _Side]]:
        return [(f"{self.where}: {a}", side) for a, side in self.rings.items()]


def _stream(name: str, seed: int, *, calls: int, batch: int, flight: int, size: int) -> dict[str, Any]:
    """What `smoe-bench stream` does, from Python, with `flight` calls in flight."""
    with smoe_mp.attach(name, "bench io") as ring:
        order = absent_first(ring, seed)
        open_calls: deque[Batch] = deque()
        hits, cpu, began = 0, time.process_time_ns(), time.perf_counter_ns()
        for at in range(calls):
            if len(open_calls) == flight:
                open_calls.popleft().wait().release()
            open_calls.append(ring.acquire(0, [order[(at * batch + k) % len(order)] for k in range(batch)]))
            hits += open_calls[-1].hits
        for call in open_calls:
            call.wait().release()
        ns, cpu = time.perf_counter_ns() - began, time.process_time_ns() - cpu
    return {"ns": ns, "bytes": calls * batch * size, "cpu_ns": cpu, "hits": hits}


# --- the device ------------------------------------------------------------------------------------------


class Device:
    """The block device under a file, as far as the system names one: `name` is "" where it does not."""

    def __init__(self, path: Path) -> None:
        dev = path.stat().st_dev
        self._stat = Path(f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}/stat")
        self.name = self._stat.parent.resolve().name if self._stat.exists() else ""

    def bytes_read(self) -> int | None:
        """Bytes read from it since the system started, by anybody; None where that is not told."""
        if not self.name:
            return None
        return int(self._stat.read_text().split()[2]) * 512  # the unit is 512 bytes whatever the device's


def _since(device: Device, before: int | None) -> int | None:
    after = device.bytes_read()
    return None if before is None or after is None else after - before


def notes_on(device: Device) -> list[str]:
    notes = [
        f"Device bytes: /sys/block's count for {device.name}, which counts everybody's reads."
        if device.name
        else "This file system names no block device: what the device read is not known."
    ]
    if machine()["virtual"]:
        notes.append(
            "This is a virtual machine: its host may answer from a cache of its own, and what a drive read"
            " cannot be known here. Ratios compare both sides alike; do not take GB/s for a drive's."
        )
    return notes


# --- the scratch file ------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[None]:
    """For the making of what a benchmark reads: the folder is there.  ConfigError, with the path, where the
    file system refuses it or anything in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, SmoeError):
            raise
        raise ConfigError(
            f"{error.filename or folder}: cannot be used for what is to be read: {error.strerror} (errno"
            f" {error.errno}): give --scratch another folder"
        ) from error


def scratch_file(folder: Path, size: int, progress: Progress, *, floats: bool = False) -> Path:
    """A file of at least `size` allocated random bytes in `folder`; one that is there already is taken.
    `floats`: they are ordinary float32 numbers as well, for who computes with them: no NaN, none denormal."""
    with scratch_folder(folder):
        return _scratch_file(folder, size, progress, floats)


def _scratch_file(folder: Path, size: int, progress: Progress, floats: bool) -> Path:
    size = -(-size // CHUNK) * CHUNK
    path = folder / ("bench-floats.bin" if floats else "bench-io.bin")
    if path.exists() and _is_whole(path, size):
        return path
    partial = path.with_suffix(".partial")
    free = free_bytes(folder, (path, partial))
    if free < size + SPARE_BYTES:
        raise SegmentError(
            f"{folder}: the scratch file needs {human_bytes(size)}, and {human_bytes(free)} are free:"
            " give --scratch another folder"
        )
    path.unlink(missing_ok=True)
    try:
        with _writable(partial, os.O_TRUNC) as fd:
            _write_random(fd, 0, size, progress, floats=floats)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    if not _is_whole(path, size):
        raise SmoeError(
            f"{path}: {human_bytes(size)} were written and {human_bytes(path.stat().st_blocks * 512)} are"
            " allocated: this file system compresses or thins out, and a benchmark on it would lie"
        )
    return path


def direct_probe(path: Path) -> segments.Probe:
    """What a direct read of the file shows; ConfigError where it is refused."""
    probe = segments.probe(path)
    if probe.mode != "direct":
        raise ConfigError(
            f"{path}: direct reads are refused here ({probe.reason}), so this would measure the page cache:"
            " give --scratch a folder on a local disk"
        )
    return probe


def drop_cache(path: Path) -> None:
    """Drop what the page cache has of a file; what is not written yet is written first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        system.drop_cached(file.fileno(), 0, 0)


def _is_whole(path: Path, size: int) -> bool:
    st = path.stat()
    return st.st_size >= size and st.st_blocks * 512 >= st.st_size


@contextlib.contextmanager
def _writable(path: Path, more: int = 0) -> Iterator[int]:
    """A descriptor for direct writes, or for plain ones where those are refused; what it leaves in the
    page cache is dropped at the end."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | more
    try:
        fd = os.open(path, flags | system.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
        os.fsync(fd)
        system.drop_cached(fd, 0, 0)
    finally:
        os.close(fd)


def fill_random(path: Path, start: int, end: int, progress: Progress) -> None:
    """Random bytes, allocated, from `start` to `end` of a file so long; past the page cache but for the
    pieces at both ends that are no whole CHUNK."""
    first, last = min(end, -(-start // CHUNK) * CHUNK), end // CHUNK * CHUNK
    random = np.random.default_rng()
    with path.open("r+b") as file:
        for at, to in ((start, first), (max(first, last), end)):
            file.seek(at)
            file.write(random.bytes(max(0, to - at)))
    with _writable(path) as fd:
        os.lseek(fd, first, os.SEEK_SET)
        _write_random(fd, first, max(first, last), progress)


def _write_random(fd: int, start: int, end: int, progress: Progress, *, floats: bool = False) -> None:
    random = np.random.default_rng()  # never the same bytes twice: nothing below can share blocks
    chunk = mmap.mmap(-1, CHUNK)  # page-aligned, as direct writes want it; closed with its last view
    for done in range(start, end, CHUNK):
        progress("scratch file, MiB", done // MIB, end // MIB)
        chunk[:] = _ordinary(random.bytes(CHUNK)) if floats else random.bytes(CHUNK)
        left = memoryview(chunk)
        while left:
            n = os.write(fd, left)
            left = left[n:]
    progress("scratch file, MiB", end // MIB, end // MIB)


def _ordinary(raw: bytes) -> bytes:
    """The same bytes but for three bits of each float32's exponent, so that it lies between 2**-31 and 2."""
    words = np.frombuffer(raw, np.uint32)
    return (words & np.uint32(0xBFFFFFFF) | np.uint32(0x30000000)).tobytes()
