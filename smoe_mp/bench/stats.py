"""The few statistics that the benchmarks use.

A benchmark takes its sides in turn, round by round; a side's value in a round is one number (a median of
many where the thing is short).  Over the rounds:

- `summarize`: median and quartiles, and the 95% interval of the median from order statistics, which asks
  nothing of the distribution.  Below 6 rounds there is none, and the range stands for it.
- `paired_ratio`: the mean of the rounds' log-ratios, with Student's t interval, so that what slows a
  whole round (a neighbour, a clock) falls out.
- `verdict`: a goal is met or missed only if the whole interval says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["met", "missed", "open"]

# Student's t, 97.5%, 1 to 30 degrees of freedom.
_T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z975 = 1.959964


def t975(degrees: int) -> float:
    """The 97.5% point of Student's t with that many degrees of freedom."""
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: an interval needs two values")
    if degrees <= len(_T975):
        return _T975[degrees - 1]
    z = _Z975  # Cornish-Fisher; right to four digits from here on
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def quantile(values: Sequence[float], q: float) -> float:
    """The `q` quantile, linear between neighbours."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics, alike on both sides, between which the median lies with at
    least 95%; the range where there are too few values for one."""
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0  # below: probability that at most k - 1 values lie under the median
    while k < (n - 1) // 2:
        below += math.comb(n, k) / 2**n
        if below > 0.025:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a side's rounds: median, quartiles, and the 95% interval of the median."""

    n: int
    median: float
    q1: float
    q3: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    low, high = median_interval(values)
    return Summary(len(values), median(values), quantile(values, 0.25), quantile(values, 0.75), low, high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A paired ratio with its 95% interval."""

    n: int
    ratio: float
    low: float
    high: float


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """`above` over `below`, round by round.  With one round the interval is all there is: 0 to infinity."""
    if len(above) != len(below) or not above:
        raise ValueError(f"{len(above)} and {len(below)} rounds are no pairs")
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    n, mean = len(logs), math.fsum(logs) / len(logs)
    if n == 1:
        return Ratio(1, math.exp(mean), 0.0, math.inf)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
    half = t975(n - 1) * deviation / math.sqrt(n)
    return Ratio(n, math.exp(mean), math.exp(mean - half), math.exp(mean + half))


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound: "at least" or "at most" `limit`."""

    kind: Literal["at least", "at most"]
    limit: float


def verdict(goal: Goal, low: float, high: float) -> Verdict:
    """Whether an interval meets a goal; "open" where it holds the limit inside."""
    good, bad = (low, high) if goal.kind == "at least" else (high, low)
    sign = 1 if goal.kind == "at least" else -1
    if sign * (good - goal.limit) >= 0:
        return "met"
    return "missed" if sign * (bad - goal.limit) < 0 else "open"
