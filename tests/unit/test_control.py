"""The control plane without a supervisor: the wire, its errors, the client, the run-time folder."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pickle
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support import LIMIT_S

from smoe_mp import runtime
from smoe_mp.control import protocol, server
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import (
    COMMANDS,
    Ping,
    PingResult,
    Prewarm,
    Status,
    Stop,
    Workers,
    WorkersResult,
)
from smoe_mp.control.server import ControlServer
from smoe_mp.errors import ConfigError, ControlError, NoAnswer, Refused, RingReplaced

LIMIT_MS = LIMIT_S * 1000
NAME = "fake"


class FakeLater:
    """A command under way: done at look number `looks`."""

    def __init__(self, looks: int) -> None:
        self.looks, self.cancelled = looks, False

    def poll(self) -> dict[str, Any] | None:
        self.looks -= 1
        if self.looks == 100:
            raise RingReplaced("gone")
        if self.looks > 0:
            return None
        return {"resident": 1, "hits": 0, "failed": [], "took_ms": 1.0, "state": "drained", "reads": 0}

    def cancel(self) -> None:
        self.cancelled = True


class FakeSystem:
    """A system of plain data that counts what is done to it."""

    def __init__(self) -> None:
        self.stops = 0
        self.kept = False
        self.fault: Exception | None = None
        self.asked = FakeLater(0)

    def identity(self) -> dict[str, Any]:
        if self.fault:
            raise self.fault
        return {"name": NAME, "pid": 7, "version": "0", "state": "live"}

    def status(self, memory: bool = True) -> dict[str, Any]:
        return {
            **self.identity(),
            "uptime_s": 1.5,
            "vault": {"path": "/m.smoe", "format": "smoe", "experts": 24, "bytes": 800},
            "files": [{"path": "/m.smoe", "mode": "direct", "size": 800}],
            "ring": {
                "slots": 8,
                "slot_bytes": 16384,
                "data_bytes": 131072,
                "pages": "4 KiB pages",
                "census": {"EMPTY": 8},
            },
            "health": "ok",
            "prewarm": {
                "state": "idle",
                "done": 0,
                "goal": 0,
                "trickle_ms": 4.0,
                "histogram": "/m.freq",
                "busy_clients": [],
            },
            "workers": [{"id": 0, "pid": 8, "alive": True, "slot": None}],
            "clients": [{"id": 0, "pid": 9, "alive": True, "label": "x", "reserved": 0, "more": 1}],
            "counters": {"hits": 3},
            "hit_rate": 0.75,
            "config": [{"key": "ring.slots", "value": 8, "origin": "file"}],
            "warnings": [],
        }

    def set_workers(self, count: int) -> dict[str, Any]:
        return {"before": 1, "count": count}

    def prewarm(self, action: str, trickle_ms: int | None = None) -> dict[str, Any]:
        return {**self.status()["prewarm"], "state": action, "trickle_ms": float(trickle_ms or 4)}

    def demand(self, pairs: list[Any]) -> Any:
        self.asked = FakeLater(len(pairs))
        return self.asked

    def speculate(self, pairs: list[Any]) -> dict[str, Any]:
        return {"queued": len(pairs)}

    def busy(self, lease_ms: int) -> dict[str, Any]:
        return {"busy_clients": [0] if lease_ms else [], "lease_ms": lease_ms}

    def histogram(self, action: str, counts: list[Any], first: int, most: int) -> dict[str, Any]:
        rows = [(0, e, 9 - e) for e in range(first, min(first + most, 3))]
        facts = {"experts": 3, "counted": 3, "total": 24, "path": "", "fingerprint": "00"}
        return {**facts, "most_popular": rows}

    def verify(self, action: str) -> dict[str, Any]:
        return {"state": "running" if action == "start" else "never"}

    def drain(self, resume: bool) -> Any:
        return FakeLater(0)

    def request_stop(self, keep_ring: bool = False) -> dict[str, Any]:
        self.stops += 1
        self.kept = keep_ring
        return {"name": NAME, "pid": 7, "uptime_s": 1.5, "counters": {"hits": 3}, "hit_rate": None}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run-time folder with a short path, wherever pytest keeps its own."""
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def system() -> FakeSystem:
    return FakeSystem()


