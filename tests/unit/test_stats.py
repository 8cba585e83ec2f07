"""stats.py: names and bounds held against C, and quantiles against numbers that were put into buckets."""

from __future__ import annotations

import math
import random

import pytest

from smoe_mp import stats
from smoe_mp._native import lib


def bucketed(lengths_s: list[float]) -> list[int]:
    buckets = [0] * lib.SMOE_BUCKETS
    for length in lengths_s:
        buckets[next((i for i, b in enumerate(stats.BOUNDS_S) if length <= b), -1)] += 1
    return buckets


def test_bounds_double_from_a_microsecond_to_about_a_minute() -> None:
    assert len(stats.BOUNDS_S) + 1 == lib.SMOE_BUCKETS
    assert stats.BOUNDS_S[0] == 1e-6
    assert all(b == 2 * a for a, b in zip(stats.BOUNDS_S, stats.BOUNDS_S[1:], strict=False))
    assert 64 < stats.BOUNDS_S[-1] < 70


@pytest.mark.parametrize("seed", range(20))
def test_a_quantile_is_in_the_bucket_of_the_number_itself(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted(math.exp(rng.uniform(-13, 3)) for _ in range(rng.randrange(1, 400)))
    buckets = bucketed(lengths)
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = lengths[max(0, math.ceil(q * len(lengths)) - 1)]
        found = stats.quantile(buckets, q)
        assert found is not None
        assert exact / 2 <= found <= exact * 2, (q, exact, found)


def test_quantiles_at_the_ends() -> None:
    assert stats.quantile([0] * lib.SMOE_BUCKETS, 0.5) is None
    longer = [0] * (lib.SMOE_BUCKETS - 1) + [3]
    assert stats.quantile(longer, 0.5) == stats.BOUNDS_S[-1]
    one = bucketed([3e-6])
    assert stats.quantile(one, 1.0) == 4e-6
    assert stats.quantile(one, 0.5) == 3e-6


def test_a_demand() -> None:
    counts = {"hits": 6, "joins": 1, "promoted": 2, "misses": 3, "wait_ns": 5_000_000}
    buckets = bucketed([0.002, 0.003])
    found = stats.demand(counts, buckets)
    assert (found["demanded"], found["coverage"]) == (12, 0.5)
    assert found["wait"]["count"] == 2
    assert found["wait"]["sum_s"] == 0.005
    assert found["wait"]["buckets"] == buckets
    assert stats.demand(dict.fromkeys(counts, 0), [0] * lib.SMOE_BUCKETS)["coverage"] is None
