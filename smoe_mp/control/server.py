"""The serving side: a ROUTER socket in the run-time folder, handled inside the supervisor's loop.

Closed by default: ipc only, socket mode 0600 in a 0700 folder, or 0660 and 0750 of the group of [access].
Whatever is no request of ours is counted,
answered with a typed error where it can be addressed, and changes nothing; libzmq itself ends a connection
that sends a frame of more than 1 MiB.  Nothing here waits: a reply to an asker that does not read is dropped
and counted, and a command that takes time is looked at again each millisecond while there is one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from smoe_mp.control import protocol
from smoe_mp.control.commands import COMMANDS, AnyCommand, Later, System
from smoe_mp.control.events import Publisher
from smoe_mp.control.sockets import bind
from smoe_mp.errors import ControlError, SmoeError
from smoe_mp.runtime import events_path, is_served

BATCH = 64  # messages handled at a turn, so that a flood cannot keep the supervisor from its other work
PENDING_MAX = 256  # commands under way
LOOK_S = 0.001  # between two looks at them

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A command under way: to whom the answer goes, and until when (time.monotonic) it may."""

    envelope: list[bytes]
    command: AnyCommand
    later: Later
    until: float


class ControlServer:
    """Serves `system` on the socket at `path`, and its events on the one beside it: for this user alone, or
    for the group `gid` too.

    Raises ControlError if the socket is served by somebody else or cannot be made.
    """

    def __init__(self, path: Path, system: System, gid: int | None = None) -> None:
        if is_served(path):
            raise ControlError(f"control socket {path}: another process serves it; stop that one first")
        self.path = path
        self.counters = dict.fromkeys(
            ("requests", "answered", "malformed", "wrong_version", "unknown_command", "too_large", "failed",
             "late", "undeliverable", "too_many"), 0
        )  # fmt: skip
        self._system = system
        self._pending: list[_Pending] = []
        self.events: Publisher | None = None
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._bind(gid)
            self.events = Publisher(self._context, events_path(path), gid)
        except BaseException:
            self.close()
            raise

    def _bind(self, gid: int | None) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MESSAGE_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an undeliverable reply is an error, to be counted
        bind(self._socket, self.path, gid, "control socket")

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """What to poll for reading; then call `handle`."""
        return self._socket

    def handle(self) -> None:
        """Answer the requests that are there, `BATCH` at most; level-triggered, so call again."""
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def tick(self) -> float:
        """Look at the commands under way, and at who listens to events; after how many seconds to come again
        at the latest."""
        if self.events is not None:
            self.events.handle()
        for entry in list(self._pending):
            if time.monotonic() > entry.until:
                entry.later.cancel()
                self.counters["late"] += 1
                self._pending.remove(entry)
            elif (reply := self._look(entry.command, entry.later)) is not None:
                self._pending.remove(entry)
                self._send(entry.envelope, reply)
        return LOOK_S if self._pending else 3600.0

    def close(self) -> None:
        """Close and remove the sockets; may be called twice."""
        for entry in self._pending:
            entry.later.cancel()
        self._pending.clear()
        if not self._socket.closed:
            if self.events is not None:
                self.events.close()
            self._socket.close(linger=0)
            self._context.term()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _answer(self, frames: list[bytes]) -> None:
        arrived = time.monotonic()
        self.counters["requests"] += 1
        asker, rest = frames[0], frames[1:]
        envelope = [asker, b""] if len(rest) > 1 and not rest[0] else [asker]
        until, command = float("inf"), None
        try:
            command = self._read(rest[len(envelope) - 1 :])
            until = arrived + command.deadline_ms / 1000
            reply = self._run(command, envelope, until)
        except protocol.BadRequest as bad:
            self._count(bad.type)
            reply = protocol.write_error(bad.id, bad.type, str(bad))
        if reply is None:
            return
        what = type(command).__name__.lower() if command else "no command"
        log.debug("control: %s: %.1f ms", what, (time.monotonic() - arrived) * 1000)
        if time.monotonic() > until:
            self.counters["late"] += 1
            return
        self._send(envelope, reply)

    def _send(self, envelope: list[bytes], reply: bytes) -> None:
        try:
            self._socket.send_multipart([*envelope, reply], zmq.NOBLOCK)
            self.counters["answered"] += 1
        except zmq.ZMQError:  # gone, or it does not read what it asked for
            self.counters["undeliverable"] += 1

    def _read(self, frames: list[bytes]) -> AnyCommand:
        if sum(map(len, frames)) > protocol.MESSAGE_BYTES_MAX:
            raise protocol.BadRequest("TooLarge", f"a message has at most {protocol.MESSAGE_BYTES_MAX} bytes")
        if len(frames) != 1:
            raise protocol.BadRequest("Malformed", f"a request is one frame, not {len(frames)}")
        id_, fields = protocol.read_request(frames[0])
        name = fields["command"]
        if name not in COMMANDS:
            known = ", ".join(sorted(COMMANDS))
            raise protocol.BadRequest("UnknownCommand", f"no command {name[:60]!r}; there are {known}", id_)
        try:
            return msgspec.convert(fields, COMMANDS[name])
        except msgspec.ValidationError as error:
            raise protocol.BadRequest("Malformed", f"{name}: {error}", id_) from None

    def _run(self, command: AnyCommand, envelope: list[bytes], until: float) -> bytes | None:
        """The reply; None: it is under way."""

        def begin() -> Struct | None:
            done: Any = command.run(self._system, dict(self.counters))
            if isinstance(done, Struct):
                return done
            self._pending.append(_Pending(envelope, command, done, until))
            return None

        if len(self._pending) >= PENDING_MAX:
            raise protocol.BadRequest("TooMany", f"{PENDING_MAX} commands are under way", command.id)
        reply = self._guarded(command, begin)
        if reply is None and (reply := self._look(command, self._pending[-1].later)) is not None:
            self._pending.pop()
        return reply

    def _look(self, command: AnyCommand, later: Later) -> bytes | None:
        """The reply of a command under way, if there is one by now."""

        def poll() -> Struct | None:
            done = later.poll()
            return None if done is None else msgspec.convert(done, type(command).result)

        return self._guarded(command, poll)

    def _guarded(self, command: AnyCommand, call: Callable[[], Struct | None]) -> bytes | None:
        """The reply with what `call` returned or raised; None where it returned None."""
        try:
            done = call()
            return None if done is None else protocol.write_result(command.id, done)
        except SmoeError as error:
            self.counters["failed"] += 1
            return protocol.write_error(command.id, type(error).__name__, str(error))
        except Exception as error:
            # A fault of ours, but one command's fault must not end the system that others compute with.
            log.exception("control: %s failed", type(command).__name__)
            self.counters["failed"] += 1
            return protocol.write_error(command.id, "Internal", f"{type(error).__name__}: {error}")

    def _count(self, type_: str) -> None:
        name = {
            "WrongVersion": "wrong_version",
            "UnknownCommand": "unknown_command",
            "TooLarge": "too_large",
            "TooMany": "too_many",
        }
        self.counters[name.get(type_, "malformed")] += 1
