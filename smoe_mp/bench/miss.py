"""bench miss: what demanding an absent expert costs before its read begins, eviction included.

Two rings of each size, both full: in the one nobody sleeps at the doorbell, as while workers are busy
reading (`issue`, which has the goal); in the other a worker process sleeps and is woken (`issue + wake`:
mostly the kernel's time to wake a process, which grows with what else runs).  Between two misses
lie hits on random residents, which make the order of eviction stale.  For the split, the search for the
victim and the doorbell's system call are timed alone; and for comparison, a search that looks at every
slot, compiled alike, on records that nobody else writes.  With several clients at once all but the one that
misses take random residents of the ring all the time.  From Python: `Ring.acquire` of one and of eight absent
experts, served by a worker process, which mostly sleeps.  The experts are in memory: nothing here says
anything of a disk.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence

import smoe_mp
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.rings import BenchRing, absent_first, bench_ring, flat_source, memory_file, native
from smoe_mp.bench.stats import Goal, median
from smoe_mp.errors import SmoeError
from smoe_mp.ring import Ring

EXPERT_BYTES = 16384
SLOTS, SLOTS_FULL = (4096, 16384), (64, 1024, 4096, 16384)
HITS = (0, 300, 3000)
BATCH = 8
AT_MOST_NS = 1000.0
SIDES = ("issue", "issue + wake", "search", "doorbell", "scan")

WHAT = (
    "ns of smoe_acquire for an absent expert in a full ring (search, eviction, queue, doorbell; not the read)"
    " with hits on random residents between two misses, against the mere search of a scan over all slots."
)


def run(
    progress: Progress,
    *,
    quick: bool = False,
    slots: Sequence[int] = SLOTS,
    hits: Sequence[int] = HITS,
    clients: Sequence[int] = (1,),
) -> Report:
    """Measure.  `slots`: ring sizes; `hits`: how many lie between two misses; `clients`: how many at once."""
    rounds, misses = (5, 20) if quick else (20, 100)
    sizes, between, many = sorted(set(slots)), sorted(set(hits)), sorted({1, *clients})
    found: dict[tuple[int, int, int, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(memory_file(2 * max(sizes) * EXPERT_BYTES))
        rings = [
            stack.enter_context(bench_ring(flat_source(path, EXPERT_BYTES, 2 * n), slots=n, workers=w))
            for n in sizes
            for w in (0, 1)
        ]
        names = [ring.name for ring in rings]
        clock_ns = 0.0
        flags = [x for h in between for x in ("--hits", h)] + [x for n in many for x in ("--clients", n)]
        progress("misses", 0, rounds)
        for line in native("miss", *names, "--rounds", rounds, "--misses", misses, *flags):
            if "clock_ns" in line:
                clock_ns = line["clock_ns"]
                continue
            found[line["slots"], line["hits"], line["clients"], line["side"]].append(line["ns"])
            progress("misses", line["round"] + 1, rounds)
        python = {n: _in_python(ring, rounds, misses) for n, ring in zip(sizes, rings[1::2], strict=True)}
    settings = {"slots": sizes, "hits": between, "clients": many, "rounds": rounds, "misses": misses}
    report = Report("miss", WHAT, settings | {"clock_ns": clock_ns})
    for n in sizes:
        for batch, values in python[n].items():
            what = "one" if batch == 1 else f"{batch}"
            report.figures.append(Figure(f"Python, acquire {what}, {n} slots", "ns", values))
        for h in between:
            where = f"{n} slots, {h} hits between"
            for side in SIDES:
                goal = Goal("at most", AT_MOST_NS) if side == "issue" else None
                report.figures.append(Figure(f"{side}, {where}", "ns", found[n, h, 1, side], goal))
            alone = found[n, h, 1, "issue"]
            report.shares.append(Share(f"issue / scan, {where}", alone, found[n, h, 1, "scan"]))
            for at_once in many[1:]:
                issue, beside = found[n, h, at_once, "issue"], f"{where}, {at_once} clients"
                report.figures.append(Figure(f"issue, {beside}", "ns", issue))
                report.shares.append(Share(f"issue, {beside} / 1", issue, alone))
    report.notes.append(
        f"Reading the clock ({clock_ns:.0f} ns) is taken off. A scan's whole issue costs its search and the"
        " rest of ours on top."
    )
    return report


def _in_python(served: BenchRing, rounds: int, misses: int) -> dict[int, list[float]]:
    """ns of a call that acquires absent experts, by how many: a median of `misses` each round."""
    found: dict[int, list[float]] = {1: [], BATCH: []}
    with smoe_mp.attach(served.name, "bench miss") as ring:
        experts = itertools.cycle(absent_first(ring, 1))
        for _ in range(rounds):
            for batch, values in found.items():
                calls = [list(itertools.islice(experts, batch)) for _ in range(misses)]
                values.append(median([_timed(ring, ids) for ids in calls]))
    return found


def _timed(ring: Ring, ids: list[int]) -> float:
    began = time.perf_counter_ns()
    batch = ring.acquire(0, ids)
    ns = time.perf_counter_ns() - began
    if batch.hits:
        raise SmoeError(f"{ring.name}: {batch.hits} of experts {ids} were hits where all should be absent")
    batch.wait().release()
    return ns
