"""bench peers: the same random experts through the ring, and the ways in which they are read without it.

    side                     what it does
    mmap + copy              copies each expert out of a map of the file
    pread                    reads it through the page cache into a buffer
    pread, threads           the same by as many threads as the ring has workers, a batch at a time
    safetensors get_slice    has safetensors make an array of it
    numpy memmap             copies it out of a numpy.memmap
    ring                     fetches it from a ring with workers, which read past the page cache

The file is one safetensors file of one stack of experts, of random bytes.  Each side is a process of its own
(peer.py) in a memory cgroup smaller than the file, of which the page cache is a part and the ring too, with
its workers; so what keeps experts in memory has the same room on all sides.  Experts are asked for as a
layer does, eight different ones at a time, the next eight when all are there.  Two traces: uniform, and
Zipf's law, which is nearer to what routers do: with uniform picks no cache finds more than its share of the
file.  A cgroup's worth of experts is read first, uncounted, then twice as much, or half in the short form.

Before each run the file's pages are dropped from the page cache.  All sides add up a word of each page that
they got, and must come to the same sum.  Sides in turn, the one that begins changing from round to round.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.cgroup import memory_group
from smoe_mp.bench.io import (
    BATCH,
    MIB,
    SPARE_BYTES,
    Device,
    direct_probe,
    drop_cache,
    fill_random,
    notes_on,
    scratch_folder,
)
from smoe_mp.bench.peer import SIDES, TENSOR, Spec
from smoe_mp.errors import SegmentError, SmoeError
from smoe_mp.launch import clear
from smoe_mp.runtime import human_bytes

EXPERT_MIB = 3
FILE_BYTES, FILE_BYTES_QUICK = 4 << 30, 384 << 20
LIMIT_SHARE = 0.25  # of the file
LEAST_BYTES = 256 << 20  # a cgroup's: what the interpreters are leaves room in it
PROCESS_BYTES = 192 << 20  # of the cgroup, not the ring's: interpreter, workers, page tables
WORKERS = 4
ZIPF = 1.0
START = 16384  # of the experts in the file
SIDE_S = 900.0
OURS = "ring"
TRACES = {"uniform": 0.0, f"Zipf {ZIPF:g}": ZIPF}

WHAT = (
    "GB/s of wanted bytes of random experts, eight at a time, each side in a memory cgroup smaller than the"
    " file; bytes that the device read and CPU seconds, for what was wanted."
)


def run(
    progress: Progress, scratch: Path, *, quick: bool = False, rounds: int = 0, workers: int = WORKERS
) -> Report:
    """Measure, with a file in the folder `scratch` that is made once and kept.  Without a memory cgroup,
    which needs root, it says so and measures nothing."""
    rounds = rounds or (2 if quick else 5)
    size = EXPERT_MIB * MIB
    count = (FILE_BYTES_QUICK if quick else FILE_BYTES) // size
    limit = max(LEAST_BYTES, int(LIMIT_SHARE * count * size))
    slots = (limit - PROCESS_BYTES) // size
    settings = {
        **{"expert_mib": EXPERT_MIB, "experts": count, "limit_bytes": limit, "slots": slots},
        **{"workers": workers, "rounds": rounds, "zipf": ZIPF},
    }
    report = Report("peers", WHAT, settings)
    try:
        with memory_group(limit):
            pass
    except SmoeError as error:
        report.notes.append(f"Skipped: {error}. It needs root.")
        report.extra["skipped"] = str(error)
        return report
    with scratch_folder(scratch):
        path = experts_file(scratch, size, count, progress)
    device = Device(path)
    align = max(4096, direct_probe(path).offset_align)
    sides = [name for name in SIDES if not name.startswith("safetensors") or _has_safetensors(report)]
    runs = [(trace, side) for trace in TRACES for side in sides]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in runs}
    warm, reads = limit // size // BATCH, (3 * limit // 2 if quick else 3 * limit) // size
    for turn in range(rounds):
        batches = {trace: picks(turn, count, skew, reads) for trace, skew in TRACES.items()}
        for at in range(len(runs)):
            trace, side = runs[(at + turn) % len(runs)]
            progress(f"{trace}: {side}", turn * len(runs) + at, rounds * len(runs))
            spec = Spec(
                *(side, str(path.absolute()), START, size, count, batches[trace], warm, slots, workers, align)
            )
            found[trace, side].append(_one(spec, limit))
        for trace in TRACES:
            check_sums({side: found[trace, side][-1]["check"] for side in sides}, trace)
    progress("", rounds * len(runs), rounds * len(runs))
    for trace in TRACES:
        _add_to(report, trace, {side: found[trace, side] for side in sides})
    report.settings |= {"file": str(path), "device": device.name}
    report.notes += [
        f"{count} experts of {EXPERT_MIB} MiB, {human_bytes(count * size)}; memory of a side:"
        f" {human_bytes(limit)}, page cache included; a ring of {slots} slots within it.",
        "device: bytes that the device read, for each that was wanted; below 1 what memory kept saved reads.",
        "CPU: of the side and of its workers; not what the kernel does in interrupts and threads of its own.",
        *notes_on(device),
    ]
    return report


def _has_safetensors(report: Report) -> bool:
    if importlib.util.find_spec("safetensors") is not None:
        return True
    report.notes.append("No side with safetensors: it is not installed.")
    return False


def picks(seed: int, count: int, skew: float, reads: int) -> list[list[int]]:
    """Batches of `BATCH` different experts of `count`, `reads` or a few more together.  Their popularity is
    1 / rank ** skew, the ranks drawn from the seed."""
    random = np.random.default_rng(seed)
    weights = random.permutation(np.arange(1, count + 1) ** -skew)
    weights /= weights.sum()
    return [random.choice(count, BATCH, replace=False, p=weights).tolist() for _ in range(-(-reads // BATCH))]


def check_sums(sums: Mapping[str, int], trace: str) -> None:
    """SmoeError where two sides did not read the same bytes."""
    if len(set(sums.values())) > 1:
        raise SmoeError(
            f"{trace}: the sides did not read the same bytes, by their sums {dict(sums)}: no figures"
        )


def _one(spec: Spec, limit: int) -> dict[str, Any]:
    """One side's run.  SmoeError where it comes to nothing, and what it left is removed."""
    drop_cache(Path(spec.path))
    command, pipe, pid = [sys.executable, "-m", "smoe_mp.bench.peer"], subprocess.PIPE, 0
    try:
        with (
            memory_group(limit) as group,
            subprocess.Popen(group.inside(command), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child,
        ):
            pid = child.pid
            try:
                out, said = child.communicate(json.dumps(asdict(spec)), timeout=SIDE_S)
            except subprocess.TimeoutExpired:
                raise SmoeError(f"{spec.side}: not done after {SIDE_S:.0f} s") from None
            finally:
                child.kill()
            kills = group.kills()
    finally:
        clear(f"bench-{pid}-0")  # the ring of a side that was killed
    if kills:
        full = f"its cgroup of {human_bytes(limit)} was full"
        raise SmoeError(f"{spec.side}: {kills} of its processes were killed by the kernel: {full}")
    if child.returncode:
        raise SmoeError(f"{spec.side}: {([f'exit status {child.returncode}', *said.splitlines()])[-1]}")
    result: dict[str, Any] = json.loads(out)
    return result


def _add_to(report: Report, trace: str, found: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    rates = {side: [one["bytes"] / one["ns"] for one in runs] for side, runs in found.items()}
    for side, runs in found.items():
        columns = {"wanted": ("GB/s", rates[side])} | dict(_columns(runs))
        row = {c: Figure(f"{trace}: {side}: {c}", unit, values) for c, (unit, values) in columns.items()}
        report.sheets.setdefault(trace, {})[side] = row
        report.figures += row.values()
    report.shares += [
        Share(f"{trace}: {OURS} / {side}, bytes/s", rates[OURS], rates[side])
        for side in found
        if side != OURS
    ]


def _columns(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, list[float]]]]:
    """Name, unit and each round's value; none of what is not known here."""
    if all(one["device"] is not None for one in runs):
        yield "device", ("bytes/byte", [one["device"] / one["bytes"] for one in runs])
    yield "CPU", ("s/GB", [one["cpu_ns"] / one["bytes"] for one in runs])
    if all(one["hits"] is not None for one in runs):
        size = EXPERT_MIB * MIB
        yield "hits", ("%", [100 * one["hits"] * size / one["bytes"] for one in runs])


def experts_file(scratch: Path, size: int, count: int, progress: Progress) -> Path:
    """A safetensors file with one tensor, `count` experts of `size` random bytes from `START` on."""
    path = scratch / f"peers-{count}x{size}.safetensors"
    if path.exists():
        return path
    free = shutil.disk_usage(scratch).free
    if free < count * size + SPARE_BYTES:
        raise SegmentError(
            f"{scratch}: the experts need {human_bytes(count * size)}, and {human_bytes(free)} are free:"
            " give --scratch another folder"
        )
    facts = {"dtype": "U8", "shape": [count, size], "data_offsets": [0, count * size]}
    head = json.dumps({TENSOR: facts}).encode().ljust(START - 8)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(START + count * size)
        fill_random(partial, START, START + count * size, progress)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
