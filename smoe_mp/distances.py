"""Stack distances: one pass over a trace gives the hit rate of a cache of every size (Mattson, Gecsei, Slutz
and Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).

A replacement algorithm that is a stack algorithm has, at any moment, the contents of a cache of n entries
among those of n + 1; so there is one list of keys, the stack, of which each cache holds the first as many as
it has room for.  The depth at which a reference finds its key is its distance, and it is a hit in all caches
that are larger than that.

    lru_distances    least recently used: the stack is the order of use, and the distance how many other keys
                     were referenced since
    opt_distances    Belady's OPT, which knows the future: of two keys the one that is referenced again later
                     goes deeper.  A referenced key goes to the top: it is loaded, nothing passes by the cache
    hit_rates        the rates that follow from distances
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["hit_rates", "lru_distances", "opt_distances"]

Distances = npt.NDArray[np.int64]


def lru_distances(keys: Iterable[int]) -> Distances:
    """Of each reference the distance, -1 where it is the key's first.  `keys`: in order of reference.

    By a Fenwick tree over the places of each key's latest reference.
    """
    order = list(keys)
    tree, latest = [0] * (len(order) + 1), dict[int, int]()
    out = np.empty(len(order), np.int64)
    for at, key in enumerate(order, 1):
        before = latest.get(key)
        out[at - 1] = -1 if before is None else len(latest) - _sum(tree, before)
        if before is not None:
            _add(tree, before, -1)
        _add(tree, at, 1)
        latest[key] = at
    return out


def _add(tree: list[int], at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at


def _sum(tree: list[int], at: int) -> int:
    total = 0
    while at:
        total += tree[at]
        at &= at - 1
    return total


def opt_distances(keys: Iterable[int]) -> Distances:
    """Of each reference the distance, -1 where it is the key's first.  `keys`: in order of reference.

    The stack is kept as each key's next reference, which names the key as well: the one that is referenced
    now is the one whose next reference is now.  It goes to the top, and what was at the top goes down: at
    each place the one of two that is needed sooner stays, and the other is carried on, as far as the place
    that has come free.  So what changes places are the running maxima of next references.
    """
    upcoming = _next_references(list(keys))
    keys_there_are = np.count_nonzero(upcoming == len(upcoming))  # each has one last reference
    stack = np.empty(keys_there_are, np.int64)
    used = 0
    out = np.empty(len(upcoming), np.int64)
    for now, following in enumerate(upcoming.tolist()):
        # No other key's next reference is as soon as this one's: it is the smallest, if the key is there.
        depth = int(stack[:used].argmin()) if used else 0
        there = used > 0 and stack[depth] == now
        out[now] = depth if there else -1
        if not there:
            depth, used = used, used + 1
        if depth:
            above = stack[:depth]
            largest = np.maximum.accumulate(above)
            carried = np.flatnonzero(largest[1:] > largest[:-1]) + 1
            values = above[carried]
            stack[carried[1:]] = values[:-1]
            stack[depth] = largest[-1]
            if len(carried):
                stack[carried[0]] = stack[0]
        stack[0] = following
    return out


def _next_references(order: Sequence[int]) -> Distances:
    """Of each reference the place of its key's next one; of the last of a key one behind the end."""
    out = np.full(len(order), len(order), np.int64)
    latest: dict[int, int] = {}
    for at, key in enumerate(order):
        if (before := latest.get(key)) is not None:
            out[before] = at
        latest[key] = at
    return out


def hit_rates(distances: npt.NDArray[Any], sizes: Sequence[int]) -> list[float]:
    """The share of references with these distances, 0 to 1, that caches of these sizes (in keys) have."""
    if not len(distances):
        return [0.0] * len(sizes)
    hits = np.cumsum(np.bincount(distances[distances >= 0], minlength=1))
    at = np.minimum(np.asarray(sizes, np.int64), len(hits))
    return [float(n) / len(distances) for n in np.where(at > 0, hits[at - 1], 0)]
