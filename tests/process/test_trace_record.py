"""Traces of a running system: what clients ask for, each demand once and in each client's order, whatever
they and the recorder suffer."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from systems import LIMIT_S, Up, kill_and_wait, make_vault, until
from systems import smoe_mp as run

import smoe_mp
from smoe_mp._native import lib
from smoe_mp.errors import IdError, RingError
from smoe_mp.trace import BUSY, DEMAND, GUESS, IDLE, KINDS, THERE, Recorder, Trace, read_trace

EXPERTS = 24
Row = tuple[str, int, list[int]]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_vault(tmp_path / "v.smoe", layers=2, experts=EXPERTS)


QUIET = "prewarm.enabled = false\n"


def rows(trace: Trace, who: int | None = None) -> list[Row]:
    """(kind, layer, experts) of all records, or of one participant's."""
    return [
        (KINDS[trace.kind[i]], int(trace.layer[i]), trace.entries(i).tolist())
        for i in range(len(trace))
        if who in (None, int(trace.who[i]))
    ]


def test_a_script_is_its_trace(up: Up, ring_name: str, made: Path) -> None:
    up(vault=made, slots=16, more=QUIET + "speculation.ranks = 2\n")
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, [9]).release()
        with Recorder(ring_name) as recorder, ring.busy():
            ring.fetch(0, [9, 2]).release()
            ring.route(1, range(EXPERTS - 1, -1, -1), 2).release()
            ring.acquire(0, np.array([4])).wait().release()
            found = ring.claim_specific(0, 4)
            assert found is not None
            found.release()
            assert ring.claim_specific(0, 23) is None
            with pytest.raises(IdError):
                ring.fetch(0, [EXPERTS])
            with pytest.raises(IdError):
                ring.fetch(0, [1, 1])
            assert sorted(x.expert for x in ring.as_ready(1, [7, 3, 5])) == [3, 5, 7]
        ring.fetch(0, [11]).release()
        trace = recorder.trace
    assert rows(trace) == [
        ("busy", 0, []),
        ("demand", 0, [9, 2]),
        ("demand", 1, [23, 22]),
        ("ranks", 1, [21, 20, 19, 18, 17, 16, 15, 14]),
        ("guess", 1, [21, 20]),
        ("demand", 0, [4]),
        ("claim", 0, [4]),
        ("demand", 1, [7, 3, 5]),
        ("idle", 0, []),
    ]
    assert (trace.layers, trace.experts, trace.lost) == (2, EXPERTS, 0)
    assert trace.outcome[trace.first[1] : trace.first[2]].tolist() == [THERE, 0]
    assert (np.diff(trace.time_us.astype(np.int64)) >= 0).all()


CLIENT = """
import sys, threading, numpy as np, smoe_mp
name, seed, threads, times = sys.argv[1], *map(int, sys.argv[2:])

def work(number):
    rng = np.random.default_rng((seed, number))
    for _ in range(times):
        ring.fetch(int(rng.integers(2)), rng.choice(12, 3, replace=False) + 12 * number).release()

with smoe_mp.attach(name, "scripted") as ring:
    print(ring.client_id, flush=True)
    sys.stdin.readline()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    [w.start() for w in workers]
    [w.join() for w in workers]
"""


def script(seed: int, number: int, times: int) -> list[Row]:
    """What a thread of CLIENT demands; its experts are no other thread's."""
    rng = np.random.default_rng((seed, number))
    return [
        ("demand", int(rng.integers(2)), (rng.choice(12, 3, replace=False) + 12 * number).tolist())
        for _ in range(times)
    ]


