"""`smoe-mp top` in a terminal of its own (a pty), with keys, and printed to a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

from systems import LIMIT_S, System, Up, smoe_mp, until

import smoe_mp as package
from smoe_mp.control.commands import Demand


class Terminal:
    """`smoe-mp ARGUMENTS` in a terminal of 80 x 30; `shown` is all that it has written."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "smoe_mp", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm-256color", **environ},
            start_new_session=True,
        )
        os.close(inner)
        self.shown = ""

    def read_until(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, self.shown[-3000:]
            if select.select([self._fd], [], [], 0.2)[0]:
                self.shown += os.read(self._fd, 65_536).decode(errors="replace")

    def press(self, key: str) -> None:
        self.shown = ""
        os.write(self._fd, key.encode())

    def end(self) -> int:
        """Read all that is left, so that it can end; its exit status."""
        deadline = time.monotonic() + LIMIT_S
        with contextlib.suppress(OSError):  # EIO: nobody has the inner side open any more
            while time.monotonic() < deadline:
                if select.select([self._fd], [], [], 0.1)[0]:
                    self.shown += os.read(self._fd, 65_536).decode(errors="replace")
        return self.process.wait(LIMIT_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def workers(system: System) -> int:
    return len(system.look().workers)


def test_keys(up: Up, ring_name: str) -> None:
    system = up(slots=160, workers=2)
    with Terminal("top", ring_name, "--every", "0.2") as terminal:
        terminal.read_until(r"160 slots")
        terminal.press("p")
        until(lambda: system.look().prewarm.state == "paused", "a pause")
        terminal.read_until("paused")
        terminal.press("p")
        until(lambda: system.look().prewarm.state != "paused", "no pause")
        terminal.press("+")
        until(lambda: workers(system) == 3, "one worker more")
        terminal.press("-")
        until(lambda: workers(system) == 2, "one worker less")
        terminal.press("q")
        assert terminal.end() == 0


def test_it_ends_with_its_system_and_says_so(up: Up, ring_name: str) -> None:
    system = up(slots=16)
    with Terminal("top", ring_name, "--every", "0.2") as terminal:
        terminal.read_until(r"16 slots")
        system.end()
        assert terminal.end() == 6
        assert "Traceback" not in terminal.shown
        assert "it was removed" in terminal.shown


def test_frames_in_a_pipe(up: Up, ring_name: str) -> None:
    system = up(slots=24, more="prewarm.enabled = false\n")
    system.ask(Demand(experts=[(0, 1), (0, 2)]))
    with package.attach(ring_name, "an engine") as ring, ring.fetch(0, [1]):
        done = smoe_mp("top", ring_name, "--frames", "2", "--every", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("24 slots") == 2
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "an engine" in done.stdout
    assert "@ held 1" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_such_system() -> None:
    done = smoe_mp("top", "nobody-serves-this")
    assert (done.returncode, done.stdout) == (4, "")
