"""ring.py against real workers: every byte, ids, order, holds, views, waits, interrupts, threads."""

from __future__ import annotations

import ctypes
import gc
import operator
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import (
    LIMIT_S,
    PAGE,
    Client,
    Served,
    StampedSource,
    grid_source,
    serve,
    source_file,
    stamped_source,
    until,
)

import smoe_mp
from smoe_mp import _held, errors, segments
from smoe_mp._native import ffi, lib
from smoe_mp.ring import Batch, QuantizedTensor
from smoe_mp.segments import probe
from smoe_mp.sources.base import Expert, Extent, Tensor
from smoe_mp.sources.smoe import open_smoe


def parts_of(expert: smoe_mp.Expert) -> list[bytes]:
    return [p.tobytes() for p in expert.parts]


@pytest.fixture
def served(source: StampedSource) -> Iterator[Served]:
    """4 slots, 2 workers, 16 experts."""
    with serve(source, slots=4, workers=2) as s:
        yield s
        for worker in s.workers:
            worker.go_on()
        s.assert_quiet()


@pytest.fixture
def ring(served: Served) -> Iterator[smoe_mp.Ring]:
    with served.attach("test") as r:
        yield r


def assert_nothing_held(served: Served) -> None:
    census = served.census()
    assert (census["held"], census["reserved"]) == (0, 0), census


# --- every byte ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["q4", "q2"])
def test_every_expert_of_the_original_s_vault_equals_the_file(shared: Path, bits: str) -> None:
    path = shared / f"vaults/qwen3-tiny.{bits}.smoe"
    vault, data = open_smoe(path), path.read_bytes()
    expected = np.load(shared / f"vaults/qwen3-tiny.{bits}.expected.npz")
    seen = set()
    with serve(vault, slots=4, workers=2) as served, served.attach() as ring:
        for x in vault.experts:
            with ring.fetch(x.layer, [x.expert]) as batch:
                (extent,) = x.extents
                assert batch[0].raw.tobytes() == data[extent.offset : extent.offset + extent.length]
                for name in ("gate", "up", "down"):
                    tensor, key = batch[0][name], f"{x.layer}.{x.expert}.{name}"
                    assert isinstance(tensor, QuantizedTensor)
                    assert not tensor.codes.flags.writeable
                    assert not tensor.scales.flags.writeable
                    weights = batch[0].dequantize(name)
                    assert weights.dtype == np.float32
                    assert weights.flags.writeable
                    assert weights.shape == tensor.shape == expected[key].shape
                    assert weights.tobytes() == expected[key].tobytes(), key
                    seen.add(key)
    assert seen == set(expected.files)


@pytest.mark.parametrize("seed", range(3))
def test_every_made_up_expert_equals_its_files(tmp_path: Path, seed: int) -> None:
    source = stamped_source(tmp_path / "s", seed=seed, experts=12, files=1 + seed, lengths=(1, 40000))
    with serve(source, slots=5, workers=3) as served, served.attach() as ring:
        for i, x in enumerate(source.experts):
            with ring.fetch(x.layer, [x.expert]) as batch:
                assert parts_of(batch[0]) == source.expected(i)
                if len(x.extents) == 1:
                    assert batch[0].raw.tobytes() == source.expected(i)[0]
                else:
                    with pytest.raises(errors.RingError, match=f"{len(x.extents)} parts"):
                        _ = batch[0].raw
        served.assert_quiet()


def test_every_remainder_and_an_odd_end_of_file(tmp_path: Path) -> None:
    """Experts at offsets of all sorts of remainders; the last one ends with its file."""
    rng = np.random.default_rng(0)
    experts, layouts, blob = [], [], bytearray()
    for i, r in enumerate((0, 1, 15, 511, 512, 513, 2047, 4094, 4095, 7)):
        blob += rng.bytes((r - len(blob)) % PAGE)
        length = (1, 4095, 4097, 12289, 8191)[i % 5]
        experts.append(Expert(0, i, (Extent(0, len(blob), length),), i))
        layouts.append((Tensor("t", "U8", (length,), 0, 0, length),))
        blob += rng.bytes(length)
    path = tmp_path / "all"
    path.write_bytes(blob)
    source = StampedSource(path, [source_file(path)], experts, layouts)
    with serve(source, slots=2) as served, served.attach() as ring:
        for i in range(len(experts)):
            with ring.fetch(0, [i]) as batch:
                assert batch[0].raw.tobytes() == source.expected(i)[0]


def test_float_tensors_are_typed_views_and_moved_where_unaligned(tmp_path: Path) -> None:
    weights = np.arange(48, dtype="<f4").reshape(6, 8)
    halves = np.arange(5, dtype="<f2")
    brains = (weights.reshape(-1).view("<u4") >> 16).astype("<u2")
    blob = b"x" * 4099 + weights.tobytes() + b"y" * 3 + halves.tobytes() + brains.tobytes()
    path = tmp_path / "floats"
    path.write_bytes(blob)
    at = 4099 + weights.nbytes + 3
    extents = (
        Extent(0, 4099, weights.nbytes),
        Extent(0, at, halves.nbytes),
        Extent(0, at + halves.nbytes, brains.nbytes),
    )
    layout = (
        Tensor("w", "F32", (6, 8), 0, 0, weights.nbytes),
        Tensor("h", "F16", (5,), 1, 0, halves.nbytes),
        Tensor("b", "BF16", (48,), 2, 0, brains.nbytes),
    )
    source = StampedSource(path, [source_file(path)], [Expert(3, 5, extents, 0)], [layout])
    with serve(source, slots=1) as served, served.attach() as ring, ring.fetch(3, [5]) as batch:
        x = batch[0]
        w, h, b = x["w"], x["h"], x["b"]
        assert isinstance(w, np.ndarray)
        assert isinstance(h, np.ndarray)
        assert isinstance(b, np.ndarray)
        assert (w.dtype, w.shape) == (np.dtype("<f4"), (6, 8))
        assert np.array_equal(w, weights)
        assert w.__array_interface__["data"][0] % 16 == 0
        assert h.dtype == np.dtype("<f2")
        assert np.array_equal(h, halves)
        assert (b.dtype, b.tobytes()) == (np.dtype(ml_dtypes.bfloat16), brains.tobytes())
        assert x.dequantize("h").dtype == np.float32
        assert np.array_equal(x.dequantize("h"), halves.astype("<f4"))
        assert parts_of(x) == source.expected(0)
        assert x.tensors["h"].offset % 2 == 0
        assert np.array_equal(x.dequantize("b"), (brains.astype("<u4") << 16).view("<f4"))
        with pytest.raises(KeyError, match="w, h, b"):
            x["gate"]


