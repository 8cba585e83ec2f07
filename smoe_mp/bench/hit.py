"""bench hit: what taking and giving back a resident expert costs, from C and from Python.

In C `smoe-bench hit` attaches all rings at once and goes round them: one hot expert, random residents, and
batches of 8 random residents, acquire and release together, thousands a sample.  From Python the same on
one of the rings: `with ring.fetch(...)` for one and for a batch of 8, and `acquire` with `release`.  What a
trace costs is shown by the same calls while one is recorded; its records are read only afterwards.
Beside them stands what the machine's memory costs alone: one load of a 128-byte record out of as many as
there are slots, each address known from the load before (`one load`).  A large ring's slots do not fit the
caches, and a hit in it cannot cost less than the lines that it has to fetch.
With several clients at once all but the one that is measured take random residents of the same ring all the
time; where there are fewer cores than clients, the median sample is one that nobody interrupted.  The
experts are in memory; no disk is touched, and a hit reads none.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import smoe_mp
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.rings import BenchRing, bench_ring, flat_source, memory_file, native
from smoe_mp.bench.stats import Goal, median
from smoe_mp.ring import Ring
from smoe_mp.trace import Recorder

EXPERT_BYTES = 16384
SLOTS = (64, 256, 1024, 4096, 16384)
PYTHON_SLOTS = 4096  # at most, of the rings there are
BATCH = 8
AT_MOST_NS = 120.0
FLAT = 1.3
PYTHON_NS = {"fetch one": 1500.0, "fetch 8": 5000.0}
JUDGED = ("one hot", "random")
RECORDED = ", recorded"

WHAT = (
    "ns of acquire + release of resident experts, at several ring sizes: in C one hot expert, random"
    " residents (another slot each time), and batches of 8; from Python the same through smoe_mp.Ring."
)

#: By kind, slots and clients.
Values = dict[tuple[str, int, int], list[float]]


def run(
    progress: Progress, *, quick: bool = False, slots: Sequence[int] = SLOTS, clients: Sequence[int] = (1,)
) -> Report:
    """Measure.  `slots`: ring sizes, from 8 slots up; `clients`: how many at once."""
    rounds, repeats, ops = (5, 20, 1000) if quick else (20, 50, 1000)
    sizes, many = sorted(set(slots)), sorted({1, *clients})
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(memory_file(max(sizes) * EXPERT_BYTES))
        rings = [
            stack.enter_context(bench_ring(flat_source(path, EXPERT_BYTES, n), slots=n, workers=1))
            for n in sizes
        ]
        c = _in_c(rings, many, progress, rounds=rounds, repeats=repeats, ops=ops)
        served = max((r for r in rings if r.segments.n_slots <= PYTHON_SLOTS), default=rings[0], key=_slots)
        python = _in_python(served, rounds, repeats, ops // 10, progress)
    report = Report(
        "hit",
        WHAT,
        {"slots": sizes, "clients": many, "rounds": rounds, "repeats": repeats, "ops": ops}
        | {"python_slots": _slots(served)},
    )
    for (kind, n, at_once), values in c.items():
        goal = Goal("at most", AT_MOST_NS) if kind in JUDGED and at_once == 1 else None
        beside = f", {at_once} clients" if at_once > 1 else ""
        report.figures.append(Figure(f"C, {kind}, {n} slots{beside}", "ns", values, goal))
    for kind, values in python.items():
        goal = Goal("at most", PYTHON_NS[kind]) if kind in PYTHON_NS else None
        report.figures.append(Figure(f"Python, {kind}, {_slots(served)} slots", "ns", values, goal))
    kinds = list(dict.fromkeys(kind for kind, _, _ in c))
    if len(sizes) > 1:
        report.shares = [_flatness(c, kind, sizes) for kind in kinds if not kind.endswith(RECORDED)]
    report.shares += [
        Share(f"a trace, C, {kind}, {n} slots: recorded / not", c[kind + RECORDED, n, 1], c[kind, n, 1])
        for kind in kinds
        if kind + RECORDED in kinds
        for n in sizes
    ]
    report.shares += [
        Share(f"C, {kind}, {n} slots: {at_once} clients / 1", values, c[kind, n, 1])
        for (kind, n, at_once), values in c.items()
        if at_once > 1
    ]
    report.shares += [
        Share(f"a trace, Python, {kind}: recorded / not", python[kind + RECORDED], python[kind])
        for kind in python
        if kind + RECORDED in python
    ]
    return report


def _slots(ring: BenchRing) -> int:
    return ring.segments.n_slots


def _flatness(values: Values, kind: str, sizes: Sequence[int]) -> Share:
    """The slowest size over the fastest, by their medians."""
    by_median = sorted(sizes, key=lambda n: median(values[kind, n, 1]))
    fast, slow = by_median[0], by_median[-1]
    goal = Goal("at most", FLAT) if kind in JUDGED else None
    name = f"flat, {kind}: slowest ({slow} slots) / fastest ({fast})"
    return Share(name, values[kind, slow, 1], values[kind, fast, 1], goal)


def _in_c(
    rings: Sequence[BenchRing],
    clients: Sequence[int],
    progress: Progress,
    *,
    rounds: int,
    repeats: int,
    ops: int,
) -> Values:
    found: Values = defaultdict(list)
    names = [ring.name for ring in rings]
    flags = [x for n in clients for x in ("--clients", n)]
    progress("in C", 0, rounds)
    for line in native("hit", *names, "--rounds", rounds, "--repeats", repeats, "--ops", ops, *flags):
        found[line["kind"], line["slots"], line["clients"]].append(line["ns"])
        progress("in C", line["round"] + 1, rounds)
    return dict(found)


def _fetch(ring: Ring, batches: Sequence[list[int]]) -> None:
    for ids in batches:
        with ring.fetch(0, ids):
            pass


def _acquire(ring: Ring, batches: Sequence[list[int]]) -> None:
    for ids in batches:
        ring.acquire(0, ids).release()


def _in_python(
    served: BenchRing, rounds: int, repeats: int, ops: int, progress: Progress
) -> dict[str, list[float]]:
    """ns for one call of each kind, a median of `repeats` each round."""
    shuffled = random.Random(1).sample(range(_slots(served)), _slots(served))
    ones = [[shuffled[i % len(shuffled)]] for i in range(ops)]
    eights = [[shuffled[(i * BATCH + k) % len(shuffled)] for k in range(BATCH)] for i in range(ops)]
    kinds: dict[str, tuple[Callable[[Ring, Sequence[list[int]]], None], list[list[int]]]] = {
        "fetch one": (_fetch, ones),
        f"fetch one{RECORDED}": (_fetch, ones),
        "fetch 8": (_fetch, eights),
        f"fetch 8{RECORDED}": (_fetch, eights),
        "acquire + release one": (_acquire, ones),
        "acquire + release 8": (_acquire, eights),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with smoe_mp.attach(served.name, "bench hit") as ring:
        for at in range(rounds):
            for kind, (call, batches) in kinds.items():
                recorder = Recorder(served.name) if kind.endswith(RECORDED) else contextlib.nullcontext()
                with recorder:
                    found[kind].append(median([_timed(call, ring, batches) for _ in range(repeats)]))
            progress("from Python", at + 1, rounds)
    return found


def _timed(
    call: Callable[[Ring, Sequence[list[int]]], None], ring: Ring, batches: Sequence[list[int]]
) -> float:
    began = time.perf_counter_ns()
    call(ring, batches)
    return (time.perf_counter_ns() - began) / len(batches)
