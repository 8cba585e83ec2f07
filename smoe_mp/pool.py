"""Children that are kept alive: the worker processes, and the prewarm process.

A child that dies is started again: the first time at once, then with a growing pause.  Five deaths within
ten seconds are an error state that status shows, not a busy loop: nothing is started for a while, then one
child to try; once that has lived for ten seconds all is well again, or at once where somebody knows that the
cause is gone (`retry`).  The number of workers may change at any
time; surplus ones are told to end and finish the read they are in.

A worker's number is its id in the ring.  One whose lock is held, by a worker that a dead supervisor left
and that has not ended yet, is not used.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from smoe_mp.errors import SmoeError
from smoe_mp.process import Child

LOOP_DEATHS = 5  # this many deaths
LOOP_S = 10.0  # within this many seconds are a crash loop
RETRY_S = 30.0  # after which one child is tried again
PAUSE_S, PAUSE_MAX_S = 0.1, 5.0
MEMORY_S = 60.0  # deaths older than this no longer lengthen the pause


class Start(Protocol):
    """Starts the child with the given number."""

    def __call__(self, number: int) -> Child: ...


class Pool:
    """`target` children of one kind, kept alive.

    `numbers`: those that children may have; `usable(number)` says whether one may be used now.
    `on_death(epitaph)` is called for each child that ended without being told, or could not be started.
    `clock` returns seconds.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        *,
        start: Start,
        usable: Callable[[int], bool],
        on_death: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = 0
        self.children: dict[int, Child] = {}
        self.failing = False
        self.deaths = 0
        self._ending: list[Child] = []
        self._recent: deque[float] = deque(maxlen=64)
        self._due = 0.0
        self._trial_since: float | None = None
        self._start, self._usable, self._on_death = start, usable, on_death
        self._numbers, self._clock = tuple(numbers), clock

    @property
    def alive(self) -> int:
        """Children that live, those that were told to end included."""
        return sum(not c.exited for c in (*self.children.values(), *self._ending))

    @property
    def all(self) -> list[Child]:
        return [*self.children.values(), *self._ending]

    @property
    def state(self) -> str:
        """ "ok", "restarting" (some are missing) or "failing" (they keep dying)."""
        if self.failing:
            return "failing"
        return "ok" if len(self.children) >= self.target else "restarting"

    def set_target(self, count: int) -> None:
        """Have `count` children from now on; surplus ones are told to end, the highest numbers first."""
        self.target = count
        self._due = min(self._due, self._clock())
        # Whoever was let end and has not yet may by now have reason to go on, beside those that are wanted.
        for child in self._ending:
            child.send(signal.SIGTERM)
        for number in sorted(self.children)[count:]:
            child = self.children.pop(number)
            child.send(signal.SIGTERM)
            self._ending.append(child)

    def retry(self) -> None:
        """What the last ones died of is gone: forget their deaths, and start all that are missing at once."""
        self.failing, self._trial_since = False, None
        self._recent.clear()
        self._due = self._clock()

    def let_end(self) -> None:
        """They end by themselves, as workers do when the ring stops, and that is no death."""
        self.target = 0
        self._ending += self.children.values()
        self.children.clear()

    def tick(self) -> float:
        """Reap the dead, start what is due; returns after how many seconds to come again at the latest."""
        now = self._clock()
        self._reap(now)
        missing = self.target - len(self.children)
        if self.failing and self._trial_since is None and missing <= 0:
            self._trial_since = now  # as many live as are wanted now: they are the trial
        if self.failing and self._trial_since is not None and now - self._trial_since >= LOOP_S:
            self.failing, self._trial_since = False, None
        if missing <= 0:
            return LOOP_S
        if now < self._due:
            return self._due - now
        if self.failing:
            missing = 1 if self._trial_since is None else 0
        for number in self._numbers:
            if missing <= 0:
                break
            if number not in self.children and self._usable(number):
                try:
                    self.children[number] = self._start(number)
                except SmoeError as error:  # no process to be had: as good as a death
                    self._lost(str(error), now)
                    return max(0.0, self._due - now)
                missing -= 1
                if self.failing:
                    self._trial_since = now
        return LOOP_S if missing <= 0 else PAUSE_S

    def _reap(self, now: float) -> None:
        for child in [c for c in self._ending if c.exited]:
            child.close()
            self._ending.remove(child)
        for number, child in list(self.children.items()):
            if child.exited:
                del self.children[number]
                child.close()
                self._lost(child.epitaph(), now)

    def _lost(self, epitaph: str, now: float) -> None:
        self.deaths += 1
        self._recent.append(now)
        recent = [t for t in self._recent if now - t < MEMORY_S]
        in_loop = [t for t in recent if now - t < LOOP_S]
        self._trial_since = None
        if self.failing or len(in_loop) >= LOOP_DEATHS:
            self.failing = True
            self._due = now + RETRY_S
        else:
            self._due = now + (0 if len(recent) == 1 else min(PAUSE_S * 2 ** (len(recent) - 2), PAUSE_MAX_S))
        self._on_death(epitaph)
