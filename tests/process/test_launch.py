"""Private systems: they serve, say what went wrong, and end with their user, however that ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import LIMIT_S, until
from systems import (
    assert_nothing_left,
    bytes_of,
    kill_and_wait,
    make_vault,
    pids_of,
    segments_of,
    status_of,
    wait_ended,
    watched,
)

import smoe_mp
from smoe_mp.errors import ConfigError, NoSuchRing, SegmentError, VaultError
from smoe_mp.launch import PrivateSystem, private_system
from smoe_mp.runtime import socket_path

pytestmark = pytest.mark.usefixtures("runtime_dir")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_vault(tmp_path / "tiny.smoe")


def start(model: Path, name: str | None = None) -> PrivateSystem:
    return private_system(model, name=name, slots=8, workers=2)


@contextmanager
def user(program: str, model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that starts a system, says its name, and goes on with `program`."""
    script = f"""
import os, sys
from smoe_mp.launch import private_system
system = private_system(sys.argv[1], slots=8, workers=2)
print(system.name, system.pid, flush=True)
{program}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        name = process.stdout.readline().split(" ")[0]
        assert name, process.communicate()[1]
        yield process, name
    finally:
        process.kill()
        process.communicate()


def test_it_serves_and_leaves_nothing(model: Path) -> None:
    with start(model) as system:
        with smoe_mp.attach(system.name) as ring, ring.fetch(0, [3]) as batch:
            assert batch[0].raw.tobytes() == bytes_of(model)[0, 3]
        assert system.name.startswith("tiny-")
        assert status_of(system.name).pid == system.pid
        assert repr(system) == f"<PrivateSystem {system.name!r} running>"
    assert_nothing_left(system.name)
    system.stop()
    assert repr(system) == f"<PrivateSystem {system.name!r} stopped>"
    with pytest.raises(NoSuchRing):
        smoe_mp.attach(system.name)


def test_each_gets_a_ring_of_its_own(model: Path) -> None:
    with start(model) as first, start(model) as second:
        assert first.name != second.name
        first.stop()
        assert status_of(second.name).state == "live"


def test_settings_reach_it(model: Path, ring_name: str, tmp_path: Path) -> None:
    where = tmp_path / "freq.bin"
    with private_system(
        model, name=ring_name, slots=8, workers=3, ranks=5,
        settings={"prewarm.enabled": False, "prewarm.histogram": os.path.relpath(where)},
    ) as system:  # fmt: skip
        status = status_of(ring_name)
    values = {row.key: row.value for row in status.config}
    assert system.name == ring_name
    assert (values["ring.slots"], values["workers.count"], values["speculation.ranks"]) == (8, 3, 5)
    assert status.prewarm.state == "not running"
    assert where.is_file()


def test_a_warning_of_the_start_is_passed_on(model: Path) -> None:
    with private_system(make_vault(model.with_name("v.smoe"), layers=4), slots=8, workers=1) as system:
        told = [line for line in system.lines if line.startswith("warning: ")]
        assert system.warnings == [line.removeprefix("warning: ") for line in told]
        assert system.lines[-1].startswith("ready: ")


def test_what_nobody_refers_to_any_more_ends(model: Path) -> None:
    system = start(model)
    name = system.name
    del system
    gc.collect()
    assert_nothing_left(name)


def test_it_ends_at_the_interpreters_exit_and_says_nothing(model: Path) -> None:
    with user("", model) as (process, name):
        assert process.communicate(timeout=LIMIT_S) == ("", "")
        assert process.returncode == 0
        assert_nothing_left(name)


def test_it_ends_with_an_error_of_its_user(model: Path) -> None:
    with user("raise SystemExit(3)", model) as (process, name):
        assert process.wait(LIMIT_S) == 3
        assert_nothing_left(name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_user_that_is_killed_leaves_nothing(model: Path, number: signal.Signals) -> None:
    with user("sys.stdin.read()", model) as (process, name):
        supervisor = watched([status_of(name).pid])
        process.send_signal(number)
        process.wait(LIMIT_S)
        wait_ended(supervisor)
        assert_nothing_left(name)


def test_a_forked_child_that_lives_on_does_not_keep_it(model: Path) -> None:
    program = """
