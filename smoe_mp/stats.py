"""What was done on a ring: counters, demands by phase, and the lengths of waits and reads.

    tally      reads what a participant, the former owners of a client's id, or all together have counted
    figures    a tally as plain data for people and programs: demands by how they were found, their coverage
               (the share that was resident on arrival), and histograms with quantiles

`csrc/counters.c` says why the sums are exact.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smoe_mp._native import check_plain, ffi, lib, text

#: What a client's thread says that it does (`Ring.phase`); the first where it says nothing.
PHASES = ("unsaid", "prefill", "decode")
#: How a demanded expert was found: resident, loading for a demand, a guess that was not there yet, not there.
KINDS = ("hits", "joins", "promoted", "misses")
#: Upper bounds of the histograms' buckets, in seconds; one more bucket has what took longer.
BOUNDS_S: tuple[float, ...] = tuple(2**i / 1e6 for i in range(lib.SMOE_BUCKETS - 1))
#: Ids that clients may have.
CLIENT_IDS = range(32)
#: The prewarm process's id: it guesses, and evicts for that.
PREWARM_ID = 161

_PHASED = (*KINDS, "waits", "wait_ns")


def _names() -> Iterator[str]:
    for number in itertools.count():
        if not (pointer := lib.smoe_counter_name(number)):
            return
        yield text(pointer)


_NAMES = tuple(_names())
assert _NAMES[: lib.SMOE_PHASED] == _PHASED


@dataclass(frozen=True, slots=True)
class Tally:
    """All `counters` by name; `phases`: those of `KINDS`, "waits" and "wait_ns" by phase; `waits`: how many
    fell into each bucket, by phase; `reads`: likewise, failed ones included."""

    counters: dict[str, int]
    phases: dict[str, dict[str, int]]
    waits: dict[str, list[int]]
    reads: list[int]


def tally(ring: Any, participant: int = -1, of: int = lib.SMOE_OF_ALL) -> Tally | None:
    """What the owners of an id counted; -1: all participants together, since the ring was made.

    `of`: of a client's id also SMOE_OF_PRESENT (its owner alone) or SMOE_OF_FORMER (those before).  None: the
    id has no owner, or got another one just now.
    """
    out = ffi.new("smoe_tally *")
    code = lib.smoe_get_tally(ring, participant, of, out)
    if code == -errno.ENOENT:
        return None
    check_plain(code, f"tally of id {participant}")
    return Tally(
        dict(zip(_NAMES, out.counters, strict=False)),
        {phase: dict(zip(_PHASED, out.phases[i], strict=False)) for i, phase in enumerate(PHASES)},
        {phase: list(out.waits[i])[: lib.SMOE_BUCKETS] for i, phase in enumerate(PHASES)},
        list(out.reads)[: lib.SMOE_BUCKETS],
    )


def counters(ring: Any, participant: int) -> dict[str, int]:
    """All counters of an id, or (-1) the sums."""
    got = tally(ring, participant)
    assert got is not None  # as it may only be of one owner's
    return got.counters


def former(ring: Any) -> Tally:
    """What clients counted that have left or died, all together."""
    return total([_former_of(ring, participant) for participant in CLIENT_IDS])


def _former_of(ring: Any, participant: int) -> Tally:
    while (got := tally(ring, participant, lib.SMOE_OF_FORMER)) is None:
        pass  # somebody came or went under the look
    return got


def total(tallies: Sequence[Tally]) -> Tally:
    """Their sum."""
    return Tally(
        {name: sum(t.counters[name] for t in tallies) for name in _NAMES},
        {phase: {k: sum(t.phases[phase][k] for t in tallies) for k in _PHASED} for phase in PHASES},
        {phase: _sums([t.waits[phase] for t in tallies]) for phase in PHASES},
        _sums([t.reads for t in tallies]),
    )


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip([0] * lib.SMOE_BUCKETS, *rows, strict=True)]


# --- figures ---------------------------------------------------------------------------------------------


def figures(t: Tally) -> dict[str, Any]:
    """`counters`; `demand`: all demands; `phases`: those of each phase in which there were any."""
    by_phase = {phase: demand(t.phases[phase], t.waits[phase]) for phase in PHASES}
    return {
        "counters": t.counters,
        "demand": demand(t.counters, _sums(list(t.waits.values()))),
        "phases": {phase: d for phase, d in by_phase.items() if d["demanded"] or d["wait"]["count"]},
    }


def demand(counts: dict[str, int], waits: Sequence[int]) -> dict[str, Any]:
    """Experts that were `demanded`, how many of each kind, their `coverage` (None: none was demanded), and
    the `wait` for those that were not there."""
    demanded = sum(counts[kind] for kind in KINDS)
    return {
        "demanded": demanded,
        **{kind: counts[kind] for kind in KINDS},
        "coverage": counts["hits"] / demanded if demanded else None,
        "wait": latency(waits, counts["wait_ns"]),
    }


def latency(buckets: Sequence[int], sum_ns: int) -> dict[str, Any]:
    """A histogram: `count`, `sum_s`, quantiles, and the `buckets` themselves."""
    return {
        "count": sum(buckets),
        "sum_s": sum_ns / 1e9,
        **{f"p{q}_s": quantile(buckets, q / 100) for q in (50, 90, 99)},
        "buckets": list(buckets),
    }


def quantile(buckets: Sequence[int], q: float) -> float | None:
    """Seconds that a share `q` (0 to 1) took at most, as if each bucket were evenly filled; of the last one,
    which has no upper bound, its lower one.  None: there are none."""
    wanted = q * sum(buckets)
    if not wanted:
        return None
    before, lower = 0, 0.0
    for n, upper in zip(buckets, BOUNDS_S, strict=False):
        if n and before + n >= wanted:
            return lower + (upper - lower) * (wanted - before) / n
        before, lower = before + n, upper
    return lower
