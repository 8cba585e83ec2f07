"""Events: what happens in a system, told to whoever listens.

    frame 0   the event's name, which a subscription filters by
    frame 1   {"v": 1, "seq": 17, "time": 1764500000.25, "event": "stats", "data": {...}}

An event is a hint, state is asked for: a subscriber that is slow loses events (its queue is bounded, and
nobody waits for it), and sees that by `seq`, which counts the events of one name.  Nothing is computed for
events that nobody listens to.

    state      the system's state or health changed
    worker     a worker process died, and what is known of its end
    warning    what also stands in `status`
    error      what ended the serving
    prewarm    how far the prewarm process is
    verify     how far a check of the files is
    stats      counters and queues, once a second
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from smoe_mp.control.protocol import MESSAGE_BYTES_MAX, VERSION, write
from smoe_mp.control.sockets import bind
from smoe_mp.errors import ControlError
from smoe_mp.runtime import check_reachable, events_path, socket_path

EVENTS = ("state", "worker", "warning", "error", "prewarm", "verify", "stats")
QUEUE_MAX = 256  # events that wait for one subscriber
TOPICS_MAX = 1000  # subscriptions that are remembered


class Event(Struct, frozen=True, kw_only=True):
    """One event; `seq` counts those of its name, from 1 on, `time` is the system's clock, seconds."""

    v: int
    seq: int
    time: float
    event: str
    data: dict[str, Any]


class Publisher:
    """The sending side, inside the supervisor.  Raises ControlError if the socket cannot be made."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, gid: int | None = None) -> None:
        self.path = path
        self._seq: Counter[str] = Counter()
        self._topics: set[bytes] = set()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4096)  # what comes in is subscriptions
        try:
            bind(self._socket, path, gid, "event socket")
        except ControlError:
            self._socket.close(linger=0)
            raise

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """What to poll for reading; then call `handle`."""
        return self._socket

    def handle(self) -> None:
        """Note who has come and gone."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._socket.recv(zmq.NOBLOCK)
                if message[:1] == b"\0":
                    self._topics.discard(message[1:])
                elif message[:1] == b"\1" and len(self._topics) < TOPICS_MAX:
                    self._topics.add(message[1:])

    def wanted(self, event: str) -> bool:
        """Whether somebody listens to events of this name."""
        name = event.encode()
        return any(name.startswith(topic) for topic in self._topics)

    def publish(self, event: str, data: Mapping[str, Any]) -> None:
        """Send it to those who listen, and wait for none."""
        self._seq[event] += 1
        if self.wanted(event):
            message = Event(v=VERSION, seq=self._seq[event], time=time.time(), event=event, data=dict(data))
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([event.encode(), write(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close(linger=0)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class EventStream:
    """The events of the ring `name`, as they come; goes on by itself when the system is started anew.

    `events`: names, by default all.  `lost` counts what was missed because it was read too slowly.
    Raises ConfigError where the run-time folder is not to be trusted.
    """

    def __init__(self, name: str, events: tuple[str, ...] = ()) -> None:
        path = events_path(socket_path(name))
        check_reachable(path)
        self.lost = 0
        self._seen: dict[str, int] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        for event in events or ("",):
            self._socket.setsockopt(zmq.SUBSCRIBE, event.encode())
        self._socket.connect(f"ipc://{path}")

    def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after `timeout_s` seconds."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = -1 if until is None else max(0, int((until - time.monotonic()) * 1000))
            if not self._socket.poll(left_ms):
                return None
            try:
                event = msgspec.json.decode(self._socket.recv_multipart()[-1], type=Event)
            except msgspec.MsgspecError:
                continue  # not ours
            seen = self._seen.get(event.event)
            if seen is not None and event.seq > seen:  # a smaller one: the system was started anew
                self.lost += event.seq - seen - 1
            self._seen[event.event] = event.seq
            return event

    def __iter__(self) -> Iterator[Event]:
        while (event := self.next()) is not None:
            yield event

    def close(self) -> None:
        """Stop listening."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
