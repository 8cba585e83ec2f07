"""The process that checks the model's files while a system serves from them.

    python -m smoe_mp.verifier --name NAME --creation HEX --source PATH --fingerprint HEX

Started by the supervisor when it is asked to verify; see `smoe_mp.verify` for what is checked.  It reads one
expert at a time, past the page cache, and rests while a client is busy or a demand waits, so that it costs
demand no more than the read that was just under way.  It reports on stderr, a JSON line each:

    {"done": 12, "goal": 512, "checked": 12}      a few times a second, and at the end
    {"layer": 3, "expert": 5, ...}                one a fault
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from smoe_mp import child, histogram
from smoe_mp._native import lib
from smoe_mp.errors import SmoeError, VaultError
from smoe_mp.segments import STATES
from smoe_mp.sources import open_source
from smoe_mp.verify import BadExpert, verify

SAY_EVERY_S = 0.25
REST_S = 0.005  # between two looks at whether the ring is quiet
_LIVE = STATES.index("live")


class Verifier:
    """Checks the source at `path` beside the ring `name`."""

    def __init__(self, name: str, creation: str, path: Path, fingerprint: bytes) -> None:
        self._ring, _ = child.attach(name, creation, lib.SMOE_ROLE_OBSERVER, "verify")
        self._source = open_source(path)
        if histogram.fingerprint(self._source) != fingerprint:
            raise VaultError(f"{path}: is not the model that the ring {name} was made for")
        self._done = self._checked = 0
        self._said = 0.0

    def run(self) -> None:
        """Check all; returns when that is done.  Raises VaultError as `verify` does."""
        verify(self._source, shown=False, threads=1, before=self._rest, after=self._after)
        self._say(at_once=True)

    def _rest(self) -> None:
        """Wait until nobody needs the disk."""
        while lib.smoe_ring_state(self._ring) == _LIVE:
            if not (lib.smoe_busy_clients(self._ring) or lib.smoe_queue_length(self._ring, 0)):
                return
            time.sleep(REST_S)
        raise SmoeError("the ring serves no more")

    def _after(self, index: int, bad: Sequence[BadExpert]) -> None:
        for one in bad:
            _print(dataclasses.asdict(one))
        self._done += 1
        self._checked += self._source.experts[index].crc32c != 0
        self._say()

    def _say(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._said >= SAY_EVERY_S:
            self._said = now
            _print({"done": self._done, "goal": len(self._source.experts), "checked": self._checked})


def _print(line: dict[str, object]) -> None:
    sys.stderr.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stderr.buffer.flush()


def main(argv: list[str] | None = None) -> int:
    """The process.  Exit status 0: all was looked at, whatever was found."""
    parser = child.parser("smoe_mp.verifier")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--fingerprint", type=bytes.fromhex, required=True)
    args = parser.parse_args(argv)
    child.follow_supervisor(args.watch_fd)
    os.nice(10)
    try:
        verifier = Verifier(args.name, args.creation, args.source, args.fingerprint)
        child.say_ready(args.ready_fd)
        verifier.run()
    except SmoeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
