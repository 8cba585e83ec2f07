"""The numpy engine on a real ring: what it computes is, bit for bit, what it computes with all experts in
memory; and what is learned of popularity in one run serves the next."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from systems import System, Up, wait_prewarmed
from systems import smoe_mp as run

import smoe_mp
from smoe_mp import models
from smoe_mp.engine import Cache, Config, Engine, Experts, ResidentExperts

PROMPT = b'def read_lines(path):\n    """'
TOKENS = 12


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the model: a system writes beside its vault."""
    return Path(shutil.copytree(models.TINY, tmp_path / "tiny"))


def written(experts: Experts, count: int, temperature: float = 0.0) -> tuple[bytes, bytes]:
    """The text and the bits of all logits."""
    tokens = list(Engine.open(models.TINY, experts).generate(PROMPT, count, temperature, seed=3))
    return bytes(t.byte for t in tokens), np.stack([t.logits for t in tokens]).tobytes()


@pytest.mark.parametrize("slots", [5, 48, 256])
def test_streamed_and_resident_are_the_same_bits(up: Up, ring_name: str, tiny: Path, slots: int) -> None:
    """5 slots: less than the experts of one step of the prompt, so that these come in waves."""
    up(vault=tiny / "tiny.smoe", slots=slots, workers=4, more="speculation.ranks = 4\n")
    with smoe_mp.attach(ring_name) as ring:
        streamed = written(ring, TOKENS, temperature=0.7)
        stats = ring.stats()
    assert streamed == written(ResidentExperts(tiny / "tiny.smoe"), TOKENS, temperature=0.7)
    assert len(streamed[0]) == TOKENS
    assert stats["misses"] > 0
    assert slots < 256 or stats["hits"] > 0
    phases, config = stats["client"]["phases"], Config.read(tiny / "config.json")
    assert list(phases) == ["prefill", "decode"]
    of_a_token = config.num_hidden_layers * config.num_experts_per_tok
    assert phases["decode"]["demanded"] == (TOKENS - 1) * of_a_token
    assert phases["prefill"]["demanded"] > of_a_token


def first_token(system: System, tiny: Path) -> dict[str, int]:
    """What the first token of a document costs: the counters that it changed."""
    with smoe_mp.attach(system.name) as ring:
        engine, before = Engine.open(tiny, ring), ring.stats()
        with ring.busy():
            engine.forward([0], Cache(engine.config))
        after = ring.stats()
    return {key: after[key] - before[key] for key in ("hits", "joins", "promoted", "misses", "guess_hits")}


def test_the_popularity_of_one_run_spares_the_next_ones_first_token_reads(
    up: Up, ring_name: str, tiny: Path
) -> None:
    """Both systems have loaded as many experts before the first token; only which differs."""
    prewarmed = 256 - 128

    def start() -> System:
        system = up(vault=tiny / "tiny.smoe", slots=256, workers=4, more="prewarm.trickle_ms = 0\n")
        status = wait_prewarmed(system)
        assert status.prewarm.done == prewarmed
        assert status.counters["guesses"] == prewarmed
        return system

    first = first_token(start(), tiny)
    assert first["misses"] == 6 * 4  # of 8 layers the table's first two were there
    with smoe_mp.attach(ring_name) as ring:
        written(ring, 40)
    assert run("down", ring_name).returncode == 0
    second = first_token(start(), tiny)
    assert second["misses"] < first["misses"]
    assert second["hits"] == second["guess_hits"] == 8 * 4 - second["misses"]
