"""`bench replay`: a trace on a real ring, every hit as by exact LRU."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SHM, grid_source, ring_name, serve
from typer.testing import CliRunner

from smoe_mp.bench import replay
from smoe_mp.bench.cli import app
from smoe_mp.bench.decoder import Decoder, Request, Spec, Step
from smoe_mp.bench.lru import ExactLru
from smoe_mp.bench.replay import steps_of
from smoe_mp.errors import ConfigError, SmoeError, VaultError
from smoe_mp.trace import DEMAND, TraceBuilder, read_trace, write_trace

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")

TOP_K = 3


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    """A file in memory where that is to be had: what is looked at here is order, not reading."""
    path = SHM / f"{ring_name()}.vault" if SHM.is_dir() else tmp_path / "vault"
    yield path
    path.unlink(missing_ok=True)


def skewed(layers: int, experts: int, tokens: int, prompt: int = 0) -> list[Step]:
    """Tokens with skewed routers; before them a prompt of so many experts of each layer."""
    random = np.random.default_rng(layers * experts + tokens)
    weights = 1 / np.arange(1, experts + 1)
    weights /= weights.sum()

    def request(layer: int, n: int) -> Request:
        return Request(layer, sorted(random.choice(experts, n, replace=False, p=weights).tolist()))

    steps = [Step(True, [request(layer, prompt) for layer in range(layers)])] if prompt else []
    for _ in range(tokens):
        steps.append(Step(False, [request(layer, TOP_K) for layer in range(layers)]))
    return steps


def assert_exact(
    vault: Path, steps: list[Step], *, layers: int, experts: int, slots: int, **more: Any
) -> list[dict[str, Any]]:
    """Two passes on a real ring of several workers; each hit as the simulation has it."""
    fillers = -(-slots // layers)
    source = grid_source(vault, layers, experts + fillers)
    with serve(source, slots=slots, workers=3, top_k=TOP_K) as served, served.attach() as ring:
        spec = Spec(served.name, str(vault), 16384, 4, experts, fillers, 1, False, steps)
        decoder = Decoder(replace(spec, **more), ring)
        passes = []
        for _ in range(2):
            decoder.empty()
            assert not any(ring.resident(layer, e) for layer in range(layers) for e in range(experts))
            passes.append(decoder.replay(0))
        demanded = sum(len(r.experts) for step in steps for r in step.requests)
        for found in passes:
            assert found["fault"] == ""
            counted = [found["prompts"], found["tokens"]]
            assert sum(c["hits"] + c["misses"] for c in counted) == demanded
        assert passes[1]["checked"] == 2 * (demanded + layers * fillers)
        missed = sum(map(len, decoder._missed))
        assert missed == passes[1]["tokens"]["misses"]
        assert_reads_and_computes(decoder, steps)
        served.assert_quiet()
    return passes


def assert_reads_and_computes(decoder: Decoder, steps: list[Step]) -> None:
    requests = sum(len(step.requests) for step in steps if not step.prompt)
    assert len(decoder.compute(2)["request_ns"]) == requests
    assert [sum(turns) for turns in decoder._turns] == [len(places) for places in decoder._missed]
    assert len(decoder._turns) == requests


@pytest.mark.parametrize("slots", [6, 12, 15, 63, 65, 130])
def test_tokens_hit_as_exact_lru(vault: Path, slots: int) -> None:
    """Around the token cycle of 12, and at the groups' borders."""
    found = assert_exact(vault, skewed(4, 40, 60), layers=4, experts=40, slots=slots)
    assert [one["bulk"] for one in found] == [0, 0]
    assert (found[1]["tokens"]["hits"] > 0) == (slots >= 12)


@pytest.mark.parametrize(("slots", "bulk"), [(20, 4), (64, 4), (120, 0)])
def test_a_prompt_of_more_than_the_ring_keeps_is_cold(vault: Path, slots: int, bulk: int) -> None:
    found = assert_exact(vault, skewed(4, 40, 30, prompt=20), layers=4, experts=40, slots=slots)
    assert [one["bulk"] for one in found] == [bulk, bulk]


def test_tokens_by_as_ready(vault: Path) -> None:
    assert_exact(vault, skewed(4, 40, 40), layers=4, experts=40, slots=64, any_order=True)


@pytest.mark.parametrize("slots", [300, 700])
@pytest.mark.parametrize(
    "name", ["qwen3-30b-a3b.route.csv", "gemma4-26b-a4b.route.csv", "kimi-linear.route.jsonl"]
)
def test_a_stretch_of_a_real_trace(shared: Path, vault: Path, name: str, slots: int) -> None:
    trace = read_trace(shared / f"traces/{name}.gz")
    steps = replay.first_tokens(steps_of(trace), 12)
    assert_exact(vault, steps, layers=trace.layers, experts=trace.experts, slots=slots)


