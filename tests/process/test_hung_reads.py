"""Reads that hang: a FUSE server that is stopped, a worker under strace, a shim that holds a direct read.

Waiters get ReadTimeout, hits go on, the slot of the hanging read is nobody else's until it has ended, status
names the worker, and when the read ends everything recovers by itself.  Field reports 18 and 21.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from faultkit import (
    Fuse,
    KnownSource,
    Serving,
    Together,
    bury,
    even_source,
    fetched,
    forget,
    fuse,
    needs,
    needs_direct,
    serving,
    shimmed,
)
from support import LIMIT_S, state_of, stop, until
from systems import System, processes_of, smoe_mp, write_config

import smoe_mp as smoe
from smoe_mp import segments
from smoe_mp.control import commands
from smoe_mp.control.client import ControlClient
from smoe_mp.errors import Busy, ControlError, ExpertReadError, NoAnswer, ReadTimeout
from smoe_mp.sources import open_source

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="Linux alone")

DEADLINE_MS = 400  # so that what hangs is given up soon; what is merely late is asked for again


class Gate:
    """Holds reads over one byte of the source for as long as it is closed."""

    def __init__(self, path: Path, at: int) -> None:
        self._path = path
        self.env = shimmed(hang=f"{at}:{path}")
        self.close()

    def close(self) -> None:
        self._path.touch()

    def open(self) -> None:
        self._path.unlink(missing_ok=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose files are read directly."""
    needs_direct(tmp_path)
    return tmp_path


@contextmanager
def hanging(folder: Path, *, slots: int, workers: int, experts: int = 8) -> Iterator[Any]:
    """(ring's view, source, gate): reads of expert 0 hang while the gate is closed."""
    source = even_source(folder / "v", experts)
    gate = Gate(folder / "gate", 100)
    with serving(source, slots=slots, workers=workers, env=gate.env, read_deadline_ms=DEADLINE_MS) as s:
        try:
            yield s, source, gate
        finally:
            gate.open()


def patiently(ring: smoe.Ring, layer: int, experts: Sequence[int]) -> smoe.Batch:
    """Fetch the experts, again and again where that takes longer than the ring's short deadline."""
    got: list[smoe.Batch] = []

    def came() -> bool:
        with suppress(ReadTimeout, Busy):
            got.append(ring.fetch(layer, experts))
        return got != []

    until(came, f"experts {experts} of layer {layer}")
    return got[0]


def assert_comes(ring: smoe.Ring, source: KnownSource, experts: Sequence[int]) -> None:
    """Each of the experts comes in the end, with its own bytes."""
    for expert in experts:
        with patiently(ring, 0, [expert]) as batch:
            assert batch[0].raw.tobytes() == source.bytes_of(expert), f"foreign bytes in expert {expert}"


def begin_read(s: Serving, ring: smoe.Ring, expert: int) -> None:
    """Have a worker begin a read that hangs."""
    with ring.acquire(0, [expert]):
        s.wait_reading()


def times_out(ring: smoe.Ring, expert: int) -> str:
    """Fetch an expert that cannot come; what the error says."""
    with pytest.raises(ReadTimeout) as caught:
        fetched(ring, expert)
    return str(caught.value)


def stuck_slot(s: Serving) -> int:
    """The one slot that a worker stays in."""

    def slots() -> list[int]:
        rows = [p["current_slot"] for p in s.segments.participants() if p["role"] == "worker"]
        return [slot for slot in rows if slot is not None]

    until(lambda: len(slots()) == 1, "an end of the other reads")
    return slots()[0]


# --- a direct read ------------------------------------------------------------------------------------


def test_all_waiters_of_a_hanging_read_time_out(folder: Path) -> None:
    with hanging(folder, slots=8, workers=2) as (s, source, gate), ExitStack() as stack:
        rings = [stack.enter_context(s.attach()) for _ in range(4)]
        begin_read(s, rings[0], 0)
        threads, said = Together(), []
        for ring in rings:
            threads.start(lambda ring=ring: said.append(times_out(ring, 0)))
        threads.join()
        assert all("expert 0 of layer 0 is being read still after" in text for text in said)
        census = s.census()
        assert (len(said), census["reading"], census["held"], census["reserved"]) == (4, 1, 0, 0)
        assert s.counters()["timeouts"] == 4
        gate.open()
        assert_comes(rings[0], source, range(8))