# --- batches ---------------------------------------------------------------------------------------------


def test_a_batch_has_the_order_asked_for(ring: smoe_mp.Ring, source: StampedSource) -> None:
    for order in ([7, 0, 3], [0, 3, 7], [3, 7, 0, 1]):
        with ring.fetch(1, order) as batch:
            assert [x.expert for x in batch] == order
            assert {x.layer for x in batch} == {1}
            for x in batch:
                assert parts_of(x) == source.expected(source.index(1, x.expert))


def test_slices_and_negative_indices(ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [5, 2, 6, 1]) as batch:
        assert len(batch) == 4
        assert [x.expert for x in batch[1:3]] == [2, 6]
        assert [x.expert for x in batch[::-1]] == [1, 6, 2, 5]
        assert batch[-1].expert == batch[np.int64(3)].expert == 1
        assert batch[-4].expert == 5
        for outside in (4, -5):
            with pytest.raises(IndexError, match="batch of 4"):
                batch[outside]
        with pytest.raises(TypeError):
            batch["1"]


@pytest.mark.parametrize(
    "good",
    [[3, 1], (3, 1), np.array([3, 1]), np.array([3, 1], np.uint8), [np.int32(3), np.uint64(1)], iter([3, 1])],
)
def test_good_ids(ring: smoe_mp.Ring, good: Any) -> None:
    with ring.fetch(np.int16(1), good) as batch:
        assert [x.expert for x in batch] == [3, 1]


BAD_IDS = [
    -1,
    8,
    2**31 - 1,
    2**31,
    2**32 + 1,
    2**63,
    2**64,
    2**70,
    -(2**70),
    True,
    False,
    np.True_,
    1.0,
    1.5,
    "1",
    None,
]
BAD_IDS += [np.float32(1), np.int64(-1), np.uint64(2**64 - 1), b"1"]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_bad_ids(ring: smoe_mp.Ring, served: Served, bad: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: ring.fetch(0, [1, bad]),
        lambda: ring.fetch(bad, [1]),
        lambda: ring.acquire(0, [bad]),
        lambda: ring.claim_specific(0, bad),
        lambda: ring.claim_specific(bad, 0),
        lambda: ring.speculate(0, [1, bad]),
        lambda: ring.speculate(bad, []) if bad != 8 else ring.speculate(bad, [1]),
        lambda: ring.route(0, [1, bad], 2),
        lambda: list(ring.as_ready(0, [1, bad])),
        lambda: list(ring.as_ready(bad, [1])),
    ]
    if isinstance(bad, int) and bad >= 2:
        calls.pop(6)  # that many layers may be asked for nothing
    for call in calls:
        with pytest.raises(errors.IdError) as raised:
            call()
        assert ring.name in str(raised.value)
    assert_nothing_held(served)
    assert served.counters()["reads"] <= 1  # as_ready may have asked for the good one


@pytest.mark.parametrize(
    "bad", [np.array([True, False]), np.array([1.0]), np.array([[1, 2]]), "12", b"12", [[1]]]
)
def test_bad_id_arrays(ring: smoe_mp.Ring, bad: Any) -> None:
    with pytest.raises(errors.IdError):
        ring.fetch(0, bad)


def test_the_message_names_the_id_and_what_there_is(ring: smoe_mp.Ring) -> None:
    with pytest.raises(errors.IdError, match=r"no expert 8 in layer 1 .*layers below 2, experts below 8"):
        ring.fetch(1, [0, 8])
    with pytest.raises(errors.IdError, match=r"no expert 0 in layer 2"):
        ring.fetch(2, [0])


@pytest.mark.parametrize("twice", [[1, 1], [3, 2, 3], [0, 1, 2, 0]])
def test_an_expert_named_twice(ring: smoe_mp.Ring, served: Served, twice: list[int]) -> None:
    for call in (ring.fetch, ring.acquire, lambda *a: list(ring.as_ready(*a))):
        with pytest.raises(errors.IdError, match="named twice"):
            call(0, twice)
    assert_nothing_held(served)
    assert served.counters()["misses"] == 0


def test_what_a_batch_refers_to_is_let_go(ring: smoe_mp.Ring, served: Served) -> None:
    """Hits, errors, numbers of other kinds, and batches that are not released by a block."""
    ids, odd = [3, 1], np.arange(2)

    def use() -> None:
        with ring.fetch(0, ids), ring.acquire(0, odd) as other:
            other.wait()
        with ring.fetch(0, ids) as batch:
            views = [memoryview(expert.memory(0, 8)) for expert in batch]  # type: ignore[arg-type]
        assert all(v.readonly and v.nbytes == 8 for v in views)
        ring.fetch(0, ids).release()
        ring.fetch(0, ids)
        for bad in ([3, 3], [2**40], [True], None):
            with pytest.raises((errors.IdError, TypeError)):
                ring.fetch(0, bad)  # type: ignore[arg-type]

    def references() -> list[int]:
        gc.collect()
        return [sys.getrefcount(o) for o in (ring._handle, ring._facts, ids, odd)]

    use()
    before = references()
    for _ in range(50):
        use()
    assert references() == before
    assert_nothing_held(served)


def test_the_list_that_was_given_may_change(ring: smoe_mp.Ring) -> None:
    ids = [3, 1]
    with ring.fetch(0, ids) as batch:
        ids[:] = [0]
        assert [expert.expert for expert in batch] == [3, 1]


def test_a_batch_of_more_than_a_few(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s", experts=20)
    mine = [(i, x) for i, x in enumerate(source.experts) if x.layer == source.experts[0].layer]
    assert len(mine) == 20
    with serve(source, slots=40, workers=2) as served, served.attach() as ring:
        for _ in range(2):
            with ring.fetch(mine[0][1].layer, [x.expert for _, x in mine]) as batch:
                assert [parts_of(expert) for expert in batch] == [source.expected(i) for i, _ in mine]


def test_the_native_functions_check_what_they_are_given(ring: smoe_mp.Ring) -> None:
    for call in (_held.demand, _held.batch, _held.view, _held.install):
        with pytest.raises(TypeError, match=call.__name__):
            call(Batch)  # type: ignore[call-arg,arg-type,operator]
    with ring.fetch(0, [1]) as batch:
        for index, offset, nbytes in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1)):
            with pytest.raises(IndexError):
                _held.view(batch, index, offset, nbytes, False)
    with pytest.raises(ValueError, match="no ring"):
        _held.batch(Batch, 0, ring._handle, ring._facts, 0, [1])
    for kind in (_held.Held, _held.View):
        with pytest.raises(TypeError):
            kind()


