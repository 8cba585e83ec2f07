"""bench miss: what demanding an absent expert costs before its read begins, eviction included.

Two rings of each size, both full: in the one nobody sleeps at the doorbell, as while workers are busy
reading (`issue`, which has the goal); in the other a worker process sleeps and is woken (`issue + wake`:
mostly the kernel's time to wake a process, which grows with what else runs).  Between two misses
lie hits on random residents, which make the order of eviction stale.  For the split, the search for the
victim and the doorbell's system call are timed alone; and for comparison, a search that looks at every
slot, compiled alike, on records that nobody else writes.  The experts are in memory: nothing here says
anything of a disk.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence

from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.rings import bench_ring, flat_source, memory_file, native
from smoe_mp.bench.stats import Goal

EXPERT_BYTES = 16384
SLOTS = (4096, 16384)
HITS = (0, 300, 3000)
AT_MOST_NS = 2000.0
SIDES = ("issue", "issue + wake", "search", "doorbell", "scan")

WHAT = (
    "ns of smoe_acquire for an absent expert in a full ring (search, eviction, queue, doorbell; not the read)"
    " with hits on random residents between two misses, against the mere search of a scan over all slots."
)


def run(
    progress: Progress, *, quick: bool = False, slots: Sequence[int] = SLOTS, hits: Sequence[int] = HITS
) -> Report:
    """Measure.  `slots`: ring sizes; `hits`: how many lie between two misses."""
    rounds, misses = (5, 20) if quick else (20, 100)
    sizes, between = sorted(set(slots)), sorted(set(hits))
    found: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(memory_file(2 * max(sizes) * EXPERT_BYTES))
        names = [
            stack.enter_context(bench_ring(flat_source(path, EXPERT_BYTES, 2 * n), slots=n, workers=w)).name
            for n in sizes
            for w in (0, 1)
        ]
        clock_ns = 0.0
        flags = [x for h in between for x in ("--hits", h)]
        progress("misses", 0, rounds)
        for line in native("miss", *names, "--rounds", rounds, "--misses", misses, *flags):
            if "clock_ns" in line:
                clock_ns = line["clock_ns"]
                continue
            found[line["slots"], line["hits"], line["side"]].append(line["ns"])
            progress("misses", line["round"] + 1, rounds)
    settings = {"slots": sizes, "hits": between, "rounds": rounds, "misses": misses, "clock_ns": clock_ns}
    report = Report("miss", WHAT, settings)
    for n in sizes:
        for h in between:
            where = f"{n} slots, {h} hits between"
            for side in SIDES:
                goal = Goal("at most", AT_MOST_NS) if side == "issue" else None
                report.figures.append(Figure(f"{side}, {where}", "ns", found[n, h, side], goal))
            report.shares.append(Share(f"issue / scan, {where}", found[n, h, "issue"], found[n, h, "scan"]))
    report.notes.append(
        f"Reading the clock ({clock_ns:.0f} ns) is taken off. A scan's whole issue costs its search and the"
        " rest of ours on top."
    )
    return report
