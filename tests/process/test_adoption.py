"""A ring outlives its supervisor: `smoe-mp up` goes on with its contents, or says why not and makes a new
one.  Field reports 25, 26, 32, 39, 47."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support import LIMIT_S, Client, Worker, stop, until
from systems import (
    System,
    Up,
    bytes_of,
    make_vault,
    segments_of,
    write_config,
)
from systems import smoe_mp as run

import smoe_mp
from smoe_mp import errors, segments
from smoe_mp.control.commands import Workers

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm to look into")
HERE = Path(__file__).resolve().parents[1]
ALL = range(8)


def control_segment(name: str) -> Path:
    return Path(f"/dev/shm/smoe.{name}")


def inodes(name: str) -> list[int]:
    return [Path("/dev/shm", s.lstrip("/")).stat().st_ino for s in segments_of(name)]


def adopted(system: System) -> bool:
    (line,) = [line for line in system.lines if line.startswith("ring: ")]
    return line.startswith("ring: adopted with its contents: ")


def reason_of(system: System) -> str:
    """Why the ring that was there was not adopted."""
    assert not adopted(system)
    before, after = "the ring that was there could not be adopted: ", "; made anew"
    (warning,) = [w for w in system.look().warnings if w.startswith(before)]
    return warning.removeprefix(before).removesuffix(after)


@pytest.fixture
def ring(up: Up, ring_name: str) -> Iterator[smoe_mp.Ring]:
    """A client of a system of 16 slots and 2 workers that was started and whose supervisor was killed; the 8
    experts of layer 0 are resident."""
    system = up()
    with smoe_mp.attach(ring_name, "survivor") as ring:
        ring.fetch(0, ALL).release()
        system.kill()
        yield ring


def assert_hits(name: str, expected: dict[tuple[int, int], bytes]) -> None:
    """Layer 0 is there, for a client that comes now, and nothing is read for it."""
    with smoe_mp.attach(name) as ring:
        before = ring.stats()["wanted_bytes"]
        with ring.fetch(0, ALL, timeout=0) as batch:
            assert batch.hits == 8
            assert [x.raw.tobytes() for x in batch] == [expected[0, e] for e in ALL]
        assert ring.stats()["wanted_bytes"] == before


# --- adopted -----------------------------------------------------------------------------------------------


def test_after_the_supervisor_s_death(ring: smoe_mp.Ring, up: Up, ring_name: str, vault: Path) -> None:
    """The client that was attached keeps its hits, learns on a miss that nobody serves, and goes on by itself
    once somebody does."""
    expected, before = bytes_of(vault), inodes(ring_name)
    with ring.fetch(0, ALL) as batch:
        assert batch.hits == 8
    with pytest.raises(errors.NoSupervisor, match="start `smoe-mp up`"):
        ring.fetch(1, [3], timeout=0.05)
    assert ring.stats()["census"]["held"] == 0
    system = up()
    assert adopted(system)
    assert inodes(ring_name) == before
    assert_hits(ring_name, expected)
    with ring.fetch(0, ALL) as kept, ring.fetch(1, [3]) as batch:
        assert kept.hits == 8
        assert batch[0].raw.tobytes() == expected[1, 3]
    status = system.look()
    assert status.health == "ok"
    assert [client.label for client in status.clients] == ["survivor"]
    assert not [line for line in system.lines if line.startswith("size: ")]


def test_a_waiter_that_is_still_waiting(up: Up, ring_name: str, vault: Path) -> None:
    """Its expert was demanded of the dead system and comes from the next."""
    system = up()
    with Client(ring_name) as client, smoe_mp.attach(ring_name) as ring:
        for row in system.look().workers:
            stop(row.pid)
        client.tell("fetch", layer=2, experts=[1, 2, 3])
        until(lambda: ring.stats()["census"]["held"] == 3, "the demand")
        system.kill(everything=True)
        assert adopted(up())
        assert len(client.answer()) == 3


def test_after_everybody_s_death(up: Up, ring_name: str, vault: Path) -> None:
    """kill -9 of supervisor, workers, prewarm and clients; the clients held, reserved and had asked for
    something."""
    system = up()
    with Client(ring_name) as client:
        client.do("fetch", layer=0, experts=list(ALL))
        for row in system.look().workers:
            stop(row.pid)
        client.tell("fetch", layer=1, experts=[0, 1])
        with smoe_mp.attach(ring_name) as ring:
            until(lambda: ring.stats()["census"]["held"] == 10, "the demand")
        system.kill(everything=True)
        client.kill()
        system = up()
        assert adopted(system)
        assert_hits(ring_name, bytes_of(vault))
        until(lambda: not any(system.look().ring.census[k] for k in ("queued", "reading")), "an end of reads")
        census = system.look().ring.census
        assert census["held"] == census["reserved"] == census["failed"] == 0
        assert system.look().clients == []


def test_after_down_keep_ring(up: Up, ring_name: str, vault: Path) -> None:
    system = up()
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, ALL).release()
        done = run("down", ring_name, "--keep-ring")
        assert (done.returncode, done.stderr) == (0, "")
        assert system.wait() == 0
        assert system.lines[-1] == f"stopped: ring {ring_name} left to the next `smoe-mp up`"
        assert len(segments_of(ring_name)) == 2
        with ring.fetch(0, ALL) as batch:
            assert batch.hits == 8
        with pytest.raises(errors.NoSupervisor):
            ring.fetch(1, [0], timeout=0.05)
        with smoe_mp.attach(ring_name):  # there is no need to wait with it
            pass
        assert adopted(up())
        assert_hits(ring_name, bytes_of(vault))
        with ring.fetch(1, [0]):
            pass


def test_again_and_again(up: Up, ring_name: str) -> None:
    system = up(workers=1)
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, ALL).release()
        for workers in (3, 1):  # settings may change, the ring stays
            system.kill(everything=True)
            system = up(workers=workers)
            assert adopted(system)
            assert len(system.look().workers) == workers
            with ring.fetch(0, ALL, timeout=0) as batch:
                assert batch.hits == 8
            ring.fetch(1, [workers]).release()


def test_an_automatic_size_is_kept(up: Up, ring_name: str, vault: Path) -> None:
    """Field report 39: what memory there is must not decide whether a ring is adopted."""
    system = up(slots=0)
    with smoe_mp.attach(ring_name) as ring:
        assert ring.slots == 24
        ring.fetch(0, ALL).release()
        system.kill()
        assert adopted(up(slots=0))
        with ring.fetch(0, ALL, timeout=0) as batch:
            assert batch.hits == 8


def test_settings_of_the_new_configuration_hold(ring: smoe_mp.Ring, up: Up, ring_name: str) -> None:
    assert adopted(up(more="ring.read_deadline_ms = 77\nspeculation.ranks = 3\n"))
    with smoe_mp.attach(ring_name) as later:
        assert later.speculation_ranks == 3


def test_an_id_whose_lock_is_held_is_not_used(up: Up, ring_name: str, vault: Path) -> None:
    """A worker that an earlier supervisor left, stopped: number 0 is its until it ends."""
    system = up(workers=1)
    creation = creation_of(ring_name)
    system.kill()
    watch_read, watch_write = os.pipe()
    orphan = Worker(ring_name, 0, creation, watch_read)
    try:
        orphan.wait_ready()
        orphan.stop()
        system = up(workers=2)
        assert adopted(system)
        assert [row.id for row in system.look().workers] == [1, 2]
        with smoe_mp.attach(ring_name) as ring, ring.fetch(1, ALL, timeout=LIMIT_S) as batch:
            assert len(batch) == 8
        assert system.ask(Workers(count=3)).count == 3
        until(lambda: [row.id for row in system.look().workers] == [1, 2, 3], "three workers")
        orphan.process.kill()
        orphan.process.wait()
        with smoe_mp.attach(ring_name) as ring:
            until(lambda: 0 not in worker_numbers(ring), "its entry cleared")
        system.ask(Workers(count=4))
        until(lambda: [row.id for row in system.look().workers] == [0, 1, 2, 3], "number 0 used again")
    finally:
        orphan.process.kill()
        orphan.process.wait()
        os.close(watch_read)
        os.close(watch_write)


def worker_numbers(ring: smoe_mp.Ring) -> list[int]:
    """Numbers of the registered workers, dead ones included."""
    rows = segments.participants(ring._open().ptr)
    return [row["number"] for row in rows if row["role"] == "worker"]


def creation_of(name: str) -> str:
    raw = control_segment(name).read_bytes()[:32]
    return "".join(f"{int.from_bytes(raw[at : at + 8], 'little'):016x}" for at in (16, 24))


def test_beside_a_living_supervisor_there_is_no_other(up: Up, ring_name: str) -> None:
    system = up()
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, ALL).release()
        stop(system.process.pid)  # stopped is not dead
        try:
            second = run("up", system.config)
            assert second.returncode == 4
            assert "a living supervisor serves it" in second.stderr
        finally:
            system.signal(signal.SIGCONT)
        with ring.fetch(0, ALL, timeout=0) as batch:
            assert batch.hits == 8
    assert system.look().health == "ok"


# --- refused -----------------------------------------------------------------------------------------------

# Places in the header: see csrc/shm_layout.h.
ABI, STATE, FINGERPRINT, SLOTS = 8, 32, 40, 88


def patch(name: str, offset: int, value: int, size: int = 4) -> None:
    with control_segment(name).open("r+b") as file:
        file.seek(offset)
        file.write(value.to_bytes(size, "little"))


def spoil_slot(word: int, vault: Path, name: str) -> None:
    """Put a word in the place of the first slot's, which is resident."""
    at = int.from_bytes(control_segment(name).read_bytes()[296:304], "little")  # off_words
    assert int.from_bytes(control_segment(name).read_bytes()[at : at + 8], "little") & 7 in (3, 4)
    patch(name, at, word, 8)


