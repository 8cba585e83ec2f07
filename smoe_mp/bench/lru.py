"""What a ring has, by a plain simulation: exact LRU, and cold experts before its end.

For benchmarks and tests that hold a real ring's hits against it.  It knows what the ring's users can know:
that a request's experts are held together, that an expert is stamped when it is asked for and once more when
its read ends (so that those of one request lie in the order in which their reads ended, which nobody but the
ring knows: `stamped` is told), and that of a request of more than the ring keeps what has to be read is cold
(docs/design.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: An expert: its layer, and its id there.
Key = tuple[int, int]


class ExactLru:
    """A ring of `slots` slots with one client, empty at the start."""

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots))
        self.slot: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self.cold: set[Key] = set()
        self.held: list[Key] = []

    def access(self, key: Key, *, cold: bool = False) -> bool:
        """Whether it is a hit."""
        hit = key in self.slot
        if hit:
            self.cold.discard(key)
        else:
            self.slot[key] = self.free.pop(0) if self.free else self._evict()
            if cold:
                self.cold.add(key)
        self.slot.move_to_end(key)
        return hit

    def _evict(self) -> int:
        idle = self.cold.difference(self.held)
        key = (
            min(idle, key=self.slot.__getitem__) if idle else next(k for k in self.slot if k not in self.held)
        )
        self.cold.discard(key)
        return self.slot.pop(key)

    def request(self, keys: Iterable[Key]) -> list[bool]:
        """A request that is held as a whole; of each whether it is a hit."""
        return self.sweep(keys, len(self.slot) + len(self.free), cold=False)

    def sweep(self, keys: Iterable[Key], window: int, *, cold: bool = True) -> list[bool]:
        """A request of which `window` are held at a time; of each whether it is a hit."""
        hits = []
        for key in keys:
            if len(self.held) == window:
                self.held.pop(0)
            hits.append(self.access(key, cold=cold))
            self.held.append(key)
        self.held.clear()
        return hits

    def stamped(self, keys: Iterable[Key]) -> None:
        """These are there, and were stamped in this order."""
        for key in keys:
            self.slot.move_to_end(key)
