"""An onlooker of a ring: reads what lies in shared memory, holds nothing, and asks nobody.

What it costs is its own; those whom it looks at do not notice.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp import child
from smoe_mp._native import ffi, lib
from smoe_mp.segments import CENSUS, PREWARM_WORDS, STATES, check_name, participants, slot_word
from smoe_mp.stats import counters

HELD, GUESS = lib.SMOE_SHOWN_HELD, lib.SMOE_SHOWN_GUESS


class Observer:
    """The ring `name`, looked at; a context manager.

    `label`: at most 31 bytes, shown by status.  Raises NoSuchRing, SegmentError, as `smoe_mp.attach` does.
    """

    def __init__(self, name: str, label: str) -> None:
        self.ptr, info = child.attach(check_name(name), "", lib.SMOE_ROLE_OBSERVER, label)
        self.name = name
        self.slots, self.slot_bytes = int(info.n_slots), int(info.slot_bytes)
        self.experts, self.top_k = int(info.n_experts), int(info.top_k)
        pair = ffi.new("uint32_t[2]")
        layers = set()
        for index in range(self.experts):
            lib.smoe_expert_pair(self.ptr, index, pair, pair + 1)
            layers.add(int(pair[0]))
        self.layers = len(layers)
        self._states = np.zeros(self.slots, np.uint8)

    @property
    def state(self) -> str:
        """The ring's state: "live", ... or "gone"."""
        code = int(lib.smoe_ring_state(self.ptr))
        return STATES[code] if 0 <= code < len(STATES) else "gone"

    def states(self) -> npt.NDArray[np.uint8]:
        """One byte a slot: its state (of `CENSUS`), + `HELD`, + `GUESS`; the array is the observer's own."""
        lib.smoe_slot_states(self.ptr, ffi.cast("uint8_t *", ffi.from_buffer(self._states)), self.slots)
        return self._states

    def counters(self) -> dict[str, int]:
        """Sums over all participants since the ring was made."""
        return counters(self.ptr, -1)

    def participants(self) -> list[dict[str, Any]]:
        """Who is registered; see `Segments.participants`."""
        return participants(self.ptr)

    def queues(self) -> tuple[int, int]:
        """Entries of the demand and the speculative queue."""
        return int(lib.smoe_queue_length(self.ptr, 0)), int(lib.smoe_queue_length(self.ptr, 1))

    def prewarm(self, which: str) -> int:
        """A word of the prewarm process: see `PREWARM_WORDS`."""
        return int(lib.smoe_prewarm_get(self.ptr, PREWARM_WORDS[which]))

    def expert_in(self, slot: int) -> tuple[int, int] | None:
        """(layer, expert) whose bytes are or will be in the slot."""
        state, index = slot_word(self.ptr, slot)
        pair = ffi.new("uint32_t[2]")
        if not state or lib.smoe_expert_pair(self.ptr, index, pair, pair + 1) < 0:
            return None
        return int(pair[0]), int(pair[1])

    def close(self) -> None:
        """Detach.  A second call does nothing."""
        if self.ptr is not None:
            lib.smoe_detach(self.ptr)
            self.ptr = None

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Names of the states by number, as in `Observer.states`.
STATE_NAMES = CENSUS[:6]
