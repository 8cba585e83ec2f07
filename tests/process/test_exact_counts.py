"""Counters add up to what was done: a script of several clients, with a worker or a client killed in it.

Where a demand must find a read under way, the only worker is stopped until the script has got there.
"""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faultkit import Serving, even_source, refused, serving, shimmed
from support import Client, Served, StampedSource, serve, stamped_source, until
from systems import Up

import smoe_mp
from smoe_mp import stats
from smoe_mp._native import lib
from smoe_mp.control.commands import DemandStatus

#: What depends on the clock, or on how often somebody looked.
TIMED = ("wait_ns", "read_ns", "pops_demand", "pops_speculative", "skips")


def counted(ring: Any, **wanted: int) -> None:
    """All counters, summed, are `wanted`; what is not named is 0."""
    got = stats.counters(ring, -1)
    expected = {**dict.fromkeys(got, 0), **wanted}
    for name in (*TIMED, "device_bytes"):
        got.pop(name)
        expected.pop(name)
    assert got == expected


def demands(got: Any) -> tuple[int, int, int, int]:
    """Hits, joins, promoted, misses of a phase or of all."""
    d = got if isinstance(got, dict) else {k: getattr(got, k) for k in stats.KINDS}
    assert d.get("demanded", sum(d[k] for k in stats.KINDS)) == sum(d[k] for k in stats.KINDS)
    return d["hits"], d["joins"], d["promoted"], d["misses"]


def figures(ring: Any, client: int, of: int = lib.SMOE_OF_PRESENT) -> dict[str, Any]:
    found = stats.tally(ring, client, of)
    assert found is not None
    return stats.figures(found)


def bytes_of(source: StampedSource, *experts: tuple[int, int]) -> int:
    return sum(sum(x.length for x in source.experts[source.index(*e)].extents) for e in experts)


def parts_of(source: StampedSource, *experts: int) -> int:
    """Parts of experts of layer 0: a view of each is a hold of its own, and given up like one."""
    return sum(len(source.experts[source.index(0, e)].extents) for e in experts)