def test_an_empty_list_gives_an_empty_batch(ring: smoe_mp.Ring, served: Served) -> None:
    for empty in ([], (), np.array([], np.int64), iter(())):
        with ring.fetch(0, empty) as batch:
            assert len(batch) == 0
            assert list(batch) == batch[:] == []
            assert batch.hits == 0
    assert len(ring.acquire(0, []).wait()) == 0
    assert list(ring.as_ready(0, [])) == []
    assert ring.speculate(0, []) == 0
    assert len(ring.route(0, [1, 2], 0)) == 0
    assert_nothing_held(served)
    assert served.counters()["reads"] == 0


@pytest.mark.parametrize("bad", [-1, -0.001, float("nan")])
def test_impossible_timeouts(ring: smoe_mp.Ring, served: Served, bad: float) -> None:
    for call in (ring.fetch, ring.acquire, ring.as_ready):
        with pytest.raises(ValueError, match="timeout"):
            call(0, [1], timeout=bad)
    assert_nothing_held(served)


@pytest.mark.parametrize("good", [float("inf"), 1e300, 2.0**60, 10**20])
def test_a_timeout_may_be_as_long_as_one_likes(ring: smoe_mp.Ring, good: float) -> None:
    with ring.fetch(0, [1], timeout=good) as batch:
        assert len(batch) == 1


def test_more_experts_than_slots(ring: smoe_mp.Ring, served: Served) -> None:
    with pytest.raises(errors.BatchTooLarge, match=r"5 experts at once.* 4 slots.*as_ready"):
        ring.fetch(0, range(5))
    with pytest.raises(errors.BatchTooLarge):
        ring.acquire(0, range(8))
    assert_nothing_held(served)
    assert served.counters()["misses"] == 0


# --- hits, claims, guesses -------------------------------------------------------------------------------


def test_hits_and_misses_are_told_apart(ring: smoe_mp.Ring, served: Served) -> None:
    with ring.fetch(0, [1, 2]) as batch:
        assert batch.hits == 0
    with ring.fetch(0, [2, 3, 1]) as batch:
        assert batch.hits == 2
        assert [x.hit for x in batch] == [True, False, True]
    counters = served.counters()
    assert (counters["hits"], counters["misses"], counters["reads"]) == (2, 3, 3)
    stats = ring.stats()
    assert stats["hit_rate"] == 2 / 5
    assert stats["client"]["misses"] == 3


def test_claim_specific_reads_nothing(ring: smoe_mp.Ring, served: Served, source: StampedSource) -> None:
    assert ring.claim_specific(0, 1) is None
    with ring.fetch(0, [1]):
        pass
    served.settle()
    before = served.counters()
    batch = ring.claim_specific(0, 1)
    assert batch is not None
    with batch:
        assert served.census()["held"] == 1
        assert parts_of(batch[0]) == source.expected(1)
        assert ring.claim_specific(0, 2) is None
    after = served.counters()
    assert after["claims"] == before["claims"] + 1
    for still in ("reads", "misses", "pops_demand", "wanted_bytes", "hits"):
        assert after[still] == before[still]
    assert served.queues_are_empty()
    assert_nothing_held(served)


def test_claim_specific_of_what_oneself_holds_in_a_full_ring(ring: smoe_mp.Ring) -> None:
    """It is resident, and its slot is paid for."""
    with ring.fetch(0, [0, 1, 2, 3]):
        again = ring.claim_specific(0, 2)
        assert again is not None
        again.release()


def test_a_claim_of_one_that_loads_is_nothing(ring: smoe_mp.Ring, served: Served) -> None:
    for worker in served.workers:
        worker.stop()
    with ring.acquire(0, [1]) as batch:
        assert ring.claim_specific(0, 1) is None
        assert not ring.resident(0, 1)
        for worker in served.workers:
            worker.go_on()
        batch.wait()
        assert ring.resident(0, 1)


def test_slot_words_say_what_the_core_says(ring: smoe_mp.Ring) -> None:
    """Held against the core's own census and its homes, over all slots."""
    with ring.fetch(1, range(4, 8)) as batch:
        ptr = ring._open().ptr
        words = [segments.slot_word(ptr, slot) for slot in range(ring.slots)]
        names = [segments.CENSUS[state] for state, _ in words]
        census = ring.stats()["census"]
        assert {name: names.count(name) for name in segments.CENSUS[:6]} == {
            name: census[name] for name in segments.CENSUS[:6]
        }
        held = {words[batch._holds[i].slot] for i in range(4)}
        indices = {lib.smoe_expert_index(ptr, 1, expert) for expert in range(4, 8)}
        assert held == {(segments.CENSUS.index("consumed"), index) for index in indices}
        assert all(words[lib.smoe_home(ptr, index) - 1][1] == index for index in indices)


def test_resident_checks_its_ids(ring: smoe_mp.Ring) -> None:
    assert not ring.resident(1, 7)
    for layer, expert in ((0, -1), (True, 0), (0, 2**31), (2, 0), (0, 8)):
        with pytest.raises(errors.IdError):
            ring.resident(layer, expert)


def test_route_demands_the_first_and_guesses_the_next(source: StampedSource) -> None:
    with serve(source, slots=12, workers=1, top_k=2, speculation_ranks=2) as served, served.attach() as ring:
        assert (ring.top_k, ring.speculation_ranks) == (2, 2)
        with ring.route(0, [5, 1, 4, 7, 3, 2], 2) as batch:
            assert [x.expert for x in batch] == [5, 1]
            assert served.census()["held"] == 2
        until(lambda: ring.resident(0, 4) and ring.resident(0, 7), "the guesses")
        assert not ring.resident(0, 3)
        assert not ring.resident(0, 2)
        counters = served.counters()
        assert (counters["misses"], counters["guesses"], counters["reads"]) == (2, 2, 4)
        with ring.fetch(0, [4, 7]):
            pass
        assert served.counters()["guess_hits"] == 2
        served.assert_quiet()


def test_route_without_ranks_guesses_nothing(ring: smoe_mp.Ring, served: Served) -> None:
    with ring.route(0, [5, 1, 4, 7], 2) as batch:
        assert [x.expert for x in batch] == [5, 1]
    assert served.counters()["guesses"] == 0
    with pytest.raises(errors.IdError, match="top_k is 3, but only 2"):
        ring.route(0, [1, 2], 3)


