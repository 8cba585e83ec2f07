"""Deaths under `smoe-mp up`: of workers, of clients, of the supervisor; workers that keep dying; a changed
number of workers; a ring whose name was deleted.  Field reports 30, 32, 47, 49."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import LIMIT_S, Client, stop, until
from systems import (
    System,
    Up,
    assert_nothing_left,
    bytes_of,
    make_vault,
    pids_of,
    segments_of,
    wait_ended,
    watched,
)
from systems import smoe_mp as run

import smoe_mp
from smoe_mp import errors
from smoe_mp.control.commands import StatusResult, Workers

HERE = Path(__file__).resolve().parents[1]


def worker_pids(status: StatusResult) -> list[int]:
    return [row.pid for row in status.workers if row.alive]


def all_well(system: System, workers: int) -> bool:
    status = system.look()
    return status.health == "ok" and len(worker_pids(status)) == workers


class Load:
    """A thread that fetches experts in turn and checks every byte, until the block ends."""

    def __init__(self, name: str, expected: dict[tuple[int, int], bytes], batch: int = 3) -> None:
        self.rounds = 0
        self.fault: BaseException | None = None
        self._name, self._expected, self._batch = name, expected, batch
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with smoe_mp.attach(self._name, "load") as ring:
                while not self._end.is_set():
                    self._one(ring)
                    self.rounds += 1
        except BaseException as fault:
            self.fault = fault

    def _one(self, ring: smoe_mp.Ring) -> None:
        keys = sorted(self._expected)
        layer, first = keys[self.rounds * self._batch % len(keys)]
        there = [e for k, e in keys if k == layer]
        at = there.index(first)
        with ring.fetch(layer, (there + there)[at : at + self._batch]) as batch:
            for x in batch:
                assert x.raw.tobytes() == self._expected[x.layer, x.expert], x

    def goes_on(self) -> None:
        """Wait until some rounds that began after now are over."""
        seen = self.rounds
        until(lambda: self.rounds > seen + 3 or self.fault is not None, "the load going on")
        assert self.fault is None, self.fault

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.fault is None, self.fault


@contextlib.contextmanager
def stopped_in_a_read(system: System, ring: smoe_mp.Ring, experts: list[int]) -> Iterator[int]:
    """The only worker, stopped in the middle of a read: its pid.  The batch that is being read is held."""
    (pid,) = worker_pids(system.look())
    for _ in range(200):
        with ring.acquire(0, experts) as batch:
            until(lambda: ring.stats()["census"]["queued"] < len(experts), "a read")
            stop(pid)
            if ring.stats()["census"]["reading"] == 1 and system.look().workers[0].slot is not None:
                yield pid
                return
            os.kill(pid, signal.SIGCONT)
            batch.wait()
        with ring.fetch(0, [9, 10, 11, 12]):  # have them evicted
            pass
    raise AssertionError("the worker is never in a read")


# --- workers -----------------------------------------------------------------------------------------------


def test_an_idle_worker_that_is_killed_is_started_again(up: Up, vault: Path, ring_name: str) -> None:
    system = up(workers=2)
    before = worker_pids(system.look())
    os.kill(before[1], signal.SIGKILL)
    until(lambda: all_well(system, 2) and worker_pids(system.look()) != before, "another worker")
    status = system.look()
    after = worker_pids(status)
    assert after[0] == before[0]
    assert after[1] not in before
    assert [row.id for row in status.workers] == [0, 1]
    assert f"worker 1 (pid {before[1]}) was killed by SIGKILL (9)" in status.warnings
    expected = bytes_of(vault)
    with smoe_mp.attach(ring_name) as ring, ring.fetch(1, range(8)) as batch:
        assert [x.raw.tobytes() for x in batch] == [expected[1, e] for e in range(8)]
    assert system.process.poll() is None


def test_a_worker_that_is_killed_in_a_read(up: Up, ring_name: str, tmp_path: Path) -> None:
    """Its read is taken up again, and whoever waits for it gets the bytes and notices nothing."""
    big = make_vault(tmp_path / "big.smoe", experts=13, side=1024)
    expected = bytes_of(big)
    system = up(vault=big, slots=4, workers=1)
    with (
        smoe_mp.attach(ring_name) as ring,
        Client(ring_name) as other,
        stopped_in_a_read(system, ring, [0, 1, 2]) as pid,
    ):
        other.tell("fetch", layer=0, experts=[0])
        (row,) = system.look().workers
        assert row.slot is not None
        assert row.reading_s is not None
        os.kill(pid, signal.SIGKILL)
        with ring.fetch(0, [0, 1, 2], timeout=LIMIT_S) as batch:
            assert [x.raw.tobytes() for x in batch] == [expected[0, e] for e in (0, 1, 2)]
        assert len(other.answer()) == 1
        other.do("release")
        until(lambda: all_well(system, 1), "another worker")
        status = system.look()
        assert status.counters["requeued"] >= 1
        assert status.counters["read_errors"] == 0
        assert status.ring.census["reading"] == 0


def test_workers_that_are_killed_under_load(up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=6, workers=3)
    expected = bytes_of(vault)
    with Load(ring_name, expected) as one, Load(ring_name, expected, batch=2) as two:
        for number in range(4):  # five within ten seconds would be another matter
            one.goes_on()
            rows = system.look().workers
            os.kill(rows[number % len(rows)].pid, signal.SIGKILL)
            until(lambda: all_well(system, 3), "another worker")
        one.goes_on()
        two.goes_on()
    census = system.look().ring.census
    assert census["held"] == census["reserved"] == census["failed"] == 0
    assert sum(census[k] for k in ("empty", "ready", "consumed")) == 6


def test_all_workers_killed_at_once(up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=6, workers=4)
    with Load(ring_name, bytes_of(vault)) as load:
        load.goes_on()
        for pid in worker_pids(system.look()):
            os.kill(pid, signal.SIGKILL)
        until(lambda: all_well(system, 4), "all workers")
        load.goes_on()


def test_workers_that_keep_dying(up: Up, ring_name: str, vault: Path, tmp_path: Path) -> None:
    """The vault goes away, so no worker can start; then it comes back."""
    expected = bytes_of(vault)
    system = up(slots=16, workers=2)
    with smoe_mp.attach(ring_name) as ring:
        with ring.fetch(0, range(8)):
            pass
        away = vault.rename(tmp_path / "away.smoe")
        for pid in worker_pids(system.look()):
            os.kill(pid, signal.SIGKILL)
        until(lambda: system.look().health.startswith("failing: workers keep dying, 0 live"), "the state")
        failing = system.look()
        assert any("No such file" in warning for warning in failing.warnings)
        reads = failing.counters["reads"]
        for layer in (1, 2):  # also what is asked for later
            with pytest.raises(errors.ExpertReadError, match="no worker is left to read it") as raised:
                ring.fetch(layer, [3], timeout=LIMIT_S)
            assert "whole" not in str(raised.value)
        with ring.fetch(0, range(8), timeout=0) as batch:
            assert batch.hits == 8
            assert [x.raw.tobytes() for x in batch] == [expected[0, e] for e in range(8)]
        census = system.look().ring.census
        assert census["queued"] == census["failed"] == census["held"] == 0
        # No busy loop: of at most one worker more, the first retry, is said that it died.
        later = system.look()
        died = [sum(w.startswith("worker ") for w in look.warnings) for look in (failing, later)]
        assert died[1] <= died[0] + 1
        assert later.counters["reads"] == reads

        away.rename(vault)
        assert (
            workers_command(ring_name, 2) == f"{ring_name}: 2 workers before, 2 from now on\n"
        )  # tries at once
        with ring.fetch(1, [3], timeout=LIMIT_S) as batch:
            assert batch[0].raw.tobytes() == expected[1, 3]
    system.end()
    assert sum(line.startswith("error: workers keep dying") for line in system.lines) == 1


def workers_command(name: str, count: int) -> str:
    done = run("workers", name, str(count))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_number_of_workers_changes_under_load(up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=6, workers=2)
    with Load(ring_name, bytes_of(vault)) as load:
        before = worker_pids(system.look())
        load.goes_on()
        for was, count in ((2, 6), (6, 1)):
            done = system.ask(Workers(count=count))
            assert (done.before, done.count) == (was, count)
            until(lambda: len(pids_of(ring_name)) == count + 1, f"{count} workers and prewarm")  # noqa: B023
            until(lambda: all_well(system, count), f"{count} workers")  # noqa: B023
            load.goes_on()
        status = system.look()
        assert worker_pids(status) == before[:1]
        assert not [warning for warning in status.warnings if "ended with" in warning or "killed" in warning]
        assert status.counters["requeued"] == 0


# --- clients -----------------------------------------------------------------------------------------------


def test_a_client_that_is_killed_gives_everything_back(up: Up, ring_name: str) -> None:
    system = up()
    with Client(ring_name) as client:
        assert len(client.do("fetch", layer=0, experts=[1, 2, 3])) == 3
        census = system.look().ring.census
        assert (census["held"], census["reserved"]) == (3, 3)
        client.kill()
        until(lambda: system.look().ring.census["held"] == 0, "its holds given back")
        until(lambda: system.look().clients == [], "its entry free")
        assert system.look().ring.census["reserved"] == 0


def test_a_client_that_is_stopped_is_not_dead(up: Up, ring_name: str) -> None:
    system = up()
    with Client(ring_name) as client:
        client.do("fetch", layer=0, experts=[1])
        stop(client.process.pid)
        with Client(ring_name) as doomed:
            doomed.kill()
            until(lambda: len(system.look().clients) == 1, "a whole sweep")
        (row,) = system.look().clients
        assert (row.id, row.alive, row.reserved) == (client.id, True, 1)
        client.process.send_signal(signal.SIGCONT)
        assert client.do("release") is True


NAMESPACE = """
import os, sys, smoe_mp
ring = smoe_mp.attach(sys.argv[1], "inside")
batch = ring.fetch(0, [2])
print(os.getpid(), flush=True)
for line in sys.stdin:
    pass