@pytest.fixture
def served(folder: Path, system: FakeSystem) -> Iterator[ControlServer]:
    """A server that the test itself turns (`ask`)."""
    made = ControlServer(runtime.socket_path(NAME), system)
    yield made
    made.close()


@pytest.fixture
def serving(served: ControlServer) -> Iterator[ControlServer]:
    """A server that runs by itself, in a thread."""
    with Pump(served):
        yield served


class Pump:
    """Turns a server in a thread until the block ends."""

    def __init__(self, turned: ControlServer) -> None:
        self._server, self._end = turned, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.is_set():
            if self._server.pollable.poll(20):
                self._server.handle()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def connect(served: ControlServer) -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    """Makes plain sockets of a type, connected to the server."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(kind: int) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.connect(f"ipc://{served.path}")
        return made

    yield make
    context.destroy(linger=0)


def ask(served: ControlServer, asker: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    asker.send_multipart(frames)
    assert served.pollable.poll(LIMIT_MS)
    served.handle()
    assert asker.poll(LIMIT_MS)
    return asker.recv_multipart()


def request(command: str = "ping", **more: Any) -> bytes:
    return json.dumps({"v": 1, "id": "a1", "command": command, **more}).encode()


Connect = Callable[[int], "zmq.Socket[bytes]"]


def test_req_and_dealer_are_answered_in_kind(served: ControlServer, connect: Connect) -> None:
    expected = {"v": 1, "id": "a1", "ok": True, "result": FakeSystem().identity()}
    assert [json.loads(frame) for frame in ask(served, connect(zmq.REQ), request())] == [expected]
    dealer = connect(zmq.DEALER)
    assert [json.loads(frame) for frame in ask(served, dealer, request())] == [expected]
    empty, reply = ask(served, dealer, b"", request())
    assert (empty, json.loads(reply)) == (b"", expected)
    assert served.counters["answered"] == served.counters["requests"] == 3


@pytest.mark.parametrize("id_", ["", "x" * 128, 0, -5, 1 << 62, None])
def test_ids_come_back(served: ControlServer, connect: Connect, id_: object) -> None:
    (reply,) = ask(served, connect(zmq.DEALER), request(id=id_))
    assert json.loads(reply)["id"] == id_


BAD = {
    "empty": (b"", "Malformed", None),
    "no JSON": (b"ping", "Malformed", None),
    "a pickle": (pickle.dumps({"v": 1}), "Malformed", None),
    "a list": (b"[1]", "Malformed", None),
    "nesting": (b"[" * 500_000, "Malformed", None),
    "not UTF-8": (b'{"id":"\xff"}', "Malformed", None),
    "no version": (b'{"id":"a1","command":"ping"}', "WrongVersion", "a1"),
    "version 2": (request(v=2), "WrongVersion", "a1"),
    "version true": (request(v=True), "WrongVersion", "a1"),
    "version 1.0": (request(v=1.0), "WrongVersion", "a1"),
    "no command": (b'{"v":1,"id":"a1"}', "Malformed", "a1"),
    "a number as command": (b'{"v":1,"id":"a1","command":3}', "Malformed", "a1"),
    "unknown command": (request("format-disk"), "UnknownCommand", "a1"),
    "unknown field": (request("stop", now=True), "Malformed", "a1"),
    "text as deadline": (request("stop", deadline_ms="1"), "Malformed", "a1"),
    "no time": (request("stop", deadline_ms=0), "Malformed", "a1"),
    "no worker": (request("workers", count=0), "Malformed", "a1"),
    "128 workers": (request("workers", count=128), "Malformed", "a1"),
    "workers in words": (request("workers", count="4"), "Malformed", "a1"),
    "an action that is none": (request("prewarm", action="dance"), "Malformed", "a1"),
    "no action": (request("prewarm"), "Malformed", "a1"),
    "no experts": (request("demand", experts=[]), "Malformed", "a1"),
    "an expert alone": (request("demand", experts=[3]), "Malformed", "a1"),
    "a layer below 0": (request("demand", experts=[[-1, 3]]), "Malformed", "a1"),
    "experts in words": (request("speculate", experts="0:3"), "Malformed", "a1"),
    "a lease for ever": (request("busy", lease_ms=1 << 40), "Malformed", "a1"),
    "a trickle below 0": (request("prewarm", action="trickle", trickle_ms=-1), "Malformed", "a1"),
    "a list as id": (request("stop", id=["a1"]), "Malformed", None),
    "a long id": (request("stop", id="x" * 129), "Malformed", None),
    "a huge id": (b'{"v":1,"command":"stop","id":' + b"9" * 5000 + b"}", "Malformed", None),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_request_changes_nothing(
    served: ControlServer, connect: Connect, system: FakeSystem, case: str
) -> None:
    body, type_, id_ = BAD[case]
    for kind in (zmq.DEALER, zmq.REQ):
        (frame,) = ask(served, connect(kind), body)
        reply = json.loads(frame)
        assert (reply["ok"], reply["error"]["type"], reply["id"]) == (False, type_, id_)
    names = {"WrongVersion": "wrong_version", "UnknownCommand": "unknown_command"}
    assert served.counters[names.get(type_, "malformed")] == 2
    assert system.stops == 0


def test_odd_framing_is_answered(served: ControlServer, connect: Connect, system: FakeSystem) -> None:
    dealer = connect(zmq.DEALER)
    for frames in ([b"x", request("stop")], [b"", b"", request("stop")], [b"", request("stop"), b""]):
        reply = json.loads(ask(served, dealer, *frames)[-1])
        assert reply["error"]["type"] == "Malformed"
    half = b" " * (protocol.MESSAGE_BYTES_MAX // 2 + 1)
    assert json.loads(ask(served, dealer, half, half)[-1])["error"]["type"] == "TooLarge"
    assert served.counters["too_large"] == 1
    assert system.stops == 0


def test_an_oversized_frame_ends_only_its_own_connection(served: ControlServer, connect: Connect) -> None:
    connect(zmq.DEALER).send(b" " * (protocol.MESSAGE_BYTES_MAX + 1))
    (reply,) = ask(served, connect(zmq.DEALER), request())
    assert json.loads(reply)["ok"]
    assert served.counters["requests"] == 1


def test_faults_of_a_command_are_typed(served: ControlServer, connect: Connect, system: FakeSystem) -> None:
    dealer = connect(zmq.DEALER)
    system.fault = RingReplaced("gone")
    assert json.loads(ask(served, dealer, request())[0])["error"] == {
        "type": "RingReplaced",
        "message": "gone",
    }
    system.fault = ZeroDivisionError("ours")
    assert json.loads(ask(served, dealer, request())[0])["error"]["type"] == "Internal"
    system.fault = None
    assert json.loads(ask(served, dealer, request())[0])["ok"]
    assert served.counters["failed"] == 2


def test_a_late_reply_is_not_sent(
    served: ControlServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealer = connect(zmq.DEALER)
    clock = iter((0.0, 5.001, 5.001))
    with monkeypatch.context() as patch:
        patch.setattr(server, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        dealer.send(request(id="late"))
        assert served.pollable.poll(LIMIT_MS)
        served.handle()
    assert served.counters["late"] == 1
    assert json.loads(ask(served, dealer, request(id="next"))[0])["id"] == "next"


def test_a_command_that_takes_time_is_looked_at_by_turns(
    served: ControlServer, connect: Connect, system: FakeSystem
) -> None:
    slow, quick = connect(zmq.DEALER), connect(zmq.REQ)
    slow.send(request("demand", experts=[[0, e] for e in range(3)]))
    assert served.pollable.poll(LIMIT_MS)
    served.handle()  # one look
    assert json.loads(ask(served, quick, request())[0])["ok"]  # others are answered meanwhile
    assert served.tick() < 1  # another look
    assert slow.poll(0) == 0
    assert served.tick() > 1  # the last
    assert slow.poll(LIMIT_MS)
    reply = json.loads(slow.recv())
    assert (reply["id"], reply["result"]["resident"]) == ("a1", 1)


def test_one_that_fails_on_the_way_says_so(served: ControlServer, connect: Connect) -> None:
    dealer = connect(zmq.DEALER)
    dealer.send(request("demand", experts=[[0, e] for e in range(102)]))
    assert served.pollable.poll(LIMIT_MS)
    served.handle()
    assert served.tick() > 1
    assert dealer.poll(LIMIT_MS)
    assert json.loads(dealer.recv())["error"]["type"] == "RingReplaced"


def test_one_that_nobody_waits_for_is_cancelled(
    served: ControlServer, connect: Connect, system: FakeSystem
) -> None:
    dealer = connect(zmq.DEALER)
    dealer.send(request("demand", experts=[[0, 1], [0, 2]], deadline_ms=1))
    assert served.pollable.poll(LIMIT_MS)
    served.handle()
    system.asked.looks = 1 << 30
    while not system.asked.cancelled:
        served.tick()
    assert served.counters["late"] == 1
    assert served.tick() > 1


def test_no_more_under_way_than_may_be(
    served: ControlServer, connect: Connect, system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PENDING_MAX", 2)
    dealer = connect(zmq.DEALER)
    many = [[0, e] for e in range(99)]
    for _ in range(2):
        dealer.send(request("demand", experts=many))
        assert served.pollable.poll(LIMIT_MS)
        served.handle()
    (reply,) = ask(served, dealer, request("demand", experts=many))
    assert json.loads(reply)["error"]["type"] == "TooMany"
    assert served.counters["too_many"] == 1
    last = system.asked
    served.close()
    assert last.cancelled


def test_a_vanished_asker_is_counted(served: ControlServer, connect: Connect) -> None:
    dealer = connect(zmq.DEALER)
    dealer.send(request())
    assert served.pollable.poll(LIMIT_MS)
    monitor = served.pollable.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.close(linger=0)
    assert monitor.poll(LIMIT_MS)
    served.pollable.disable_monitor()
    served.handle()
    assert served.counters["undeliverable"] + served.counters["answered"] == 1


def test_every_command_has_its_documentation() -> None:
    for name, command in COMMANDS.items():
        assert command.__struct_config__.tag == name
        assert command.__doc__
        assert command.result
        assert bool(command.cli) == bool(command.example)


# --- the socket ------------------------------------------------------------------------------------------


def test_the_socket_is_closed_to_others_and_removed(served: ControlServer) -> None:
    found = served.path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    served.close()
    served.close()
    assert not served.path.exists()


def test_a_served_socket_is_not_taken_over(
    served: ControlServer, connect: Connect, system: FakeSystem
) -> None:
    with pytest.raises(ControlError, match="another process serves it"):
        ControlServer(served.path, system)
    assert json.loads(ask(served, connect(zmq.DEALER), request())[0])["ok"]


def test_a_socket_left_by_a_dead_supervisor_is_taken_over(folder: Path, system: FakeSystem) -> None:
    path = runtime.socket_path(NAME)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    assert not runtime.is_served(path)
    made = ControlServer(path, system)
    assert runtime.is_served(path)
    made.close()


# --- the client ------------------------------------------------------------------------------------------


def test_calls_give_typed_results(serving: ControlServer, system: FakeSystem) -> None:
    with ControlClient(NAME, timeout_ms=LIMIT_MS) as control:
        assert control.call(Ping()) == PingResult(name=NAME, pid=7, version="0", state="live")
        status = control.call(Status())
        assert (status.ring.slots, status.workers[0].slot, status.control["requests"]) == (8, None, 2)
        assert control.call(Stop()).hit_rate is None
        assert system.stops == 1


def test_the_commands_that_change_something(serving: ControlServer, system: FakeSystem) -> None:
    with ControlClient(NAME, timeout_ms=LIMIT_MS) as control:
        assert control.call(Workers(count=127)) == WorkersResult(before=1, count=127)
        assert control.call(Prewarm(action="pause")).state == "pause"
        assert control.call(Prewarm(action="trickle", trickle_ms=0)).trickle_ms == 4
        assert control.call(Prewarm(action="trickle", trickle_ms=7)).trickle_ms == 7
        for wrong in (Prewarm(action="trickle"), Prewarm(action="run", trickle_ms=4)):
            with pytest.raises(Refused, match="ConfigError: prewarm: trickle takes trickle_ms"):
                control.call(wrong)
        control.call(Stop(keep_ring=True))
        assert system.kept
        control.call(Stop())
        assert not system.kept


def test_an_error_becomes_refused(serving: ControlServer, system: FakeSystem) -> None:
    system.fault = RingReplaced("gone")
    with (
        ControlClient(NAME, timeout_ms=LIMIT_MS) as control,
        pytest.raises(Refused, match="RingReplaced: gone"),
    ):
        control.call(Ping())


def test_nobody_there(folder: Path) -> None:
    with ControlClient(NAME, timeout_ms=50) as control, pytest.raises(NoAnswer, match="smoe-mp up"):
        control.call(Ping())


def test_a_busy_supervisor_then_a_new_one(folder: Path, system: FakeSystem) -> None:
    path = runtime.socket_path(NAME)
    with ControlClient(NAME, timeout_ms=200) as control:
        first = ControlServer(path, system)
        with pytest.raises(NoAnswer, match="try again"):
            control.call(Stop())  # nobody turns the server
        first.close()
        with pytest.raises(NoAnswer, match="smoe-mp up"):
            control.call(Stop())
        second = ControlServer(path, system)
        control.timeout_ms = LIMIT_MS
        with Pump(second):
            assert control.call(Ping()).name == NAME
        second.close()
    assert system.stops == 0, "a command that nobody answered must not reach a later supervisor"


def test_late_replies_are_dropped(folder: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{runtime.socket_path(NAME)}")

    def answer_late() -> None:
        asker, body = router.recv_multipart()
        id_ = json.loads(body)["id"]
        stranger = {"name": "late", "pid": 1, "version": "0", "state": "live"}
        for late_id, result in (("earlier", stranger), (id_, {**stranger, "name": NAME})):
            reply = {"v": 1, "id": late_id, "ok": True, "result": result}
            router.send_multipart([asker, json.dumps(reply).encode()])

    thread = threading.Thread(target=answer_late)
    thread.start()
    with ControlClient(NAME, timeout_ms=LIMIT_MS) as control:
        assert control.call(Ping()).name == NAME
    thread.join()
    context.destroy(linger=0)


def test_a_forked_child_asks_on_its_own(serving: ControlServer) -> None:
    with ControlClient(NAME, timeout_ms=LIMIT_MS) as control:
        assert control.call(Ping()).name == NAME
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if control.call(Ping()).name == NAME else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert control.call(Ping()).name == NAME


def test_a_closed_client_opens_again(serving: ControlServer) -> None:
    control = ControlClient(NAME, timeout_ms=LIMIT_MS)
    for _ in range(2):
        assert control.call(Ping()).pid == 7
        control.close()


# --- the run-time folder ---------------------------------------------------------------------------------


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_RUNTIME_DIR", "/a/b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert runtime.runtime_folder() == Path("/a/b")
    monkeypatch.delenv("SMOE_RUNTIME_DIR")
    assert runtime.runtime_folder() == Path("/run/user/1/smoe-mp")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime.runtime_folder() == Path(f"/tmp/smoe-mp-{os.getuid()}")


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_folder_is_made_private(folder: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder / "x" / "y"))
    old = os.umask(mask)
    try:
        made = runtime.make_runtime_folder()
    finally:
        os.umask(old)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert runtime.make_runtime_folder() == made


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o704, 0o720])
def test_an_open_folder_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}, open to others"):
        runtime.make_runtime_folder()
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        ControlClient(NAME)


def test_a_link_or_a_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to("real")
    (folder / "file").touch()
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder / "link"))
    with pytest.raises(ConfigError, match="is no folder"):
        runtime.make_runtime_folder()
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder / "file"))
    with pytest.raises(ConfigError, match="cannot make"):
        runtime.make_runtime_folder()


def test_another_owner_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"belongs to uid {uid}, not to uid {uid + 1}"):
        runtime.make_runtime_folder()
    with pytest.raises(ConfigError, match=f"belongs to uid {uid}, not to uid {uid + 1}"):
        ControlClient(NAME)


def test_another_owners_folder_of_a_group_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client takes it where it was named, and only if it was opened to the group; a supervisor never."""
    uid, gid = os.geteuid(), folder.stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    folder.chmod(0o750)
    ControlClient(NAME).close()
    with pytest.raises(ConfigError, match="belongs to uid"):
        runtime.make_runtime_folder()
    folder.chmod(0o710)  # not as we make them
    with pytest.raises(ConfigError, match="belongs to uid"):
        ControlClient(NAME)
    folder.chmod(0o750)
    monkeypatch.setattr(runtime, "own_groups", lambda: {gid + 1})
    with pytest.raises(ConfigError, match="belongs to uid"):
        ControlClient(NAME)