def start_client(name: str, seed: int, threads: int, times: int) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, name, str(seed), str(threads), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_two_clients_of_two_threads_each_demand_once_and_in_order(
    up: Up, ring_name: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "GRACE_S", LIMIT_S)  # nobody dies, but a machine may stand
    times = 400
    up(vault=made, slots=20, more=QUIET)
    clients = [start_client(ring_name, seed, 2, times) for seed in (1, 2)]
    done = threading.Event()
    with Recorder(ring_name) as recorder:

        def poll() -> None:
            while not done.is_set():
                recorder.poll()
                time.sleep(0.001)

        poller = threading.Thread(target=poll)
        poller.start()
        for process, _ in clients:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process, _ in clients:
            assert process.wait(LIMIT_S) == 0
        done.set()
        poller.join()
    for seed, (_, who) in enumerate(clients, 1):
        seen = rows(recorder.trace, who)
        for number in (0, 1):
            assert [row for row in seen if row[2][0] // 12 == number] == script(seed, number, times)
    assert len(recorder.trace) == 4 * times
    assert recorder.trace.lost == 0


def test_a_recorder_that_sleeps_too_long_says_so(up: Up, ring_name: str, made: Path) -> None:
    up(vault=made, slots=20, more=QUIET)
    room = 1 << 17
    with smoe_mp.attach(ring_name) as ring, Recorder(ring_name) as recorder:
        ring.fetch(0, range(16)).release()
        for _ in range(room // 18 + 100):
            ring.fetch(0, range(16)).release()
    trace = recorder.trace
    assert trace.lost > 0
    assert trace.lost + 2 * len(trace) + len(trace.expert) == (room // 18 + 101) * 18
    assert {tuple(row[2]) for row in rows(trace)} == {tuple(range(16))}


def tracing(name: str) -> int:
    with smoe_mp.attach(name) as ring:
        return int(lib.smoe_tracing(ring._open().ptr)[0])


def test_a_killed_recorder_leaves_nothing_on(up: Up, ring_name: str, made: Path, tmp_path: Path) -> None:
    up(vault=made, slots=20, more=QUIET)
    command = [sys.executable, "-m", "smoe_mp", "trace", "record", ring_name, "-o", str(tmp_path / "a.trace")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"recording {ring_name}: Ctrl-C ends it\n"
    assert tracing(ring_name) == 1
    with pytest.raises(RingError, match="one at a time"), Recorder(ring_name):
        pass
    kill_and_wait(process.pid)
    process.wait()
    until(lambda: tracing(ring_name) == 0, "the sweep turns recording off")
    with Recorder(ring_name) as recorder:
        pass
    assert len(recorder.trace) == 0


def test_a_recorder_that_dies_without_a_supervisor_is_followed_by_the_next(
    up: Up, ring_name: str, made: Path, tmp_path: Path
) -> None:
    """Nobody sweeps: whoever records next finds recording on, and turns it off."""
    system = up(vault=made, slots=20, more=QUIET)
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, [1, 2]).release()
        system.kill()
        command = [sys.executable, "-m", "smoe_mp", "trace", "record", ring_name, "-o", str(tmp_path / "a")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == f"recording {ring_name}: Ctrl-C ends it\n"
        kill_and_wait(process.pid)
        process.wait()
        assert tracing(ring_name) == 1
        ring.fetch(0, [2, 1]).release()
        with Recorder(ring_name) as recorder:
            ring.fetch(0, [1]).release()
        assert rows(recorder.trace) == [("demand", 0, [1])]
        assert tracing(ring_name) == 0
    up(vault=made, slots=20, more=QUIET)


def test_a_killed_client_costs_its_last_record_at_most(up: Up, ring_name: str, made: Path) -> None:
    up(vault=made, slots=20, more=QUIET)
    process, who = start_client(ring_name, 7, 1, 20_000)  # all in all less than the log holds
    assert process.stdin is not None
    with Recorder(ring_name) as recorder:
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: recorder.poll() >= 0 and recorder.records_cells > 500, "records")
        kill_and_wait(process.pid)
        process.wait()
        with smoe_mp.attach(ring_name) as ring:
            ring.fetch(0, [1, 2, 3]).release()
    seen = [row for row in rows(recorder.trace, who) if row[0] == "demand"]
    right = script(7, 0, len(seen))
    # The other client may have got the dead one's number: its one demand is the last.
    assert seen[:-1] == right[:-1]
    assert rows(recorder.trace)[-1] == ("demand", 0, [1, 2, 3])
    assert recorder.trace.lost in (0, 5)


def record_until(name: str, path: Path, end: Sequence[str] | signal.Signals) -> tuple[int, str]:
    """Run `smoe-mp trace record` while a client asks; ended by a signal or by a command."""
    command = [sys.executable, "-m", "smoe_mp", "trace", "record", name, "-o", str(path), "--force"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    with smoe_mp.attach(name) as ring, ring.busy():
        ring.fetch(1, [5, 6]).release()
    if isinstance(end, signal.Signals):
        process.send_signal(end)
    else:
        assert run(*end).returncode == 0
    said, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, said


@pytest.mark.parametrize("by", ["SIGINT", "SIGTERM", "the system's end"])
def test_the_command_writes_a_trace(up: Up, ring_name: str, made: Path, tmp_path: Path, by: str) -> None:
    up(vault=made, slots=20, more=QUIET)
    path = tmp_path / "evening.trace"
    path.write_bytes(b"yesterday's")
    refused = run("trace", "record", ring_name, "-o", path)
    assert (refused.returncode, path.read_bytes()) == (2, b"yesterday's")
    assert run("trace", "record", ring_name, "-o", tmp_path / "no" / "a.trace").returncode == 3
    end = getattr(signal, by, ("down", ring_name))
    code, said = record_until(ring_name, path, end)
    assert code == 0
    assert said == f"{path}: 3 records, 2 experts, {path.stat().st_size} bytes\n"
    trace = read_trace(path)
    assert trace.kind.tolist() == [BUSY, DEMAND, IDLE]
    assert trace.entries(1).tolist() == [5, 6]
    shown = run("trace", "show", path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "2 experts demanded" in shown.stdout


def test_prewarm_is_seen_too(up: Up, ring_name: str, tmp_path: Path) -> None:
    """Twelve popular experts were driven out: it loads them again, one record each, under its own number."""
    vault = make_vault(tmp_path / "many.smoe", experts=200)
    system = up(vault=vault, slots=140, more="prewarm.trickle_ms = 0\n")
    popular = list(range(100, 112))
    with smoe_mp.attach(ring_name) as ring, Recorder(ring_name) as recorder:
        with ring.busy():
            for _ in range(3):
                ring.fetch(0, popular).release()
            for first in (0, 130):
                ring.fetch(0, range(first, first + 70)).release()
            until(lambda: "busy" in system.look().prewarm.state, "prewarm seeing the request")
        until(lambda: all(ring.resident(0, x) for x in popular), "prewarm")
    guesses = recorder.trace.kind == GUESS
    last = recorder.trace.kind.tolist().index(IDLE)
    assert set(recorder.trace.who[guesses].tolist()) == {161}
    assert [row[2] for row in rows(recorder.trace)[last + 1 :]] == [[x] for x in popular]
    assert system.look().prewarm.state != "not running"


def test_no_ring_is_one_line(runtime_dir: Path) -> None:
    done = run("trace", "record", "nowhere")
    assert done.returncode == 4
    assert done.stderr.startswith("smoe-mp: error: ring nowhere")
    assert done.stderr.count("\n") == 1
