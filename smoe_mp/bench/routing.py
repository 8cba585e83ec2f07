"""Routing token by token, and what could have been foretold of it.

    chosen[t, l]   the experts that token t demanded of layer l, best first: [tokens, layers, k]
    behind[t, l]   what the same router ranked behind them

Whoever guesses names experts before they are demanded.  Four ways of doing so:

    behind   the token before names, in each layer, the ranks behind its own experts
    last     the token before names its own experts, and then the ranks behind them
    ahead    the layer before names, as its experts are about to compute, what this layer's router makes of
             the hidden state as it is then
    late     the same when those experts are done: only the attention is between

`behind` and `last` can be had of a trace that records further ranks; `ahead` and `late` of the engine alone
(`lookahead`), since they need the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from smoe_mp.bench.curve import usual_top_k
from smoe_mp.bench.lru import ExactLru
from smoe_mp.distances import lru_distances
from smoe_mp.engine import F32, Cache, Engine, _Layer
from smoe_mp.errors import ConfigError
from smoe_mp.trace import BUSY, DEMAND, IDLE, RANKS, Trace

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Way = Literal["behind", "last", "ahead", "late"]
Told = Literal["behind", "ahead"]  # those that a ring is told of

NOBODY = -1


@dataclass(frozen=True)
class Routing:
    """Routing by token.  Expert ids; `NOBODY` where there is none.

    `begins` [tokens]: whether a token has none before it that it could be guessed from.  `ahead` and `late`
    [tokens, layers, ranks]: what was named of a layer; nothing of the first.  Both None: not known.
    """

    chosen: Ids
    behind: Ids
    begins: Bools
    experts: int
    ahead: Ids | None = None
    late: Ids | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def layers(self) -> int:
        return int(self.chosen.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.chosen.shape[2])

    @property
    def ways(self) -> tuple[Way, ...]:
        return ("behind", "last") if self.ahead is None else ("behind", "last", "ahead", "late")

    def named(self, way: Way, n: int) -> Ids:
        """The `n` experts that were named before each demand: [tokens, layers, n]."""
        if way in ("ahead", "late"):
            foretold = self.ahead if way == "ahead" else self.late
            assert foretold is not None
            return foretold[:, :, :n]
        by_token = self.behind if way == "behind" else np.concatenate((self.chosen, self.behind), axis=-1)
        before = np.roll(by_token[:, :, :n], 1, axis=0)
        before[self.begins] = NOBODY
        return before

    def told(self, way: Told, n: int, token: int, layer: int) -> tuple[int, list[int]]:
        """What is guessed right behind the demand of a token in a layer: the layer guessed for, and experts.

        For "behind" the next token's, for "ahead" the next layer's; the last layer's next is not known yet.
        """
        if way == "behind":
            ids = self.behind[token, layer, :n]
        elif layer + 1 == self.layers:
            return layer, []
        else:
            layer += 1
            ids = self.named(way, n)[token, layer]
        return layer, ids[ids != NOBODY].tolist()

    def was_named(self, way: Way, n: int) -> Bools:
        """Of each expert demanded, whether it was among the `n` named: like `chosen`."""
        found: Bools = (self.chosen[..., None] == self.named(way, n)[..., None, :]).any(axis=-1)
        return found

    def missing(self, slots: int) -> Bools:
        """Of each expert demanded, whether a ring with exact LRU and no guesses would not have had it."""
        keys = self.chosen + self.experts * np.arange(self.layers)[:, None]
        distances = lru_distances(keys.flatten().tolist())
        return ((distances < 0) | (distances >= slots)).reshape(self.chosen.shape)

    def coverage(self, way: Told, n: int, slots: int) -> float:
        """The share of all experts demanded that a ring of `slots` with exact LRU would have, were each guess
        read the moment that it is told; what it brings in is as fresh as what was demanded."""
        ring, hits = ExactLru(slots), 0
        for token, layer in np.ndindex(self.chosen.shape[:2]):
            hits += sum([ring.access((layer, expert)) for expert in self.chosen[token, layer].tolist()])
            whom, guesses = self.told(way, n, token, layer)
            for key in ((whom, expert) for expert in guesses):
                if key not in ring.slot:
                    ring.access(key)
        return hits / self.chosen.size

    def share_named(self, way: Way, n: int) -> float:
        """Of the experts demanded, the share that was among the `n` named before."""
        return float(self.was_named(way, n)[self.guessable()].mean())

    def guessable(self) -> Bools:
        """Where every way could have named something: like `chosen`."""
        could = np.broadcast_to(~self.begins[:, None, None], self.chosen.shape).copy()
        if self.ahead is not None:
            could[:, 0] = False
        return could

    def spared(self, way: Way, n: int, slots: int) -> float:
        """Of the experts that a ring of `slots` would not have had, the share that was among the `n` named;
        0 where it would have had all."""
        wanted = self.missing(slots) & self.guessable()
        return float(self.was_named(way, n)[wanted].mean()) if wanted.any() else 0.0


def of_trace(trace: Trace) -> Routing:
    """The tokens of one client's decode, with the ranks that its router gave.

    A demand of more than top-k experts is a prompt's: it is left out, and the token behind it begins anew.
    So is a token without a demand and ranks in every layer.  ConfigError where no ranks were recorded.
    """
    ranking = trace.who[trace.kind == RANKS]
    if not len(ranking):
        raise ConfigError(
            "the trace records no ranks behind the top-k, so there is nothing to guess by: record one of a"
            " client that uses route (smoe-mp trace record)"
        )
    who = int(np.bincount(ranking).argmax())
    counts = np.diff(trace.first)
    top_k = usual_top_k(trace)
    most = int(counts[trace.kind == RANKS].max())
    layers = np.unique(trace.layer[trace.kind == RANKS]).tolist()
    tokens = _Tokens(len(layers), top_k, most)
    for i in np.flatnonzero(trace.who == who).tolist():
        kind, ids = int(trace.kind[i]), trace.entries(i).tolist()
        if kind in (BUSY, IDLE) or (kind == DEMAND and len(ids) != top_k):
            tokens.cut()
        elif kind == DEMAND:
            tokens.demanded(layers.index(layer) if (layer := int(trace.layer[i])) in layers else 0, ids)
        elif kind == RANKS:
            tokens.ranked(ids)
    return tokens.routing(trace.experts)


class _Tokens:
    """Takes demands and ranks as they come; keeps the tokens that are whole."""

    def __init__(self, layers: int, top_k: int, ranks: int) -> None:
        self._chosen: list[Ids] = []
        self._behind: list[Ids] = []
        self._begins: list[bool] = []
        self._shape = (layers, top_k, ranks)
        self._anew = True
        self._start()

    def _start(self) -> None:
        layers, top_k, ranks = self._shape
        self._next = 0  # the layer whose demand comes next in a token that is whole so far
        self._one = np.full((layers, top_k), NOBODY), np.full((layers, ranks), NOBODY)

    def cut(self) -> None:
        """What comes next does not follow what was."""
        self._anew = True
        self._start()

    def demanded(self, layer: int, ids: list[int]) -> None:
        if layer != self._next:
            self.cut()
        if layer == self._next:
            self._one[0][layer] = ids

    def ranked(self, ids: list[int]) -> None:
        if self._one[0][self._next][0] == NOBODY:
            return  # of a demand that was left out
        self._one[1][self._next, : len(ids)] = ids
        self._next += 1
        if self._next == self._shape[0]:
            self._chosen.append(self._one[0])
            self._behind.append(self._one[1])
            self._begins.append(self._anew)
            self._anew = False
            self._start()

    def routing(self, experts: int) -> Routing:
        if not self._chosen:
            raise ConfigError("the trace has no token with a demand and ranks in every layer")
        begins = np.array(self._begins)
        return Routing(np.stack(self._chosen), np.stack(self._behind), begins, experts)


# --- with the hidden state -------------------------------------------------------------------------------


class Looking(Engine):
    """Notes what routers say, each layer's as well of the hidden states before it.

    A norm divides by a length, whichever norm it is: from what one norm gave, another's result follows by
    its weights alone, so that nothing of the engine has to be changed for a look.
    """

    def note(self, text: Sequence[int], ranks: int) -> None:
        """Run `text` in one go; then `ranked`, `ahead` and `late` are the first `ranks` of each layer."""
        self._ranks = ranks
        nothing = np.full((len(text), ranks), NOBODY)
        self.ranked, self.ahead, self.late = list[Ids](), [nothing], list[Ids]()
        self.forward(text, Cache(self.config))

    def _order(self, x: F32, norm: F32, layer: _Layer) -> Ids:
        """What a layer's router makes of `x`, the output of another norm with the weights `norm`."""
        scores = (x / norm * layer.experts_norm) @ layer.router.T
        return np.argsort(-scores, axis=-1, kind="stable")[:, : self._ranks]

    def _attend(self, layer: _Layer, x: F32, number: int, cache: Cache, turn: tuple[F32, F32]) -> F32:
        seen = self._order(x, layer.attention_norm, layer)
        self.late.append(seen if number else np.full_like(seen, NOBODY))
        return super()._attend(layer, x, number, cache, turn)

    def _mix(self, number: int, layer: _Layer, x: F32) -> F32:
        self.ranked.append(self._order(x, layer.experts_norm, layer))
        if number + 1 < len(self._layers):
            self.ahead.append(self._order(x, layer.experts_norm, self._layers[number + 1]))
        return super()._mix(number, layer, x)


def lookahead(engine: Looking, texts: Sequence[bytes], ranks: int = 8) -> Routing:
    """The routing of `texts`, each a document of its own, with what is foretold `ahead` and `late`.

    `ranks`: how many behind the top-k are kept.
    """
    top_k = engine.config.num_experts_per_tok
    parts: list[list[Ids]] = []
    begins = []
    for text in texts:
        engine.note([0, *text], top_k + ranks)
        parts.append([np.stack(kept, axis=1) for kept in (engine.ranked, engine.ahead, engine.late)])
        begins += [True] + [False] * len(text)
    ranked, ahead, late = (np.concatenate(kept) for kept in zip(*parts, strict=True))
    return Routing(
        ranked[:, :, :top_k], ranked[:, :, top_k:], np.array(begins), engine.config.num_experts, ahead, late
    )
