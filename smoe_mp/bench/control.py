"""bench control: the same expert, resident, over the socket and over shared memory.

A real `smoe-mp up`; one client of each kind, from Python, in turn: a demand message there and back, a status
message, and a `fetch` that is given back at once.  A demand over the socket is for those who cannot map the
ring; this says what that costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import smoe_mp
from smoe_mp.bench import Figure, Progress, Report
from smoe_mp.bench.idle import small_system
from smoe_mp.bench.stats import median
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Demand, Ping, Speculate, Status

WHAT = "Microseconds from asking to the answer, for a resident expert (and a ping and a status beside it)."


def run(progress: Progress, *, quick: bool = False) -> Report:
    """Measure; each round's value is the median of its calls."""
    rounds, calls = (3, 100) if quick else (12, 500)
    with small_system(1) as name, ControlClient(name) as control, smoe_mp.attach(name, "bench") as ring:
        asked, one, eight = Demand(experts=[(0, 3)]), [3], list(range(8))

        def fetch() -> None:
            ring.fetch(0, one).release()

        sides: dict[str, Callable[[], object]] = {
            "fetch over shared memory": fetch,
            "ping over the socket": lambda: control.call(Ping()),
            "demand of 1 over the socket": lambda: control.call(asked),
            "demand of 8 over the socket": lambda: control.call(Demand(experts=[(0, e) for e in eight])),
            "speculate 8 over the socket": lambda: control.call(Speculate(experts=[(0, e) for e in eight])),
            "status over the socket": lambda: control.call(Status()),
        }
        values: dict[str, list[float]] = {side: [] for side in sides}
        for call in sides.values():
            call()
        for at in range(rounds):
            progress("rounds", at, rounds)
            for side, call in sides.items():
                values[side].append(_median_us(call, calls))
        progress("rounds", rounds, rounds)
    report = Report("control", WHAT, {"rounds": rounds, "calls": calls})
    report.figures = [Figure(side, "us", found) for side, found in values.items()]
    return report


def _median_us(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1000)
    return median(times)
