"""The prewarm process: loads the most popular experts while nobody needs the disk.

    python -m smoe_mp.prewarm --name NAME --creation HEX --histogram FILE --fingerprint HEX

Started and kept alive by the supervisor, like a worker.  A pass goes through the experts by popularity
(ties and the first boot: table order) and guesses each that is not in the ring, through the speculative
queue, `trickle` apart; it ends after slots - max(128, slots / 4) experts, so that the live working set
keeps that headroom.  It begins at the start and anew after each request, and rests while any client is busy
or somebody has paused it; both are looked at before every push.

The words that steer it and that it reports in lie in shared memory.  It also keeps the histogram's file:
every minute if counts have changed, and after each request; the supervisor saves it once more at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_mp import child, histogram
from smoe_mp._native import ffi, lib
from smoe_mp.errors import SmoeError
from smoe_mp.segments import PREWARM_STATES, PREWARM_WORDS, STATES, read_histogram, slot_word

SAVE_EVERY_S = 60.0
#: Guesses of ours that may wait at a time, so that a demand that turns up finds the workers free soon.
QUEUE_MOST = 4
#: How often one expert is tried for while the ring gives no slot for a guess.
TRIES_MOST = 250
LOOK_MS = 1000

_IDLE, _RUNS, _BUSY, _PAUSED, _SMALL = range(1, len(PREWARM_STATES))
_LIVE = STATES.index("live")


def budget(slots: int) -> int:
    """How many experts a pass loads at most: the ring less the headroom max(128, slots / 4), 0 where that
    leaves nothing."""
    return max(0, slots - max(128, slots // 4))


class Prewarmer:
    """One ring's prewarm process; `run` returns when it is told to stop or the ring ends."""

    def __init__(self, name: str, creation: str, path: Path, fingerprint: bytes) -> None:
        self._ring, info = child.attach(name, creation, lib.SMOE_ROLE_PREWARM, "prewarm")
        self._name, self._path, self._fingerprint = name, path, fingerprint
        self._n, self._budget = int(info.n_experts), budget(int(info.n_slots))
        pair = ffi.new("uint32_t[2]")
        self._pairs: list[tuple[int, int]] = []
        for index in range(self._n):
            lib.smoe_expert_pair(self._ring, index, pair, pair + 1)
            self._pairs.append((int(pair[0]), int(pair[1])))
        # What is in the file is not known here: of a ring that was adopted there may be more to save.
        self._saved: npt.NDArray[np.uint32] | None = None
        self._save_due = time.monotonic() + SAVE_EVERY_S
        self._stop = False
        self._warned = ""

    def stop(self) -> None:
        """To be called from a signal handler: end at the next look."""
        self._stop = True
        if self._ring == ffi.NULL:
            return  # it has ended already, and the ring's memory is somebody else's
        lib.smoe_prewarm_set(self._ring, PREWARM_WORDS["pause"], self._get("pause"))  # rings the bell

    def run(self) -> None:
        runs, was_busy = -1, False
        plan: Iterator[int] = iter(())
        while True:
            bell = self._get("bell")  # before all that it announces
            if self._stop or lib.smoe_ring_state(self._ring) != _LIVE:
                break
            busy = bool(lib.smoe_busy_clients(self._ring))
            if was_busy and not busy:
                runs = -1  # the request is over: anew
                self._save()
            was_busy = busy
            if time.monotonic() >= self._save_due:
                self._save()
            if busy or self._get("pause"):
                self._rest(_BUSY if busy else _PAUSED, bell)
                continue
            if runs != self._get("run"):
                runs = self._get("run")
                plan = self._pass()
            if next(plan, None) is None:
                self._rest(_IDLE if self._budget else _SMALL, bell)
            else:
                lib.smoe_prewarm_sleep(self._ring, bell, max(1, self._get("trickle_us") // 1000))
        lib.smoe_prewarm_set(self._ring, PREWARM_WORDS["state"], 0)
        ring, self._ring = self._ring, ffi.NULL
        lib.smoe_detach(ring)

    def _get(self, which: str) -> int:
        return int(lib.smoe_prewarm_get(self._ring, PREWARM_WORDS[which] if which != "bell" else 0))

    def _say(self, which: str, value: int) -> None:
        lib.smoe_prewarm_set(self._ring, PREWARM_WORDS[which], value)

    def _rest(self, state: int, bell: int) -> None:
        self._say("state", state)
        lib.smoe_prewarm_sleep(self._ring, bell, LOOK_MS)

    def _pass(self) -> Iterator[int]:
        """One pass; yields after each push, and after each look that could not push."""
        counts = read_histogram(self._ring, self._n)
        order = histogram.Histogram(counts).order()[: self._budget]
        self._say("goal", len(order))
        self._say("done", 0)
        for done, index in enumerate(order, 1):
            tries = 0
            while tries < TRIES_MOST and not self._resident(int(index)):
                self._say("state", _RUNS)
                if lib.smoe_queue_length(self._ring, 1) < QUEUE_MOST:  # else the disk is slow: no refusal
                    self._guess(int(index))
                    tries += 1
                yield int(index)
            self._say("done", done)

    def _resident(self, index: int) -> bool:
        """In the ring, loading or failed: then there is nothing to do."""
        home = lib.smoe_home(self._ring, index)
        state, expert = slot_word(self._ring, home - 1) if home else (0, 0)
        return bool(state) and expert == index

    def _guess(self, index: int) -> None:
        layer, expert = self._pairs[index]
        lib.smoe_speculate(self._ring, layer, [expert], 1, ffi.NULL)

    def _save(self) -> None:
        self._save_due = time.monotonic() + SAVE_EVERY_S
        counts = read_histogram(self._ring, self._n)
        if self._saved is not None and np.array_equal(counts, self._saved):
            return
        try:
            histogram.save(self._path, self._fingerprint, self._pairs, counts)
            self._saved = counts
        except SmoeError as e:
            if str(e) != self._warned:  # once, not every minute
                self._warned = str(e)
                print(f"warning: {e}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = child.parser("smoe_mp.prewarm")
    parser.add_argument("--histogram", type=Path, required=True)
    parser.add_argument("--fingerprint", type=bytes.fromhex, required=True)
    args = parser.parse_args(argv)
    child.follow_supervisor(args.watch_fd)
    try:
        warmer = Prewarmer(args.name, args.creation, args.histogram, args.fingerprint)
    except SmoeError as e:
        print(e, file=sys.stderr)
        return 1
    child.on_term(warmer.stop)
    child.say_ready(args.ready_fd)
    warmer.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