def test_a_default_folder_of_another_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can foresee its name, and a group in common must not be enough."""
    monkeypatch.delenv("SMOE_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "smoe-mp").mkdir()
    (folder / "smoe-mp").chmod(0o750)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="belongs to uid"):
        ControlClient(NAME)


def test_a_folder_for_a_group(folder: Path) -> None:
    gid = folder.stat().st_gid
    runtime.make_runtime_folder(gid)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    runtime.make_runtime_folder()  # a system without a group may serve beside it
    runtime.make_runtime_folder(gid)
    with pytest.raises(ConfigError, match=f"is open to group .*, and access.group is {gid + 7777}"):
        runtime.make_runtime_folder(gid + 7777)
    assert folder.stat().st_gid == gid


def test_a_folder_that_the_group_cannot_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below /run/user/UID: the option would do nothing."""
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder / "x"))
    gid = folder.stat().st_gid
    with pytest.raises(
        ConfigError, match=f"cannot reach the run-time folder {folder}/x: {folder} has mode 0700"
    ):
        runtime.make_runtime_folder(gid)
    folder.chmod(0o710)
    runtime.make_runtime_folder(gid)


def test_the_socket_is_never_open_wider(
    folder: Path, system: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the moment between bind and chmod either, whatever the umask."""
    old = os.umask(0)
    try:
        monkeypatch.setattr(os, "chmod", lambda path, mode: None)
        with contextlib.closing(ControlServer(runtime.socket_path(NAME), system)) as made:
            assert stat.S_IMODE(made.path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
        monkeypatch.undo()
        monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder))
        gid = folder.stat().st_gid
        with contextlib.closing(ControlServer(runtime.socket_path(NAME), system, gid)) as made:
            assert stat.S_IMODE(made.path.stat().st_mode) == 0o660
            assert made.path.stat().st_gid == gid
    finally:
        os.umask(old)


@pytest.mark.parametrize("group", ["no-such-group-at-all", "-1", "1.5"])
def test_no_such_group(group: str) -> None:
    with pytest.raises(ConfigError, match=f'access.group = "{group}": no such group'):
        runtime.group_id(group)


def test_whose_group_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own = grp.getgrgid(os.getegid())
    assert runtime.group_id("") is None
    assert runtime.group_id(own.gr_name) == runtime.group_id(str(own.gr_gid)) == own.gr_gid
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert runtime.group_id(own.gr_name) == own.gr_gid
    monkeypatch.setattr(runtime, "own_groups", lambda: {4712})
    with pytest.raises(ConfigError, match=r"uid 4711 is not in it, .* its groups are 4712"):
        runtime.group_id(own.gr_name)