def test_a_hit_that_is_none_by_exact_lru_is_told(vault: Path) -> None:
    """The simulation is given a ring of other size than there is."""
    source = grid_source(vault, 2, 24)
    with serve(source, slots=8, top_k=TOP_K) as served, served.attach() as ring:
        steps = skewed(2, 16, 40)
        decoder = Decoder(Spec(served.name, str(vault), 16384, 4, 16, 8, 1, False, steps), ring)
        decoder._check._reference = ExactLru(9)
        assert "exact LRU has" in decoder.replay(0)["fault"]


# --- the command -----------------------------------------------------------------------------------------


def trace_file(folder: Path) -> Path:
    b = TraceBuilder()
    for step in skewed(4, 16, 6, prompt=8):
        for request in step.requests:
            b.add(DEMAND, 0, request.layer, 0, experts=request.experts)
    write_trace(b.build(layers=4, experts=16, top_k=TOP_K), folder / "a.trace")
    return folder / "a.trace"


def test_the_command(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.QUICK, "file_bytes", 2 << 20)  # so that some are folded
    words = ["replay", str(trace_file(disk)), "--quick", "--scratch", str(disk / "s"), "--json"]
    done = CliRunner().invoke(app, [*words, "--ring", "40"])
    assert done.exit_code == 0, (done.output, done.exception)
    plain = json.loads(done.stdout)
    assert (plain["settings"]["slots"], plain["settings"]["replayed_tokens"]) == (26, 4)
    assert any("folded onto the same bytes" in note for note in plain["notes"])
    assert any("as by exact LRU" in note for note in plain["notes"])
    sides = ["0 x", "1 x"]
    assert [r["name"] for r in plain["ratios"]] == [
        f"{side}: token / {bound}"
        for side in sides
        for bound in ("bound", "bound by layers", "bound by turns")
    ]
    figures = {f["name"]: f["rounds"] for f in plain["figures"]}
    for side in sides:
        assert all(0 < hits < 100 for hits in figures[f"{side}: hits"])
        assert min(figures[f"{side}: token"] + figures[f"{side}: reads"]) > 0
        assert [x > 0 for x in figures[f"{side}: computing"]] == 2 * [side != "0 x"]
    for side in plain["bytes"]:
        assert side["wanted"] % 65536 == 0
        assert side["device"] is None or side["device"] >= side["wanted"]
    assert [p.name for p in SHM.glob(f"smoe?bench-{os.getpid()}-*")] == []


def test_several_clients(disk: Path) -> None:
    settings = replace(
        replay.Settings(**replay.QUICK), clients=2, rounds=1, compute=(0.5,), file_bytes=1 << 20
    )
    report = replay.run(lambda *_: None, disk / "s", trace_file(disk), settings)
    assert any("were not held against exact LRU" in note for note in report.notes)
    assert {len(f.values) for f in report.figures} == {1}
    if importlib.util.find_spec("matplotlib"):
        replay.plot(report, disk / "a.png")
        assert (disk / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_client_that_fails_says_why() -> None:
    spec = Spec("nobody", "file", 4096, 1, 1, 1, 1, False, [])
    with pytest.raises(SmoeError, match=r"a client of the benchmark failed: .*nobody"), replay._client(spec):
        pass


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    b = TraceBuilder()
    for layer in (0, 1):
        b.add(DEMAND, 0, layer, 0, experts=[0, 1, 2])
    write_trace(b.build(layers=2, experts=4, top_k=2), tmp_path / "a.trace")
    with pytest.raises(VaultError, match="no tokens to replay, only 1 prompts"):
        replay.run(lambda *_: None, tmp_path, tmp_path / "a.trace", replay.Settings())
    done = CliRunner().invoke(app, ["replay", "x", "--expert-kib", "3"])
    assert isinstance(done.exception, ConfigError)


def test_a_disk_is_wanted(tmp_path: Path) -> None:
    folder = SHM / f"{ring_name()}.scratch"
    try:
        with pytest.raises(ConfigError, match="direct reads are refused here"):
            replay.run(
                lambda *_: None,
                folder,
                trace_file(tmp_path),
                replay.Settings(**{**replay.QUICK, "file_bytes": 1 << 20}),
            )
    finally:
        (folder / "bench-floats.bin").unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()
