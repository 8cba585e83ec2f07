"""A system as a service manager has it: Type=notify, the watchdog, and the unit file in docs."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from systems import LIMIT_S, Up, pids_of, segments_of, until

from smoe_mp import cli, errors, supervisor
from smoe_mp.launch import private_system

pytestmark = [
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's"),
]
UNIT = Path(__file__).resolve().parents[2] / "docs/deploy/smoe-mp.service"


class Manager:
    """A service manager's socket, and what has come to it."""

    def __init__(self) -> None:
        self.address = f"@smoe-mp-{os.urandom(8).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address.replace("@", "\0"))
        self.socket.setblocking(False)
        self.lines: list[str] = []

    def heard(self) -> list[str]:
        try:
            while True:
                self.lines += self.socket.recv(4096).decode().split("\n")
        except BlockingIOError:
            return self.lines

    def has(self, line: str, times: int = 1) -> bool:
        return self.heard().count(line) >= times


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = Manager()
    monkeypatch.setenv("NOTIFY_SOCKET", made.address)
    yield made
    made.socket.close()


def test_ready_status_stopping(up: Up, manager: Manager, ring_name: str) -> None:
    system = up()
    until(lambda: manager.has("READY=1"), "READY=1")
    serving = f"STATUS=ring {ring_name}: 16 slots, 2 workers, ok"
    at = manager.lines.index("READY=1")
    assert manager.lines[at + 1] == serving
    heads = [line.split(": ")[0] for line in manager.lines[:at]]
    assert heads[0] == "STATUS=vault"
    assert heads[-3:] == ["STATUS=size", "STATUS=ring", "STATUS=workers"]
    for pid in pids_of(ring_name):  # a child is not the service
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()

    for segment in segments_of(ring_name):
        (Path("/dev/shm") / segment.lstrip("/")).unlink()
    until(lambda: any("workers, nameless: " in line for line in manager.heard()), "health")
    system.signal(signal.SIGTERM)
    assert system.wait() == 0
    assert manager.has("STOPPING=1")
    assert manager.lines[-2:] == ["STOPPING=1", "STATUS=stopping: SIGTERM"]
    assert manager.lines.count("READY=1") == 1
    assert "WATCHDOG=1" not in manager.lines


def test_the_watchdog_is_fed_while_the_loop_turns(
    up: Up, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    system = up()
    until(lambda: manager.has("WATCHDOG=1", 3), "three pings")
    system.signal(signal.SIGSTOP)  # what a loop that hangs looks like from outside
    os.waitid(os.P_PID, system.process.pid, os.WSTOPPED)
    seen = manager.heard().count("WATCHDOG=1")
    system.signal(signal.SIGCONT)
    until(lambda: manager.has("WATCHDOG=1", seen + 1), "the next one")


def test_a_private_system_is_not_the_service(manager: Manager, vault: Path, runtime_dir: Path) -> None:
    """The service is the program that started it, and may be far from ready."""
    with private_system(vault, slots=16, workers=1):
        pass
    assert manager.heard() == []


def test_the_unit_file(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, delimiters="=", comment_prefixes="#", interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify"
    limits = (supervisor.GRACE_S, supervisor.TERM_S, supervisor.KILL_S, supervisor.SAVE_S)
    assert float(service["TimeoutStopSec"]) > sum(limits)
    assert float(service["WatchdogSec"]) > 10 * supervisor.SWEEP_S
    assert service["RestartPreventExitStatus"].split() == [
        str(kind.exit_code) for kind in (errors.ConfigError, errors.VaultError, errors.SegmentSpaceError)
    ]
    program, command, config = shlex.split(service["ExecStart"])
    assert (Path(program).name, config) == ("smoe-mp", "/etc/smoe-mp/model.toml")
    assert command in [c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback]

    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not here")
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
