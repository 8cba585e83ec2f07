"""The control plane's own client of the ring: demand, guesses and the busy flag that come over the socket.

A command over the socket does what the calls on shared memory do, and through them, so there is one meaning
of each.  The supervisor is the client; it never waits: a demand is looked at by turns (`Demand.poll`).  While
its read is under way an expert is held, so that nothing evicts it before the answer; then the hold ends.
At most a quarter of the ring is held so, and a list may be longer than the ring.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from smoe_mp.errors import Busy, ExpertReadError, ReadTimeout
from smoe_mp.ring import Batch, Ring, attach

LABEL = "control plane"
TURN_MOST = 256  # experts that one turn asks for: some hundred microseconds

Pair = tuple[int, int]


class Remote:
    """The client of the ring `name`; attached by the first command that needs it, for good.

    Raises what `smoe_mp.attach` raises, then.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._ring: Ring | None = None
        self._busy = contextlib.ExitStack()
        self._busy_until: float | None = None

    @property
    def ring(self) -> Ring:
        """The attached ring."""
        if self._ring is None:
            self._ring = attach(self._name, LABEL)
        return self._ring

    def demand(self, pairs: Iterable[Pair]) -> Demand:
        """Begin a demand.  Raises IdError for an expert that there is not."""
        return Demand(self.ring, pairs, self._clock)

    def speculate(self, pairs: Iterable[Pair]) -> int:
        """Guess; how many were queued.  Raises IdError as `demand` does, and guesses nothing then."""
        pairs = known(self.ring, pairs)
        return sum(self.ring.speculate(layer, [expert]) for layer, expert in pairs)

    def busy(self, lease_ms: int) -> None:
        """Raise the busy flag for `lease_ms` from now on; 0: lower it."""
        if lease_ms == 0:
            self._busy_until = None
            self._busy.close()
            return
        if self._busy_until is None:
            self._busy.enter_context(self.ring.busy())
        self._busy_until = self._clock() + lease_ms / 1000

    def lease_ms(self) -> int:
        """How long the busy flag stays up."""
        return 0 if self._busy_until is None else max(0, int((self._busy_until - self._clock()) * 1000))

    def tick(self) -> None:
        """End a lease that has run out."""
        if self._busy_until is not None and self._clock() >= self._busy_until:
            self.busy(0)

    def close(self) -> None:
        """Detach.  A second call does nothing."""
        if self._ring is not None:
            self.busy(0)
            self._ring.close()
            self._ring = None


def known(ring: Ring, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs, each once, in the order given.  Raises IdError for one that the ring has not."""
    once = list(dict.fromkeys((layer, expert) for layer, expert in pairs))
    for layer, expert in once:
        ring.resident(layer, expert)  # raises for an unknown one
    return once


class Demand:
    """A demand under way: see `smoe_mp.control.commands.Later`."""

    def __init__(self, ring: Ring, pairs: Iterable[Pair], clock: Callable[[], float]) -> None:
        self._ring, self._clock, self._began = ring, clock, clock()
        self._todo = deque(known(ring, pairs))
        self._flying: list[tuple[Pair, Batch]] = []
        self._window = max(1, ring.slots // 4)
        self._resident = self._hits = 0
        self._failed: list[dict[str, Any]] = []

    def poll(self) -> dict[str, Any] | None:
        """Go on as far as it goes without waiting; the result when all have landed or failed.

        Raises RingError where the ring serves no more.
        """
        try:
            self._land()
            self._ask()
        except BaseException:
            self.cancel()
            raise
        if self._todo or self._flying:
            return None
        return {
            "resident": self._resident,
            "hits": self._hits,
            "failed": self._failed,
            "took_ms": round((self._clock() - self._began) * 1000, 3),
        }

    def cancel(self) -> None:
        """Give up all holds."""
        for _, batch in self._flying:
            batch.release()
        self._flying.clear()
        self._todo.clear()

    def _land(self) -> None:
        for entry in list(self._flying):
            (layer, expert), batch = entry
            if not batch.landed:
                continue
            self._flying.remove(entry)
            try:
                batch.wait(0)
                self._resident += 1
            except (ExpertReadError, ReadTimeout) as error:
                self._fail(layer, expert, error)
            finally:
                batch.release()

    def _ask(self) -> None:
        for _ in range(TURN_MOST):
            if not self._todo or len(self._flying) >= self._window:
                return
            layer, expert = self._todo[0]
            try:
                batch = self._ring.acquire(layer, [expert], 0)
            except (Busy, ReadTimeout):
                return  # all slots are held by others: at the next turn
            self._todo.popleft()
            if batch.hits:
                self._resident += 1
                self._hits += 1
                batch.release()
            else:
                self._flying.append(((layer, expert), batch))

    def _fail(self, layer: int, expert: int, error: Exception) -> None:
        kind, message = type(error).__name__, str(error)
        self._failed.append({"layer": layer, "expert": expert, "error": kind, "message": message})
