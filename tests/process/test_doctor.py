"""`smoe-mp doctor`: which rings lie in shared memory, which are orphans, and what --clean removes.

In a /dev/shm of its own, since other tests leave orphans on purpose in the machine's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from systems import LIMIT_S, make_vault, write_config
from systems import smoe_mp as run

pytestmark = pytest.mark.root
HERE = Path(__file__).resolve().parents[1]

PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from support import Client, Worker
from systems import System, segments_of, smoe_mp
import smoe_mp as package
SHM = Path("/dev/shm")
folder, mark = Path(sys.argv[3]), sys.argv[4]

def up(name):
    return System(mark + name, folder / f"{name}.toml", (), folder / f"{name}.stderr")

def doctor(*flags):
    done = smoe_mp("doctor", "--json", *flags)
    assert (done.returncode, done.stderr) == (0, ""), done
    return by_name(done.stdout)

def by_name(out):
    return {row["name"].removeprefix(mark): row for row in json.loads(out)}

def left():
    return sorted(name.replace(mark, "") for name in os.listdir(SHM))

def patch(name, offset, value):
    with (SHM / f"smoe.{mark}{name}").open("r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(4, "little"))
"""


def in_own_shm(program: str, tmp_path: Path, names: str) -> None:
    """Run `program` behind PROGRAM; its rings have these names behind a mark of this run's own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare, to mount a /dev/shm of its own")
    vault, mark = make_vault(tmp_path / "v.smoe", experts=20), f"{os.urandom(4).hex()}-"
    for name in names.split():
        write_config(tmp_path / f"{name}.toml", mark + name, vault, 16, 1)
    mount = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command: list[Any] = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(
        [*command, HERE / "process", HERE, tmp_path, mark],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    if done.returncode and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespace to be had: {done.stderr.strip()}")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.endswith("done\n"), (done.stdout, done.stderr)


WHO = """
served, orphan, used = map(up, ("served", "orphan", "used"))
with Client(mark + "used") as client:
    client.do("fetch", layer=0, experts=[1])
    orphan.kill()
    used.kill(everything=True)
    found = doctor()
    assert sorted(found) == ["orphan", "served", "used"]
    assert [found[n]["served"] for n in sorted(found)] == [False, True, False]
    assert [found[n]["orphan"] for n in sorted(found)] == [True, False, False]
    assert [found[n]["state"] for n in sorted(found)] == ["live"] * 3
    assert found["orphan"]["living"] == []
    (who,) = found["used"]["living"]
    assert str(client.process.pid) in who, who
    assert any(who.startswith("supervisor") for who in found["served"]["living"])
    size = sum((SHM / s.lstrip("/")).stat().st_size for s in segments_of(mark + "orphan"))
    assert found["orphan"]["bytes"] == size > 16 * 16384

    people = smoe_mp("doctor").stdout
    assert "ORPHAN" in people and "1 orphans: smoe-mp doctor --clean removes them" in people, people
    assert "no supervisor, but in use by" in " ".join(people.replace("│", " ").split()), people

    cleaned = doctor("--clean")
    assert [cleaned[n]["removed"] for n in sorted(cleaned)] == [True, False, False]
    assert segments_of(mark + "orphan") == []
    assert sorted(doctor()) == ["served", "used"]
    assert served.look().health == "ok"
    assert client.do("release") is True  # its ring is what it was

