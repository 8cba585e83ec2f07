"""`smoe-mp up --detach` and the log of a real system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from systems import (
    LIMIT_S,
    Up,
    assert_nothing_left,
    kill_and_wait,
    pids_of,
    processes_of,
    smoe_mp,
    status_of,
    until,
    write_config,
)

from smoe_mp.launch import private_system
from smoe_mp.process import ExitWatch

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/smoe-mp"


@pytest.fixture
def config(vault: Path, ring_name: str, tmp_path: Path, state: Path) -> Iterator[Path]:
    """A configuration whose system is stopped at the end, if it runs."""
    yield write_config(tmp_path / "c.toml", ring_name, vault, 16, 2)
    smoe_mp("down", ring_name)


def said(path: Path) -> list[str]:
    """Lines of a text log, less the time."""
    return [line.split(" ", 1)[1] for line in path.read_text().splitlines()]


def test_detach(config: Path, ring_name: str, state: Path) -> None:
    done = smoe_mp("up", config, "--detach", "--workers", "3")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    path = state / f"{ring_name}.log"
    assert lines[0].startswith(f"log: {path}: ")
    assert lines[-1] == f'ready: attach with smoe_mp.attach("{ring_name}")'
    status = status_of(ring_name)
    assert last == f"detached: pid {status.pid}"
    assert len(status.workers) == 3
    assert said(path) == lines

    path.rename(state / "old")
    smoe_mp("workers", ring_name, "1")
    assert said(path) == ["workers: 3 to 1"]
    if sys.platform == "linux":
        assert os.getsid(status.pid) == status.pid
        until(lambda: os.readlink(f"/proc/{status.pid}/fd/2") == str(path), "stderr follows the file")
        assert os.readlink(f"/proc/{status.pid}/fd/0") == "/dev/null"

    assert smoe_mp("down", ring_name).returncode == 0
    assert said(path)[1:] == [
        "stopping: asked to by the control plane",
        f"stopped: ring {ring_name} removed",
    ]
    assert_nothing_left(ring_name)


def test_a_detached_start_that_fails(config: Path, ring_name: str, state: Path, tmp_path: Path) -> None:
    """Its error and exit status are the command's."""
    done = smoe_mp(
        "up", config, "--detach", "--ring", "65535", "--slot-mb", "1024", "--log-file", tmp_path / "x"
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("smoe-mp: error: ring of 65535 slots")
    assert f"error: {done.stderr.removeprefix('smoe-mp: error: ').strip()}" == said(tmp_path / "x")[-1]
    assert not state.exists()
    assert smoe_mp("up", tmp_path / "none.toml", "--detach").returncode == 2
    assert_nothing_left(ring_name)


def test_a_second_detached_start(config: Path, ring_name: str) -> None:
    assert smoe_mp("up", config, "--detach").returncode == 0
    again = smoe_mp("up", config, "--detach")
    assert again.returncode == 4
    assert "a living supervisor serves it" in again.stderr
    assert status_of(ring_name).state == "live"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_to_end_while_it_waits(number: signal.Signals, status: int, runtime_dir: Path) -> None:
    """A start that hangs, here for a configuration that never comes, is ended together with its waiter."""
    waiter = subprocess.Popen(
        [sys.executable, "-m", "smoe_mp", "up", "/dev/stdin", "--detach"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children = Path(f"/proc/{waiter.pid}/task/{waiter.pid}/children")
    if not children.exists():
        pytest.skip("who is whose child is read from /proc")
    until(lambda: children.read_text().split() != [], "the start")
    watch = ExitWatch(int(children.read_text()))
    waiter.send_signal(number)
    assert waiter.wait(LIMIT_S) == status  # before stdin is closed, which would be a start that fails
    assert waiter.communicate() == (b"", b"")
    assert watch.wait(0)
    watch.close()


def test_what_happens_is_logged(up: Up, ring_name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    system = up(flags=("--log-file", str(path), "--log-format", "json", "--log-level", "debug"))
    until(lambda: len(processes_of(ring_name)) == 3, "2 workers and the prewarm process")
    victim = status_of(ring_name).workers[0].pid
    assert victim in pids_of(ring_name)
    kill_and_wait(victim)
    until(lambda: "was killed by SIGKILL" in path.read_text(), "the death")
    system.signal(signal.SIGTERM)
    assert system.wait() == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [json.loads(line) for line in system.lines] == rows
    assert {row["system"] for row in rows} == {ring_name}
    assert {row["pid"] for row in rows} == {system.process.pid}
    levels = {row["message"]: row["level"] for row in rows}
    (death,) = [message for message in levels if "was killed by SIGKILL" in message]
    assert death.startswith(f"worker 0 (pid {victim})")
    assert levels[death] == "warning"
    assert levels["workers: 2 ready"] == "info"
    assert {level for message, level in levels.items() if message.startswith("control: status: ")} == {
        "debug"
    }


def test_a_private_system_with_a_log_of_its_own_form(vault: Path, runtime_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    settings = {"log.level": "warning", "log.format": "json", "log.file": str(path)}
    with private_system(vault, slots=16, workers=1, settings=settings) as system:
        assert system.lines[-1].startswith("ready: ")
        assert {json.loads(line)["level"] for line in path.read_text().splitlines()} <= {"warning"}
