"""Routing by token, and what was foretold of it: against what can be reckoned by hand or another way."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from smoe_mp import models
from smoe_mp.bench.routing import NOBODY, Looking, Routing, lookahead, of_trace
from smoe_mp.engine import F32, ResidentExperts
from smoe_mp.errors import ConfigError
from smoe_mp.trace import BUSY, DEMAND, GUESS, IDLE, RANKS, TraceBuilder

TEXTS = [b"import os\n\n\ndef f(x):\n", b"class A:\n    pass\n"]


def random_routing(seed: int, tokens: int = 40, layers: int = 3) -> Routing:
    """Experts of 12, 3 chosen and 4 ranked behind them; a request begins at the tokens 0 and 17."""
    random = np.random.default_rng(seed)
    ranked = random.permuted(np.tile(np.arange(12), (tokens, layers, 1)), axis=-1)
    begins = np.isin(np.arange(tokens), (0, 17))
    ahead = random.permuted(ranked, axis=-1)[:, :, :6]
    ahead[:, 0] = NOBODY
    return Routing(ranked[:, :, :3], ranked[:, :, 3:7], begins, 12, ahead, ahead[:, :, ::-1])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_told_is_what_was_named(n: int) -> None:
    """The two views of a guess: from the one who tells it, and from the demand that it is for."""
    routing = random_routing(1)
    for way in ("behind", "ahead"):
        told: dict[tuple[int, int], list[int]] = {}
        for token in range(len(routing)):
            for layer in range(routing.layers):
                whom, ids = routing.told(way, n, token, layer)  # type: ignore[arg-type]
                if ids:
                    assert told.setdefault((token + (way == "behind"), whom), ids) is ids
        named = routing.named(way, n)  # type: ignore[arg-type]
        for token, layer in np.ndindex(named.shape[:2]):
            ids = named[token, layer].tolist()
            if ids[0] != NOBODY:
                assert told[token, layer] == ids
        nobody = (named == NOBODY).all(axis=-1)
        if way == "behind":
            assert nobody[routing.begins].all()
            assert not nobody[~routing.begins].any()
        else:
            assert nobody[:, 0].all()
            assert not nobody[:, 1:].any()


@pytest.mark.parametrize("way", ["behind", "last", "ahead", "late"])
def test_shares_by_counting(way: Any) -> None:
    routing, n, slots = random_routing(2), 4, 15
    ring: OrderedDict[tuple[int, int], None] = OrderedDict()
    named = demanded = spared = missed = 0
    for t, layer in np.ndindex(len(routing), routing.layers):
        before = t - 1
        ids = {
            "behind": routing.behind[before, layer, :n],
            "last": [*routing.chosen[before, layer], *routing.behind[before, layer]][:n],
            "ahead": routing.ahead[t, layer, :n],  # type: ignore[index]
            "late": routing.late[t, layer, :n],  # type: ignore[index]
        }[way]
        for expert in routing.chosen[t, layer]:
            key = (layer, int(expert))
            there = key in ring
            ring[key] = None
            ring.move_to_end(key)
            if len(ring) > slots:
                ring.popitem(last=False)
            if layer and not routing.begins[t]:
                demanded += 1
                named += expert in ids
                missed += not there
                spared += not there and expert in ids
    assert 0 < spared < missed < demanded
    assert routing.share_named(way, n) == pytest.approx(named / demanded)
    assert routing.spared(way, n, slots) == pytest.approx(spared / missed)
    assert routing.spared(way, n, 36) <= 1  # all fit, so that only first demands are missing


@pytest.mark.parametrize("way", ["behind", "ahead"])
def test_coverage_at_best(way: Any) -> None:
    routing, slots = random_routing(3), 15
    assert routing.coverage(way, 0, slots) == pytest.approx(1 - routing.missing(slots).mean())
    # What no ring throws out is missed once: at its first demand, or never where it was named before.
    all_fit = routing.coverage(way, 3, 36)
    named, first = set[tuple[int, int]](), 0
    for t, layer in np.ndindex(len(routing), routing.layers):
        keys = [(layer, e) for e in routing.chosen[t, layer].tolist()]
        first += sum(key not in named for key in keys)
        whom, ids = routing.told(way, 3, t, layer)
        named.update(keys, ((whom, e) for e in ids))
    assert all_fit == pytest.approx(1 - first / routing.chosen.size)
    assert all_fit > routing.coverage(way, 0, 36)


def one_token(builder: TraceBuilder, shift: int, who: int = 0, layers: tuple[int, ...] = (1, 3)) -> None:
    for layer in layers:
        builder.add(DEMAND, who, layer, 0, experts=[shift, layer + 10])
        builder.add(RANKS, who, layer, 0, experts=[shift + 1, shift + 2, shift + 3])


def test_tokens_of_a_trace() -> None:
    made = TraceBuilder()
    made.add(BUSY, 0, 0, 0)
    one_token(made, 0)
    one_token(made, 5, who=7)  # of another client
    one_token(made, 1)
    made.add(GUESS, 161, 1, 0, experts=[4])
    made.add(DEMAND, 0, 1, 0, experts=[1, 2, 3, 4])  # a prompt
    made.add(DEMAND, 0, 3, 0, experts=[5, 6, 7])
    one_token(made, 2)
    one_token(made, 3)
    one_token(made, 9, layers=(1,))  # not whole
    one_token(made, 4)
    made.add(IDLE, 0, 0, 0)
    made.add(BUSY, 0, 0, 0)
    one_token(made, 6)
    routing = of_trace(made.build(layers=4, experts=32, top_k=2))
    assert routing.chosen[:, :, 0].tolist() == [[s, s] for s in (0, 1, 2, 3, 4, 6)]
    assert routing.chosen[:, :, 1].tolist() == [[11, 13]] * 6
    assert routing.behind[1].tolist() == [[2, 3, 4], [2, 3, 4]]
    assert routing.begins.tolist() == [True, False, True, False, True, True]
    assert (routing.experts, routing.ways) == (32, ("behind", "last"))


def test_traces_without_what_is_wanted() -> None:
    made = TraceBuilder()
    made.add(DEMAND, 0, 0, 0, experts=[1, 2])
    with pytest.raises(ConfigError, match="no ranks"):
        of_trace(made.build())
    one_token(made, 9, layers=(1,))
    made.add(DEMAND, 0, 2, 0, experts=[1, 2])
    made.add(RANKS, 0, 2, 0, experts=[3])
    made.add(DEMAND, 0, 1, 0, experts=[1, 2])
    assert len(of_trace(made.build(top_k=2))) == 1
    made = TraceBuilder()
    one_token(made, 9, layers=(3, 1))
    with pytest.raises(ConfigError, match="no token"):
        of_trace(made.build(top_k=2))


class _Reference(Looking):
    """Sees the hidden states themselves, in front of the norms."""

    def __init__(self, *args: Any) -> None:
        self.states: dict[int, F32] = {}
        super().__init__(*args)

    def _rms(self, x: F32, weight: F32) -> F32:
        self.states[id(weight)] = x
        return super()._rms(x, weight)


def test_looking_ahead_is_the_next_router_on_this_hidden_state() -> None:
    engine = _Reference.open(models.TINY, ResidentExperts(models.TINY / "tiny.smoe"))
    text = TEXTS[0]
    routing = lookahead(engine, [text], ranks=8)
    assert routing.chosen.shape == (len(text) + 1, 8, 4)
    assert routing.ahead is not None
    assert routing.late is not None
    states = dict(engine.states)

    def sets(x: F32, layer: Any, n: int) -> list[set[int]]:
        scores = engine._rms(x, layer.experts_norm) @ layer.router.T
        return [set(row) for row in np.argsort(-scores, axis=-1, kind="stable")[:, :n].tolist()]

    agree = total = 0
    for number in range(1, len(engine._layers)):
        before_attention = states[id(engine._layers[number].attention_norm)]
        before_experts = states[id(engine._layers[number - 1].experts_norm)]
        for made, x in ((routing.ahead, before_experts), (routing.late, before_attention)):
            wanted = sets(x, engine._layers[number], 4)
            found = [set(row) for row in made[:, number, :4].tolist()]
            agree += sum(a == b for a, b in zip(wanted, found, strict=True))
            total += len(wanted)
    assert agree >= total - 2  # scores that differ in the last bits alone may change places


def test_looking_changes_nothing_and_tells_what_is_demanded() -> None:
    resident = ResidentExperts(models.TINY / "tiny.smoe")
    engine = Looking.open(models.TINY, resident)
    demanded: list[set[int]] = []
    as_ready = resident.as_ready

    def spy(layer: int, experts: Any) -> Any:
        demanded.append(set(experts))
        return as_ready(layer, experts)

    resident.as_ready = spy  # type: ignore[method-assign]
    routing = lookahead(engine, TEXTS)
    assert [len(text) + 1 for text in TEXTS] == np.diff(
        [*np.flatnonzero(routing.begins), len(routing)]
    ).tolist()
    for number, text in enumerate(TEXTS):
        at = sum(len(t) + 1 for t in TEXTS[:number])
        part = routing.chosen[at : at + len(text) + 1]
        assert [set(part[:, layer].flatten().tolist()) for layer in range(8)] == demanded[8 * number :][:8]
    assert (routing.ahead[:, 0] == NOBODY).all()  # type: ignore[index]
    assert (routing.late[:, 0] == NOBODY).all()  # type: ignore[index]
