"""Systems of one's own: `smoe-mp up` as a child process that ends with its user.

    with private_system("model/") as system:
        ring = smoe_mp.attach(system.name)

Facts first.  A supervisor has to be a process of its own, since it owns signals and children; a library has
to leave nothing behind, however its process ends.  So the child is told its parent's pid and follows it:
the kernel reports that end, by `kill -9` too, and the child then stops in order (supervisor.py).  Its
configuration goes through a pipe, so there is no file that could stay.  It has a process group of its own,
so Ctrl-C in a terminal is the parent's alone.  Its lines are read up to "ready" and the pipe closed: a
supervisor goes on without a reader.  What it says when it fails is an exception here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from smoe_mp import config, models, segments
from smoe_mp.config import LoadedConfig
from smoe_mp.errors import (
    ConfigError,
    ControlError,
    RingError,
    SegmentError,
    SegmentSpaceError,
    SmoeError,
    VaultError,
)
from smoe_mp.paths import expanded
from smoe_mp.runtime import events_path, socket_path

STALL_S = 120.0  # a start may take long, but not so long without a line or processor time
STOP_S = 60.0  # for an end in order: its own limits, all together, are less
KILL_S = 5.0  # after SIGKILL, and for workers to notice that their supervisor is gone
ERROR, WARNING = "smoe-mp: error: ", "warning: "
CHUNK = 1 << 16

_RAISED: dict[int, type[SmoeError]] = {
    kind.exit_code: kind
    for kind in (ConfigError, VaultError, SegmentError, SegmentSpaceError, RingError, ControlError)
}


class PrivateSystem:
    """A running system that ends with `stop`, with this object, or with this process.  A context manager.

    `name` is the ring's; `lines` what the system said up to its being ready, `warnings` those of them that
    are one; `pid` its supervisor's.
    """

    def __init__(self, loaded: LoadedConfig) -> None:
        self.name = segments.check_name(loaded.config.name)
        child = _start(config.render(loaded))
        self._end = weakref.finalize(self, end, child, self.name, os.getpid())
        self.pid = child.pid
        try:
            self.lines = await_ready(child, "the private system")
        except BaseException:
            self.stop()
            raise
        self.warnings = [
            line.removeprefix("warning: ") for line in self.lines if line.startswith("warning: ")
        ]

    def __repr__(self) -> str:
        return f"<PrivateSystem {self.name!r} {'running' if self._end.alive else 'stopped'}>"

    def stop(self) -> None:
        """Stop the system in order and wait for its end.  A second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def private_system(
    model: str | Path,
    *,
    name: str | None = None,
    slots: int = 0,
    workers: int | None = None,
    ranks: int | None = None,
    settings: Mapping[str, bool | int | str] | None = None,
) -> PrivateSystem:
    """Start a system on `model`, a path that `smoe-mp up` takes or a hub id in the local cache.

    `name`: the ring's, None for one that nobody else has; `slots` of the ring, 0 for as memory allows;
    `workers` and speculation `ranks`, None for the defaults; `settings`: other options by key, as in
    configs/reference.toml ("reserve.scout_mb").  Returns when it serves.  Raises what `smoe-mp up` would
    say, as the exception that its exit status stands for: ConfigError, VaultError, SegmentSpaceError, ...
    """
    path = models.resolve(model)
    chosen = {**(settings or {}), "ring.slots": slots}
    if workers is not None:
        chosen["workers.count"] = workers
    if ranks is not None:
        chosen["speculation.ranks"] = ranks
    for key in ("prewarm.histogram", "log.file"):
        if given := chosen.get(key):
            chosen[key] = str(expanded(str(given)).absolute())  # of a pipe's folder
    return PrivateSystem(config.for_model(path, name or models.private_name(path), settings=chosen))


def _start(text: str) -> subprocess.Popen[bytes]:
    """The child, with the configuration `text` given to it."""
    if not sys.executable:
        raise SmoeError("this Python does not know its program (sys.executable): start smoe-mp up yourself")
    command = [sys.executable, "-m", "smoe_mp", "up", "/dev/stdin", "--parent", str(os.getpid())]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
    except OSError as error:
        raise SmoeError(f"cannot start {sys.executable}: {error.strerror}") from error
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # of one that failed: told by its end
        pipe.write(text.encode())  # less than a pipe holds
    return child


def await_ready(child: subprocess.Popen[bytes], what: str) -> list[str]:
    """The lines up to the one that says ready; closes its stdout.

    Raises what the child failed with, or that it stalls.  `what` it is, for messages.
    """
    assert child.stdout is not None
    with child.stdout as pipe:
        text, moved, spent = b"", time.monotonic(), 0
        while b"\nready: " not in b"\n" + text:
            if _readable(pipe, 1.0):
                chunk = os.read(pipe.fileno(), CHUNK)
                if not chunk:
                    raise _failure(child, what)
                text, moved = text + chunk, time.monotonic()
            elif (now_spent := _processor_ticks(child.pid)) != spent:
                spent, moved = now_spent, time.monotonic()
            elif time.monotonic() - moved > STALL_S:
                raise SmoeError(
                    f"{what} (pid {child.pid}) is not ready and has not moved for {STALL_S:.0f}"
                    f" s; it said: {'; '.join(_lines(text)) or 'nothing'}"
                )
        return _lines(text)


def _lines(text: bytes) -> list[str]:
    return text.decode(errors="replace").splitlines()


def _readable(pipe: IO[bytes], timeout_s: float) -> bool:
    poller = select.poll()  # unlike select, it takes a descriptor of any number
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _processor_ticks(pid: int) -> int:
    """Processor time of a process: it moves while a large ring's pages are made.  0 where /proc is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return 0


def _failure(child: subprocess.Popen[bytes], what: str) -> SmoeError:
    """What a child that ended before it was ready failed with."""
    assert child.stderr is not None
    said = _lines(child.stderr.read())
    code = child.wait()
    errors = [line.removeprefix(ERROR) for line in said if line.startswith(ERROR)]
    if errors:
        return _RAISED.get(code, SmoeError)(errors[-1])
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return SmoeError(f"{what} {how}: {' '.join(said[-5:]) or 'it said nothing'}")


def end(child: subprocess.Popen[bytes], name: str, owner: int) -> None:
    """Stop the child in order and reap it.  In a forked process: nothing, it is the parent's.  `name`: the
    ring's, "" where it is not known and what a child that had to be killed leaves is the next start's."""
    if os.getpid() != owner:
        return
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # its read hangs: it cannot be reaped
            child.wait(KILL_S)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    killed = child.returncode is None or child.returncode < 0
    if name and killed and child.returncode != -signal.SIGTERM:  # by that one: it had made nothing yet
        clear(name)


def clear(name: str) -> None:
    """Remove what a supervisor that was killed could not; nothing where one still serves the ring."""
    with contextlib.suppress(SmoeError):
        segments.remove_orphan(name)
    with contextlib.suppress(SmoeError):
        path = socket_path(name)
        for socket in (path, events_path(path)):
            with contextlib.suppress(OSError):
                socket.unlink()