# Its last user has gone: now it is one.
assert doctor("--clean")["used"]["removed"]
served.end()
assert doctor() == {} and left() == []
assert smoe_mp("doctor").stdout == "no rings in shared memory\\n"
print("done")
"""


def test_served_used_and_orphaned(tmp_path: Path, runtime_dir: Path) -> None:
    in_own_shm(WHO, tmp_path, "served orphan used")


LEFT = """
(SHM / "smoe.empty").touch()
(SHM / "smoe.data.d").write_bytes(bytes(100_000))
(SHM / "smoe.foreign").write_bytes(b"not a ring at all" * 100)
(SHM / "smoe.small").write_bytes(b"x")
(SHM / "other").write_bytes(b"y")
torn = up("torn")
torn.kill(everything=True)
patch("torn", 32, 77)
old = up("old")
with package.attach(mark + "old") as ring:  # of another build when the doctor comes, and in use
    old.kill(everything=True)
    patch("old", 8, 99)
    found = doctor()
    assert sorted(found) == ["data", "empty", "old", "torn"], found
    assert found["data"]["state"] == "data segment without its ring"
    assert found["data"]["bytes"] == 100_000
    assert found["empty"]["state"] == "creating"
    assert found["torn"]["state"] == "77, which is none"
    assert found["old"]["state"] == "the ring was made by another version or build"
    assert found["old"]["living"] == ["1 processes"]
    assert [found[n]["orphan"] for n in sorted(found)] == [True, True, False, True]
    cleaned = doctor("--clean")
    assert [cleaned[n]["removed"] for n in sorted(cleaned)] == [True, True, False, True]
    assert left() == ["other", "smoe.foreign", "smoe.old", "smoe.old.d", "smoe.small"]
    with ring.fetch(0, [], timeout=0):
        pass
assert doctor("--clean")["old"]["removed"]
assert left() == ["other", "smoe.foreign", "smoe.small"]
print("done")
"""


def test_halves_foreign_ones_and_other_builds(tmp_path: Path, runtime_dir: Path) -> None:
    """What is not ours is not shown; what cannot be attached is judged by its locks alone."""
    in_own_shm(LEFT, tmp_path, "torn old")


WORKER = """
name = "lost"
lost = up(name)
raw = (SHM / f"smoe.{mark}{name}").read_bytes()
creation = "".join(f"{int.from_bytes(raw[at : at + 8], 'little'):016x}" for at in (16, 24))
lost.kill(everything=True)
read, write = os.pipe()
worker = Worker(mark + name, 3, creation, read)
worker.wait_ready()
assert doctor("--clean")[name]["orphan"] is False
worker.stop()  # stopped is not dead
assert doctor("--clean")[name]["living"] == [f"worker 3 (pid {worker.process.pid})"]
worker.process.kill()
worker.process.wait()
assert doctor("--clean")[name]["removed"]
assert left() == []
print("done")
"""


def test_a_worker_that_was_left_keeps_its_ring(tmp_path: Path, runtime_dir: Path) -> None:
    in_own_shm(WORKER, tmp_path, "lost")


NAMESPACE = """
used = up("used")
inside = subprocess.Popen(
    ["unshare", "-pf", "--mount-proc", sys.executable, "-c",
     "import smoe_mp, sys; ring = smoe_mp.attach(sys.argv[1]); print(1, flush=True); sys.stdin.read()",
     mark + "used"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert inside.stdout.readline() == "1\\n"
used.kill(everything=True)
assert doctor("--clean")["used"]["orphan"] is False
# And from there, where neither the supervisor's nor the client's pid is to be seen:
served = up("served")
command = ["unshare", "-pf", "--mount-proc", sys.executable, "-m", "smoe_mp", "doctor", "--clean", "--json"]
done = subprocess.run(command, capture_output=True, text=True)
found = by_name(done.stdout)
assert [(n, f["orphan"], f["removed"]) for n, f in sorted(found.items())] == [
    ("served", False, False), ("used", False, False)]
served.end()
inside.stdin.close()
inside.wait()
assert doctor("--clean")["used"]["removed"]
assert left() == []
print("done")
"""


def test_from_and_into_another_pid_namespace(tmp_path: Path, runtime_dir: Path) -> None:
    """Field report 32: pids mean nothing there, so the living are deleted and the dead are kept."""
    in_own_shm(NAMESPACE, tmp_path, "used served")


def test_on_the_machine_as_it_is() -> None:
    """Whatever lies there, looking at it is no fault."""
    done = run("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    for row in json.loads(done.stdout):
        assert not row["removed"]