def test_others_evict_around_the_slot_of_a_hanging_read(folder: Path) -> None:
    """Four slots: the three others take five experts in turn, time and again."""
    with hanging(folder, slots=4, workers=2) as (s, source, gate), s.attach() as ring:
        begin_read(s, ring, 0)
        times_out(ring, 0)
        slot = stuck_slot(s)
        assert_comes(ring, source, [1, 2, 3, 4, 5] * 6)
        with patiently(ring, 0, [1, 2, 3]) as batch:
            assert [x.raw.tobytes() for x in batch] == [source.bytes_of(i) for i in (1, 2, 3)]
            assert slot not in [batch._holds[i].slot for i in range(len(batch))]
        assert stuck_slot(s) == slot
        assert s.census()["reading"] == 1
        gate.open()
        until(lambda: s.census()["reading"] == 0, "the end of the read")
        before = s.counters()["reads"]
        assert_comes(ring, source, [0])  # its bytes came after all
        assert s.counters()["reads"] == before


def test_a_new_demand_of_the_hanging_expert(folder: Path) -> None:
    """It joins the read that hangs, times out in turn, and starts no second one."""
    with hanging(folder, slots=4, workers=3) as (s, source, gate), s.attach() as ring, s.attach() as other:
        begin_read(s, ring, 0)
        times_out(ring, 0)
        times_out(ring, 0)
        times_out(other, 0)
        assert s.census()["reading"] == 1
        assert_comes(other, source, [1, 2])
        batch = other.acquire(0, [0])
        gate.open()
        until(lambda: s.census()["reading"] == 0, "the end of the read")
        with batch.wait():
            assert batch[0].raw.tobytes() == source.bytes_of(0)
        assert s.counters()["reads"] == 3


def test_a_waiter_with_a_limit_of_its_own(folder: Path) -> None:
    with hanging(folder, slots=4, workers=1) as (s, source, gate), s.attach() as ring:
        with pytest.raises(ReadTimeout):
            ring.fetch(0, [0], timeout=0.05)
        s.wait_reading()
        gate.open()
        assert_comes(ring, source, [0])


def test_a_hit_beside_a_hanging_expert(folder: Path) -> None:
    """A batch of both times out and holds neither; the hit alone is served at once."""
    with hanging(folder, slots=4, workers=1) as (s, source, gate), s.attach() as ring:
        assert_comes(ring, source, [1, 2])
        with pytest.raises(ReadTimeout):
            ring.fetch(0, [1, 0, 2])
        s.wait_reading()
        census = s.census()
        assert (census["held"], census["reserved"]) == (0, 0)
        hits = s.counters()["hits"]
        assert_comes(ring, source, [1, 2])
        assert s.counters()["hits"] == hits + 2
        landed = []
        with pytest.raises(ReadTimeout):
            landed += [x.expert for x in ring.as_ready(0, [2, 0])]
        assert s.census()["held"] == 0
        gate.open()


def test_the_only_worker_hangs(folder: Path) -> None:
    """Others' reads stay queued and time out; they are served when it goes on."""
    with hanging(folder, slots=4, workers=1) as (s, source, gate), s.attach() as ring:
        begin_read(s, ring, 0)
        times_out(ring, 0)
        assert "expert 1 of layer 0 is queued still" in times_out(ring, 1)
        assert s.census()["reading"] == 1
        gate.open()
        assert_comes(ring, source, [0, 1, 2])


def test_one_slot_and_a_hanging_read(folder: Path) -> None:
    """Nothing can be taken while the read is in the only slot, and the error names what was asked for."""
    with hanging(folder, slots=1, workers=2) as (s, source, gate), s.attach() as ring:
        begin_read(s, ring, 0)
        times_out(ring, 0)
        with pytest.raises((ReadTimeout, Busy)):
            fetched(ring, 3)
        assert s.census()["reserved"] == 0
        gate.open()
        assert_comes(ring, source, [3, 0])


