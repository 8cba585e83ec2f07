"""The supervisor's side of a check of the files: one child at a time (`verifier`), and what it has said."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from smoe_mp.errors import SmoeError
from smoe_mp.process import Child, Loop, WatchPipe

BAD_MOST = 1000  # faults that are kept


class Checking:
    """Starts and ends the verifier, whose own arguments are `args`.  `on_bad` is called with words, once for
    a check that has found something."""

    def __init__(
        self, args: Sequence[str], watch: WatchPipe, loop: Loop, on_bad: Callable[[str], None]
    ) -> None:
        self._args, self._watch, self._loop, self._on_bad = list(args), watch, loop, on_bad
        self._child: Child | None = None
        self._said: dict[str, Any] = {"done": 0, "goal": 0, "checked": 0}
        self._bad: list[dict[str, Any]] = []
        self._state, self._error = "never", ""

    @property
    def children(self) -> list[Child]:
        """The verifier, while there is one."""
        return [self._child] if self._child is not None else []

    def start(self) -> None:
        """Begin.  Raises SmoeError where one is under way or cannot be started."""
        if self._child is not None:
            raise SmoeError("the files are being verified already; stop that first, or wait")
        self._said = {"done": 0, "goal": 0, "checked": 0}
        self._bad, self._error = [], ""
        argv = [sys.executable, "-m", "smoe_mp.verifier", *self._args]
        self._child = Child("verifier", argv, self._watch, self._loop, self._on_line)
        self._state = "running"

    def stop(self) -> None:
        """End one that is under way."""
        if self._child is not None:
            self._state = "stopped"
            self._child.send(signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        """The fields of `VerifyStatus`."""
        return {"state": self._state, **self._said, "bad": self._bad, "error": self._error}

    def tick(self) -> None:
        """Notice its end."""
        if self._child is None or not self._child.exited:
            return
        child, self._child = self._child, None
        child.close()
        if self._state == "running":
            self._state = "failed" if child.failed else "done"
            self._error = child.epitaph() if child.failed else ""
        if self._bad:
            first = self._bad[0]
            wrong = len({(b["layer"], b["expert"]) for b in self._bad})
            self._on_bad(
                f"verify: {wrong} experts are bad, the first is expert {first['expert']} of layer"
                f" {first['layer']}: {first['path']} at {first['offset']}: {first['fault']}"
            )

    def _on_line(self, line: str) -> None:
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            return  # words: they are in the child's tail, and so in its epitaph
        if "fault" not in said:
            self._said = said
        elif len(self._bad) < BAD_MOST:
            self._bad.append(said)
