"""Child processes, signals and the one loop that waits for them.

Facts first.  A signal handler may run at any instruction, so handlers here do nothing: the kernel's notice
arrives as a byte on a descriptor (`SignalInbox`) and is read in the loop.  A death is a SIGCHLD like any
other.  A terminal's Ctrl-C goes to the whole foreground process group, so children get groups of their own
and end when they are told.  A supervisor that is killed tells nobody; its children therefore watch a pipe
whose write end nobody else has (`WatchPipe`), and the kernel hangs up for it.

In a container the supervisor is pid 1: signals that it has no handler for do not reach it, and whoever is
orphaned there becomes its child (`reap_orphans`).

So the loop sleeps in poll until something happens, and nothing needs a thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import zmq

from smoe_mp.errors import SmoeError
from smoe_mp.platform import system
from smoe_mp.runtime import printable

ExitWatch = system.ExitWatch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LINE_BYTES_MAX = 4096  # of a child's stderr; longer lines are cut
TAIL_LINES = 20  # of a child's stderr, kept for the report of its death


class Loop:
    """Waits for descriptors and ZeroMQ sockets, and calls back."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._calls: dict[object, Callable[[], None]] = {}

    def add(self, source: int | zmq.Socket[bytes], call: Callable[[], None]) -> None:
        """Have `call` called whenever `source` can be read or has hung up."""
        self._poller.register(source, zmq.POLLIN)
        self._calls[source] = call

    def remove(self, source: int | zmq.Socket[bytes]) -> None:
        """Forget `source`; to be done before it is closed."""
        if self._calls.pop(source, None) is not None:
            self._poller.unregister(source)

    def turn(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` seconds, and make the calls that are due."""
        for source, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            call = self._calls.get(source)  # an earlier call of this turn may have removed it
            if call is not None:
                call()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Turn until `condition` holds (True) or `timeout_s` seconds have passed (False)."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.turn(min(left_s + 0.001, 60.0))
        return True


def _noticed(number: int, frame: FrameType | None) -> None:
    """The handler of all signals: the wake-up descriptor has it already."""


def ignore(*numbers: int) -> None:
    """Ignore these signals from now on; for the main thread of a process that is about to end.

    One that comes while its handler is being taken away makes Python print a traceback later ("ignored due
    to race condition").  A mask does not help: any thread takes it, numpy's among them.  It is to be ignored,
    so nothing is said of it.
    """
    say = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, OSError) and "ignored due to race condition" in str(error)):
            say(unraisable)

    sys.unraisablehook = hook
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class SignalInbox:
    """SIGTERM, SIGINT, SIGHUP and SIGCHLD as bytes on a descriptor.  For the main thread, once a process.

    From `close` on the stop signals are ignored: the process is about to end, and a second Ctrl-C must not
    cut that short.  A SIGHUP that was ignored at the start (nohup) stays so.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._numbers = [n for n in STOP_SIGNALS if not (nohup and n == signal.SIGHUP)]
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*self._numbers, signal.SIGCHLD):
            signal.signal(number, _noticed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*self._numbers, signal.SIGCHLD))  # a mask is inherited

    def drain(self) -> list[signal.Signals]:
        """The signals that came since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        return []

    def close(self) -> None:
        """Stop receiving, and ignore the stop signals from now on."""
        ignore(*self._numbers)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        os.close(self.fd)
        os.close(self._write_fd)


class WatchPipe:
    """A pipe whose hang-up tells the children that this process is gone."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()  # both close-on-exec: only read_fd is passed on

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class Child:
    """A child process that says when it is ready, and whose stderr is kept and passed on by lines.

    `argv` gets " --watch-fd N --ready-fd N" appended.  `on_line` receives each line of stderr.  `fds`: more
    descriptors that it inherits, under their numbers.  Raises SmoeError if the program cannot be started.
    """

    def __init__(
        self,
        label: str,
        argv: Sequence[str],
        watch: WatchPipe,
        loop: Loop,
        on_line: Callable[[str], None],
        *,
        fds: Sequence[int] = (),
    ) -> None:
        self.label, self.ready = label, False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._loop, self._on_line, self._partial = loop, on_line, b""
        try:
            ready_read, ready_write = os.pipe()
        except OSError as error:
            raise SmoeError(f"{label}: cannot start {argv[0]}: pipe: {error.strerror}") from error
        try:
            self._process = subprocess.Popen(
                [*argv, "--watch-fd", str(watch.read_fd), "--ready-fd", str(ready_write)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(watch.read_fd, ready_write, *fds),
                process_group=0,
            )
        except OSError as error:
            os.close(ready_read)
            raise SmoeError(f"{label}: cannot start {argv[0]}: {error.strerror}") from error
        finally:
            os.close(ready_write)
        self._ready_fd: int | None = ready_read
        assert self._process.stderr is not None
        self._stderr_fd: int | None = self._process.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
        loop.add(ready_read, self._on_ready)
        loop.add(self._stderr_fd, self._on_stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether it has ended; reaps it."""
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.exited and self._process.returncode != 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        self._process.send_signal(number)

    def epitaph(self) -> str:
        """How it ended, with the last lines of its stderr."""
        code = self._process.returncode
        if code is None:
            how = "has not ended"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit status {code}"
        said = "; ".join(self.tail)
        return f"{self.label} (pid {self.pid}) {how}" + (f": {said}" if said else "")

    def close(self) -> None:
        """Take the last of its stderr and let go of the pipes; not the process's end."""
        if self._stderr_fd is not None:
            self._on_stderr()
        self._close_stderr()
        self._close_ready()

    def _on_ready(self) -> None:
        assert self._ready_fd is not None
        self.ready = os.read(self._ready_fd, 1) != b""
        self._close_ready()

    def _on_stderr(self) -> None:
        assert self._stderr_fd is not None
        try:
            chunk = os.read(self._stderr_fd, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if not chunk or len(self._partial) > LINE_BYTES_MAX:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._take_line(line)
        if not chunk:
            self._close_stderr()

    def _take_line(self, line: bytes) -> None:
        text = printable(line[:LINE_BYTES_MAX].decode(errors="replace").strip())
        if text:
            self.tail.append(text)
            self._on_line(text)

    def _close_ready(self) -> None:
        if self._ready_fd is not None:
            self._loop.remove(self._ready_fd)
            os.close(self._ready_fd)
            self._ready_fd = None

    def _close_stderr(self) -> None:
        if self._stderr_fd is not None:
            self._loop.remove(self._stderr_fd)
            self._stderr_fd = None
            assert self._process.stderr is not None
            self._process.stderr.close()


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def end_all(
    children: Iterable[Child], loop: Loop, grace_s: float, term_s: float, kill_s: float
) -> list[Child]:
    """Wait for the children to end by themselves, then SIGTERM, then SIGKILL them; seconds for each.

    Returns those that did not end even so: a process inside a read that hangs cannot be reaped.
    """
    left = [child for child in children if not child.exited]

    def gone() -> bool:
        left[:] = [child for child in left if not child.exited]
        return not left

    for number, limit_s in ((None, grace_s), (signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for child in left:
            if number is not None:
                child.send(number)
            child.send(signal.SIGCONT)  # a stopped one hears of anything only when it goes on
        if loop.wait_until(gone, limit_s):
            break
    return left


def reap_orphans(own: Collection[int]) -> None:
    """Reap processes that ended and are nobody's any more: pid 1 inherits every orphan of its container.

    `own`: pids of children that somebody here waits for.  One of these that has ended and is not reaped yet
    stands before others, which then are reaped by a later call.
    """
    while (pid := system.ended_child()) and pid not in own:
        os.waitpid(pid, os.WNOHANG)
