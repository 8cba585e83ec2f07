"""Hit rates by ring size: stack distances against caches that are simulated one size at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from smoe_mp.bench import curve
from smoe_mp.bench.cli import app
from smoe_mp.distances import hit_rates, lru_distances, opt_distances
from smoe_mp.errors import VaultError
from smoe_mp.trace import DEMAND, TraceBuilder, read_trace, write_trace
from smoe_mp.trace_view import demanded


def simulate(keys: Sequence[int], size: int, *, knows_the_future: bool) -> list[bool]:
    """Whether each reference is a hit in a cache that evicts what was used longest ago, or what will be used
    latest; by looking through the whole trace each time."""
    cache: list[int] = []
    hits = []
    for now, key in enumerate(keys):
        hits.append(key in cache)
        if key in cache:
            cache.remove(key)
        elif len(cache) == size:
            rest = list(keys[now + 1 :])
            victim = cache[0]
            if knows_the_future:
                victim = max(cache, key=lambda k: rest.index(k) if k in rest else len(rest))
            cache.remove(victim)
        cache.append(key)
    return hits


traces = st.one_of(
    st.lists(st.integers(0, 11), max_size=70),
    st.integers(0, 2**32).map(lambda seed: zipf(seed, 60)),
)


def zipf(seed: int, n: int) -> list[int]:
    """Skewed, with cycles in between."""
    random = np.random.default_rng(seed)
    skewed = (random.zipf(1.4, n) % 16).tolist()
    return [*skewed, *list(range(int(random.integers(2, 9)))) * 3, *skewed[: n // 2]]


@settings(max_examples=150, deadline=None)
@given(traces)
def test_every_size_hits_as_a_simulated_cache(keys: list[int]) -> None:
    """Reference by reference for LRU.  Two caches by OPT may differ in what they evict of keys that are never
    used again, so their hits are counted."""
    lru, opt = lru_distances(keys), opt_distances(keys)
    for size in range(1, len(set(keys)) + 2):
        right = simulate(keys, size, knows_the_future=False)
        assert ((lru >= 0) & (lru < size)).tolist() == right
        assert ((opt >= 0) & (opt < size)).sum() == sum(simulate(keys, size, knows_the_future=True))


def test_no_cache_beats_opt_and_a_full_one_has_all() -> None:
    keys = zipf(3, 400)
    sizes = range(30)
    lru, opt = (hit_rates(f(keys), sizes) for f in (lru_distances, opt_distances))
    assert all(a <= b for a, b in zip(lru, opt, strict=True))
    assert lru[0] == opt[0] == 0
    assert opt == sorted(opt)
    assert lru[-1] == opt[-1] == 1 - len(set(keys)) / len(keys)
    assert hit_rates(lru_distances([]), [0, 1, 5]) == [0, 0, 0]


def cycles(tokens: int) -> TraceBuilder:
    """A prompt of three rows, and tokens that pick the same 2 of 5 experts in each of 3 layers."""
    b = TraceBuilder()
    for layer in range(3):
        for row in range(3):
            b.add(DEMAND, 0, layer, 0, experts=[row, row + 1])
    for _ in range(tokens):
        for layer in range(3):
            b.add(DEMAND, 0, layer, 0, experts=[0, 4])
    return b


def test_below_the_token_cycle_lru_finds_nothing(tmp_path: Path) -> None:
    write_trace(cycles(20).build(layers=3, experts=5), tmp_path / "a.trace")
    found = curve.run(lambda *_: None, tmp_path / "a.trace", slots=(5, 8, 16))
    assert (found.top_k, found.cycle, found.experts, found.references) == (2, 6, 15, 18 + 120)
    prompt_hits = 3 * 2  # of each layer, by the rows' overlap
    assert round(found.lru[4] * found.references) == prompt_hits
    assert found.lru[5] > 0.8
    assert found.opt[4] > 0.5
    assert found.sizes[6] == "40%, one token's cycle"
    assert found.sizes[5] == found.sizes[8] == ""
    assert 16 not in found.sizes
    assert [row["slots"] for row in found.plain()["table"]] == sorted(found.sizes)


def test_a_trace_without_demands_is_refused(tmp_path: Path) -> None:
    write_trace(TraceBuilder().build(layers=2, experts=2), tmp_path / "a.trace")
    with pytest.raises(VaultError, match=r"a\.trace: the trace has no demands"):
        curve.run(lambda *_: None, tmp_path / "a.trace")


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(cycles(5).build(layers=3, experts=5), path)
    done = CliRunner().invoke(app, ["curve", str(path), "--slots", "5", "--json"])
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert (plain["bench"], len(plain["lru"]), plain["cycle"]) == ("curve", 15, 6)
    drawn = io.StringIO()
    curve.run(lambda *_: None, path).draw(Console(file=drawn, width=80))
    assert "one token's cycle" in drawn.getvalue()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    write_trace(cycles(5).build(layers=3, experts=5), tmp_path / "a.trace")
    found = curve.run(lambda *_: None, tmp_path / "a.trace")
    found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gemma4-26b-a4b"])
def test_opt_of_the_shared_traces_is_as_their_readme_says(shared: Path, model: str) -> None:
    """LRU is held against it in test_trace.py."""
    readme = (shared / "traces/README.md").read_text()
    rows = [[c.strip() for c in x.split("|")[1:-1]] for x in readme.splitlines() if "|" in x]
    slots = [int(c) for c in next(row for row in rows if row[0] == "slots")[1:]]
    right = next(row for row in rows if row[0] == f"{model} OPT")[1:]
    keys, _ = demanded(read_trace(shared / f"traces/{model}.route.csv.gz"))
    rates = hit_rates(opt_distances(keys.tolist()), slots)
    assert [f"{rate:.3f}".removeprefix("0") for rate in rates] == right
