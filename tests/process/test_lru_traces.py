"""Eviction is exact LRU: real routing traces and random ones through a real ring, against a simulation.
What a request that is more than the ring can keep has read goes first (field report 43)."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import SHM, Served, grid_source, ring_name, serve

import smoe_mp
from smoe_mp._native import lib
from smoe_mp.bench.lru import ExactLru
from smoe_mp.ring import BULK_SLOTS

Trace = list[tuple[int, int]]


def lru(trace: Trace, slots: int) -> list[bool]:
    """Whether each access is a hit in an exact LRU cache that is empty at the start."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = []
    for key in trace:
        hits.append(key in cache)
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > slots:
            cache.popitem(last=False)
    return hits


def csv_trace(path: Path) -> Trace:
    with gzip.open(path, "rt") as f:
        rows = [line.split(",") for line in f if not line.startswith("#")]
    layer, expert = rows[0].index("layer"), rows[0].index("expert")
    return [(int(row[layer]), int(row[expert])) for row in rows[1:]]


def jsonl_trace(path: Path, tokens: int) -> Trace:
    trace = []
    with gzip.open(path, "rt") as f:
        for line, _ in zip(f, range(tokens), strict=False):
            for layer, experts in enumerate(json.loads(line)["layers"]):
                trace += [(layer, e) for e in experts]
    return trace


def readme_rate(readme: Path, model: str, slots: int) -> str:
    """The LRU row of ../shared/traces/README.md."""
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in readme.read_text().splitlines() if "|" in line
    ]
    column = next(row for row in rows if row[0] == "slots").index(str(slots))
    return next(row for row in rows if row[0] == f"{model} LRU")[column]


def replay(served: Served, trace: Trace) -> list[bool]:
    """One expert at a time; whether each was a hit.  Every 16th expert's stamp is looked at."""
    hits = []
    n_experts = served.source.experts[-1].expert + 1
    with served.attach() as ring:
        for i, (layer, expert) in enumerate(trace):
            with ring.fetch(layer, (expert,)) as batch:
                hits.append(bool(batch.hits))
                if i % 16 == 0:
                    stamp = int.from_bytes(batch[0].raw[:8].tobytes(), "little")
                    assert stamp == layer * n_experts + expert
    served.assert_quiet()
    return hits


def assert_exact(served: Served, trace: Trace) -> list[bool]:
    got, right = replay(served, trace), lru(trace, served.segments.n_slots)
    first = next((i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b), None)
    assert first is None, f"access {first} of {len(trace)}: {trace[first]} hit is {got[first]}"
    counters = served.counters()
    assert counters["hits"] == sum(right)
    assert counters["misses"] == counters["reads"] == len(trace) - sum(right)
    assert counters["evictions"] == max(0, counters["misses"] - served.segments.n_slots)
    return got


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    """A file in memory where that is to be had: what is measured here is order, not reading."""
    path = SHM / f"{ring_name()}.vault"
    if not SHM.is_dir():
        path = tmp_path / "vault"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("slots", [512, 1024])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gemma4-26b-a4b"])
def test_a_real_trace_hits_as_its_readme_says(shared: Path, vault: Path, model: str, slots: int) -> None:
    trace = csv_trace(shared / f"traces/{model}.route.csv.gz")
    layers = max(layer for layer, _ in trace) + 1
    with serve(grid_source(vault, layers, 128), slots=slots) as served:
        hits = assert_exact(served, trace)
    rate = f"{sum(hits) / len(hits):.3f}".removeprefix("0")
    assert rate == readme_rate(shared / "traces/README.md", model, slots)


@pytest.mark.parametrize("slots", [512, 1024])
def test_a_trace_of_kimi_linear(shared: Path, vault: Path, slots: int) -> None:
    trace = jsonl_trace(shared / "traces/kimi-linear.route.jsonl.gz", tokens=120)
    with serve(grid_source(vault, 26, 256), slots=slots) as served:
        assert sum(assert_exact(served, trace)) > 0


def zipf_trace(rng: np.random.Generator, layers: int, experts: int, n: int) -> Trace:
    """Skewed as routers are; now and then a sweep over everything."""
    weights = 1 / np.arange(1, experts + 1)
    trace: Trace = []
    while len(trace) < n:
        if rng.random() < 0.01:
            trace += [(layer, e) for layer in range(layers) for e in range(experts)]
        layer = int(rng.integers(layers))
        trace.append((layer, int(rng.choice(experts, p=weights / weights.sum()))))
    return trace


@pytest.mark.parametrize("slots", [1, 2, 3, 63, 64, 65, 128, 200])
def test_random_traces_of_experts_of_several_sizes(vault: Path, slots: int) -> None:
    """Group borders (64 slots) included; the sizes leave odd remainders."""
    source = grid_source(vault, 4, 64, sizes=(16384, 5001, 33333, 8, 12288))
    with serve(source, slots=slots) as served:
        assert_exact(served, zipf_trace(np.random.default_rng(slots), 4, 64, 3000))