def test_route_with_a_bad_guess_holds_nothing(source: StampedSource) -> None:
    """Raised is raised: also while the traceback is still kept, as a notebook keeps it."""
    with serve(source, slots=12, speculation_ranks=2) as served, served.attach() as ring:
        with pytest.raises(errors.IdError, match="no expert 99"):
            ring.route(0, [5, 1, 99], 2)
        assert_nothing_held(served)


def test_guesses_never_exceed_a_quarter_of_the_slots(source: StampedSource) -> None:
    with serve(source, slots=12) as served, served.attach() as ring:
        served.workers[0].stop()
        assert ring.speculate(0, [0, 1]) == 2
        assert ring.speculate(0, [0, 2, 3, 4]) == 1  # the first is there already
        assert served.census()["guesses"] == 3
        assert served.counters()["guess_drops"] == 2
        served.workers[0].go_on()
        until(lambda: served.census()["ready"] == 3, "the guesses")
        served.assert_quiet()


def test_a_queued_guess_is_promoted(source: StampedSource) -> None:
    """A demand for it joins, goes ahead of the other guesses, and it is read once."""
    with serve(source, slots=12) as served, served.attach() as ring:
        served.workers[0].stop()
        assert ring.speculate(0, [0, 1, 2]) == 3
        with ring.acquire(0, [2]) as batch:
            assert served.census()["guesses"] == 2
            assert served.segments.queues() == {"demand": 1, "speculative": 3}
            served.workers[0].go_on()
            batch.wait(LIMIT_S)
            assert not batch[0].hit
            assert parts_of(batch[0]) == source.expected(2)
        until(lambda: served.counters()["reads"] == 3, "the other guesses")
        served.settle()
        counters = served.counters()
        assert (counters["promoted"], counters["misses"], counters["reads"]) == (1, 0, 3)
        assert counters["skips"] >= 1  # the promoted one's older entry
        assert counters["pops_demand"] >= 1
        ticks = ticks_of(ring, [(0, 2), (0, 0), (0, 1)])
        assert ticks == sorted(ticks)
        served.assert_quiet()


def ticks_of(ring: smoe_mp.Ring, pairs: list[tuple[int, int]]) -> list[int]:
    """The ticks of the experts' slots: when nothing touches them, the order in which they landed."""
    ptr = ring._open().ptr
    return [
        int(lib.smoe_slot_tick(ptr, lib.smoe_home(ptr, lib.smoe_expert_index(ptr, *pair)) - 1))
        for pair in pairs
    ]


@pytest.mark.parametrize("turn", range(3))
def test_demand_is_popped_before_speculation(source: StampedSource, turn: int) -> None:
    """Invariant 8: of guesses queued first and demands queued after them, the demands land first."""
    with serve(source, slots=16) as served, served.attach() as ring:
        served.workers[0].stop()
        guesses, demands = [0, 1, 2, 3], [4 + turn, 7, 6 if turn != 2 else 5]
        assert ring.speculate(0, guesses) == 4
        with ring.acquire(0, demands) as batch:
            assert served.segments.queues() == {"demand": 3, "speculative": 4}
            served.workers[0].go_on()
            batch.wait(LIMIT_S)
        until(lambda: served.counters()["reads"] == 7, "the guesses")
        ticks = ticks_of(ring, [(0, e) for e in demands + guesses])
        assert ticks == sorted(ticks)
        served.assert_quiet()


# --- views and holds -------------------------------------------------------------------------------------


def test_views_are_read_only_and_lie_in_the_data_segment(ring: smoe_mp.Ring, served: Served) -> None:
    ptr = ring._open().ptr
    start = int(ffi.cast("uintptr_t", lib.smoe_slot_data(ptr, 0)))
    with ring.fetch(0, [1, 2]) as batch:
        for x in batch:
            views = [*x.parts, x["p0"]]
            slot = int(ffi.cast("uintptr_t", lib.smoe_slot_data(ptr, x._hold().slot)))
            assert (slot - start) % ring.slot_bytes == 0
            for view in views:
                assert isinstance(view, np.ndarray)
                address = view.__array_interface__["data"][0]
                assert slot <= address
                assert address + view.nbytes <= slot + ring.slot_bytes
                assert not view.flags.writeable
                assert not view.flags.owndata
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 1
                with pytest.raises(ValueError, match="read-only"):
                    np.add(view, 1, out=view)
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view.flags.writeable = True
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view[1:].setflags(write=True)
        del views, view


