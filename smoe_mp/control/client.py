"""The asking side: typed commands over a DEALER socket, each with a time limit.

    with ControlClient("smoe-demo") as control:
        print(control.call(Status()).hit_rate)

Facts that shape it: a REQ socket that lost a reply can never ask again, so this is a DEALER; a message
queued for a dead supervisor would reach the next one, so only a finished connection takes messages, and
the socket is thrown away after a time-out; a context must not be used in a forked child, so a changed pid
gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from types import TracebackType
from typing import TypeVar, cast

import msgspec
import zmq
from msgspec import Struct

from smoe_mp.control import protocol
from smoe_mp.control.commands import Command
from smoe_mp.errors import ControlError, NoAnswer, NoSuchRing, Refused
from smoe_mp.runtime import check_reachable, is_served, socket_path
from smoe_mp.segments import check_name

R = TypeVar("R", bound=Struct)


class ControlClient:
    """Asks the supervisor of the ring `name`; `timeout_ms` bounds each call.

    For one thread at a time.  Works again after the supervisor was restarted, and in a forked child.
    Raises ConfigError where the run-time folder is not to be trusted, ControlError where the socket is not
    open to this user.
    """

    def __init__(self, name: str, *, timeout_ms: int = 5000) -> None:
        self.name, self.timeout_ms = name, timeout_ms
        self.path = socket_path(name)
        check_reachable(self.path)
        self._pid = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def call(self, command: Command[R]) -> R:
        """Send `command` and return its result.

        Raises NoAnswer when no reply came in time, Refused when the supervisor answered with an error,
        ControlError when the request is too large or the reply is not to be understood.
        """
        id_ = secrets.token_hex(8)
        asked = msgspec.structs.replace(command, id=id_, deadline_ms=self.timeout_ms)
        body = msgspec.json.encode(asked)
        if len(body) > protocol.MESSAGE_BYTES_MAX:
            raise ControlError(f"a request of {len(body)} bytes; at most {protocol.MESSAGE_BYTES_MAX} may be")
        reply = self._exchange(body, id_)
        if not reply.ok:
            error = reply.error or protocol.ErrorBody("Malformed", "an error without an error")
            raise Refused(f"ring {self.name!r}: {error.type}: {error.message}")
        try:
            return cast(R, msgspec.json.decode(reply.result, type=type(command).result))
        except msgspec.MsgspecError as error:
            raise ControlError(f"ring {self.name!r}: a reply that does not add up: {error}") from error

    def close(self) -> None:
        """Close the sockets; a later call opens new ones."""
        if self._pid == os.getpid():
            if self._socket is not None:
                self._socket.close(linger=0)
            if self._context is not None:
                self._context.term()
        self._socket = self._context = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> zmq.Socket[bytes]:
        if self._pid != os.getpid():  # forked: the parent's are left alone, pyzmq does not end them here
            self._pid, self._context, self._socket = os.getpid(), None, None
        if self._context is None:
            self._context = zmq.Context()
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.MESSAGE_BYTES_MAX)
            self._socket.connect(f"ipc://{self.path}")
        return self._socket

    def _exchange(self, body: bytes, id_: str) -> protocol.Reply:
        deadline = time.monotonic() + self.timeout_ms / 1000
        socket = self._connected()
        try:
            self._await(socket, zmq.POLLOUT, deadline)
            socket.send(body, zmq.NOBLOCK)
            while True:
                self._await(socket, zmq.POLLIN, deadline)
                with contextlib.suppress(msgspec.MsgspecError):
                    reply = protocol.read_reply(socket.recv_multipart(zmq.NOBLOCK)[-1])
                    if reply.id == id_:  # else the late reply of an earlier call
                        return reply
        except NoAnswer:
            socket.close(linger=0)
            self._socket = None
            raise

    def _await(self, socket: zmq.Socket[bytes], event: int, deadline: float) -> None:
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        if not socket.poll(left_ms, event):
            raise NoAnswer(self._no_answer())

    def _no_answer(self) -> str:
        if is_served(self.path):
            return (
                f"ring {self.name!r}: no answer in {self.timeout_ms} ms from the supervisor at {self.path};"
                " it is busy or stopped: try again with a longer time limit"
            )
        return no_ring(self.name)


def check_served(name: str) -> None:
    """Raise NoSuchRing where nobody serves the ring `name`, ConfigError where that is no name."""
    path = socket_path(check_name(name))
    check_reachable(path)
    if not is_served(path):
        raise NoSuchRing(no_ring(name))


def no_ring(name: str) -> str:
    """What to say where nobody serves the ring `name`."""
    return (
        f"no system serves the ring {name!r} (nobody listens on {socket_path(name)});"
        " start it with smoe-mp up, or set SMOE_RUNTIME_DIR as it was when it was started"
    )
