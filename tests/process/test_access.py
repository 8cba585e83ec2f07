"""Who may attach and command: real processes of other users, as root can start them.

OWNER runs the system, MEMBER is in the group that it is opened to, STRANGER is not.  The group is TEAM.
"""

from __future__ import annotations

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
    make_vault,
    segments_of,
    until,
    write_config,
)

import smoe_mp
from smoe_mp import runtime

pytestmark = [
    pytest.mark.timeout(3 * LIMIT_S),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be other users"),
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory has a group on Linux only"),
]

TEAM, OTHER_TEAM = 61_001, 61_002
ROOT = User(0, 0)
OWNER, MEMBER, STRANGER = User(60_001, TEAM), User(60_002, TEAM), User(60_003, OTHER_TEAM)
SHM = Path("/dev/shm")


def as_user(user: User, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*user.prefix(), *map(str, command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def command(user: User, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return as_user(user, sys.executable, "-m", "smoe_mp", *arguments)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = done.stderr.splitlines()
    assert line.startswith("smoe-mp: error: "), line
    return line.removeprefix("smoe-mp: error: ")


FETCH = """
import sys, smoe_mp
with smoe_mp.attach(sys.argv[1]) as ring, ring.fetch(0, [3, 5]) as batch:
    print(*(b"".join(bytes(p) for p in expert.parts).hex() for expert in batch))
"""


def fetched(user: User, name: str) -> subprocess.CompletedProcess[str]:
    """Experts 3 and 5 of layer 0 as `user` gets them, in hexadecimal."""
    return as_user(user, sys.executable, "-c", FETCH, name)


TRY = """
import errno, os, socket, sys
shm, control = sys.argv[1:]
for name, flags in ((shm, os.O_RDONLY), (shm, os.O_RDWR), (shm + ".d", os.O_RDONLY), (shm + ".d", os.O_RDWR)):
    try:
        os.open("/dev/shm/smoe." + name, flags)
        print("opened")
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    socket.socket(socket.AF_UNIX).connect(control)
    print("connected")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def doors(user: User, name: str) -> list[str]:
    """What a program of `user` gets at: the control segment to read and to write, the data segment to read
    and to write, the control socket."""
    return as_user(user, sys.executable, "-c", TRY, name, runtime.socket_path(name)).stdout.split()


CLOSED = ["EACCES"] * 5


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of OWNER's that others may enter, with a vault."""
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    path.chmod(0o755)
    make_vault(path / "v.smoe")
    for entry in (path, path / "v.smoe"):
        os.chown(entry, OWNER.uid, OWNER.uid)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def name(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A ring name whose control socket lies in a folder of OWNER's."""
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(place / "run"))
    monkeypatch.setenv("HOME", str(place))
    name = f"t{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    assert_nothing_left(name)


def owner_status(name: str) -> dict[str, Any]:
    done = command(OWNER, "status", name, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Starter:
    """Starts systems of OWNER's, or other users'; all are stopped at the end."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self.started: list[System] = []

    def config(self, more: str = "") -> Path:
        return write_config(self.place / "c.toml", self.name, self.place / "v.smoe", 8, 2, more=more)

    def __call__(self, more: str = "", user: User = OWNER, flags: tuple[str, ...] = ()) -> System:
        errors = self.place / f"{len(self.started)}.stderr"
        self.started.append(System(self.name, self.config(more), flags, errors, user.prefix()))
        return self.started[-1]


@pytest.fixture
def start(name: str, place: Path) -> Iterator[Starter]:
    starter = Starter(name, place)
    yield starter
    for system in starter.started:
        system.end()


GROUP = f'access.group = "{TEAM}"\n'


def test_closed_by_default(start: Starter, name: str, place: Path) -> None:
    old = os.umask(0)
    try:
        start()
    finally:
        os.umask(old)
    assert doors(OWNER, name) == ["opened"] * 4 + ["connected"]
    for user in (MEMBER, STRANGER):
        assert doors(user, name) == CLOSED
        done = fetched(user, name)
        assert f"permission denied for uid {user.uid}: it belongs to uid {OWNER.uid}" in done.stderr
        done = command(user, "status", name)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"belongs to uid {OWNER.uid}, not to uid {user.uid}" in error_of(done)


def test_open_to_a_group(start: Starter, name: str, place: Path) -> None:
    system = start(GROUP)
    assert doors(MEMBER, name) == ["opened", "opened", "opened", "EACCES", "connected"]
    raw = bytes_of(place / "v.smoe")
    done = fetched(MEMBER, name)
    assert (done.stdout.split(), done.stderr) == ([raw[0, 3].hex(), raw[0, 5].hex()], "")
    done = command(MEMBER, "status", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{name}: live" in done.stdout
    assert command(MEMBER, "workers", name, "3").stdout == f"{name}: 2 workers before, 3 from now on\n"

    assert doors(STRANGER, name) == CLOSED
    assert "permission denied" in fetched(STRANGER, name).stderr
    done = command(STRANGER, "status", name)
    assert done.returncode == 2
    assert "or to one that is open to a group of yours" in error_of(done)

    assert command(MEMBER, "down", name).returncode == 0
    assert system.wait() == 0
    assert_nothing_left(name)


def test_a_members_death_is_swept_up(start: Starter, name: str) -> None:
    """Its lock is on a segment that it does not own."""
    start(GROUP)
    program = FETCH + "    sys.stdout.flush(); sys.stdin.read()\n"
    client = subprocess.Popen(
        [*MEMBER.prefix(), sys.executable, "-c", program, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline()
    (row,) = owner_status(name)["clients"]
    assert (row["pid"], row["alive"], row["reserved"]) == (client.pid, True, 2)
    client.kill()
    client.communicate()
    until(lambda: owner_status(name)["clients"] == [], "the sweep")
    assert owner_status(name)["ring"]["census"]["held"] == 0


def test_a_system_without_a_group_beside_one_with(start: Starter, name: str, place: Path) -> None:
    """The folder is open to the group then, the other's socket is not."""
    start(GROUP)
    other = Starter(f"{name[:-2]}-b", place)
    try:
        other()
        assert doors(MEMBER, other.name) == CLOSED
        done = command(MEMBER, "status", other.name)
        assert done.returncode == 7
        assert f"permission denied for uid {MEMBER.uid}: it belongs to uid {OWNER.uid}" in error_of(done)
        assert command(OWNER, "status", other.name).returncode == 0
    finally:
        for system in other.started:
            system.end()
    assert_nothing_left(other.name)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ("no-such-group", "no such group"),
        (str(OTHER_TEAM), f"uid {OWNER.uid} is not in it"),
    ],
)
def test_a_group_that_cannot_be(start: Starter, group: str, why: str) -> None:
    done = command(OWNER, "up", start.config(f'access.group = "{group}"\n'))
    assert done.returncode == 2
    assert error_of(done).startswith(f'access.group = "{group}": {why}')


TWICE = """
import sys, smoe_mp
with smoe_mp.attach(sys.argv[1]) as ring:
    for turn in range(2):
        with ring.fetch(0, [3 + turn]) as batch:
            print(len(batch[0].raw), flush=True)
        sys.stdin.readline()
"""


def test_adopted_with_another_setting(start: Starter, name: str) -> None:
    """The new supervisor's setting holds; who is attached goes on."""
    start(GROUP)
    client = subprocess.Popen(
        [*MEMBER.prefix(), sys.executable, "-c", TWICE, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    first = client.stdout.readline()
    assert command(OWNER, "down", name, "--keep-ring").returncode == 0
    system = start()
    assert any("adopted" in line for line in system.lines)
    assert doors(MEMBER, name) == CLOSED
    client.stdin.write("\n")
    client.stdin.flush()
    assert client.stdout.readline() == first
    client.communicate()
    assert client.returncode == 0
    assert command(OWNER, "down", name, "--keep-ring").returncode == 0
    start(GROUP)
    assert doors(MEMBER, name) == ["opened", "opened", "opened", "EACCES", "connected"]


def test_a_member_cannot_take_the_ring_over(start: Starter, name: str, place: Path) -> None:
    """Of a ring that nobody serves, which its group may write: neither adopted nor removed by `up` or
    `doctor --clean` of another user."""
    system = start(GROUP)
    system.kill(everything=True)
    os.environ["SMOE_RUNTIME_DIR"] = str(place / "member")
    (place / "member").mkdir(mode=0o700)
    os.chown(place / "member", MEMBER.uid, MEMBER.uid)
    done = command(MEMBER, "up", start.config())
    assert done.returncode == 4
    assert f"belongs to uid {OWNER.uid}, not to uid {MEMBER.uid}" in error_of(done)
    done = command(MEMBER, "doctor", "--clean")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"uid {OWNER.uid} or root removes them" in " ".join(done.stdout.split())
    assert len(segments_of(name)) == 2
    os.environ["SMOE_RUNTIME_DIR"] = str(place / "run")
    adopted = start(GROUP)
    assert any("adopted" in line for line in adopted.lines)


def test_root_serves_for_a_user(start: Starter, name: str, place: Path) -> None:
    """Field report 33: the server is root, its client is not."""
    system = start(GROUP, user=ROOT)
    assert fetched(MEMBER, name).stderr == ""
    assert doors(STRANGER, name) == CLOSED
    with smoe_mp.attach(name) as ring, ring.fetch(0, [1]):
        pass
    system.signal(signal.SIGTERM)
    assert system.wait() == 0


def test_a_ring_that_anybody_may_write(start: Starter, name: str) -> None:
    """A stranger's, made to be attached to by those who expect another under that name."""
    start("prewarm.enabled = false\n")
    control, data = SHM / f"smoe.{name}", SHM / f"smoe.{name}.d"
    control.chmod(0o666)
    data.chmod(0o644)
    done = fetched(STRANGER, name)
    assert f"anybody may write it: it belongs to uid {OWNER.uid}, mode 0666" in done.stderr
    assert done.stdout == ""
    control.chmod(0o606)  # open to all but the group
    assert "anybody may write it" in fetched(STRANGER, name).stderr
    control.chmod(0o600)
    assert fetched(OWNER, name).stderr == ""