def test_a_write_past_numpy_s_flag_meets_the_mmu(served: Served) -> None:
    """The data segment is mapped read-only: a faulty client dies, and nobody else's weights change."""
    with served.attach() as ring, ring.fetch(0, [0]) as batch:
        before = parts_of(batch[0])
        program = (
            "import sys, ctypes, smoe_mp\n"
            "ring = smoe_mp.attach(sys.argv[1])\n"
            "view = ring.fetch(0, [0])[0].parts[0]\n"
            "ctypes.memset(view.__array_interface__['data'][0], 0, 16)\n"
        )
        done = subprocess.run([sys.executable, "-c", program, served.name], timeout=LIMIT_S, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert parts_of(batch[0]) == before
    assert served.segments.recover()["clients"] == 1


def test_use_after_the_block(ring: smoe_mp.Ring, served: Served) -> None:
    with ring.fetch(0, [1]) as batch:
        expert = batch[0]
    for use in (lambda: expert.parts, lambda: expert["p0"], lambda: expert.tensors, lambda: expert.hit):
        with pytest.raises(errors.RingError, match="its block has ended"):
            use()
    batch.release()  # a second time does nothing
    assert_nothing_held(served)
    assert served.counters()["releases"] == 1


def test_use_before_the_wait(ring: smoe_mp.Ring, served: Served) -> None:
    for worker in served.workers:
        worker.stop()
    with ring.acquire(0, [1]) as batch:
        with pytest.raises(errors.RingError, match="wait for it first"):
            _ = batch[0].parts
        for worker in served.workers:
            worker.go_on()
        ring.wait(batch)
        assert batch[0].parts
        ring.release(batch)
    assert_nothing_held(served)


def test_a_batch_that_is_dropped_gives_up_its_holds(ring: smoe_mp.Ring, served: Served) -> None:
    batch: Any = ring.fetch(0, [1, 2])
    assert served.census()["held"] == 2
    del batch
    assert_nothing_held(served)


def pressure(ring: smoe_mp.Ring, source: StampedSource) -> None:
    """Fetch every expert, each alone, twice over."""
    for _ in range(2):
        for i, x in enumerate(source.experts):
            with ring.fetch(x.layer, [x.expert]) as batch:
                assert parts_of(batch[0]) == source.expected(i)


def test_a_slot_is_not_evicted_while_a_view_lives(
    ring: smoe_mp.Ring, served: Served, source: StampedSource
) -> None:
    """Field report 40."""
    with ring.fetch(0, [2]) as batch:
        views = batch[0].parts
        assert len(views) == 3
        slot = batch[0]._hold().slot
    word = lib.smoe_slot_word(ring._open().ptr, slot)
    del batch
    pressure(ring, source)
    assert lib.smoe_slot_word(ring._open().ptr, slot) == word
    assert [v.tobytes() for v in views] == source.expected(2)
    assert (served.census()["held"], served.census()["reserved"]) == (1, 1)
    part = views[1][5:50]  # a view of a view
    del views
    pressure(ring, source)
    assert part.tobytes() == source.expected(2)[1][5:50]
    assert served.census()["held"] == 1
    del part
    assert_nothing_held(served)
    pressure(ring, source)
    assert lib.smoe_slot_word(ring._open().ptr, slot) != word


def test_views_outlive_the_ring(served: Served, source: StampedSource) -> None:
    ring = served.attach()
    with ring.fetch(0, [1]) as batch:
        first = batch[0].parts[0]
    ring.close()
    del ring, batch
    gc.collect()
    assert served.census()["held"] == 1
    with served.attach() as other:
        pressure(other, source)
    assert first.tobytes() == source.expected(1)[0]
    assert [p["role"] for p in served.segments.participants()].count("client") == 1
    del first
    assert_nothing_held(served)
    assert [p["role"] for p in served.segments.participants()].count("client") == 0


def test_views_outlive_the_ring_s_removal(source: StampedSource) -> None:
    with serve(source, slots=4) as served:
        ring = served.attach()
        with ring.fetch(0, [1]) as batch:
            view = batch[0].parts[0]
    with pytest.raises(errors.RingReplaced, match="attach anew"):
        ring.fetch(0, [1])
    with pytest.raises(errors.RingReplaced):
        list(ring.as_ready(0, [1]))
    assert view.tobytes() == source.expected(1)[0]
    ring.close()


def test_a_closed_ring(served: Served) -> None:
    ring = served.attach()
    batch = ring.fetch(0, [1])
    loading = ring.acquire(0, [2])
    ring.close()
    ring.close()
    for use in (
        lambda: ring.fetch(0, [1]),
        lambda: ring.acquire(0, [1]),
        lambda: ring.claim_specific(0, 1),
        lambda: ring.speculate(0, [1]),
        lambda: ring.route(0, [1], 1),
        lambda: ring.as_ready(0, [1]),
        lambda: ring.resident(0, 1),
        lambda: ring.wait(loading),
        lambda: ring.fetch(0, []),
        ring.stats,
    ):
        with pytest.raises(errors.RingClosed, match=f"{served.name}: this handle was closed"):
            use()
    assert "closed" in repr(ring)
    batch.release()
    loading.release()
    assert_nothing_held(served)


def test_nested_holds_of_one_expert(ring: smoe_mp.Ring, served: Served, source: StampedSource) -> None:
    with ring.fetch(0, [1]) as a:
        with ring.fetch(0, [1, 2]) as b:
            assert (served.census()["held"], served.census()["reserved"]) == (2, 2)
            assert parts_of(b[0]) == source.expected(1)
        assert (served.census()["held"], served.census()["reserved"]) == (1, 1)
        assert parts_of(a[0]) == source.expected(1)
    assert_nothing_held(served)


# --- as_ready --------------------------------------------------------------------------------------------


def test_as_ready_gives_each_once_in_waves_larger_than_the_ring(
    ring: smoe_mp.Ring, served: Served, source: StampedSource
) -> None:
    for ids in (list(range(8)), [3], [7, 1, 4], list(range(8))[::-1]):
        seen = []
        for x in ring.as_ready(1, ids):
            assert parts_of(x) == source.expected(source.index(1, x.expert))
            assert served.census()["held"] <= 2
            seen.append(x.expert)
        assert sorted(seen) == sorted(ids)
        assert_nothing_held(served)


def test_as_ready_on_a_ring_of_one_slot(source: StampedSource) -> None:
    with serve(source, slots=1) as served, served.attach() as ring:
        assert sorted(x.expert for x in ring.as_ready(0, range(8))) == list(range(8))
        served.assert_quiet()


def test_as_ready_ends_early(ring: smoe_mp.Ring, served: Served) -> None:
    for _ in ring.as_ready(0, range(8)):
        break
    gc.collect()
    assert_nothing_held(served)
    started = ring.as_ready(0, range(8))
    next(started)
    assert served.census()["held"] > 0
    started.close()  # type: ignore[attr-defined]
    assert_nothing_held(served)
    never = ring.as_ready(0, range(8))
    del never
    assert_nothing_held(served)


def test_as_ready_with_an_exception_in_the_loop(ring: smoe_mp.Ring, served: Served) -> None:
    def loop_closing() -> None:
        with closing(ring.as_ready(0, range(8))) as experts:
            for _ in experts:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop_closing()
    assert_nothing_held(served)

    def loop() -> None:
        for _ in ring.as_ready(0, range(8)):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    gc.collect()
    assert_nothing_held(served)


def test_a_view_kept_from_as_ready_stays_right(
    ring: smoe_mp.Ring, served: Served, source: StampedSource
) -> None:
    kept = {}
    for x in ring.as_ready(0, range(8)):
        if x.expert < 2:
            kept[x.expert] = x.parts
    for expert, views in kept.items():
        assert [v.tobytes() for v in views] == source.expected(expert)
    assert served.census()["held"] == 2
    kept.clear()
    del views, x
    assert_nothing_held(served)


def test_two_as_ready_at_once_do_not_wait_for_each_other(served: Served, source: StampedSource) -> None:
    """Each holds nothing while it waits for room."""
    ids = list(range(8))
    with Client(served.name) as a, Client(served.name) as b:
        for _ in range(20):
            a.tell("as_ready", layer=0, experts=ids)
            b.tell("as_ready", layer=1, experts=ids[::-1])
            assert [e for e, _ in a.answer()] == [e for e, _ in b.answer()] == ids
    until(lambda: served.segments.recover()["clients"] == 0)


# --- waiting for slots -------------------------------------------------------------------------------------


def test_busy_names_the_holders_and_leaves_nothing(served: Served) -> None:
    with served.attach() as a, served.attach() as b, served.attach() as c:
        with a.fetch(0, [0, 1, 2]), b.fetch(1, [0]):
            for timeout in (0, 0.05):
                with pytest.raises(errors.Busy, match=r"no 1 slots .*\(0 free\).*clients 0, 1:") as raised:
                    c.fetch(0, [5], timeout=timeout)
            assert isinstance(raised.value, TimeoutError)
            with pytest.raises(errors.Busy):
                b.acquire(0, [5, 6], timeout=0)
            with pytest.raises(errors.Busy):
                list(c.as_ready(0, [5, 6], timeout=0))
            assert served.census()["reserved"] == 4
            assert {
                p["id"]: p["reserved"] for p in served.segments.participants() if p["role"] == "client"
            } == {
                0: 3,
                1: 1,
                2: 0,
            }
        with c.fetch(0, [5]):
            pass
    assert_nothing_held(served)


def test_a_waiter_gets_the_slots_that_another_releases(served: Served, source: StampedSource) -> None:
    with served.attach() as a, served.attach() as b:
        got: list[list[bytes]] = []
        batch = a.fetch(0, [0, 1, 2, 3])

        def fetch() -> None:
            with b.fetch(1, [4], timeout=LIMIT_S) as mine:
                got.append(parts_of(mine[0]))

        thread = threading.Thread(target=fetch)
        thread.start()
        until(lambda: served.counters()["busy_waits"] == 1, "the wait for a slot")
        batch.release()
        thread.join(LIMIT_S)
        assert got == [source.expected(source.index(1, 4))]
        del batch


def test_a_client_that_is_killed_frees_what_it_held(served: Served, source: StampedSource) -> None:
    """Field report 42: A holds every slot; B gets "busy" in time; A is killed; B goes on."""
    with Client(served.name) as a, served.attach() as b:
        assert a.do("fetch", layer=0, experts=[0, 1, 2, 3])
        with pytest.raises(errors.Busy, match=f"held by client {a.id}:"):
            b.fetch(1, [4, 5], timeout=1)
        got: list[list[bytes]] = []

        def fetch() -> None:
            with b.fetch(1, [4, 5], timeout=LIMIT_S) as batch:
                got.extend(parts_of(x) for x in batch)

        thread = threading.Thread(target=fetch)
        waits = served.counters()["busy_waits"]
        thread.start()
        until(lambda: served.counters()["busy_waits"] == waits + 1, "the wait for a slot")
        a.kill()
        assert served.segments.recover()["clients"] == 1
        thread.join(LIMIT_S)
        assert got == [source.expected(source.index(1, e)) for e in (4, 5)]
        assert served.segments.recover()["clients"] == 0
    assert_nothing_held(served)


def test_the_next_client_of_an_id_cleans_up_after_the_dead_one(served: Served) -> None:
    with Client(served.name) as a:
        a.do("fetch", layer=0, experts=[0, 1, 2, 3])
        a.kill()
        with served.attach() as b:
            assert b.client_id == a.id
            with b.fetch(0, [5], timeout=LIMIT_S):
                pass
    assert_nothing_held(served)


def test_32_clients_and_no_more(served: Served) -> None:
    with ExitStack() as stack:
        ids = [stack.enter_context(served.attach()).client_id for _ in range(32)]
        assert ids == list(range(32))
        with pytest.raises(errors.SegmentError, match="32 clients"):
            served.attach()
    with served.attach() as ring, ring.fetch(0, [0]):
        pass


def test_one_cold_expert_asked_for_by_16_clients_is_read_once(source: StampedSource) -> None:
    """Field report 41, made certain: all ask before the worker looks."""
    with serve(source, slots=16) as served, ExitStack() as stack:
        served.workers[0].stop()
        rings = [stack.enter_context(served.attach()) for _ in range(16)]
        batches = [ring.acquire(1, [3]) for ring in rings]
        served.workers[0].go_on()
        for batch in batches:
            batch.wait(LIMIT_S)
            assert parts_of(batch[0]) == source.expected(source.index(1, 3))
            batch.release()
        counters = served.counters()
        assert (counters["misses"], counters["joins"], counters["reads"]) == (1, 15, 1)
        served.assert_quiet()


def test_16_processes_ask_for_one_cold_expert(source: StampedSource) -> None:
    """Field report 41: as it happens."""
    with serve(source, slots=16, workers=4) as served, ExitStack() as stack:
        clients = [stack.enter_context(Client(served.name)) for _ in range(16)]
        for n, x in enumerate(source.experts[:8]):
            for client in clients:
                client.tell("take_and_give_back", layer=x.layer, experts=[x.expert])
            answers = [client.answer() for client in clients]
            assert all(a == answers[0] for a in answers)
            assert served.counters()["reads"] == n + 1
        counters = served.counters()
        assert counters["misses"] == 8
        assert counters["hits"] + counters["joins"] == 8 * 15
        served.assert_quiet()


def test_a_read_that_does_not_come_is_a_timeout(served: Served, ring: smoe_mp.Ring) -> None:
    for worker in served.workers:
        worker.stop()
    with pytest.raises(errors.ReadTimeout, match="expert 1 of layer 0 is queued"):
        ring.fetch(0, [1, 2], timeout=0.05)
    assert_nothing_held(served)
    with pytest.raises(errors.ReadTimeout):
        list(ring.as_ready(0, [3], timeout=0.05))
    assert_nothing_held(served)
    for worker in served.workers:
        worker.go_on()
    with ring.fetch(0, [1, 2], timeout=LIMIT_S) as batch:
        assert len(batch) == 2


def test_a_time_limit_of_0_is_a_poll(served: Served, ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [1]):
        pass
    with ring.fetch(0, [1], timeout=0) as batch:
        assert batch.hits == 1
    for worker in served.workers:
        worker.stop()
    with pytest.raises(errors.ReadTimeout):
        ring.fetch(0, [1, 2], timeout=0)
    assert_nothing_held(served)


def test_a_timeout_for_want_of_a_slot_names_the_expert(source: StampedSource) -> None:
    """The only slot is being read for somebody who has given up: there is a reservation, and no slot."""
    with serve(source, slots=1) as served, served.attach() as ring:
        path = Path(f"/dev/shm/smoe.{served.name}")
        with path.open("r+b") as control:
            control.seek(OFF_WORDS)
            at = int.from_bytes(control.read(8), "little")
            control.seek(at)
            control.write((2 | 126 << 4 | 3 << 11).to_bytes(8, "little"))  # READING, by worker 126, expert 3
            control.flush()
            with pytest.raises(errors.ReadTimeout, match="expert 5 of layer 1 "):
                ring.fetch(1, [5], timeout=0.05)
            assert_nothing_held(served)
            control.seek(at)
            control.write(bytes(8))


OFF_WORDS = 296  # where the header says where the slot words are


def test_the_ring_s_own_deadline_is_the_default(source: StampedSource) -> None:
    with serve(source, slots=4, read_deadline_ms=150) as served, served.attach() as ring:
        served.workers[0].stop()
        with pytest.raises(errors.ReadTimeout):
            ring.fetch(0, [1])
        with ring.acquire(0, [2]) as batch, pytest.raises(errors.ReadTimeout):
            batch.wait()
        assert_nothing_held(served)


def test_a_failed_read_is_told_to_every_waiter(source: StampedSource) -> None:
    """Field report 41: and the next demand, after the fault is gone, is served."""
    with serve(source, slots=4) as served, served.attach() as a, served.attach() as b:
        file = source.files[0].path
        index = next(i for i, x in enumerate(source.experts) if x.extents[0].file == 0)
        x = source.experts[index]
        os.utime(file, ns=(1, 1))  # no longer the file that the ring was made for
        served.workers[0].stop()
        batches = [r.acquire(x.layer, [x.expert]) for r in (a, b)]
        served.workers[0].go_on()
        for batch in batches:
            with pytest.raises(errors.ExpertReadError, match="replaced or changed") as raised:
                batch.wait(LIMIT_S)
            assert (raised.value.layer, raised.value.expert) == (x.layer, x.expert)
            assert raised.value.path == str(file)
        assert_nothing_held(served)
        with pytest.raises(errors.ExpertReadError):
            a.fetch(x.layer, [x.expert])
        os.utime(file, ns=(source.files[0].mtime_ns, source.files[0].mtime_ns))
        with a.fetch(x.layer, [x.expert]) as batch:
            assert parts_of(batch[0]) == source.expected(index)
        del batches, batch
        served.assert_quiet()


def test_a_ring_that_stops_takes_no_new_demand(source: StampedSource) -> None:
    with serve(source, slots=4) as served, served.attach() as ring:
        batch = ring.fetch(0, [1])
        served.segments.set_state("stopping")
        for call in (
            lambda: ring.fetch(0, [1]),
            lambda: ring.speculate(0, [1]),
            lambda: list(ring.as_ready(0, [1])),
        ):
            with pytest.raises(errors.RingStopping):
                call()
        assert parts_of(batch[0]) == source.expected(1)
        batch.release()
        assert_nothing_held(served)


# --- interrupts and threads ---------------------------------------------------------------------------------


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """One SIGINT for this thread, once the condition holds.  It must end what goes on, not the time limit."""
    main, over, lost = threading.get_ident(), threading.Event(), []

    def send() -> None:
        until(condition, "the state to be interrupted in")
        signal.pthread_kill(main, signal.SIGINT)
        if not over.wait(LIMIT_S / 4):
            lost.append("the signal was not heeded while the call waited")

    thread = threading.Thread(target=send)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT_S)
        signal.signal(signal.SIGINT, old)
    assert lost == []