os._exit(9)  # by no exit that gives back
"""


@pytest.mark.root
def test_a_client_in_another_pid_namespace(up: Up, ring_name: str) -> None:
    """Its pid there is no pid, or another process's, here: only its lock tells whether it lives."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare")
    system = up()
    command = ["unshare", "-pf", "--mount-proc", sys.executable, "-c", NAMESPACE, ring_name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as inside:
        assert inside.stdin is not None
        assert inside.stdout is not None
        first = inside.stdout.readline()
        if not first:
            inside.stdin.close()
            pytest.skip("no pid namespace to be had")
        assert first == "1\n"
        with Client(ring_name) as doomed:  # its death makes for a sweep
            doomed.kill()
            until(lambda: len(system.look().clients) == 1, "the sweep")
        (row,) = system.look().clients
        assert (row.label, row.pid, row.alive, row.reserved) == ("inside", 1, True, 1)
        inside.stdin.close()
        until(lambda: system.look().clients == [], "its death noticed")
        assert system.look().ring.census["held"] == 0


# --- the supervisor ----------------------------------------------------------------------------------------


def test_children_end_with_a_killed_supervisor(up: Up, ring_name: str) -> None:
    """Also those that are stopped, as soon as they run again."""
    system = up(workers=3)
    until(lambda: len(pids_of(ring_name)) == 4, "workers and prewarm")
    children = watched(pids_of(ring_name))
    stopped = worker_pids(system.look())[0]
    stop(stopped)
    os.kill(system.process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # the kernel itself may have had it go on, and so ended it
        os.kill(stopped, signal.SIGCONT)
    wait_ended(children)
    system.wait()
    assert len(segments_of(ring_name)) == 2
    up()  # takes it over, to be removed


def test_a_stop_in_the_error_state(up: Up, ring_name: str, vault: Path, tmp_path: Path) -> None:
    system = up(workers=1)
    away = vault.rename(tmp_path / "away.smoe")
    for pid in worker_pids(system.look()):
        os.kill(pid, signal.SIGKILL)
    until(lambda: system.look().health.startswith("failing"), "the error state")
    assert run("down", ring_name).returncode == 0
    assert system.wait() == 0
    assert_nothing_left(ring_name)
    away.rename(vault)


def test_a_name_that_is_deleted(up: Up, ring_name: str, vault: Path) -> None:
    """Field report 30: status says so, attached clients go on, and the stop leaves nothing."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    system = up()
    expected = bytes_of(vault)
    with smoe_mp.attach(ring_name) as ring:
        Path(f"/dev/shm/smoe.{ring_name}").unlink()
        until(lambda: system.look().health.startswith("nameless"), "the name missed")
        until(lambda: any("was deleted" in w for w in system.look().warnings), "the warning")
        with pytest.raises(errors.NoSuchRing):
            smoe_mp.attach(ring_name)
        with ring.fetch(2, [1, 2]) as batch:
            assert [x.raw.tobytes() for x in batch] == [expected[2, 1], expected[2, 2]]
        assert run("down", ring_name, "--keep-ring").returncode == 0  # there is nothing to keep it by
        assert system.wait() == 0
        assert_nothing_left(ring_name)
        with pytest.raises(errors.RingReplaced):
            ring.fetch(2, [1])


def test_a_name_that_was_given_to_another_ring(up: Up, ring_name: str) -> None:
    """The stop of the nameless system must not remove the other one's segments."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    system = up()
    for segment in segments_of(ring_name):
        path = Path("/dev/shm") / segment.lstrip("/")
        path.unlink()
        path.write_bytes(b"another's")
    system.signal(signal.SIGTERM)
    assert system.wait() == 0
    assert len(segments_of(ring_name)) == 2
    for segment in segments_of(ring_name):
        (Path("/dev/shm") / segment.lstrip("/")).unlink()