def touch(vault: Path, ring_name: str) -> None:
    st = vault.stat()
    os.utime(vault, ns=(st.st_atime_ns, st.st_mtime_ns + 10**9))


def copy_over(vault: Path, ring_name: str) -> None:
    st = vault.stat()
    other = Path(shutil.copy(vault, vault.with_name("other")))
    os.utime(other, ns=(st.st_atime_ns, st.st_mtime_ns))
    other.rename(vault)


def another_data_segment(vault: Path, ring_name: str) -> None:
    path = Path(f"/dev/shm/smoe.{ring_name}.d")
    other = path.with_name(f"{ring_name}.other")
    other.write_bytes(bytes(path.stat().st_size))
    other.rename(path)


Spoil = Callable[[Path, str], None]
SPOILED: dict[str, list[tuple[Spoil, str]]] = {
    "vault": [
        (touch, "a file's time of change has changed (file 0 of the source)"),
        (copy_over, "a file's device or inode has changed (file 0 of the source)"),
    ],
    "header": [
        (lambda _, name: patch(name, ABI, 99), "the ring was made by another version or build"),
        (lambda _, name: patch(name, FINGERPRINT, 1, 8), "the ring was made by another version or build"),
        (lambda _, name: patch(name, SLOTS, 17), "ring {} (shared memory /smoe.{}): "),
    ],
    "state": [
        (lambda _, name: patch(name, STATE, 0), "its state is creating"),
        (lambda _, name: patch(name, STATE, 2), "its state is stopping"),
        (lambda _, name: patch(name, STATE, 77), "its state is 77, which is none"),
    ],
    "slot word": [  # of no state, of no expert, of no worker
        (partial(spoil_slot, word), "a slot word does not add up (0, ")
        for word in (6, 24 << 11 | 3, 127 << 4 | 2)
    ],
    "data segment": [
        (lambda _, name: Path(f"/dev/shm/smoe.{name}.d").unlink(), "its data segment is gone"),
        (another_data_segment, "its data segment is another one"),
    ],
}