@pytest.mark.parametrize("slots", [5, 64, 130])
def test_the_victim_is_the_evictable_slot_with_the_smallest_tick(vault: Path, slots: int) -> None:
    """Invariant 9, with some slots held for a while: a held slot is never the victim, whatever its tick."""
    rng = np.random.default_rng(slots)
    with serve(grid_source(vault, 4, 64), slots=slots) as served, served.attach() as ring:
        ptr = ring._open().ptr
        held: list[smoe_mp.Batch] = []
        evictions = 0
        for layer, expert in zipf_trace(rng, 4, 64, 2000):
            while len(held) >= slots - 1 or (held and rng.random() < 0.3):
                held.pop(int(rng.integers(len(held)))).release()
            words = [lib.smoe_slot_word(ptr, s) for s in range(slots)]
            idle = [
                (lib.smoe_slot_tick(ptr, s), s)
                for s, w in enumerate(words)
                if w & 7 in (3, 4) and not w >> 32
            ]
            batch = ring.fetch(layer, [expert])
            if not batch.hits and not any(w & 7 == 0 for w in words):
                evictions += 1
                assert batch[0]._hold().slot == min(idle)[1]
            if rng.random() < 0.5:
                held.append(batch)
            else:
                batch.release()
        assert evictions > 100
        assert served.counters()["evictions"] == evictions
        for batch in held:
            batch.release()
        served.assert_quiet()


# --- requests that are more than the ring can keep ---------------------------------------------------------


def misses(ring: smoe_mp.Ring) -> int:
    return int(ring.stats()["misses"])


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("call", ["in_order", "as_ready"])
def test_a_long_prompt_leaves_the_hot_set(vault: Path, call: str, layers: int) -> None:
    """Heat 8 experts, request all 128 of a layer, or of each, with 32 slots, request the 8 again."""
    hot = [3, 17, 30, 44, 60, 77, 90, 111]
    with serve(grid_source(vault, layers, 128), slots=32) as served, served.attach() as ring:
        ring.fetch(0, hot).release()
        before = misses(ring)
        for layer in range(layers):
            got = [(x.expert, int.from_bytes(x.raw[:8].tobytes(), "little"))
                   for x in getattr(ring, call)(layer, range(128))]  # fmt: skip
            assert sorted(got) == [(e, layer * 128 + e) for e in range(128)]
        assert misses(ring) - before == layers * 128 - len(hot)
        with ring.fetch(0, hot) as batch:
            assert batch.hits == len(hot)
        assert served.counters()["evictions"] == misses(ring) - 32
        served.assert_quiet()


@pytest.mark.parametrize("slots", [2, 5, 64, 130, 200])
def test_prompts_between_tokens(vault: Path, slots: int) -> None:
    """Sweeps over some layers between single experts: every hit and every slot as in the reference."""
    rng = np.random.default_rng(slots)
    reference, window = ExactLru(slots), min(slots // 2, max(2, slots // 4), BULK_SLOTS)
    sweeps = 0
    with serve(grid_source(vault, 4, 64), slots=slots) as served, served.attach() as ring:
        for layer, expert in zipf_trace(rng, 4, 64, 1500):
            with ring.fetch(layer, [expert]) as batch:
                assert batch.hits == reference.access((layer, expert), cold=False)
                assert batch[0]._hold().slot == reference.slot[layer, expert]
            if rng.random() < 0.02:
                sweeps += 1
                wanted = np.flatnonzero(rng.random(64) < 0.9)
                before = ring.stats()["hits"]
                for _ in ring.in_order(layer, wanted):
                    pass
                hits = sum(reference.sweep([(layer, int(e)) for e in wanted], window))
                assert ring.stats()["hits"] - before == hits
        assert sweeps > 10
        counters = served.counters()
        assert counters["misses"] == counters["reads"] == counters["evictions"] + slots
        served.assert_quiet()


def test_a_request_that_the_ring_can_keep_is_kept(vault: Path) -> None:
    """8 of each of 4 layers fit into 32 slots; 9 do not, and take a quarter of them."""
    with serve(grid_source(vault, 4, 64), slots=32) as served, served.attach() as ring:
        for first, n, kept in ((0, 8, 32), (8, 9, 24)):
            for layer in range(4):
                assert len(list(ring.in_order(layer, range(first, first + n)))) == n
            assert sum(ring.resident(layer, e) for layer in range(4) for e in range(8)) == kept
        served.assert_quiet()


def test_what_one_token_wants_is_kept_whatever_the_ring(vault: Path) -> None:
    """The same call serves prompts and tokens: top-k experts are those of a token."""
    with serve(grid_source(vault, 4, 64), slots=8, top_k=4) as served, served.attach() as ring:
        for layer in range(4):
            list(ring.in_order(layer, range(4)))
        assert [ring.resident(layer, e) for layer in range(4) for e in range(4)] == [False] * 8 + [True] * 8
        served.assert_quiet()
