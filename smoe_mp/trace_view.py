"""What a trace shows: popularity, overlap of adjacent tokens, reuse distance, the union of a turn's experts.

A token is seen as what it demands of a layer: a demand of more experts than the model's top-k is several
tokens at once (a prompt), and takes no part in what is said of adjacent ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smoe_mp import plots
from smoe_mp.distances import hit_rates, lru_distances
from smoe_mp.trace import BUSY, CLAIM, DEMAND, GUESS, IDLE, KINDS, RANKS, THERE, Trace

__all__ = ["Summary", "draw", "overlap", "plot", "popularity", "reuse_distances", "summary"]

SLOTS = (64, 128, 256, 512, 1024, 1536, 2048, 4096)
_SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Turn:
    """A request of one client: its demands, experts demanded, and how many different ones these were."""

    who: int
    demands: int
    experts: int
    union: int


@dataclass(frozen=True)
class Summary:
    """A trace in figures.  Rates are 0 to 1, None where nothing was there to count.

    `overlap_by_layer`: the share of a token's experts that the token before it had demanded too.
    `reuse_median`, `reuse_90`: quantiles of how many other experts were demanded between two demands of one;
    `first_demands`: share that had no demand before.  `lru`: slots to the hit rate of an exact LRU cache of
    that size, empty at the start.  `ranks_of_next`: of the experts that the next token demanded and this one
    did not, the share that this one's router had ranked right behind its own.
    """

    records: dict[str, int]
    demanded: int
    hit_rate: float | None
    guesses: int
    seconds: float
    layers: int
    experts: int
    top_k: int
    lost: int
    overlap_by_layer: list[float | None]
    overlap: float | None
    ranks_of_next: float | None
    first_demands: float | None
    reuse_median: float | None
    reuse_90: float | None
    lru: dict[int, float]
    turns: list[Turn]


def _demands(trace: Trace) -> npt.NDArray[np.intp]:
    return np.flatnonzero((trace.kind == DEMAND) | (trace.kind == CLAIM))


def demanded(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Every expert demanded, as layer x experts + expert, in order; and its outcome."""
    counts = np.diff(trace.first)
    is_demand = np.repeat((trace.kind == DEMAND) | (trace.kind == CLAIM), counts)
    layer = np.repeat(trace.layer.astype(np.int64), counts)[is_demand]
    return layer * trace.experts + trace.expert[is_demand], trace.outcome[is_demand]


def popularity(trace: Trace) -> npt.NDArray[np.int64]:
    """How often each expert was demanded: [layers, experts]."""
    keys, _ = demanded(trace)
    counts = np.bincount(keys, minlength=trace.layers * trace.experts)
    return counts.reshape(trace.layers, trace.experts)


def _adjacent(trace: Trace) -> tuple[dict[int, list[float]], list[float]]:
    """By layer, where there are any, the shares that two adjacent tokens had in common; and the shares that
    ranks foretold."""
    shares: defaultdict[int, list[float]] = defaultdict(list)
    foretold: list[float] = []
    last: dict[tuple[int, int], set[int]] = {}
    ranks: dict[tuple[int, int], set[int]] = {}
    most = trace.top_k or trace.experts
    for i in range(len(trace)):
        kind, who = int(trace.kind[i]), int(trace.who[i])
        if kind in (BUSY, IDLE):  # the first token of a request has none before it
            for key in [key for key in last if key[0] == who]:
                last.pop(key)
                ranks.pop(key, None)
        key = (who, int(trace.layer[i]))
        if kind == RANKS:
            ranks[key] = set(trace.entries(i).tolist())
        if kind != DEMAND:
            continue
        now = set(trace.entries(i).tolist())
        before, ranked = last.pop(key, None), ranks.pop(key, None)
        if not now or len(now) > most:
            continue
        last[key] = now
        if before is not None:
            shares[key[1]].append(len(now & before) / len(now))
            if ranked is not None and now - before:
                foretold.append(len((now - before) & ranked) / len(now - before))
    return shares, foretold


def overlap(trace: Trace) -> list[float | None]:
    """For each layer the mean share of a token's experts that the token before had demanded too."""
    return _by_layer(trace, _adjacent(trace)[0])


def _by_layer(trace: Trace, shares: dict[int, list[float]]) -> list[float | None]:
    return [_mean(shares.get(layer, ())) for layer in range(trace.layers)]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def reuse_distances(trace: Trace) -> npt.NDArray[np.int64]:
    """For each expert demanded, in order, how many others were since its last demand; -1: the first."""
    return lru_distances(demanded(trace)[0].tolist())


def turns(trace: Trace) -> list[Turn]:
    """The requests, each from its client's busy to its idle; of a trace without, what each client asked."""
    open_turns: dict[int, tuple[int, list[npt.NDArray[np.int64]]]] = {}
    done = []

    def close(who: int) -> None:
        demands, keys = open_turns.pop(who, (0, []))
        if demands:
            every = np.concatenate(keys)
            done.append(Turn(who, demands, len(every), len(np.unique(every))))

    for i in range(len(trace)):
        kind, who = int(trace.kind[i]), int(trace.who[i])
        if kind in (BUSY, IDLE):
            close(who)
        elif kind in (DEMAND, CLAIM):
            demands, keys = open_turns.get(who, (0, []))
            keys.append(trace.entries(i).astype(np.int64) + int(trace.layer[i]) * trace.experts)
            open_turns[who] = (demands + 1, keys)
    for who in sorted(open_turns):
        close(who)
    return done


