"""One side of `bench peers`: a program that reads experts of a safetensors file in one of several ways.

    python -m smoe_mp.bench.peer < SPEC       SPEC: JSON, the fields of `Spec`

It reads the batches, the first `warm` of them uncounted, and prints one line of JSON: `ns`, `cpu_ns` (its
own and its workers'), `bytes` wanted, `device`: bytes that the device read meanwhile or null, `check`: a sum
over one word a page of all that was read, the same for whoever read the same experts, and `hits`, of the
ring alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import smoe_mp
from smoe_mp.bench.io import Device
from smoe_mp.bench.rings import bench_ring, flat_source
from smoe_mp.errors import SmoeError

U8 = npt.NDArray[np.uint8]
#: Reads a batch of experts and yields their bytes, each good until the next is asked for.
Reader = Callable[[Sequence[int]], Iterable[U8]]

TENSOR = "experts"
PAGE_WORDS = 512


@dataclass(frozen=True)
class Spec:
    """`side`: a name of SIDES; `start` of the experts in the file, and how large each of `count` is;
    `batches` of different experts; `slots` and `workers` of the ring (and threads of the pool)."""

    side: str
    path: str
    start: int
    expert_bytes: int
    count: int
    batches: list[list[int]]
    warm: int
    slots: int
    workers: int
    read_align: int


@dataclass
class Reading:
    """A reader, and what is told of it beside the time."""

    read: Reader
    workers_cpu_ns: Callable[[], int] = lambda: 0
    hits: Callable[[], int | None] = lambda: None


def _mapped(spec: Spec) -> Iterator[Reading]:
    with Path(spec.path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        held = np.empty(spec.expert_bytes, np.uint8)

        def read(ids: Sequence[int]) -> Iterator[U8]:
            for at in (spec.start + x * spec.expert_bytes for x in ids):
                with memoryview(whole) as view, view[at : at + spec.expert_bytes] as wanted:
                    held.data[:] = wanted
                yield held

        yield Reading(read)


def _memmap(spec: Spec) -> Iterator[Reading]:
    whole = np.memmap(spec.path, np.uint8, "r", spec.start, (spec.count, spec.expert_bytes))
    held = np.empty(spec.expert_bytes, np.uint8)

    def read(ids: Sequence[int]) -> Iterator[U8]:
        for x in ids:
            held[:] = whole[x]
            yield held

    yield Reading(read)


def _pread_into(fd: int, held: U8, offset: int) -> U8:
    got = 0
    while got < len(held):
        n = os.preadv(fd, [held.data[got:]], offset + got)
        if n == 0:
            raise SmoeError(
                f"preadv: the file ends at {offset + got}: {len(held)} bytes from {offset} wanted"
            )
        got += n
    return held


def _pread(spec: Spec) -> Iterator[Reading]:
    held = np.empty(spec.expert_bytes, np.uint8)
    with Path(spec.path).open("rb", buffering=0) as file:
        yield Reading(
            lambda ids: (_pread_into(file.fileno(), held, spec.start + x * spec.expert_bytes) for x in ids)
        )


def _pread_threads(spec: Spec) -> Iterator[Reading]:
    held = [np.empty(spec.expert_bytes, np.uint8) for _ in spec.batches[0]]
    with Path(spec.path).open("rb", buffering=0) as file, ThreadPoolExecutor(spec.workers) as pool:

        def one(into: U8, expert: int) -> U8:
            return _pread_into(file.fileno(), into, spec.start + expert * spec.expert_bytes)

        yield Reading(lambda ids: pool.map(one, held, ids))


def _safetensors(spec: Spec) -> Iterator[Reading]:
    safetensors: Any = importlib.import_module("safetensors")
    with safetensors.safe_open(spec.path, framework="np") as file:
        whole = file.get_slice(TENSOR)
        yield Reading(lambda ids: (whole[x] for x in ids))


def _ring(spec: Spec) -> Iterator[Reading]:
    source = flat_source(Path(spec.path), spec.expert_bytes, spec.count, spec.start)
    hits = 0
    with (
        bench_ring(source, slots=spec.slots, workers=spec.workers, read_align=spec.read_align) as ring,
        smoe_mp.attach(ring.name, "bench peers") as client,
    ):

        def read(ids: Sequence[int]) -> Iterator[U8]:
            nonlocal hits
            with client.fetch(0, ids) as batch:
                hits += batch.hits
                for expert in batch:
                    yield expert.raw

        yield Reading(read, ring.workers_cpu_ns, lambda: hits)
        ring.check()
        mode = ring.segments.files()[0]["mode"]
        if mode != "direct":
            raise SmoeError(f"{spec.path}: the workers read it in mode {mode}, not direct: no figures")


#: By the side's name: a generator that gives one `Reading`, and cleans up when it is resumed.
SIDES: dict[str, Callable[[Spec], Iterator[Reading]]] = {
    "mmap + copy": _mapped,
    "pread": _pread,
    "pread, threads": _pread_threads,
    "safetensors get_slice": _safetensors,
    "numpy memmap": _memmap,
    "ring": _ring,
}


def _read_all(reading: Reading, batches: Sequence[Sequence[int]]) -> int:
    """The check of what was read."""
    total = 0
    for ids in batches:
        for held in reading.read(ids):
            total += int(held.view(np.uint64)[::PAGE_WORDS].sum(dtype=np.uint64))
    return total % (1 << 64)


def main(spec: Spec) -> dict[str, Any]:
    """Read as told; what is printed."""
    device = Device(Path(spec.path))
    with contextlib.contextmanager(SIDES[spec.side])(spec) as reading:
        _read_all(reading, spec.batches[: spec.warm])
        counted = spec.batches[spec.warm :]
        before, hits = device.bytes_read(), reading.hits()
        cpu, began = time.process_time_ns() + reading.workers_cpu_ns(), time.perf_counter_ns()
        check = _read_all(reading, counted)
        ns = time.perf_counter_ns() - began
        cpu = time.process_time_ns() + reading.workers_cpu_ns() - cpu
        after, now = device.bytes_read(), reading.hits()
    return {
        "ns": ns,
        "cpu_ns": cpu,
        "bytes": sum(map(len, counted)) * spec.expert_bytes,
        "device": None if before is None or after is None else after - before,
        "check": check,
        "hits": None if hits is None or now is None else now - hits,
    }


if __name__ == "__main__":
    try:
        print(json.dumps(main(Spec(**json.loads(sys.stdin.read())))))
    except SmoeError as error:
        sys.exit(str(error))
