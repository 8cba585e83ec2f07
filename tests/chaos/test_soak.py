"""What a soak takes for growth, and what not; the soak itself is `make soak`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import soak

RING = 1 << 20


def lived(anonymous: list[int], role: str = "supervisor") -> soak.Lived:
    """A process with a sample a second; one in five sees a block that is given back at once."""
    samples = [
        soak.Sample(float(at), own + (at % 5 == 0) * 5 * soak.MIB, own + 2 * soak.MIB, 0, 9, 1, 99)
        for at, own in enumerate(anonymous)
    ]
    return soak.Lived(role, 4711, samples)


def test_what_grows_to_its_working_size_and_stays_there_is_no_failure() -> None:
    start = [10_000 * min(at, 20) for at in range(100)]
    grown = soak.growths(lived(start), RING)
    assert [(g.measure, g.begin, g.end, g.failure) for g in grown] == [
        ("anonymous", 200_000, 200_000, ""),
        ("resident", 200_000 + 2 * soak.MIB, 200_000 + 2 * soak.MIB, ""),
    ]


@pytest.mark.parametrize("role", ["supervisor", "prewarm", "metrics", "client", "worker"])
def test_what_grows_all_the_time_is_one_at_the_role_s_bound(role: str) -> None:
    """From the middle of the first quarter to that of the last: 60 samples of 100."""
    bound = soak.GROWTH[role]
    for step, fails in ((bound // 60, False), (bound // 50, True)):
        anonymous, _ = soak.growths(lived([step * at for at in range(100)], role), RING)
        assert bool(anonymous.failure) == fails, anonymous
    for part in (f"{role} (pid 4711)", "anonymous", str(anonymous.begin), str(anonymous.end), str(bound)):
        assert part in anonymous.failure


def test_one_that_lived_for_a_moment_is_not_compared_with_itself() -> None:
    assert soak.growths(lived([0, 10 * soak.MIB] * 10), RING) == []


def look(**more: Any) -> soak.Look:
    same = {"supervisor": [27], "worker": [6, 6]}
    first = soak.Look(10.0, same, same, same, 10**8, 2, 4 << 20, ["a", "b"], 0)
    return dataclasses.replace(first, **more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"descriptors": {"supervisor": [28], "worker": [6, 6]}}, "supervisor: descriptors were [27]"),
        ({"threads": {"supervisor": [27], "worker": [6, 7]}}, "worker: threads were [6, 6]"),
        ({"threads": {"supervisor": [27]}}, "worker: threads were [6, 6]"),
        ({"mappings": {"supervisor": [52], "worker": [6, 6]}}, "supervisor: mappings were [27]"),
        ({"proportional_bytes": 2 * 10**8}, "system: bytes of proportional memory were 100000000"),
        ({"segments": 3}, "system: segments were 2"),
        ({"segment_bytes": 5 << 20}, "system: segment_bytes were 4194304"),
        ({"files": ["a", "c"]}, "system: files were ['a', 'b']"),
        ({"zombies": 1}, "system: zombies were 0"),
    ],
)
def test_a_count_that_is_another_is_said(more: dict[str, Any], said: str) -> None:
    (sentence,) = look(at_s=99.0, **more).differences(look())
    assert sentence.startswith(said)
    assert "at 10 s and are" in sentence
    assert sentence.endswith("at 99 s")


def test_a_few_mappings_more_are_let_be() -> None:
    later = look(mappings={"supervisor": [27 + soak.MAPPINGS], "worker": [6, 6]})
    assert [*later.differences(look())] == []


def test_a_latency_lies_in_its_bucket() -> None:
    for ns in (1, 300, 20_000, 441_000, 10**9, 10**12):
        counts = np.zeros(216, np.int64)
        counts[soak.bucket(ns)] = 1
        end_us = soak.quantile_us(counts, 0.99)
        assert ns >= 10**12 or ns / 1000 <= end_us <= max(ns / 1000 * 1.1, 0.257)