@pytest.mark.parametrize("what", SPOILED)
def test_refused_with_its_reason_and_made_anew(up: Up, ring_name: str, vault: Path, what: str) -> None:
    system = up()
    for spoil, reason in SPOILED[what]:
        with smoe_mp.attach(ring_name) as ring:
            ring.fetch(0, ALL).release()
            system.kill(everything=True)
            before = inodes(ring_name)[0]
            spoil(vault, ring_name)
            system = up()
            assert reason_of(system).startswith(reason.format(ring_name, ring_name))
            assert inodes(ring_name)[0] != before
            with pytest.raises(errors.RingReplaced):
                ring.fetch(0, [1], timeout=LIMIT_S)
        with smoe_mp.attach(ring_name) as anew:
            assert not anew.resident(0, 1)
            with anew.fetch(0, [1]) as batch:
                assert batch[0].raw.tobytes() == bytes_of(vault)[0, 1]


def test_another_number_of_slots(ring: smoe_mp.Ring, up: Up, ring_name: str) -> None:
    system = up(slots=12)
    assert reason_of(system) == "slots differ: 16, now 12"
    with pytest.raises(errors.RingReplaced):
        ring.fetch(0, [1])


def test_another_slot_size(ring: smoe_mp.Ring, up: Up, ring_name: str) -> None:
    assert reason_of(up(more="ring.slot_mb = 1\n")) == f"slot size differs: {ring.slot_bytes}, now 1048576"