def test_the_error_for_want_of_a_slot_names_the_expert(folder: Path) -> None:
    with hanging(folder, slots=1, workers=2) as (s, _, _), s.attach() as ring:
        begin_read(s, ring, 0)
        times_out(ring, 0)
        assert "expert 3 of layer 0" in times_out(ring, 3)


def test_a_guess_that_hangs(folder: Path) -> None:
    """It holds nobody up; a demand of it is a promotion, and times out."""
    with hanging(folder, slots=8, workers=2) as (s, source, gate), s.attach() as ring:
        assert ring.speculate(0, [0]) == 1
        s.wait_reading()
        assert_comes(ring, source, range(1, 8))
        times_out(ring, 0)
        gate.open()
        assert_comes(ring, source, [0])


def test_a_hanging_read_that_fails_in_the_end(folder: Path) -> None:
    """Nobody waits any more: the slot is simply free."""
    source = even_source(folder / "v", 4)
    gate = Gate(folder / "gate", 100)
    env = gate.env | shimmed(at=f"100:{errno.EIO}:1")
    with (
        serving(source, slots=2, env=env, read_deadline_ms=DEADLINE_MS) as s,
        s.attach() as ring,
    ):
        begin_read(s, ring, 0)
        times_out(ring, 0)
        gate.open()
        until(lambda: s.census()["empty"] == 2, "a free slot")
        assert s.counters()["failed_reads"] == 1
        assert_comes(ring, source, [0, 1, 2])


def test_a_stopped_worker_in_a_read(folder: Path) -> None:
    """SIGSTOP instead of a slow disk: the same, and it recovers by SIGCONT."""
    with hanging(folder, slots=4, workers=2) as (s, source, gate), s.attach() as ring:
        batch = ring.acquire(0, [0])
        s.wait_reading()
        slot = stuck_slot(s)
        (reader,) = [p["pid"] for p in s.segments.participants() if p["current_slot"] == slot]
        stop(reader)
        gate.open()
        with pytest.raises(ReadTimeout):
            batch.wait()
        assert_comes(ring, source, [1, 2, 3, 4, 5])
        times_out(ring, 0)
        os.kill(reader, signal.SIGCONT)
        until(lambda: s.census()["reading"] == 0, "the end of the read")
        assert_comes(ring, source, range(8))


def test_a_read_that_a_tracer_holds_up(folder: Path) -> None:
    """A system call that is delayed at its entry (field report 18): the time-out comes, others are read into
    other slots, the late bytes land in their own."""
    needs("strace")
    source = even_source(folder / "v", 6)
    log = folder / "strace"
    # By seccomp: of a tracer that is stopped nothing but the traced call waits.
    command = ["strace", "--seccomp-bpf", "-f", "-qq", "-e", "trace=pread64", "-o", str(log)]
    ring_of = serving(source, slots=2, workers=0, read_deadline_ms=DEADLINE_MS)
    with ring_of as s, s.attach() as ring:
        tracer = s.start(0, under=command)
        tracer.wait_ready()
        stop(tracer.process.pid)
        late = ring.acquire(0, [0])
        s.wait_reading()
        s.start(1).wait_ready()
        with pytest.raises(ReadTimeout):
            late.wait()
        assert_comes(ring, source, [1, 2, 3, 4, 1])
        assert s.census()["reading"] == 1
        tracer.send(signal.SIGCONT)
        until(lambda: s.census()["reading"] == 0, "the end of the read")
        assert_comes(ring, source, [0, 5])
    assert "pread64(" in log.read_text()


# --- FUSE ---------------------------------------------------------------------------------------------


