"""The control plane of a real system: demand, guesses, busy, histogram, verify, drain, events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq
from systems import LIMIT_S, Up, bytes_of, make_vault, processes_of, smoe_mp, until

import smoe_mp as package
from smoe_mp import runtime
from smoe_mp.control.commands import (
    Busy,
    Demand,
    Drain,
    ExpertCount,
    Histogram,
    Idle,
    Prewarm,
    Speculate,
    Status,
    Stop,
    Verify,
    Workers,
)
from smoe_mp.control.events import EventStream
from smoe_mp.errors import Refused, RingStopping
from smoe_mp.sources import open_source

ROOT = Path(__file__).resolve().parents[2]
ALL = [(layer, expert) for layer in range(3) for expert in range(8)]
NO_PREWARM = "prewarm.enabled = false\n"


def plain(name: str, command: str, **fields: object) -> dict[str, object]:
    """As any language's client asks: a REQ socket and JSON."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.REQ) as asker:
        asker.connect(f"ipc://{runtime.socket_path(name)}")
        asker.send(
            json.dumps({"v": 1, "id": 5, "command": command, "deadline_ms": 60_000, **fields}).encode()
        )
        assert asker.poll(LIMIT_S * 1000)
        reply: dict[str, object] = json.loads(asker.recv())
    context.term()
    assert reply["id"] == 5
    return reply


