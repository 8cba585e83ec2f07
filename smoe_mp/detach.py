"""`smoe-mp up --detach`: a system in the background, once it is known to run.

The system is the same program anew, in a session of its own, so that no terminal's end reaches it.  Until it
is ready its lines come through pipes, as with `launch`, and a start that fails is an error here.  Then it
lets go of stdin, stdout and stderr (`Log.leave_terminal`), and whoever started it may end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from smoe_mp.errors import SmoeError
from smoe_mp.launch import await_ready, end


def start(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run `smoe-mp up ARGUMENTS` in the background; its pid, and what it said up to "ready".

    Main thread only.  Raises what it failed with, and then it has ended; so it has when this process is told
    to end while it waits.
    """
    told = _Told()
    before = [(number, signal.signal(number, told)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        child = _spawn([sys.executable, "-m", "smoe_mp", "up", "--detached", *arguments])
        try:
            told.may_raise()
            lines = await_ready(child, "the system")
        except BaseException:
            end(child, "", os.getpid())
            raise
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert child.stderr is not None
    child.stderr.close()
    return child.pid, lines


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
    except OSError as error:
        raise SmoeError(f"cannot start {command[0]}: {error.strerror}") from error


class _Told:
    """The handler of Ctrl-C and SIGTERM.  It raises only once the child is known, who would else be left."""

    def __init__(self) -> None:
        self._number, self._raises = 0, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if self._raises:
            sys.exit(128 + number)

    def may_raise(self) -> None:
        self._raises = True
        if self._number:
            sys.exit(128 + self._number)