@contextmanager
def on_fuse(folder: Path, experts: int = 8) -> Iterator[tuple[KnownSource, Fuse]]:
    """A source whose file lies on FUSE."""
    source = even_source(folder / "behind", experts)
    with fuse(folder / "mount", folder / "behind") as server:
        st = server.path.stat()
        file = source.files[0]
        source.files[0] = type(file)(
            server.path, st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, file.digest
        )
        yield source, server


def test_an_unknown_kind_of_file_system_is_read_through_a_buffer(tmp_path: Path) -> None:
    with on_fuse(tmp_path) as (source, server):
        found = segments.probe(server.path)
        assert (found.mode, found.fs, found.os_error) == ("bounce", "fuse", 0)
        assert "no local block file system" in found.reason
        with serving(source, slots=3, workers=2) as s, s.attach() as ring:
            assert_comes(ring, source, [*range(8), *range(8)])
            assert s.file()["mode"] == "bounce"


def test_a_fuse_server_that_is_stopped(tmp_path: Path) -> None:
    """Both workers hang in the kernel; what is resident is served; all goes on with the server."""
    with (
        on_fuse(tmp_path) as (source, server),
        serving(source, slots=4, workers=2, read_deadline_ms=DEADLINE_MS) as s,
        s.attach() as ring,
        s.attach() as other,
    ):
        assert_comes(ring, source, [0, 1])
        forget(server.path)
        server.stop()
        batch = other.acquire(0, [2])
        times_out(ring, 2)
        with pytest.raises(ReadTimeout):
            batch.wait()
        times_out(other, 3)
        s.wait_reading(2)
        times_out(ring, 2)
        assert_comes(ring, source, [0, 1])
        assert_comes(other, source, [1, 0])
        server.go_on()
        assert_comes(other, source, [2, 3, 4, 5, 6, 7])


def test_a_fuse_server_that_dies(tmp_path: Path) -> None:
    """An error that names the file; what is resident is served."""
    with on_fuse(tmp_path) as (source, server), serving(source, slots=4) as s, s.attach() as ring:
        assert_comes(ring, source, [0])
        forget(server.path)
        server.process.kill()
        server.process.wait()
        with pytest.raises(ExpertReadError) as caught:
            fetched(ring, 5)
        assert caught.value.path == str(server.path)
        assert caught.value.os_error in (errno.ENOTCONN, errno.ECONNABORTED)
        assert_comes(ring, source, [0])


# --- a whole system -----------------------------------------------------------------------------------


SHORT = f"ring.read_deadline_ms = {DEADLINE_MS}\n"


@contextmanager
def system_on_fuse(vault: Path, name: str, folder: Path) -> Iterator[tuple[System, Fuse]]:
    """`smoe-mp up` on a vault that lies on FUSE, with two workers and a short deadline."""
    with fuse(folder / "mount", vault) as server:
        config = write_config(folder / "c.toml", name, server.path, 16, 2, more=SHORT)
        system = System(name, config, (), folder / "stderr")
        try:
            yield system, server
        finally:
            server.go_on()
            system.end()


def hang_in_a_read(ring: smoe.Ring, server: Fuse) -> None:
    """Have a worker wait for a file system that answers nobody, until `server.go_on()`."""
    forget(server.path)
    server.stop()
    with pytest.raises(ReadTimeout):
        ring.fetch(1, [0])


def test_status_names_the_stuck_worker(vault: Path, ring_name: str, tmp_path: Path) -> None:
    with system_on_fuse(vault, ring_name, tmp_path) as (system, server):
        with smoe.attach(ring_name) as ring:
            patiently(ring, 0, [0]).release()
            hang_in_a_read(ring, server)
            patiently(ring, 0, [0]).release()
            until(lambda: any(row.stuck for row in system.look().workers), "a stuck worker")
            status = system.status()
            (row,) = [row for row in status["workers"] if row["stuck"]]
            assert status["ring"]["census"]["reading"] == 1
            assert row["alive"]
            assert row["slot"] is not None
            assert row["reading_s"] > DEADLINE_MS / 1000
            assert "stuck" in smoe_mp("status", ring_name).stdout
            assert any("bounce" in line and "fuse" in line for line in status["warnings"])
            server.go_on()
            until(lambda: not any(row.stuck for row in system.look().workers), "recovery")
            with patiently(ring, 1, [0, 1, 2]) as batch:
                expected = open_source(vault)
                for x in batch:
                    (record,) = [e for e in expected.experts if (e.layer, e.expert) == (1, x.expert)]
                    (extent,) = record.extents
                    with vault.open("rb") as f:
                        f.seek(extent.offset)
                        assert x.raw.tobytes() == f.read(extent.length)
        census = system.look().ring.census
        assert census["held"] == census["reserved"] == census["reading"] == census["failed"] == 0