def queued(served: Served, n: int) -> Callable[[], bool]:
    return lambda: served.census()["queued"] == n


WAITS: dict[str, Callable[[smoe_mp.Ring], object]] = {
    "fetch": lambda r: r.fetch(0, [1, 2], timeout=LIMIT_S),
    "acquire, wait": lambda r: r.acquire(0, [1, 2]).wait(LIMIT_S),
    "route": lambda r: r.route(0, [1, 2], 2, timeout=LIMIT_S),
    "as_ready": lambda r: list(r.as_ready(0, [1, 2], timeout=LIMIT_S)),
}


@pytest.mark.parametrize("how", WAITS)
def test_an_interrupt_in_a_wait_leaves_no_hold(served: Served, ring: smoe_mp.Ring, how: str) -> None:
    """At the moment that it is raised: a notebook keeps the traceback, and with it all that it names."""
    for worker in served.workers:
        worker.stop()
    with interrupted_when(queued(served, 2)), pytest.raises(KeyboardInterrupt) as raised:
        WAITS[how](ring)
    assert served.counters()["timeouts"] == 0
    assert_nothing_held(served)
    del raised
    for worker in served.workers:
        worker.go_on()
    with ring.fetch(0, [1, 2], timeout=LIMIT_S) as batch:
        assert len(batch) == 2


