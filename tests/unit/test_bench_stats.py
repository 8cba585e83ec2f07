"""The statistics of the benchmarks, against known values and by their own properties."""

from __future__ import annotations

import io
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from smoe_mp.bench import Figure, Report, Share
from smoe_mp.bench.stats import (
    Goal,
    median_interval,
    paired_ratio,
    quantile,
    summarize,
    t975,
    verdict,
)

VALUES = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=60)


@pytest.mark.parametrize(
    ("degrees", "point"),
    [(1, 12.7062), (2, 4.3027), (9, 2.2622), (30, 2.0423), (31, 2.0395), (40, 2.0211), (120, 1.9799)],
)
def test_student_t(degrees: int, point: float) -> None:
    assert t975(degrees) == pytest.approx(point, abs=1e-4)


def test_student_t_needs_a_degree_of_freedom() -> None:
    with pytest.raises(ValueError, match="needs two values"):
        t975(0)


def test_quantiles_lie_between_neighbours() -> None:
    assert [quantile([4, 1, 3, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.75, 2.5, 4]
    assert quantile([7], 0.25) == 7


@pytest.mark.parametrize(
    ("n", "ranks"),
    # Tables of the sign test's interval: the k-th smallest and the k-th largest.
    [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15))],
)
def test_the_medians_interval(n: int, ranks: tuple[int, int]) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert median_interval(values) == ranks


@given(VALUES)
def test_a_summary_is_ordered(values: list[float]) -> None:
    s = summarize(values)
    assert min(values) <= s.low <= s.median <= s.high <= max(values)
    assert s.q1 <= s.median <= s.q3
    assert s.n == len(values)


def test_the_paired_ratio_by_hand() -> None:
    # Log-ratios ln 2 and ln 8: mean ln 4, standard error ln 2.
    r = paired_ratio([2.0, 8.0], [1.0, 1.0])
    half = 12.7062 * math.log(2)
    assert r.ratio == pytest.approx(4)
    assert math.log(r.high) - math.log(r.ratio) == pytest.approx(half)
    assert math.log(r.ratio) - math.log(r.low) == pytest.approx(half)


@given(VALUES, st.floats(0.01, 100))
def test_what_slows_a_whole_round_falls_out(slowness: list[float], factor: float) -> None:
    r = paired_ratio([factor * x for x in slowness], slowness)
    assert r.ratio == pytest.approx(factor)
    if len(slowness) > 1:
        assert r.low == pytest.approx(factor)
        assert r.high == pytest.approx(factor)


@given(VALUES, VALUES)
def test_a_ratio_turned_round_is_its_inverse(a: list[float], b: list[float]) -> None:
    n = min(len(a), len(b))
    one, other = paired_ratio(a[:n], b[:n]), paired_ratio(b[:n], a[:n])
    assert one.ratio == pytest.approx(1 / other.ratio)
    if n > 2 and other.low > 1e-100:
        assert one.high == pytest.approx(1 / other.low)


def test_one_round_says_nothing() -> None:
    r = paired_ratio([3.0], [1.0])
    assert (r.ratio, r.low, r.high) == (pytest.approx(3), 0, math.inf)
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("kind", "low", "high", "found"),
    [
        ("at least", 0.96, 0.99, "met"),
        ("at least", 0.95, 0.99, "met"),
        ("at least", 0.90, 0.99, "open"),
        ("at least", 0.90, 0.94, "missed"),
        ("at most", 0.90, 0.94, "met"),
        ("at most", 0.90, 0.99, "open"),
        ("at most", 0.96, 0.99, "missed"),
    ],
)
def test_a_goal_is_met_only_by_the_whole_interval(kind: str, low: float, high: float, found: str) -> None:
    assert verdict(Goal(kind, 0.95), low, high) == found  # type: ignore[arg-type]


def report() -> Report:
    fast, slow = [1.0, 1.1, 0.9, 1.0, 1.0, 1.05], [4.0, 4.1, 3.9, 4.0, 4.0, 4.05]
    return Report(
        "made up",
        "nothing [at all]",
        {"rounds": 6},
        [Figure("fast", "ns", fast, Goal("at most", 2)), Figure("slow", "ns", slow)],
        [Share("slow / fast", slow, fast, Goal("at most", 5)), Share("plain", slow, slow)],
        ["a note"],
    )


def test_a_report_as_data() -> None:
    plain = json.loads(json.dumps(report().plain()))
    assert [f["name"] for f in plain["figures"]] == ["fast", "slow"]
    assert plain["figures"][0]["verdict"] == "met"
    assert plain["figures"][0]["goal"] == {"kind": "at most", "limit": 2}
    assert plain["figures"][1]["goal"] is None
    assert plain["ratios"][0]["low"] < plain["ratios"][0]["ratio"] < plain["ratios"][0]["high"]
    assert plain["ratios"][1]["verdict"] is None
    assert plain["verdict"] == "met"
    assert plain["machine"]["cores"] >= 1


def test_the_worst_goal_is_the_reports() -> None:
    made = report()
    assert made.verdict == "met"
    made.shares.append(Share("wide", [1.0, 9.0], [1.0, 1.0], Goal("at most", 2)))
    assert made.verdict == "open"
    made.figures.append(Figure("bad", "ns", [9.0, 9.0], Goal("at most", 2)))
    assert made.verdict == "missed"
    assert Report("empty", "", {}).verdict is None


def test_a_report_drawn() -> None:
    out = io.StringIO()
    report().draw(Console(file=out, width=100, color_system=None))
    text = out.getvalue()
    for part in ("bench made up: nothing [at all]", "at most 2", "met", "slow / fast", "- a note"):
        assert part in text
