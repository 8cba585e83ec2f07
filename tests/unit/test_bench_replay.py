"""What a replay goes through: steps out of a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smoe_mp.bench.decoder import Request, Seen, Spec, Step
from smoe_mp.bench.io import _ordinary
from smoe_mp.bench.lru import ExactLru
from smoe_mp.bench.replay import first_tokens, in_turns, lru_rate, steps_of, turned
from smoe_mp.trace import BUSY, CLAIM, DEMAND, GUESS, IDLE, TraceBuilder, read_trace


def two_turns() -> TraceBuilder:
    """A prompt of two rows and two tokens, and another turn; a second client in between."""
    b = TraceBuilder()
    b.add(BUSY, 0, 0, 0)
    for layer in (0, 1):
        for row in ([3, 1], [1, 2]):
            b.add(DEMAND, 0, layer, 0, experts=row)
    for chosen in ([4, 0], [5, 4]):
        b.add(DEMAND, 0, 0, 0, experts=chosen)
        b.add(DEMAND, 7, 0, 0, experts=[6, 7])
        b.add(GUESS, 0, 1, 0, experts=[7])
        b.add(DEMAND, 0, 1, 0, experts=chosen)
    b.add(IDLE, 0, 0, 0)
    b.add(BUSY, 0, 0, 0)
    for expert in (2, 6):
        b.add(CLAIM, 0, 1, 0, experts=[expert])
    return b


def test_rows_of_a_layer_are_one_request_and_layers_that_ascend_one_step() -> None:
    steps = steps_of(two_turns().build(layers=2, experts=8, top_k=2))
    assert steps == [
        Step(True, [Request(0, [1, 2, 3]), Request(1, [1, 2, 3])]),
        Step(False, [Request(0, [0, 4]), Request(1, [0, 4])]),
        Step(False, [Request(0, [4, 5]), Request(1, [4, 5])]),
        Step(False, [Request(1, [2, 6])]),
    ]
    assert first_tokens(steps, 0) == steps
    assert first_tokens(steps, 1) == steps[:2]
    assert first_tokens(steps, 9) == steps
    assert turned(steps, 0.5) == [*steps[2:], *steps[:2]]
    # Of 16 demands, those of expert 4 in the third step are there again, with 2 others in between.
    assert (lru_rate(steps, 8, 2), lru_rate(steps, 8, 3)) == (0, 2 / 16)


@pytest.mark.parametrize(
    ("missed", "took"),
    [
        ([False, False, False, False], 8),  # all computing
        ([True, False, False, False], 6 + 8),  # the first is awaited
        ([False, False, False, True], 6 + 2),  # all but the last are computed meanwhile
        ([True, False, False, True], 3 + 8),  # the second lands while they are
        ([True, True, True, True], 1.5 + 8),
    ],
)
def test_what_is_missed_is_awaited_in_its_turn(missed: list[bool], took: float) -> None:
    """6 to read, 8 to compute with four."""
    assert in_turns(8, 6, missed) == took


def test_of_one_layer_each_record_is_a_step() -> None:
    b = TraceBuilder()
    for chosen in ([2, 1], [1, 3], [1, 3]):
        b.add(DEMAND, 0, 0, 0, experts=chosen)
    assert steps_of(b.build(layers=1, experts=4, top_k=2)) == [
        Step(False, [Request(0, sorted(chosen))]) for chosen in ([2, 1], [1, 3], [1, 3])
    ]
    assert steps_of(TraceBuilder().build(layers=1, experts=4)) == []


def test_a_spec_comes_back_as_it_was() -> None:
    steps = steps_of(two_turns().build(layers=2, experts=8, top_k=2))
    spec = Spec("ring", "file", 4096, 3, 8, 2, 2, False, steps)
    plain = {**vars(spec), "steps": [{**vars(s), "requests": [vars(r) for r in s.requests]} for s in steps]}
    assert Spec.of(plain) == spec


def test_the_shared_trace_has_one_prompt(shared: Path) -> None:
    """28 rows of 48 layers, of the last only the last row; then 128 tokens."""
    steps = steps_of(read_trace(shared / "traces/qwen3-30b-a3b.route.csv.gz"))
    assert [step.prompt for step in steps] == [True] + 128 * [False]
    assert all(len(step.requests) == 48 for step in steps)
    assert all(len(r.experts) == 6 for step in steps[1:] for r in step.requests)
    assert len(steps[0].requests[-1].experts) == 6 < len(steps[0].requests[0].experts)


def test_what_is_seen_is_put_back_into_the_order_of_the_request() -> None:
    seen = Seen(3, [5, 1, 4], [True, False, False], [10, 30, 20])
    assert seen.in_order([1, 4, 5]) == Seen(3, [1, 4, 5], [False, False, True], [30, 20, 10])


def test_the_order_of_stamps_decides_what_goes_first() -> None:
    """Two of a request whose reads end in the other order: the one that ended first goes first."""
    for order, gone in (([0, 1], 0), ([1, 0], 1)):
        lru = ExactLru(2)
        assert lru.request([(0, 0), (0, 1)]) == [False, False]
        lru.stamped([(0, e) for e in order])
        assert lru.request([(0, 2)]) == [False]
        assert lru.request([(0, 1 - gone)]) == [True]


def test_scratch_floats_are_ordinary_numbers() -> None:
    raw = np.random.default_rng(1).bytes(1 << 16)
    for given in (raw, bytes(4096), b"\xff" * 4096):
        values = np.abs(np.frombuffer(_ordinary(given), np.float32))
        assert values.min() >= 2**-31
        assert values.max() < 2
    assert len(np.unique(np.frombuffer(_ordinary(raw), np.uint32))) > 16000