def test_workers_that_a_drain_left_in_a_read_end_after_it(
    vault: Path, ring_name: str, tmp_path: Path
) -> None:
    """Resumed meanwhile, the ring is live again when the read ends."""

    def workers() -> list[str]:
        return [line for line in processes_of(ring_name) if "smoe-worker" in line]

    with system_on_fuse(vault, ring_name, tmp_path) as (system, server):
        with smoe.attach(ring_name) as ring:
            hang_in_a_read(ring, server)
        with ControlClient(ring_name, timeout_ms=100) as control, pytest.raises(NoAnswer):
            control.call(commands.Drain())  # it goes on
        assert system.ask(commands.Drain(resume=True)).state == "live"
        with smoe.attach(ring_name) as ring:
            until(lambda: len(workers()) > 2, "new workers beside the old ones")
            server.go_on()
            until(lambda: len(workers()) == 2, "an end of the old ones")
            patiently(ring, 1, [0]).release()


def test_nothing_is_begun_while_a_stop_waits_for_a_read(vault: Path, ring_name: str, tmp_path: Path) -> None:
    with system_on_fuse(vault, ring_name, tmp_path) as (system, server):
        with smoe.attach(ring_name) as ring:
            hang_in_a_read(ring, server)
        system.ask(commands.Stop())
        changes = (
            commands.Workers(count=3),
            commands.Verify(action="start"),
            commands.Drain(),
            commands.Prewarm(action="run"),
            commands.Demand(experts=[(0, 0)]),
            commands.Speculate(experts=[(0, 0)]),
            commands.Busy(),
            commands.Histogram(action="reset"),
        )
        for change in changes:
            with pytest.raises(ControlError, match="is stopping: asked to by the control plane"):
                system.ask(change)
        server.go_on()
        assert system.wait() == 0


#: `smoe-mp`, less patient with its workers at the stop.
HASTY = (
    "from smoe_mp import cli, supervisor as s; s.GRACE_S = s.TERM_S = s.SAVE_S = 0.1;"
    " import sys; sys.exit(cli.main())"
)


def test_down_with_a_read_that_hangs(
    vault: Path, ring_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for a stopped FUSE server is killed in the end, and nothing is left."""
    with fuse(tmp_path / "mount", vault) as server:
        config = write_config(tmp_path / "c.toml", ring_name, server.path, 16, 2, more=SHORT)
        command = [sys.executable, "-c", HASTY, "up", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                until(lambda: process.stdout.readline().startswith("ready: "), "ready")
                with smoe.attach(ring_name) as ring:
                    hang_in_a_read(ring, server)
                process.terminate()
                lines = process.stdout.read().splitlines()
                assert process.wait(LIMIT_S) == 0
                assert lines[-1] == f"stopped: ring {ring_name} removed"
            finally:
                server.go_on()
                process.terminate()


def test_a_killed_supervisor_with_a_read_that_hangs(vault: Path, ring_name: str, tmp_path: Path) -> None:
    """Field report 47: the workers end also in a blocked read."""
    with system_on_fuse(vault, ring_name, tmp_path) as (system, server):
        pids = [row.pid for row in system.look().workers]
        try:
            with smoe.attach(ring_name) as ring:
                hang_in_a_read(ring, server)
            system.signal(signal.SIGKILL)
            system.wait()
            until(lambda: all(state_of(pid) in "ZX" for pid in pids), "an end of the workers")
        finally:
            bury(ring_name)
