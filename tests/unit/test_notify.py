"""What a service manager hears: a socket of the test's own stands in its place."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smoe_mp.notify import Notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """Its socket and the address as NOTIFY_SOCKET has it."""
    if request.param == "abstract" and sys.platform != "linux":
        pytest.skip("abstract addresses are Linux's")
    folder = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    address = str(folder / "notify") if request.param == "path" else f"@smoe-mp-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address.replace("@", "\0"))
        sock.setblocking(False)
        yield sock, address
    shutil.rmtree(folder)


def heard(manager: socket.socket) -> list[str]:
    out = []
    while True:
        try:
            out.append(manager.recv(4096).decode())
        except BlockingIOError:
            return out


def test_what_is_said(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    environ = {"NOTIFY_SOCKET": address, "HOME": "/"}
    notify = Notify.from_environment(environ)
    assert environ == {"HOME": "/"}
    notify.status("vault: a\nREADY=1 forged")
    notify.ready("8 slots")
    notify.stopping("SIGTERM")
    assert notify.ping() == float("inf")
    assert heard(sock) == [
        "STATUS=vault: a?READY=1 forged",
        "READY=1\nSTATUS=8 slots",
        "STOPPING=1\nSTATUS=stopping: SIGTERM",
    ]


def test_the_watchdog(manager: tuple[socket.socket, str]) -> None:
    sock, address = manager
    now = 100.0
    notify = Notify(address, 3.0, clock=lambda: now)
    assert notify.ping() == 1.5
    assert heard(sock) == ["WATCHDOG=1"]
    now += 1.0
    assert notify.ping() == 0.5
    assert heard(sock) == []
    now += 0.5
    assert notify.ping() == 1.5
    assert heard(sock) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    ("usec", "pid", "watched"),
    [
        ("2000000", "", True),
        ("2000000", "own", True),
        ("2000000", "other", False),
        ("", "", False),
        ("x", "", False),
        ("0", "", False),
    ],
)
def test_whether_it_is_watched(usec: str, pid: str, watched: bool) -> None:
    pids = {"own": str(os.getpid()), "other": str(os.getpid() + 1)}
    environ = {"NOTIFY_SOCKET": "/none", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pids.get(pid, pid)}
    due_s = Notify.from_environment(environ).ping()
    assert due_s == (1.0 if watched else float("inf"))
    assert environ == {}


def test_nobody_listens() -> None:
    for address in ("", "/none/notify", "@smoe-mp-nobody", "x" * 200, "vsock:2:1234"):
        Notify(address, 1.0).ready("x")
