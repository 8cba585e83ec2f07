"""A system as in a container, by the namespaces that containers are made of.

It is pid 1 there, its /dev/shm is small, or shared with an engine in another one that has another uid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from systems import (
    LIMIT_S,
    System,
    User,
    assert_nothing_left,
    bytes_of,
    kill_and_wait,
    make_vault,
    pids_of,
    segments_of,
    smoe_mp,
    until,
    write_config,
)

from smoe_mp import runtime
from smoe_mp._native import lib

pytestmark = [
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"),
        reason="needs root, unshare and nsenter",
    ),
]
ROOT, OWNER, MEMBER = User(0, 0), User(60_001, 61_001), User(60_002, 61_001)


def contained(user: User, *, shm: str = "") -> list[str]:
    """Words before a command that have it run as pid 1 of namespaces of its own, as `user`; `shm`: with a
    /dev/shm of its own of that size."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc"]
    if shm:
        words += ["sh", "-c", f'mount -t tmpfs -o size={shm} tmpfs /dev/shm && exec "$@"', "sh"]
    return words + user.prefix()


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    done = subprocess.run([*contained(ROOT, shm="1m"), "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no namespaces to be had: {done.stderr.strip()}")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def inner(process: subprocess.Popen[Any]) -> int:
    """The pid, seen from here, of what `unshare` runs."""
    until(lambda: len(children_of(process.pid)) == 1, "the contained process")
    return children_of(process.pid)[0]


class Container(System):
    """A system in namespaces of its own; signals go to it, not to `unshare`."""

    def signal(self, number: signal.Signals) -> None:
        os.kill(inner(self.process), number)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of OWNER's that others may enter, with a vault; the run-time folder is in it."""
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    path.chmod(0o755)
    make_vault(path / "v.smoe", experts=20)
    for entry in (path, path / "v.smoe"):
        os.chown(entry, OWNER.uid, OWNER.uid)
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path / "run"))
    monkeypatch.setenv("HOME", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def name(place: Path) -> Iterator[str]:
    name = f"t{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    assert_nothing_left(name)


GROUP = f'access.group = "{OWNER.team}"\n'


@contextlib.contextmanager
def container(name: str, place: Path, before: list[str], more: str = "") -> Iterator[Container]:
    config = write_config(place / "c.toml", name, place / "v.smoe", 8, 2, more=more)
    system = Container(name, config, (), place / "stderr", before)
    try:
        yield system
    finally:
        system.end()


@pytest.mark.parametrize("shift_s", ["864000", "-30"])
def test_the_ring_s_clock_is_the_machine_s_in_a_time_namespace(shift_s: str) -> None:
    """Times in shared memory are compared by all; a client that was ten days ahead took each read that was
    under way for one that hangs."""
    words = ["unshare", "--time", "--fork", "--monotonic", shift_s]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no time namespace to be had")
    program = "from smoe_mp._native import lib; print(lib.smoe_now_ns())"
    before = lib.smoe_now_ns()
    said = subprocess.run([*words, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert before < int(said.stdout) < lib.smoe_now_ns()


def test_pid_1(name: str, place: Path) -> None:
    """A signal reaches it, it reaps who is orphaned in its container, and its stop leaves nothing."""
    metrics = 'metrics.listen = "127.0.0.1:0"\n'
    with container(name, place, contained(ROOT, shm="64m"), metrics) as system:
        pid = inner(system.process)
        children = pids_of(name)
        assert len(children) == 4  # 2 workers, prewarm, metrics
        orphan = "sleep 0.01 & sleep 0.01 & exit"  # their parent ends at once
        inside = ["nsenter", "--target", str(pid), "--pid", "--mount", "sh", "-c", orphan]
        subprocess.run(inside, check=True, timeout=LIMIT_S)
        until(lambda: sorted(children_of(pid)) == sorted(children), "the orphans are reaped")
        kill_and_wait(*children)  # its own are reaped, and told of, as ever
        until(lambda: len(pids_of(name)) == 4, "others in their places")
        system.signal(signal.SIGTERM)
        assert system.wait() == 0
        assert system.lines[-2:] == ["stopping: SIGTERM", f"stopped: ring {name} removed"]
        assert sum("was killed by SIGKILL" in line for line in system.lines) == 4
        assert system.errors() == ""


def test_shared_memory_as_containers_have_it(name: str, place: Path) -> None:
    """Field report 24: 64 MB unless it is asked for, here 1 MB."""
    config = write_config(place / "c.toml", name, place / "v.smoe", 20, 2)
    done = subprocess.run(
        [*contained(ROOT, shm="1m"), sys.executable, "-m", "smoe_mp", "up", config, "--slot-mb", "1"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert "/dev/shm" in line
    assert "--shm-size" in line


ENGINE = """
import json, os, sys, smoe_mp
from smoe_mp.errors import SmoeError
ring = smoe_mp.attach(sys.argv[1], "engine")
print(json.dumps([os.getpid(), os.geteuid()]), flush=True)
for line in sys.stdin:
    try:
        with ring.fetch(0, json.loads(line), timeout=float(sys.argv[2])) as batch:
            print(json.dumps([b"".join(bytes(p) for p in x.parts).hex() for x in batch]), flush=True)
            sys.stdin.readline()
    except SmoeError as error:
        print(json.dumps(type(error).__name__), flush=True)
"""


class Engine:
    """An engine in a container of its own, of another uid.  `take` holds experts until `give_back`."""

    def __init__(self, name: str, timeout_s: float = LIMIT_S) -> None:
        self.process = subprocess.Popen(
            [*contained(MEMBER), sys.executable, "-c", ENGINE, name, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == [1, MEMBER.uid]

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def take(self, *experts: int) -> Any:
        self._tell(json.dumps(experts))
        return self._answer()

    def give_back(self) -> None:
        self._tell("")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(inner(self.process), signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)


def inside(user: User, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`smoe-mp ARGUMENTS` in a container of its own."""
    return subprocess.run(
        [*contained(user), sys.executable, "-m", "smoe_mp", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def status_of(name: str) -> dict[str, Any]:
    done = inside(MEMBER, "status", name, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_an_engine_in_another_container(name: str, place: Path) -> None:
    """Shared are /dev/shm and the run-time folder; each is pid 1, and no pid says who lives."""
    raw = bytes_of(place / "v.smoe")
    with container(name, place, contained(OWNER), GROUP) as system:
        engine = Engine(name)
        try:
            assert engine.take(3, 5) == [raw[0, 3].hex(), raw[0, 5].hex()]
            status = status_of(name)
            assert status["pid"] == 1
            assert [(c["pid"], c["alive"], c["reserved"]) for c in status["clients"]] == [(1, True, 2)]
            doctor = json.loads(inside(MEMBER, "doctor", "--clean", "--json").stdout)
            (row,) = [row for row in doctor if row["name"] == name]
            assert (row["served"], row["orphan"], row["removed"]) == (True, False, False)
        finally:
            engine.kill()
        until(lambda: status_of(name)["clients"] == [], "the sweep of the dead engine")
        assert status_of(name)["ring"]["census"]["held"] == 0

        done = inside(MEMBER, "down", name)  # where pid 1 is the command itself
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{name}: stopped after ")
        assert not runtime.socket_path(name).exists()
        assert system.wait() == 0


def test_down_from_outside(name: str, place: Path) -> None:
    """Where pid 1 is another process altogether, and the supervisor has a number that it does not know."""
    with container(name, place, contained(ROOT)) as system:
        assert runtime.serving_pid(runtime.socket_path(name)) == inner(system.process)
        done = smoe_mp("down", name)
        assert (done.returncode, done.stderr) == (0, "")
        assert system.wait() == 0


def test_the_systems_container_is_killed(name: str, place: Path) -> None:
    """Its engine goes on with what is resident, and the next system adopts the ring."""
    with container(name, place, contained(OWNER), GROUP) as system:
        engine = Engine(name, timeout_s=2)
        try:
            first = engine.take(3)
            engine.give_back()
            os.kill(inner(system.process), signal.SIGKILL)
            system.wait()
            assert pids_of(name) == []  # the kernel ends a namespace with its first process
            assert len(segments_of(name)) == 2
            assert engine.take(3) == first
            engine.give_back()
            assert engine.take(7) == "NoSupervisor"
            with container(name, place, contained(OWNER), GROUP) as second:
                assert any("adopted" in line for line in second.lines)
                assert engine.take(3) == first
                engine.give_back()
                assert engine.take(7) == [bytes_of(place / "v.smoe")[0, 7].hex()]
                assert [c["alive"] for c in status_of(name)["clients"]] == [True]
        finally:
            engine.kill()