def test_another_vault(ring: smoe_mp.Ring, up: Up, ring_name: str, tmp_path: Path) -> None:
    other = make_vault(tmp_path / "other.smoe", experts=20)
    assert reason_of(up(vault=other)) == f"slot size differs: {ring.slot_bytes}, now 16384"


def test_a_waiter_hears_of_it(up: Up, ring_name: str, vault: Path) -> None:
    """Also one that sleeps in a wait when its ring is buried, and when that is of another ABI."""
    for abi in (1, 99):
        system = up()
        with Client(ring_name) as client, smoe_mp.attach(ring_name) as ring:
            for row in system.look().workers:
                stop(row.pid)
            client.tell("fetch", layer=2, experts=[1])
            until(lambda: ring.stats()["census"]["held"] == 1, "the demand")
            system.kill(everything=True)
            patch(ring_name, ABI, abi)
            touch(vault, ring_name)
            system = up()
            assert not adopted(system)
            assert client.answer()["error"] == "RingReplaced"
        assert run("down", ring_name).returncode == 0


def test_what_a_killed_creator_leaves(up: Up, ring_name: str) -> None:
    """Field report 25: an empty segment, and nobody who holds its lock."""
    control_segment(ring_name).touch(mode=0o600)
    assert reason_of(up()) == "its state is creating"


# --- room --------------------------------------------------------------------------------------------------

ROUNDS = """
import os, signal, subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:5]
from systems import kill_and_wait, pids_of
config, vault, name = sys.argv[1], sys.argv[2], sys.argv[5]

def up():
    command = [sys.executable, "-m", "smoe_mp", "up", config]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith("ready: "):
            return process, lines
    sys.exit(f"not ready: {lines}")

free = os.statvfs("/dev/shm").f_bavail
for turn in range(6):
    process, lines = up()
    ring, = (line for line in lines if line.startswith("ring: "))
    print("adopted" if "adopted" in ring else "made", flush=True)
    if turn == 5:
        process.send_signal(signal.SIGTERM)
        process.wait()
        break
    process.kill()
    kill_and_wait(*pids_of(name))
    process.wait()
    if turn in (1, 3):  # what cannot be adopted must not be in the way either
        os.utime(vault, ns=(0, turn * 10**9))
    if turn == 2:
        os.unlink(f"/dev/shm/smoe.{name}")  # the data segment alone, with all the memory
left = os.listdir("/dev/shm")
assert left == [], left
assert os.statvfs("/dev/shm").f_bavail == free
print("nothing left")
"""


@pytest.mark.root
@pytest.mark.parametrize("slots", [32, 0])
def test_kill_and_start_in_a_shared_memory_with_room_for_one(
    ring_name: str, runtime_dir: Path, tmp_path: Path, slots: int
) -> None:
    """Field report 26: each start after a crash found no room, for ever."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare, to mount a /dev/shm of its own")
    vault = make_vault(tmp_path / "v.smoe", experts=40, side=256)  # 112 KiB each
    config = write_config(tmp_path / "c.toml", ring_name, vault, slots, 2)
    size_mb = 6 if slots else 64 + 6  # automatic sizing leaves 64 MiB to others
    mount = f'mount -t tmpfs -o size={size_mb}m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", ROUNDS, config, vault]
    done = subprocess.run(
        [*command, HERE / "process", HERE, ring_name],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    if done.returncode and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no mount namespace to be had: {done.stderr.strip()}")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.split("\n")[:-1] == [
        "made",
        "adopted",
        "made",
        "made",
        "made",
        "adopted",
        "nothing left",
    ]
    assert not list(runtime_dir.iterdir())