@pytest.mark.parametrize("how", WAITS)
def test_an_interrupt_while_waiting_for_slots(served: Served, how: str) -> None:
    with served.attach() as a, served.attach() as b:
        with a.fetch(1, [0, 1, 2, 3]):
            wait = {**WAITS, "acquire, wait": lambda r: r.acquire(0, [1, 2], LIMIT_S)}[how]
            waiting = interrupted_when(lambda: served.counters()["busy_waits"] == 1)
            with waiting, pytest.raises(KeyboardInterrupt):
                wait(b)
            assert served.census()["reserved"] == 4
        assert_nothing_held(served)


def test_an_interrupt_that_comes_before_the_sleep_is_not_lost(served: Served) -> None:
    """A signal that arrives while the wait still spins finds nobody asleep; it must be seen all the same."""
    for worker in served.workers:
        worker.stop()
    with (
        served.attach(spin_us=300_000) as ring,
        interrupted_when(queued(served, 1)),
        pytest.raises(KeyboardInterrupt),
    ):
        ring.fetch(0, [1], timeout=LIMIT_S)
    assert served.counters()["timeouts"] == 0  # not raised only when the time was over
    assert_nothing_held(served)


@pytest.mark.parametrize("how", ["fetch", "reserve", "as_ready"])
def test_signals_do_not_prolong_a_wait(served: Served, how: str) -> None:
    """A handler that returns, run every 10 ms (a profiler's, say): the time limit is the caller's still."""
    calls = 0

    def tick(*_: object) -> None:
        nonlocal calls
        calls += 1
        assert calls < 1000, "10 s of ticks have not ended a wait of 0.3 s"

    for worker in served.workers:
        worker.stop()
    with ExitStack() as stack:
        ring = stack.enter_context(served.attach())
        wanted: type[errors.RingError] = errors.ReadTimeout
        if how == "reserve":
            other = stack.enter_context(served.attach())
            stack.enter_context(other.acquire(1, [0, 1, 2, 3]))
            wanted = errors.Busy
        old = signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            ask = (lambda *a: list(ring.as_ready(*a))) if how == "as_ready" else ring.fetch
            while calls <= 5:  # once, as a rule; a process that is not run meanwhile hears of one tick only
                with pytest.raises(wanted):
                    ask(0, [7], 0.3)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
    for worker in served.workers:
        worker.go_on()