def summary(trace: Trace, slots: Sequence[int] = SLOTS) -> Summary:
    """All figures of a trace; `slots`: the ring sizes of `lru`."""
    _, outcomes = demanded(trace)
    shares, foretold = _adjacent(trace)
    distances = reuse_distances(trace)
    again = distances[distances >= 0]
    kinds = np.bincount(trace.kind, minlength=len(KINDS))
    known = bool((outcomes == THERE).any())
    return Summary(
        records={name: int(kinds[i]) for i, name in enumerate(KINDS) if kinds[i]},
        demanded=len(outcomes),
        hit_rate=float(np.mean(outcomes == THERE)) if known else None,
        guesses=int(np.diff(trace.first)[trace.kind == GUESS].sum()),
        seconds=float(trace.time_us.max(initial=0)) / 1e6,
        layers=trace.layers,
        experts=trace.experts,
        top_k=trace.top_k,
        lost=trace.lost,
        overlap_by_layer=_by_layer(trace, shares),
        overlap=_mean([x for layer in shares.values() for x in layer]),
        ranks_of_next=_mean(foretold),
        first_demands=float(np.mean(distances < 0)) if len(distances) else None,
        reuse_median=float(np.quantile(again, 0.5)) if len(again) else None,
        reuse_90=float(np.quantile(again, 0.9)) if len(again) else None,
        lru=dict(zip(slots, hit_rates(distances, slots), strict=True)),
        turns=turns(trace),
    )


def as_plain(about: Summary) -> dict[str, Any]:
    """For JSON."""
    return asdict(about)


# --- drawing ---------------------------------------------------------------------------------------------


def heat_map(counts: npt.NDArray[np.int64], width: int) -> list[str]:
    """One line a layer, a character for each expert, or for several side by side where `width` is too small;
    the shade says how often, against the layer's most popular."""
    layers, experts = counts.shape
    by = -(-experts // max(width, 1))
    padded = np.zeros((layers, -(-experts // by) * by))
    padded[:, :experts] = counts
    cells = padded.reshape(layers, -1, by).mean(axis=-1)
    most = cells.max(axis=-1, keepdims=True)
    level = np.ceil(cells / np.where(most > 0, most, 1) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[x] for x in row) for row in level]


def draw(trace: Trace, about: Summary, console: Console) -> None:
    """Draw a trace, readable at 80 columns and without colour."""
    console.print(_facts(about), highlight=False)
    if not about.demanded:
        return
    console.print("popularity, layers x experts; behind it the overlap of adjacent tokens", style="bold")
    lines = heat_map(popularity(trace), console.width - 16)
    for layer, (line, share) in enumerate(zip(lines, about.overlap_by_layer, strict=True)):
        shown = "" if share is None else f"{share:6.1%}"
        console.print(Text(f"{layer:4} │{line}│ {shown}"), no_wrap=True, overflow="crop")
    console.print(_ring_table(about))
    if about.turns:
        console.print(_turn_table(about))


def _facts(about: Summary) -> str:
    records = ", ".join(f"{n} {name}" for name, n in about.records.items())
    lines = [
        f"{records} records in {about.seconds:.1f} s; {about.layers} layers of {about.experts} experts,"
        f" top-{about.top_k or '?'}",
        f"{about.demanded} experts demanded"
        + ("" if about.hit_rate is None else f", {about.hit_rate:.1%} were there")
        + (f"; {about.guesses} guessed" if about.guesses else ""),
    ]
    if about.lost:
        lines.append(f"not whole: {about.lost} cells of the log were lost, the recorder was too slow")
    if about.overlap is not None:
        lines.append(f"adjacent tokens share {about.overlap:.1%} of their experts")
    if about.ranks_of_next is not None:
        lines.append(
            f"of the next token's other experts {about.ranks_of_next:.1%} were in the router's next ranks"
        )
    if about.reuse_median is not None:
        lines.append(
            f"reuse distance: median {about.reuse_median:.0f}, 90% below {about.reuse_90:.0f} other experts;"
            f" {about.first_demands:.1%} are first demands"
        )
    return "\n".join(lines)


def _ring_table(about: Summary) -> Table:
    table = Table(title="a ring with exact LRU", title_justify="left")
    for name in ("slots", "hit rate", "turns whose experts fit"):
        table.add_column(name, justify="right")
    for slots, rate in about.lru.items():
        fit = sum(turn.union <= slots for turn in about.turns)
        table.add_row(str(slots), f"{rate:.3f}", f"{fit} of {len(about.turns)}")
    return table


def _turn_table(about: Summary, most: int = 12) -> Table:
    table = Table(title="turns", title_justify="left")
    for name in ("turn", "client", "demands", "experts", "different", "of all"):
        table.add_column(name, justify="right")
    for number, turn in enumerate(about.turns[:most], 1):
        share = turn.union / (about.layers * about.experts)
        table.add_row(*map(str, (number, turn.who, turn.demands, turn.experts, turn.union)), f"{share:.1%}")
    if len(about.turns) > most:
        table.caption = f"and {len(about.turns) - most} more"
    return table


def plot(trace: Trace, path: Path) -> None:
    """The popularity as a picture, layers x experts.  SmoeError where matplotlib is not here."""
    figure = plots.figure(10, 1 + trace.layers / 6)
    axes = figure.add_subplot(xlabel="expert", ylabel="layer", title="demands")
    figure.colorbar(axes.imshow(popularity(trace), aspect="auto", interpolation="nearest"))
    plots.save(figure, path)