if os.fork() == 0:
    os.close(1), os.close(2)
    sys.stdin.read()
    os._exit(0)
print('forked', flush=True)
sys.stdin.read()
"""
    with user(program, model) as (process, name):
        assert process.stdout is not None
        assert process.stdout.readline() == "forked\n"
        supervisor = watched([status_of(name).pid])
        kill_and_wait(process.pid)
        wait_ended(supervisor)
        assert_nothing_left(name)


def test_a_forked_child_that_ends_does_not_end_it(model: Path) -> None:
    program = """
pid = os.fork()
if pid == 0: sys.exit(0)
os.waitpid(pid, 0)
print('on', flush=True)
sys.stdin.read()
"""
    with user(program, model) as (process, name):
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        assert status_of(name).state == "live"


def test_a_user_killed_while_it_starts_leaves_nothing(model: Path, ring_name: str) -> None:
    script = "import sys; from smoe_mp.launch import private_system as p; p(sys.argv[1], name=sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", script, str(model), ring_name])
    until(lambda: segments_of(ring_name) != [], "the ring's segments")
    kill_and_wait(process.pid)
    process.wait(LIMIT_S)
    until(lambda: not segments_of(ring_name) and not pids_of(ring_name), "the system's end")
    until(lambda: not socket_path(ring_name).exists(), "the control socket's end")


def test_stop_clears_what_a_killed_supervisor_left(model: Path) -> None:
    with start(model) as system:
        children = watched(pids_of(system.name))
        kill_and_wait(system.pid)
        assert segments_of(system.name)
    wait_ended(children)
    assert_nothing_left(system.name)


def test_only_a_parent_can_be_followed(model: Path) -> None:
    command = [sys.executable, "-m", "smoe_mp", "up", str(model), "--parent", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if os.getpid() == 1:
        pytest.skip("this process is pid 1")
    assert done.returncode == 1
    assert done.stderr == ("smoe-mp: error: --parent 1: no such process started this one, or it has ended\n")


def test_errors_are_those_of_the_command(model: Path, tmp_path: Path, ring_name: str) -> None:
    damaged = tmp_path / "damaged.smoe"
    damaged.write_bytes(model.read_bytes()[:100])
    with pytest.raises(VaultError, match=r"damaged\.smoe"):
        start(damaged)
    with pytest.raises(VaultError, match=r"no such file or folder"):
        start(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"workers\.count = 0: must be a whole number from 1 to 127"):
        private_system(model, workers=0)
    with pytest.raises(ConfigError, match=r"unknown key ring\.slot; the nearest known one is ring\.slots"):
        private_system(model, settings={"ring.slot": 4})
    with pytest.raises(ConfigError, match="only letters"):
        start(model, "no name")
    with start(model, ring_name), pytest.raises(SegmentError, match=ring_name):
        start(model, ring_name)


def test_up_takes_a_model(ring_name: str, tmp_path: Path) -> None:
    model = make_vault(tmp_path / f"{ring_name}.smoe")
    command = [sys.executable, "-m", "smoe_mp", "up", str(model), "--ring", "8", "--workers", "2"]
    systems, names = [], (ring_name, f"{ring_name}-2")
    try:
        for name in names:
            system = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            systems.append(system)
            assert system.stdout is not None
            lines = iter(system.stdout.readline, "")
            assert next(line for line in lines if line.startswith("ready: ")) == (
                f'ready: attach with smoe_mp.attach("{name}")\n'
            )
            assert {row.key: row.origin for row in status_of(name).config}["vault.path"] == "model"
    finally:
        for system in systems:
            system.terminate()
            system.communicate(timeout=LIMIT_S)
    assert [system.returncode for system in systems] == [0, 0]
    for name in names:
        assert_nothing_left(name)