def test_the_manual_s_client(up: Up, ring_name: str, tmp_path: Path) -> None:
    """As it stands in docs/control.md, where a desktop session has its run-time folder."""
    up(slots=24, more=NO_PREWARM)
    client = (ROOT / "docs/control.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "smoe-mp").symlink_to(runtime.runtime_folder())
    environment = {k: v for k, v in os.environ.items() if k != "SMOE_RUNTIME_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", client.replace("smoe-demo", ring_name)],
        env={**environment, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    demanded, guessed, rate = done.stdout.splitlines()
    assert "'resident': 2" in demanded
    assert "'ok': True" in guessed
    assert 0 <= float(rate) <= 1


def test_demand_by_plain_zeromq(up: Up, ring_name: str) -> None:
    system = up(slots=24, more=NO_PREWARM)
    first = plain(ring_name, "demand", experts=[[0, 3], [2, 7], [0, 3]])["result"]
    assert isinstance(first, dict)
    assert (first["resident"], first["hits"], first["failed"]) == (2, 0, [])
    assert first["took_ms"] > 0
    again = plain(ring_name, "demand", experts=[[2, 7], [0, 3]])["result"]
    assert isinstance(again, dict)
    assert (again["resident"], again["hits"]) == (2, 2)
    look = system.look()
    assert (look.counters["misses"], look.counters["hits"], look.counters["reads"]) == (2, 2, 2)
    assert look.ring.census["held"] == 0
    unknown = plain(ring_name, "demand", experts=[[0, 1], [9, 0]])
    assert isinstance(unknown["error"], dict)
    assert unknown["error"]["type"] == "IdError"
    assert system.look().counters["misses"] == 2  # the other of the two was not asked for either


def test_what_is_demanded_over_the_socket_is_there_for_a_client(up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=24, more=NO_PREWARM)
    assert system.ask(Demand(experts=ALL)).resident == 24
    with package.attach(ring_name) as ring:
        for (layer, expert), raw in bytes_of(vault).items():
            with ring.fetch(layer, [expert]) as batch:
                assert batch.hits == 1
                assert bytes(batch[0].raw) == raw


def test_a_list_longer_than_the_ring(up: Up) -> None:
    system = up(slots=4, more=NO_PREWARM)
    done = system.ask(Demand(experts=ALL))
    assert (done.resident, done.hits, done.failed) == (24, 0, [])
    assert system.look().counters["reads"] == 24
    assert system.look().ring.census["held"] == 0


def test_demands_of_many_at_once_and_one_that_nobody_waits_for(up: Up, ring_name: str) -> None:
    system = up(slots=8, more=NO_PREWARM)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    askers = [context.socket(zmq.DEALER) for _ in range(8)]
    for n, asker in enumerate(askers):
        asker.connect(f"ipc://{runtime.socket_path(ring_name)}")
        body = {"v": 1, "id": n, "command": "demand", "experts": ALL[n:] + ALL[:n], "deadline_ms": 60_000}
        asker.send(json.dumps(body).encode())
    askers.pop(0).close(linger=0)
    for n, asker in enumerate(askers, 1):
        assert asker.poll(LIMIT_S * 1000)
        reply = json.loads(asker.recv())
        assert (reply["id"], reply["result"]["resident"], reply["result"]["failed"]) == (n, 24, [])
    context.destroy(linger=0)
    until(lambda: system.look().ring.census["held"] == 0, "an end of all holds")


def test_a_demand_that_cannot_be_read(up: Up, vault: Path) -> None:
    system = up(slots=24, more=NO_PREWARM + "vault.check_s = 3600\n")
    with vault.open("r+b") as file:
        file.truncate(vault.stat().st_size - 4096)
    done = system.ask(Demand(experts=[(2, 7), (0, 0)]))
    assert done.resident <= 1
    assert {(f.layer, f.expert) for f in done.failed} >= {(2, 7)}
    assert all(f.error in ("ExpertReadError", "SourceChanged") and f.message for f in done.failed)


def test_guesses_over_the_socket(up: Up) -> None:
    system = up(slots=24, more=NO_PREWARM)
    assert system.ask(Speculate(experts=[(1, 0), (1, 1), (1, 1)])).queued == 2
    until(lambda: system.look().counters["reads"] == 2, "two reads")
    assert system.ask(Speculate(experts=[(1, 0)])).queued == 0
    assert system.ask(Demand(experts=[(1, 0), (1, 1)])).hits == 2
    with pytest.raises(Refused, match="IdError"):
        system.ask(Speculate(experts=[(1, 2), (7, 7)]))
    assert system.look().counters["guesses"] == 2


def test_busy_has_a_lease(up: Up) -> None:
    system = up(slots=160)
    assert len(system.ask(Busy(lease_ms=3_600_000)).busy_clients) == 1
    until(lambda: system.look().prewarm.state == "resting: a client is busy", "a rest")
    assert system.ask(Idle()).busy_clients == []
    until(lambda: system.look().prewarm.state == "idle", "no rest")
    assert system.ask(Busy(lease_ms=1)).lease_ms <= 1
    until(lambda: system.look().prewarm.busy_clients == [], "the lease's end")
    assert system.ask(Idle()).lease_ms == 0


def test_histogram_of_a_running_system(up: Up, ring_name: str, tmp_path: Path) -> None:
    system = up(slots=24, more=NO_PREWARM)
    for experts in ([(2, 5), (0, 1)], [(2, 5)], [(2, 5)]):
        system.ask(Demand(experts=experts))
    seen = system.ask(Histogram(most=3))
    assert (seen.experts, seen.counted, seen.total) == (24, 2, 4)
    assert [(r.layer, r.expert, r.count) for r in seen.most_popular][:2] == [(2, 5, 3), (0, 1, 1)]
    assert [len(system.ask(Histogram(first=n, most=10)).most_popular) for n in (0, 20, 24)] == [10, 4, 0]
    out = tmp_path / "mine.bin"
    assert smoe_mp("histogram", "export", ring_name, out).returncode == 0
    assert smoe_mp("histogram", "export", ring_name, out).returncode == 2  # it is there
    assert smoe_mp("histogram", "reset", ring_name).returncode == 0
    assert system.ask(Histogram()).total == 0
    assert smoe_mp("histogram", "import", ring_name, out).returncode == 0
    assert system.ask(Histogram(most=3)).most_popular == seen.most_popular
    shown = smoe_mp("histogram", "show", ring_name, "--top", "5").stdout
    assert "2 of 24 experts were demanded, 4 times in all" in shown
    saved = system.ask(Histogram(action="save"))
    assert Path(saved.path).read_bytes() == out.read_bytes()
    for bad in (tmp_path / "none.bin", Path(__file__)):
        failed = smoe_mp("histogram", "import", ring_name, bad)
        assert (failed.returncode, bad.name in failed.stderr) == (2, True)
    assert Path(__file__).exists()  # a file of somebody's is not set aside
    with pytest.raises(Refused, match="no expert 9 in layer 7"):
        system.ask(Histogram(action="set", counts=[ExpertCount(0, 0, 5), ExpertCount(7, 9, 1)]))
    assert system.ask(Histogram()).total == 4


def test_verify_beside_serving(up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=24, more=NO_PREWARM)
    assert system.ask(Verify()).state == "never"
    with package.attach(ring_name) as ring, ring.busy():
        assert system.ask(Verify(action="start")).state == "running"
        with pytest.raises(Refused, match="being verified already"):
            system.ask(Verify(action="start"))
        until(lambda: len(system.look().clients) == 1, "the client")
        with ring.fetch(0, [0]):  # a demand is served meanwhile
            pass
        assert system.ask(Verify()).done == 0  # and a busy client lets it rest
    until(lambda: system.ask(Verify()).state == "done", "its end")
    found = system.ask(Verify())
    assert (found.done, found.goal, found.bad) == (24, 24, [])
    assert system.look().verify.state == "done"
    assert system.look().counters["reads"] == 1
    done = smoe_mp("verify", "--ring", ring_name)
    assert (done.returncode, "none is bad" in done.stdout) == (0, True), done.stderr


def test_verify_names_what_is_bad_and_can_be_stopped(up: Up, ring_name: str, tmp_path: Path) -> None:
    vault = make_vault(tmp_path / "v.smoe", layers=2, experts=4)
    first = next(e for x, e in zip(bytes_of(vault), _extents(vault), strict=True) if x == (1, 2))
    with vault.open("r+b") as file:
        stat = os.fstat(file.fileno())
        # the scales, which lie at the blob's end: a NaN
        file.seek(first[0] + first[1] - 4096)
        at = file.tell()
        data = bytearray(file.read(4096))
        data[:] = np.full(2048, np.nan, np.float16).tobytes()
        file.seek(at)
        file.write(data)
        os.utime(file.fileno(), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    system = up(vault=vault, slots=8, more=NO_PREWARM)
    done = smoe_mp("verify", "--ring", ring_name, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {(b["layer"], b["expert"]) for b in found["bad"]} == {(1, 2)}
    assert any("1 experts are bad" in warning for warning in system.look().warnings)
    with package.attach(ring_name) as ring, ring.busy():
        system.ask(Verify(action="start"))
        system.ask(Verify(action="stop"))
        until(lambda: not any("smoe_mp.verifier" in line for line in processes_of(ring_name)), "its end")
    assert system.ask(Verify()).state == "stopped"


def _extents(vault: Path) -> list[tuple[int, int]]:
    return [(x.extents[0].offset, x.extents[0].length) for x in open_source(vault).experts]


def test_drain_and_resume(up: Up, ring_name: str) -> None:
    system = up(slots=24, workers=2)
    with package.attach(ring_name) as ring:
        with ring.fetch(0, [1, 2]) as held:
            before = [bytes(x.raw) for x in held]
            assert system.ask(Drain()).state == "drained"
            assert [bytes(x.raw) for x in held] == before  # what is held stays right
            with pytest.raises(RingStopping):
                ring.fetch(0, [1])
        look = system.look()
        assert (look.state, look.workers) == ("drained", [])
        assert look.health.startswith("drained")
        with pytest.raises(Refused, match="resume it first"):
            system.ask(Workers(count=3))
        with pytest.raises(Refused, match="RingStopping"):
            system.ask(Demand(experts=[(0, 0)]))
        assert system.ask(Drain()).state == "drained"  # twice does no harm
        assert system.ask(Drain(resume=True)).state == "live"
        with ring.fetch(0, [1, 2]) as batch:
            assert batch.hits == 2  # the ring was kept
        with ring.fetch(2, [6]) as batch:
            assert len(batch) == 1
    assert len(system.look().workers) == 2
    assert system.ask(Drain(resume=True)).state == "live"


def test_a_drained_system_stops_and_leaves_its_ring(up: Up, ring_name: str) -> None:
    system = up(slots=24, more=NO_PREWARM)
    system.ask(Demand(experts=ALL))
    system.ask(Drain())
    system.ask(Stop(keep_ring=True))
    assert system.wait() == 0
    again = up(slots=24, more=NO_PREWARM)
    assert again.ask(Demand(experts=ALL)).hits == 24


def test_events_of_a_system(up: Up, ring_name: str) -> None:
    system = up(slots=160, more="prewarm.enabled = false\n")
    with EventStream(ring_name, ("state", "worker", "warning", "stats")) as stream:
        event = stream.next(LIMIT_S)
        while event is None or event.event != "stats":
            event = stream.next(LIMIT_S)
            assert event is not None
        assert event.data["counters"]["misses"] == 0
        assert event.data["queues"] == {"demand": 0, "speculative": 0}
        os.kill(system.look().workers[0].pid, signal.SIGKILL)
        seen: set[str] = set()
        while not {"worker", "warning"} <= seen:
            event = stream.next(LIMIT_S)
            assert event is not None
            seen.add(event.event)
        system.ask(Drain())
        while event is None or event.data.get("state") != "drained":
            event = stream.next(LIMIT_S)
            assert event is not None
        # The stream goes on by itself with the next system of that name.
        system.ask(Stop())
        system.wait()
        up(slots=160, more=NO_PREWARM)
        until(lambda: (e := stream.next(LIMIT_S)) is not None and e.event == "stats", "events of the next")
        assert stream.lost == 0


def test_a_subscriber_that_does_not_read_costs_nobody_anything(up: Up, ring_name: str) -> None:
    system = up(more=NO_PREWARM)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SUBSCRIBE, b"")
    deaf.connect(f"ipc://{runtime.socket_path(ring_name).with_suffix('.evt')}")
    for count in range(200):
        system.ask(Prewarm(action="pause" if count % 2 else "resume"))
        system.ask(Status())
    assert system.look().state == "live"
    context.destroy(linger=0)


def test_commands_for_people(up: Up, ring_name: str) -> None:
    up(slots=24, more=NO_PREWARM)
    done = smoe_mp("demand", ring_name, "0:0-3", "1:7")
    assert (done.returncode, "5 resident, 0 of them before" in done.stdout) == (0, True), done.stderr
    assert "2 of 3 guesses queued" in smoe_mp("speculate", ring_name, "2:0-1", "0:0").stdout
    assert "1 clients are busy" in smoe_mp("busy", ring_name).stdout
    assert "0 clients are busy" in smoe_mp("idle", ring_name).stdout
    assert json.loads(smoe_mp("demand", ring_name, "0:0", "--json").stdout)["hits"] == 1
    assert "the ring is kept" in smoe_mp("drain", ring_name).stdout
    assert smoe_mp("drain", ring_name, "--resume").stdout == f"{ring_name}: live\n"
    for wrong in (
        ("demand", ring_name, "0"),
        ("demand", ring_name, "0:5-2"),
        ("events", ring_name, "--only", "x"),
        ("verify",),
        ("verify", "--ring", ring_name, "x"),
    ):
        failed = smoe_mp(*wrong)
        assert (failed.returncode, failed.stdout) == (2, "")
        assert failed.stderr.startswith("smoe-mp: error: ")
        assert failed.stderr.count("\n") == 1
    assert smoe_mp("demand", "nobody-serves-this", "0:1").returncode == 4


def test_events_for_people_and_programs(up: Up, ring_name: str) -> None:
    up(more=NO_PREWARM)
    for flags, check in (((), "stats"), (("--json",), '"event":"stats"')):
        argv = [sys.executable, "-m", "smoe_mp", "events", ring_name, "--only", "stats", *flags]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert check in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""


def test_the_supervisor_dies_with_a_demand_under_way(up: Up, ring_name: str) -> None:
    """The control plane's own client dies with it, and its holds go."""
    system = up(slots=24, more=NO_PREWARM)
    workers = [worker.pid for worker in system.look().workers]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.connect(f"ipc://{runtime.socket_path(ring_name)}")
    asker.send(json.dumps({"v": 1, "command": "demand", "experts": ALL}).encode())
    until(lambda: system.look().ring.census["held"] > 0, "a hold")
    system.kill(everything=True)
    context.destroy(linger=0)
    again = up(slots=24, more=NO_PREWARM)
    assert again.look().ring.census["held"] == 0
    assert again.ask(Demand(experts=ALL)).resident == 24
