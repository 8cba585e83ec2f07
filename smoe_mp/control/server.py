"""The serving side: a ROUTER socket in the run-time folder, handled inside the supervisor's loop.

Closed by default: ipc only, socket mode 0600 in a 0700 folder, or 0660 and 0750 of the group of [access].
Whatever is no request of ours is counted,
answered with a typed error where it can be addressed, and changes nothing; libzmq itself ends a connection
that sends a frame of more than 1 MiB.  Nothing here waits: a reply to an asker that does not read is dropped
and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import msgspec
import zmq

from smoe_mp.control import protocol
from smoe_mp.control.commands import COMMANDS, AnyCommand, System
from smoe_mp.errors import ControlError, SmoeError
from smoe_mp.runtime import is_served

BATCH = 64  # messages handled at a turn, so that a flood cannot keep the supervisor from its other work

log = logging.getLogger(__name__)


class ControlServer:
    """Serves `system` on the socket at `path`, for this user alone or for the group `gid` too.

    Raises ControlError if the socket is served by somebody else or cannot be made.
    """

    def __init__(self, path: Path, system: System, gid: int | None = None) -> None:
        if is_served(path):
            raise ControlError(f"control socket {path}: another process serves it; stop that one first")
        self.path = path
        self.counters = dict.fromkeys(
            ("requests", "answered", "malformed", "wrong_version", "unknown_command", "too_large", "failed",
             "late", "undeliverable"), 0
        )  # fmt: skip
        self._system = system
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._bind(gid)
        except BaseException:
            self.close()
            raise

    def _bind(self, gid: int | None) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MESSAGE_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an undeliverable reply is an error, to be counted
        mask = os.umask(0o177)  # nobody gets in between bind and chmod
        try:
            self._socket.bind(f"ipc://{self.path}")
            if gid is not None:
                os.chown(self.path, -1, gid)
            os.chmod(self.path, 0o600 if gid is None else 0o660)
        except (zmq.ZMQError, OSError) as error:
            raise ControlError(f"control socket {self.path}: bind: {error.strerror}") from error
        finally:
            os.umask(mask)

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

    def close(self) -> None:
        """Close and remove the socket; may be called twice."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def _answer(self, frames: list[bytes]) -> None:
        started = time.monotonic()
        self.counters["requests"] += 1
        asker, rest = frames[0], frames[1:]
        envelope = [asker, b""] if len(rest) > 1 and not rest[0] else [asker]
        limit_s, command = float("inf"), None
        try:
            command = self._read(rest[len(envelope) - 1 :])
            limit_s = command.deadline_ms / 1000
            reply = self._run(command)
        except protocol.BadRequest as bad:
            self._count(bad.type)
            reply = protocol.write_error(bad.id, bad.type, str(bad))
        took_s = time.monotonic() - started
        what = type(command).__name__.lower() if command else "no command"
        log.debug("control: %s: %.1f ms", what, took_s * 1000)
        if took_s > limit_s:
            self.counters["late"] += 1
            return
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

    def _run(self, command: AnyCommand) -> bytes:
        try:
            return protocol.write_result(command.id, command.run(self._system, dict(self.counters)))
        except SmoeError as error:
            self.counters["failed"] += 1
            return protocol.write_error(command.id, type(error).__name__, str(error))
        except Exception as error:
            # A fault of ours, but one command's fault must not end the system that others compute with.
            log.exception("control: %s failed", type(command).__name__)
            self.counters["failed"] += 1
            return protocol.write_error(command.id, "Internal", f"{type(error).__name__}: {error}")

    def _count(self, type_: str) -> None:
        name = {"WrongVersion": "wrong_version", "UnknownCommand": "unknown_command", "TooLarge": "too_large"}
        self.counters[name.get(type_, "malformed")] += 1