def test_several_threads_on_one_handle(source: StampedSource) -> None:
    """Their nested holds are counted apart: none's last release clears another's bit."""
    with serve(source, slots=6, workers=3) as served, served.attach() as ring:
        faults: list[BaseException] = []
        expected = [source.expected(i) for i in range(len(source.experts))]

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for turn in range(150):
                    layer = int(rng.integers(2))
                    ids = rng.choice(8, size=int(rng.integers(1, 3)), replace=False)
                    if turn % 3 == 0:
                        for x in ring.as_ready(layer, ids):
                            assert parts_of(x) == expected[layer * 8 + x.expert]
                        continue
                    with ring.fetch(layer, ids) as batch:
                        for x in batch:
                            assert parts_of(x) == expected[layer * 8 + x.expert]
            except BaseException as e:
                faults.append(e)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LIMIT_S)
            assert not t.is_alive()
        assert faults == []
        served.assert_quiet()


# --- a hit costs nothing ----------------------------------------------------------------------------------

HITS = """
import os, sys, smoe_mp
ring = smoe_mp.attach(sys.argv[1])
def run(n):
    for _ in range(n):
        with ring.fetch(0, [2, 1]) as batch:
            assert batch.hits == 2
            batch[0].parts[0]
        ring.claim_specific(0, 1).release()
with ring.fetch(0, [2, 1]):
    pass
run(1000)
os.access("/begin", 0)
run(1000)
os.access("/end", 0)
"""


def test_a_hit_makes_no_system_call_and_reads_nothing(served: Served, tmp_path: Path) -> None:
    """Invariant 6."""
    strace = shutil.which("strace")
    if not strace:
        pytest.skip("strace is not installed")
    log = tmp_path / "calls"
    done = subprocess.run(
        [strace, "-f", "-o", str(log), sys.executable, "-c", HITS, served.name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "PTRACE" in done.stderr or "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if '"/begin"' in line)
    end = next(i for i, line in enumerate(lines) if '"/end"' in line)
    assert lines[begin + 1 : end] == []
    counters = served.counters()
    assert counters["hits"] >= 4000
    assert counters["claims"] == 2000
    assert counters["reads"] == 2
    assert counters["waits"] == 1


def test_hits_read_no_byte(ring: smoe_mp.Ring, served: Served) -> None:
    with ring.fetch(0, [0, 1, 2, 3]):
        pass
    served.settle()
    before = served.counters()
    for _ in range(100):
        with ring.fetch(0, [3, 1, 0, 2]) as batch:
            assert batch.hits == 4
    after = served.counters()
    for still in ("wanted_bytes", "device_bytes", "reads", "pops_demand", "misses", "waits"):
        assert after[still] == before[still]
    assert after["hits"] == before["hits"] + 400


def test_what_was_wanted_and_what_was_read_are_counted(
    ring: smoe_mp.Ring, served: Served, source: StampedSource
) -> None:
    for x in source.experts:
        with ring.fetch(x.layer, [x.expert]):
            pass
    wanted = sum(e.length for x in source.experts for e in x.extents)
    counters = served.counters()
    assert counters["wanted_bytes"] == wanted
    assert wanted < counters["device_bytes"] < wanted + 16 * 3 * 2 * PAGE
    assert counters["reads"] == 16
    assert counters["evictions"] == 12


# --- the page cache ---------------------------------------------------------------------------------------


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache (mincore)."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    page = os.sysconf("SC_PAGE_SIZE")
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, 1, 1, fd, 0)  # PROT_READ, MAP_SHARED
        assert address != ctypes.c_void_p(-1).value
        there = (ctypes.c_ubyte * -(-size // page))()
        rc = libc.mincore(address, size, there)
        libc.munmap(address, size)
        assert rc == 0, os.strerror(ctypes.get_errno())
    finally:
        os.close(fd)
    return sum(b & 1 for b in there)


def drop_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_the_page_cache_stays_empty_in_direct_mode(tmp_path: Path) -> None:
    """Invariant 11's neighbour, number 10: streaming leaves the page cache as it found it."""
    source = stamped_source(tmp_path / "source")
    paths = [f.path for f in source.files]
    for path in paths:
        path.read_bytes()
    assert all(cached_pages(p) > 0 for p in paths)  # so the measure works
    how = probe(source.files[0].path)
    if how.mode != "direct":
        pytest.skip(f"reads of {tmp_path} are not direct: {how.reason}")
    expected = [source.expected(i) for i in range(16)]
    for p in paths:
        drop_cache(p)
    assert [cached_pages(p) for p in paths] == [0, 0, 0]
    with serve(source, slots=4, workers=2) as served, served.attach() as ring:
        for i, x in enumerate(source.experts):
            with ring.fetch(x.layer, [x.expert]) as batch:
                assert parts_of(batch[0]) == expected[i]
        assert {f["mode"] for f in served.segments.files()} == {"direct"}
        assert served.counters()["reads"] == 16
        assert served.counters()["fallbacks"] == 0
    assert [cached_pages(p) for p in paths] == [0, 0, 0]


def test_a_vault_in_memory_is_said_to_be_so(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"smoe-test-{os.getpid()}.bin"
    try:
        source = grid_source(path, 1, 4)
        with serve(source, slots=2) as served, served.attach() as ring:
            with ring.fetch(0, [3]) as batch:
                assert batch[0].raw[:8].tobytes() == (3).to_bytes(8, "little")
            assert [f["mode"] for f in served.segments.files()] == ["memory"]
    finally:
        path.unlink(missing_ok=True)


# --- what a handle says of itself ------------------------------------------------------------------------


def test_a_ring_tells_its_facts(ring: smoe_mp.Ring, served: Served) -> None:
    assert ring.name == served.name
    assert (ring.slots, ring.experts, ring.client_id) == (4, 16, 0)
    assert ring.slot_bytes == served.segments.slot_bytes
    assert served.name in repr(ring)
    (me,) = (p for p in served.segments.participants() if p["role"] == "client")
    assert (me["label"], me["pid"], me["alive"]) == ("test", os.getpid(), True)


@pytest.mark.parametrize("label", ["", "x" * 31, "x" * 100, "ä" * 40, "a\0b"])
def test_labels_are_cut_to_31_bytes(served: Served, label: str) -> None:
    with served.attach(label):
        (me,) = (p for p in served.segments.participants() if p["role"] == "client")
        right = label.partition("\0")[0].encode()[:31].decode(errors="ignore")
        assert me["label"].rstrip("\ufffd") == right


def test_a_whole_number_of_one_s_own_type_is_an_id(ring: smoe_mp.Ring) -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    with ring.fetch(0, [Three()]) as batch:  # type: ignore[list-item]
        assert operator.index(batch[0].expert) == 3
