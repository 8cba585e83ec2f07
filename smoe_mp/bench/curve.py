"""bench curve: the hit rate by ring size, of exact LRU and of Belady's OPT, over a trace.

Nothing is run: both are reckoned, for all sizes at once, from stack distances (`smoe_mp.distances`).  What is
referenced is every expert that the trace's clients demanded, in the trace's order: of each token all its
layers in turn, of each layer the experts that its router picked, best first where the trace has them so; the
rows of a prompt one by one, as they stand in the trace.  The cache is empty at the start, and every expert
takes one slot.

The mark is the token cycle: how many experts one token references, layers x top-k.  A smaller ring has lost,
under LRU, all that a token used before the next one comes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from smoe_mp import plots
from smoe_mp.bench import Progress
from smoe_mp.distances import hit_rates, lru_distances, opt_distances
from smoe_mp.errors import VaultError
from smoe_mp.runtime import version
from smoe_mp.trace import CLAIM, DEMAND, Trace, read_trace
from smoe_mp.trace_view import demanded

#: Ring sizes of the table, in percent of the model's experts.
SHARES = (1, 2, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)

WHAT = "hit rates that a trace would have by ring size: exact LRU and Belady's OPT, empty at the start."


@dataclass(frozen=True)
class Curve:
    """Hit rates of a trace, 0 to 1: `lru[i]` and `opt[i]` are of a ring of i + 1 slots, up to all `experts`
    of the model.  `cycle`: experts that one token references, layers x top-k; `references`: in the whole
    trace; `sizes`: slots to what the table says of them."""

    file: str
    layers: int
    experts: int
    top_k: int
    cycle: int
    references: int
    different: int
    lru: list[float]
    opt: list[float]
    sizes: dict[int, str]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bench": "curve",
            "what": WHAT,
            "version": version(),
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "sizes"},
            "table": [
                {"slots": n, "is": what, "lru": self.lru[n - 1], "opt": self.opt[n - 1]}
                for n, what in self.sizes.items()
            ],
        }

    def show(self, *, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.plain(), indent=2))
        else:
            self.draw(Console())

    def draw(self, console: Console) -> None:
        console.print(f"[bold]bench curve[/bold]: {WHAT}", highlight=False)
        console.print(
            f"{self.references} references to {self.different} of {self.experts} experts. A token references"
            f" all its {self.layers} layers in turn, top-{self.top_k} each: its cycle is {self.cycle}"
            " experts. Rows of a prompt are taken one by one.",
            highlight=False,
        )
        table = Table()
        for column in ("slots", "LRU", "OPT", "LRU / OPT"):
            table.add_column(column, justify="right")
        table.add_column("")
        for n, what in self.sizes.items():
            lru, opt = self.lru[n - 1], self.opt[n - 1]
            ratio = f"{lru / opt:.3f}" if opt else ""
            table.add_row(str(n), f"{lru:.3f}", f"{opt:.3f}", ratio, what)
        console.print(table)

    def plot(self, path: Path) -> None:
        """Draw both curves.  SmoeError where matplotlib is not here."""
        picture = plots.figure(8, 5)
        axes = picture.add_subplot(
            xlabel="slots", ylabel="hit rate", title=Path(self.file).name, xlim=(0, self.experts), ylim=(0, 1)
        )
        slots = np.arange(1, self.experts + 1)
        axes.plot(slots, self.opt, label="Belady's OPT")
        axes.plot(slots, self.lru, label="exact LRU")
        axes.axvline(self.cycle, color="grey", linestyle=":", label=f"one token: {self.cycle} experts")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        plots.save(picture, path)


def usual_top_k(trace: Trace) -> int:
    """Experts that a token demands of a layer: as the trace says, else as most of its records have."""
    counts = np.diff(trace.first)[(trace.kind == DEMAND) | (trace.kind == CLAIM)]
    return trace.top_k or int(np.bincount(counts).argmax())


def run(progress: Progress, file: Path, *, slots: Sequence[int] = ()) -> Curve:
    """Reckon the curves of the trace at `file`; `slots`: more ring sizes for the table.  VaultError where the
    file is no trace, or has no demands."""
    trace = read_trace(file)
    keys, _ = demanded(trace)
    if not len(keys):
        raise VaultError(f"{file}: the trace has no demands: there is nothing to reckon")
    experts, top_k = trace.layers * trace.experts, usual_top_k(trace)
    cycle = len(np.unique(keys // trace.experts)) * top_k
    every = range(1, experts + 1)
    progress("LRU", 0, 2)
    lru = hit_rates(lru_distances(keys.tolist()), every)
    progress("OPT", 1, 2)
    opt = hit_rates(opt_distances(keys.tolist()), every)
    progress("", 2, 2)
    sizes = {max(1, experts * share // 100): f"{share}%" for share in SHARES}
    sizes |= {n: sizes.get(n, "") for n in slots if n <= experts}
    if cycle <= experts:
        sizes[cycle] = ", ".join(filter(None, (sizes.get(cycle, ""), "one token's cycle")))
    return Curve(
        file=str(file),
        layers=trace.layers,
        experts=experts,
        top_k=top_k,
        cycle=cycle,
        references=len(keys),
        different=len(np.unique(keys)),
        lru=lru,
        opt=opt,
        sizes=dict(sorted(sizes.items())),
    )
