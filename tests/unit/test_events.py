"""Events without a supervisor: who gets what, what is lost, and that nobody waits."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from smoe_mp import runtime
from smoe_mp.control import events
from smoe_mp.control.events import EventStream, Publisher
from smoe_mp.errors import ConfigError, ControlError

NAME = "fake"
LIMIT_S = 60


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def publisher(folder: Path) -> Iterator[Publisher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Publisher(context, runtime.events_path(runtime.socket_path(NAME)))
    yield made
    made.close()
    context.term()


def await_subscription(publisher: Publisher, event: str, *, wanted: bool = True) -> None:
    deadline = time.monotonic() + LIMIT_S
    while publisher.wanted(event) != wanted:
        assert time.monotonic() < deadline
        publisher.pollable.poll(100)
        publisher.handle()


def test_only_what_is_listened_to_is_wanted_and_sent(publisher: Publisher) -> None:
    assert not publisher.wanted("stats")
    with EventStream(NAME, ("state",)) as stream:
        await_subscription(publisher, "state")
        assert not publisher.wanted("stats")
        publisher.publish("stats", {"x": 1})
        publisher.publish("state", {"state": "live"})
        event = stream.next(LIMIT_S)
        assert event is not None
        assert (event.event, event.seq, event.data) == ("state", 1, {"state": "live"})
        assert stream.next(0.0) is None
    await_subscription(publisher, "state", wanted=False)


def test_a_gap_in_the_numbers_is_counted(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventStream(NAME) as stream:
        await_subscription(publisher, "stats")
        publisher.publish("stats", {})
        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "wanted", lambda self, event: False)  # dropped on the way
            publisher.publish("stats", {})
            publisher.publish("stats", {})
        publisher.publish("state", {})
        publisher.publish("stats", {})
        seen = [stream.next(LIMIT_S) for _ in range(3)]
        assert [e.seq for e in seen if e is not None] == [1, 1, 4]
        assert stream.lost == 2


def test_nobody_waits_for_a_deaf_subscriber(publisher: Publisher) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    deaf.connect(f"ipc://{publisher.path}")
    await_subscription(publisher, "stats")
    with EventStream(NAME, ("state",)) as stream:
        await_subscription(publisher, "state")
        for n in range(20_000):
            publisher.publish("stats", {"n": n, "filling": "x" * 1000})
        publisher.publish("state", {"state": "live"})
        event = stream.next(LIMIT_S)
        assert event is not None
        assert event.data == {"state": "live"}
    first = msgspec.json.decode(deaf.recv_multipart()[1], type=events.Event)
    got = 1
    while deaf.poll(200):
        deaf.recv_multipart()
        got += 1
    assert first.seq == 1
    assert got < 20_000  # its queue is bounded
    context.destroy(linger=0)


def test_what_is_no_subscription_changes_nothing(publisher: Publisher) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rude = context.socket(zmq.XSUB)
    rude.connect(f"ipc://{publisher.path}")
    rude.send(b"\1stats")
    await_subscription(publisher, "stats")
    for message in (b"", b"\2", b"stop", b"\1" + b"x" * 2000, b"\0never"):
        rude.send(message)
    rude.send(b"\1state")
    await_subscription(publisher, "state")
    assert publisher.wanted("stats")
    context.destroy(linger=0)


def test_a_folder_open_to_others_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        EventStream(NAME)


def test_a_socket_that_cannot_be_made(folder: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ControlError, match="event socket"):
        Publisher(context, folder / "none" / "x.evt")
    context.term()


def test_a_path_that_is_not_utf8_is_told_as_far_as_it_is(publisher: Publisher) -> None:
    with EventStream(NAME, ("warning",)) as stream:
        await_subscription(publisher, "warning")
        publisher.publish("warning", {"text": "histogram /m\udcff/\xe9.bin: not saved"})
        event = stream.next(LIMIT_S)
    assert event is not None
    assert event.data == {"text": "histogram /m?/\xe9.bin: not saved"}
