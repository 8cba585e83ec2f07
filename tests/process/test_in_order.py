"""`Ring.in_order`: experts in the order asked for, in waves, however their reads end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import Served, StampedSource, serve

import smoe_mp
from smoe_mp.errors import IdError, RingClosed


@pytest.fixture
def served(source: StampedSource) -> Iterator[Served]:
    with serve(source, slots=4, workers=2) as served:
        yield served


def bytes_of(expert: smoe_mp.Expert) -> bytes:
    return b"".join(part.tobytes() for part in expert.parts)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 3], [5], []])
def test_the_order_is_the_one_asked_for(served: Served, source: StampedSource, order: list[int]) -> None:
    with served.attach() as ring:
        seen = [(x.expert, bytes_of(x)) for x in ring.in_order(1, order)]
    assert seen == [(e, b"".join(source.expected(source.index(1, e)))) for e in order]
    served.assert_quiet()


def test_what_is_there_waits_for_what_is_asked_for_before_it(served: Served) -> None:
    with served.attach() as ring:
        ring.fetch(0, [6]).release()
        served.workers[0].stop()
        served.workers[1].stop()
        experts = ring.in_order(0, [2, 6], timeout=0.05)
        with pytest.raises(TimeoutError, match=r"expert 2 of layer 0 is queued"):
            next(experts)
        assert ring.resident(0, 6)
        for worker in served.workers:
            worker.go_on()
        assert [x.expert for x in ring.in_order(0, [2, 6])] == [2, 6]
    served.assert_quiet()


def test_at_most_half_the_ring_is_held(served: Served) -> None:
    with served.attach() as ring:
        reserved = [served.census()["reserved"] for _ in ring.in_order(0, range(8))]
    assert max(reserved) == ring.slots // 2
    served.assert_quiet()


def test_leaving_early_gives_everything_back(served: Served) -> None:
    with served.attach() as ring:
        experts = ring.in_order(0, range(8))
        next(experts)
        experts.close()
        with pytest.raises(IdError, match=r"named twice"):
            next(ring.in_order(0, [1, 1]))
    with pytest.raises(RingClosed):
        ring.in_order(0, [1])
    served.assert_quiet()