def test_a_script_of_every_kind(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s")
    with serve(source, slots=8) as served, Client(served.name) as a, Client(served.name) as b:
        ring, (worker,) = served.segments.ring, served.workers
        worker.stop()
        a.do("phase", name="prefill")
        b.do("phase", name="decode")
        a.do("acquire", layer=0, experts=[0, 1, 2])  # 3 misses
        b.do("acquire", layer=0, experts=[1, 2])  # 2 joins
        assert a.do("speculate", layer=0, experts=[3, 4]) == 2
        assert a.do("speculate", layer=0, experts=[5]) == 0  # a quarter of the slots are guesses already
        b.do("acquire", layer=0, experts=[3])  # promoted
        worker.go_on()
        a.do("wait")
        b.do("wait")
        until(lambda: served.counters()["reads"] == 5)
        a.do("release")
        b.do("release")
        a.do("phase", name="decode")
        a.do("fetch", layer=0, experts=[4, 0, 1])  # 3 hits, one of them on a guess
        a.do("release")
        assert b.do("claim", layer=0, expert=2)
        assert not b.do("claim", layer=1, expert=2)
        b.do("release")
        counted(
            ring,
            hits=3,
            joins=2,
            promoted=1,
            misses=3,
            waits=3,  # of b two batches
            guess_hits=1,
            guesses=2,
            guess_drops=1,
            guess_used_bytes=bytes_of(source, (0, 3), (0, 4)),
            claims=1,
            releases=10 + parts_of(source, 0, 1, 2, 1, 2, 3, 4, 0, 1),
            reads=5,
            wanted_bytes=bytes_of(source, *((0, e) for e in range(5))),
        )
        assert demands(figures(ring, a.id)["phases"]["prefill"]) == (0, 0, 0, 3)
        assert demands(figures(ring, a.id)["phases"]["decode"]) == (3, 0, 0, 0)
        assert demands(figures(ring, b.id)["demand"]) == (0, 2, 1, 0)
        assert list(figures(ring, b.id)["phases"]) == ["decode"]
        assert figures(ring, a.id)["demand"]["coverage"] == 0.5
        whole = served.segments.figures()
        assert (whole["read_latency"]["count"], whole["demand"]["wait"]["count"]) == (5, 3)
        assert whole["departed"]["demand"]["demanded"] == 0
        assert_device_bytes(served, source, 5)


def assert_device_bytes(served: Served | Serving, source: StampedSource, reads: int) -> None:
    """Not less than was wanted, and not more than the pages around each part."""
    got = served.counters()
    parts = max(len(x.extents) for x in source.experts)
    assert got["wanted_bytes"] <= got["device_bytes"] <= got["wanted_bytes"] + reads * parts * 2 * 4096


def test_guesses_that_nobody_wants(tmp_path: Path) -> None:
    """Evicted unread, or displaced before they are read; every guess ends as something."""
    source = stamped_source(tmp_path / "s", layers=3)
    with serve(source, slots=8) as served, served.attach() as ring:
        (worker,) = served.workers
        assert ring.speculate(0, [0, 1]) == 2
        until(lambda: served.counters()["reads"] == 2)
        with ring.fetch(1, range(8)):  # evicts both
            pass
        with ring.fetch(1, [0]):
            pass
        worker.stop()
        assert ring.speculate(0, [2, 3]) == 2  # evicts two
        batch = ring.acquire(2, range(8))  # takes those two slots and evicts the other six
        worker.go_on()
        batch.wait()
        batch.release()
        counted(
            served.segments.ring,
            hits=1,
            misses=16,
            waits=2,
            guesses=4,
            guess_wasted=2,
            guess_wasted_bytes=bytes_of(source, (0, 0), (0, 1)),
            guess_displaced=2,
            evictions=2 + 2 + 6,
            releases=17,
            reads=18,
            wanted_bytes=bytes_of(source, (0, 0), (0, 1), *((x, e) for x in (1, 2) for e in range(8))),
        )


def test_a_worker_that_is_killed_in_a_read(tmp_path: Path) -> None:
    source, gate = even_source(tmp_path / "f.bin", 8), tmp_path / "gate"
    gate.touch()
    hangs = shimmed(hang=f"{source.extent(2).offset}:{gate}")
    with serving(source, slots=4, env=hangs) as s, s.attach() as ring:
        batch = ring.acquire(0, [2])
        s.wait_reading()
        kill_and_replace(s)
        assert batch.wait()[0].raw.tobytes() == source.bytes_of(2)
        batch.release()
        counted(s.segments.ring, misses=1, waits=1, reads=1, requeued=1, releases=2, wanted_bytes=32 << 10)
        assert s.counters()["device_bytes"] == 32 << 10


def test_a_worker_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """Each demand is a miss, and each miss is one read, however often its worker is killed on the way."""
    experts, rounds, kills = 64, 400, 40
    source = even_source(tmp_path / "f.bin", experts, 96 << 10)
    rng = np.random.default_rng(3)
    with serving(source, slots=4, workers=1) as s, s.attach() as ring:
        last: list[int] = []
        for turn in range(rounds):
            # Four others than the last four, which fill the ring: all are misses.
            picked = rng.choice([e for e in range(experts) if e not in last], 4, replace=False).tolist()
            with ring.acquire(0, picked) as batch:
                if turn % (rounds // kills) == 0:
                    kill_and_replace(s, int(rng.integers(0, 400)))
                for x in batch.wait():
                    assert x.raw.tobytes() == source.bytes_of(x.expert)
            last = picked
        counters = s.counters()
        assert counters["requeued"] <= kills
        counted(
            s.segments.ring,
            misses=4 * rounds,
            waits=rounds,
            evictions=4 * rounds - 4,
            releases=2 * 4 * rounds,
            reads=4 * rounds,
            wanted_bytes=4 * rounds * (96 << 10),
            requeued=counters["requeued"],
        )
        assert counters["device_bytes"] == counters["wanted_bytes"]  # experts begin and end at pages
        assert s.segments.figures()["read_latency"]["count"] == 4 * rounds


def kill_and_replace(s: Serving, spins: int = 0) -> None:
    """SIGKILL the worker at some point of its work, sweep, and start another under its number."""
    worker = s.workers.pop()
    for _ in range(spins):
        s.segments.queues()
    worker.process.kill()
    worker.process.wait()
    worker.close()
    s.segments.recover()
    s.start(0).wait_ready()


def test_a_client_that_is_killed(tmp_path: Path) -> None:
    """Its counts stay in the sums, as those of somebody who is gone; the next under its id begins anew."""
    source = stamped_source(tmp_path / "s")
    with serve(source, slots=8) as served:
        ring, (worker,) = served.segments.ring, served.workers
        with Client(served.name) as victim:
            victim.do("phase", name="decode")
            victim.do("fetch", layer=0, experts=[0, 1])
            worker.stop()
            victim.tell("fetch", layer=0, experts=[0, 2, 3])
            until(lambda: served.counters()["misses"] == 4)
            victim.kill()
        assert served.segments.recover()["clients"] == 1
        worker.go_on()
        until(lambda: served.counters()["reads"] == 4)
        with Client(served.name) as heir:
            assert heir.id == victim.id
            heir.do("fetch", layer=0, experts=[0, 1, 2, 3])
            assert demands(figures(ring, heir.id)["demand"]) == (4, 0, 0, 0)
            departed = served.segments.figures()["departed"]
            assert demands(departed["phases"]["decode"]) == (1, 0, 0, 4)
            heir.do("release")
            counted(
                ring,
                hits=5,
                misses=4,
                waits=1,  # the one that was killed did not end
                releases=4 + parts_of(source, 0, 1, 0, 1, 2, 3),
                reads=4,
                wanted_bytes=bytes_of(source, *((0, e) for e in range(4))),
            )
        assert demands(served.segments.figures()["departed"]["demand"]) == (5, 0, 0, 4)


def test_reads_that_fail(tmp_path: Path) -> None:
    source = even_source(tmp_path / "f.bin", 8)
    broken = shimmed(at=f"{source.extent(7).offset}:{errno.EIO}:0")
    with serving(source, slots=4, env=broken) as s, s.attach() as one, s.attach() as two:
        for ring in (one, two, one):
            refused(ring, 7)
        counted(s.segments.ring, misses=3, waits=3, failed_reads=3, read_errors=3)
        assert s.segments.figures()["read_latency"]["count"] == 3


def test_what_status_says(up: Up, ring_name: str) -> None:
    """Each client has its own figures, and those who have left are together."""
    system = up(more="prewarm.enabled = false\n")
    with smoe_mp.attach(ring_name, "first") as first, smoe_mp.attach(ring_name, "second") as second:
        with first.phase("prefill"), first.fetch(0, range(8)):
            pass
        with second.phase("decode"), second.fetch(0, [0, 1]), second.phase("unsaid"), second.fetch(0, [2]):
            pass
        with (
            pytest.raises(ValueError, match="phase 'chat': wanted is one of unsaid, prefill, decode"),
            first.phase("chat"),
        ):
            pass
        status = system.look()
        by_label = {client.label: client for client in status.clients}
        assert demands(by_label["first"].phases["prefill"]) == (0, 0, 0, 8)
        assert demands(by_label["second"].phases["decode"]) == (2, 0, 0, 0)
        assert demands(by_label["second"].phases["unsaid"]) == (1, 0, 0, 0)
        assert by_label["second"].demand.coverage == 1.0
        assert by_label["first"].demand.wait.count == 1
        assert by_label["first"].counters["misses"] == status.counters["misses"] == 8
        assert demands(status.demand) == (3, 0, 0, 8)
        assert status.departed.demand == DemandStatus(wait=status.departed.demand.wait)
        assert sum(status.read_latency.buckets) == status.read_latency.count == status.counters["reads"] == 8
        own = second.stats()["client"]
        assert (own["hits"], own["demand"]["demanded"], list(own["phases"])) == (3, 3, ["unsaid", "decode"])
    status = system.look()
    assert status.clients == []
    assert demands(status.departed.demand) == (3, 0, 0, 8)
    plain = system.status()
    assert plain["departed"]["phases"]["prefill"]["misses"] == 8
    assert len(plain["read_latency"]["buckets"]) == lib.SMOE_BUCKETS
    with smoe_mp.attach(ring_name) as third:
        assert third.stats()["client"]["hits"] == 0
        assert third.stats()["hits"] == 3
    system.signal(signal.SIGTERM)
    assert system.wait() == 0
