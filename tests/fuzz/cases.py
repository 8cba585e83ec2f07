"""How many cases a fuzz test tries, a number of them or for some seconds, and with which seed it begins."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))


def first_seed(usual: int) -> int:
    """FUZZ_SEED, or `usual`; by time, where there is no other end, one that was not tried before."""
    fresh = int.from_bytes(os.urandom(4), "little") if SECONDS else usual
    return int(os.environ.get("FUZZ_SEED", str(fresh)))


def cases(runs: int, first: int = 0) -> Iterator[int]:
    """Numbers of cases from `first` on: `runs` of them, or with FUZZ_SECONDS for so many seconds."""
    until = time.monotonic() + SECONDS
    for number in itertools.count(first):
        if time.monotonic() >= until if SECONDS else number >= first + runs:
            break
        yield number
    if SECONDS:
        print(f"{number - first} cases from {first} on")
