"""The pool of children with a clock and children of the test's own: restarts, back-off, the crash loop."""

from __future__ import annotations

import itertools
import resource
import signal
from typing import Any

import pytest

from smoe_mp.errors import SmoeError
from smoe_mp.pool import LOOP_DEATHS, LOOP_S, PAUSE_MAX_S, RETRY_S, Pool
from smoe_mp.process import Child, Loop, WatchPipe


class FakeChild:
    """A child that ends when the test says so."""

    def __init__(self, number: int) -> None:
        self.number, self.exited, self.closed = number, False, False
        self.signals: list[signal.Signals] = []

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def close(self) -> None:
        self.closed = True

    def epitaph(self) -> str:
        return f"child {self.number} died"


class Bench:
    """A pool, its clock and all children that it ever started."""

    def __init__(self, target: int, numbers: range = range(127)) -> None:
        self.now = 1000.0
        self.started: list[FakeChild] = []
        self.epitaphs: list[str] = []
        self.taken: set[int] = set()
        self.fault: SmoeError | None = None
        self.pool = Pool(
            numbers,
            start=self._start,
            usable=lambda number: number not in self.taken,
            on_death=self.epitaphs.append,
            clock=lambda: self.now,
        )
        self.pool.set_target(target)
        self.pool.tick()

    def _start(self, number: int) -> Any:
        if self.fault:
            raise self.fault
        self.started.append(FakeChild(number))
        return self.started[-1]

    @property
    def numbers(self) -> list[int]:
        return sorted(self.pool.children)

    def kill(self, number: int) -> None:
        child: Any = self.pool.children[number]
        child.exited = True

    def kill_next(self) -> None:
        """Wait until all are there, and kill the first."""
        self.run_until_full()
        self.kill(self.numbers[0])
        self.pool.tick()

    def wait(self, seconds: float) -> None:
        """Let time pass as the supervisor does: a tick whenever one is due."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + max(self.pool.tick(), 0.001))
        self.pool.tick()

    def run_until_full(self) -> None:
        for _ in range(1000):
            due = self.pool.tick()
            if len(self.pool.children) == self.pool.target:
                return
            self.now += max(due, 0.001)
        raise AssertionError("never full")

    def loop(self) -> None:
        """Into the error state."""
        while not self.pool.failing:
            self.kill_next()


def test_as_many_as_wanted_by_the_lowest_numbers() -> None:
    bench = Bench(3)
    assert bench.numbers == [0, 1, 2]
    assert (bench.pool.state, bench.pool.alive, bench.pool.deaths) == ("ok", 3, 0)
    assert bench.pool.tick() > 0
    assert len(bench.started) == 3


def test_the_first_death_is_made_good_at_once() -> None:
    bench = Bench(2)
    bench.kill(1)
    bench.pool.tick()
    assert bench.numbers == [0, 1]
    assert bench.epitaphs == ["child 1 died"]
    assert bench.started[1].closed
    assert bench.pool.state == "ok"


def test_the_next_ones_with_a_growing_pause() -> None:
    bench = Bench(1)
    pauses = []
    for _ in range(LOOP_DEATHS - 1):
        bench.kill(0)
        bench.pool.tick()
        before = bench.now
        bench.run_until_full()
        pauses.append(bench.now - before)
    assert pauses[0] == 0
    assert all(a < b for a, b in itertools.pairwise(pauses)), pauses
    assert not bench.pool.failing


def test_the_pause_is_bounded_and_forgotten() -> None:
    bench = Bench(1)
    for _ in range(40):  # too slow to be a crash loop
        bench.kill_next()
        before = bench.now
        bench.run_until_full()
        assert bench.now - before <= PAUSE_MAX_S + 0.01
        bench.wait(2.5)
    assert not bench.pool.failing
    bench.wait(61)
    before = bench.now
    bench.kill_next()
    bench.run_until_full()
    assert bench.now == before


def test_five_deaths_in_ten_seconds_are_an_error_state_not_a_busy_loop() -> None:
    bench = Bench(2)
    bench.loop()
    assert bench.pool.deaths == LOOP_DEATHS
    assert bench.pool.state == "failing"
    started, ticks, end = len(bench.started), 0, bench.now + RETRY_S - 0.1
    while bench.now < end:
        bench.now += bench.pool.tick()
        ticks += 1
    assert len(bench.started) <= started + 1, "only the one that was due when the retry came"
    assert ticks <= RETRY_S / 5, "the supervisor is not woken for nothing"


def test_four_deaths_or_slow_ones_are_not() -> None:
    bench = Bench(1)
    for _ in range(LOOP_DEATHS - 1):
        bench.kill_next()
    assert not bench.pool.failing
    bench.wait(LOOP_S)
    bench.kill_next()
    assert not bench.pool.failing


def test_one_child_is_tried_and_all_come_back_once_it_has_lived() -> None:
    bench = Bench(4)
    bench.loop()
    for number in bench.numbers:
        bench.kill(number)
    bench.pool.tick()
    assert (bench.pool.alive, bench.pool.state) == (0, "failing")
    bench.wait(RETRY_S - 0.5)
    assert bench.pool.alive == 0
    bench.wait(1)
    assert bench.pool.alive == 1
    bench.wait(LOOP_S - 1)
    assert (bench.pool.alive, bench.pool.state) == (1, "failing")
    bench.wait(1)
    assert (bench.pool.alive, bench.pool.state) == (4, "ok")
    assert bench.numbers == [0, 1, 2, 3]


def test_a_trial_that_dies_is_the_only_one_until_the_next_retry() -> None:
    bench = Bench(3)
    bench.loop()
    for number in bench.numbers:
        bench.kill(number)
    bench.pool.tick()
    for _ in range(5):
        before = len(bench.started)
        bench.wait(RETRY_S + 0.1)
        assert len(bench.started) == before + 1
        bench.kill(bench.numbers[0])
        bench.pool.tick()
        assert bench.pool.failing


def test_another_s_death_while_a_trial_lives_begins_the_wait_anew() -> None:
    bench = Bench(2)
    bench.loop()
    bench.wait(RETRY_S + 0.1)
    assert bench.pool.alive == 2
    bench.kill(1)
    bench.pool.tick()
    bench.wait(LOOP_S + 1)
    assert (bench.pool.alive, bench.pool.failing) == (1, True)
    bench.wait(RETRY_S)
    bench.wait(LOOP_S)
    assert (bench.pool.alive, bench.pool.state) == (2, "ok")


def test_the_error_state_ends_when_fewer_are_wanted_and_those_live() -> None:
    """No trial is started then, so the error state would never have ended."""
    bench = Bench(3)
    bench.loop()
    assert bench.pool.alive == 2
    bench.pool.set_target(2)
    bench.pool.tick()
    assert bench.pool.failing
    bench.wait(LOOP_S + 0.1)
    assert (bench.pool.state, bench.pool.alive) == ("ok", 2)


def test_once_the_cause_is_gone_all_are_started_and_their_deaths_forgotten() -> None:
    bench = Bench(3)
    bench.loop()
    for number in bench.numbers:
        bench.kill(number)
    bench.pool.tick()
    assert (bench.pool.alive, bench.pool.state) == (0, "failing")
    bench.pool.retry()
    bench.pool.tick()
    assert (bench.pool.alive, bench.pool.state) == (3, "ok")
    bench.kill(1)
    bench.pool.tick()
    assert (bench.pool.alive, bench.pool.state) == (3, "ok"), "made good at once, as a first death is"


def test_a_new_number_of_workers_is_tried_at_once() -> None:
    bench = Bench(1)
    bench.loop()
    bench.pool.set_target(1)
    bench.pool.tick()
    assert bench.pool.alive == 1
    bench.wait(LOOP_S + 0.1)
    assert bench.pool.state == "ok"


def test_more_and_fewer() -> None:
    bench = Bench(2)
    bench.pool.set_target(6)
    bench.pool.tick()
    assert bench.numbers == [0, 1, 2, 3, 4, 5]
    bench.pool.set_target(1)
    assert bench.numbers == [0]
    ending = bench.started[1:]
    assert all(child.signals == [signal.SIGTERM] for child in ending)
    assert bench.pool.alive == 6
    assert len(bench.pool.all) == 6
    for child in ending:
        child.exited = True
    bench.pool.tick()
    assert (bench.pool.alive, bench.pool.deaths, bench.epitaphs) == (1, 0, [])
    assert all(child.closed for child in ending)


def test_who_was_let_end_is_told_to_where_others_are_wanted_again() -> None:
    """A drained worker in a slow read sees the drain only after it, and by then the ring may serve again."""
    bench = Bench(2)
    bench.pool.let_end()
    first, second = bench.started
    assert (first.signals, second.signals) == ([], [])
    second.exited = True
    bench.pool.tick()
    bench.taken = {0}
    bench.pool.set_target(2)
    bench.pool.tick()
    assert first.signals == [signal.SIGTERM]
    assert (bench.numbers, bench.pool.alive) == ([1, 2], 3)
    first.exited = True
    bench.pool.tick()
    assert (bench.pool.alive, bench.epitaphs) == (2, [])


def test_a_number_that_is_taken_is_not_used() -> None:
    bench = Bench(0)
    bench.taken = {0, 2}
    bench.pool.set_target(3)
    bench.pool.tick()
    assert bench.numbers == [1, 3, 4]


def test_numbers_that_come_free_are_looked_at_soon() -> None:
    bench = Bench(0, range(2))
    bench.taken = {0, 1}
    bench.pool.set_target(2)
    assert 0 < bench.pool.tick() < 1
    assert (bench.numbers, bench.pool.state) == ([], "restarting")
    bench.taken = {1}
    bench.pool.tick()
    bench.taken = set()
    bench.pool.tick()
    assert bench.numbers == [0, 1]


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_child_that_cannot_be_started_counts_as_a_death(wanted: int) -> None:
    """A machine without a process to spare for a moment must not end the system."""
    bench = Bench(wanted)
    bench.fault = SmoeError("cannot start it: Resource temporarily unavailable")
    bench.kill(0)
    bench.wait(LOOP_S)
    assert bench.pool.failing
    assert bench.epitaphs[1:] == [str(bench.fault)] * (LOOP_DEATHS - 1)
    bench.fault = None
    bench.wait(RETRY_S + LOOP_S)
    assert (bench.pool.state, bench.pool.alive) == ("ok", wanted)


def test_a_process_without_descriptors_to_spare_starts_nobody_and_says_so() -> None:
    watch, loop = WatchPipe(), Loop()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(SmoeError, match=r"worker 3: cannot start /bin/true: .*[Tt]oo many open files"):
            Child("worker 3", ["/bin/true"], watch, loop, print)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        watch.close()
