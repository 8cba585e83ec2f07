"""bench wake: from demand to bytes while the workers sleep, over a bare read of the same place.

An expert of 16 KiB, so that the read is as short as one gets and what is put on top of it shows: the
doorbell, the kernel's waking a worker, the worker's way to its read and from there to the published word,
the kernel's waking the client.  `smoe-bench wake` is the client; the bare side is the same process, which
preads the same place (O_DIRECT, a descriptor of its own) into the same ring's memory.  What any design costs
that has another process read is shown by a third side, the relay: a process that sleeps on a futex, is woken,
does the bare read, and wakes its parent, with nothing else in between.  In turn, place by place, another one
first each time; each place was read once before, uncounted, so that a cache below the device answers all
alike.  Before each of them all workers sleep and the client computes for half a millisecond, so that the
workers' cores sleep as well.

By default a client spins for 20 us and then sleeps (`client sleeps`); one that spins until its bytes are
there is the other form (`client spins`).  Where the time goes is told by stamps that the ring has anyway:
the worker's, when it takes a slot and when its read has ended, beside the client's (`demand issued` and
`reader has it` both count from the demand, the rest from what stands before it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from smoe_mp import segments
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.io import FILE_BYTES_QUICK, Device, direct_probe, notes_on, scratch_file
from smoe_mp.bench.rings import bench_ring, flat_source, native
from smoe_mp.bench.stats import Goal

EXPERT_BYTES = 16384
SLOTS = 64
EXPERTS = 65536  # at most, of those in the file
WORKERS, WORKERS_FULL = (1,), (1, 4, 16)
PAUSE_US = 500
AT_MOST_US = 15.0
CLIENTS = ("sleeps", "spins")
SIDES = ("ring", "relay", "bare")
#: What `smoe-bench wake` tells of a side, and in words.
PARTS = {
    "all": "in all",
    "more": "over bare",
    "issued": "demand issued",
    "woken": "reader has it",
    "read": "its read",
    "told": "client told",
}
GOALS = {("ring", "more"): Goal("at most", AT_MOST_US)}

WHAT = (
    "us from the demand of an absent expert of 16 KiB to its bytes, the workers asleep, against a bare direct"
    " read of the same place."
)


#: By client, side and part.
Values = dict[tuple[str, str, str], list[float]]


def run(
    progress: Progress, scratch: Path, *, quick: bool = False, workers: Sequence[int] = WORKERS
) -> Report:
    """Measure, with the file of `bench io` in the folder `scratch`; one of 128 MiB is enough."""
    rounds, reads = (6, 40) if quick else (20, 100)
    path = scratch_file(scratch, FILE_BYTES_QUICK, progress)
    probe = direct_probe(path)
    device = Device(path)
    counts = sorted(set(workers))
    settings = {"workers": counts, "rounds": rounds, "reads": reads, "pause_us": PAUSE_US}
    report = Report("wake", WHAT, {**settings, "file": str(path), "fs": probe.fs, "device": device.name})
    source = flat_source(path, EXPERT_BYTES, min(EXPERTS, path.stat().st_size // EXPERT_BYTES))
    for at, n in enumerate(counts):
        found: Values = defaultdict(list)
        align = max(4096, probe.offset_align)
        with bench_ring(source, slots=SLOTS, workers=n, read_align=align) as ring:
            ring.settle()
            for line in native(
                *("wake", ring.name, path, segments.segment_names(ring.name)[1]),
                *("--rounds", rounds, "--reads", reads, "--seed", 1),
                *("--bytes", EXPERT_BYTES, "--pause", PAUSE_US),
            ):
                for side in SIDES:
                    for part, ns in line[side].items():
                        found[line["client"], side, part].append(ns / 1000)
                progress(f"{n} workers", at * rounds + line["round"] + 1, len(counts) * rounds)
            ring.check()
        _add_to(report, f"{n} workers" if n > 1 else "1 worker", found)
    report.notes += notes_on(device)
    return report


def _add_to(report: Report, where: str, found: Values) -> None:
    for client in CLIENTS:
        setting = f"{where}, client {client}"
        for side in SIDES:
            row = {
                text: Figure(
                    f"{setting}: {side}, {text}", "us", found[client, side, part], GOALS.get((side, part))
                )
                for part, text in PARTS.items()
                if (client, side, part) in found
            }
            report.sheets.setdefault(f"{setting}: medians of the rounds' medians, and quartiles", {})[
                side
            ] = row
            report.figures += row.values()
        ring, relay, bare = (found[client, side, "all"] for side in SIDES)
        report.shares.append(Share(f"{setting}: ring / bare", ring, bare))
        report.shares.append(Share(f"{setting}: ring / relay", ring, relay))
        more = next(f for f in report.figures if f.name == f"{setting}: ring, {PARTS['more']}")
        s = more.summary
        report.notes.append(
            f"{setting}: the ring takes {s.median:.1f} us more than the bare read (95%: {s.low:.1f} to"
            f" {s.high:.1f}); the goal, at most {AT_MOST_US:g}, is {more.verdict}."
        )
