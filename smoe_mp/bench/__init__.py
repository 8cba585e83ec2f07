"""`smoe-mp bench`: the figures that are claimed, measured where you are.

    stats    medians, spread, paired ratios, verdicts
    rings    rings with real workers for measuring, and the native program smoe-bench
    io hit miss wake idle open formats peers dequant    one benchmark each: `run(...)` gives a `Report`
    replay decoder lru                       a decode loop by a trace, its client, and what LRU would have
    curve                                    hit rates of a trace by ring size; nothing is run
    speculate routing                        what guesses cost and spare, and what they name
    prewarm                                  the first turn after a start
    picture  a report, drawn
    cli      the commands

Each benchmark states what it measures, runs its sides in turn in one run, and prints what it found with
its spread.  Nothing that the page cache may have answered is called a disk's speed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from smoe_mp.bench.stats import Goal, Ratio, Summary, Verdict, paired_ratio, summarize, verdict
from smoe_mp.platform import system
from smoe_mp.runtime import version

__all__ = ["Figure", "Progress", "Report", "Share", "machine"]

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, float, float], None]

HOW = (
    "Sides in turn, round by round. Median and quartiles over the rounds; the median's 95% interval from"
    " order statistics (below 6 rounds the range). Ratios: Student's t on the rounds' paired log-ratios."
)
_STYLE = {"met": "green", "missed": "red", "open": "yellow"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One side: its value in each round, in `unit`."""

    name: str
    unit: str
    values: Sequence[float]
    goal: Goal | None = None

    @property
    def summary(self) -> Summary:
        return summarize(self.values)

    @property
    def verdict(self) -> Verdict | None:
        s = self.summary
        return verdict(self.goal, s.low, s.high) if self.goal else None


@dataclass(frozen=True, slots=True)
class Share:
    """A paired ratio of two sides: `above` over `below`."""

    name: str
    above: Sequence[float]
    below: Sequence[float]
    goal: Goal | None = None

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(self.above, self.below)

    @property
    def verdict(self) -> Verdict | None:
        r = self.ratio
        return verdict(self.goal, r.low, r.high) if self.goal else None


@dataclass
class Report:
    """What a benchmark found.  `what` says what is measured, `settings` how it was run, `notes` what one
    must know to read it.  `sheets`: by title, figures drawn as a table with a row a side, by side and column,
    in place of the list of all figures."""

    bench: str
    what: str
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    sheets: dict[str, dict[str, dict[str, Figure]]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict | None:
        """The worst of all goals; None where there are none."""
        found = {f.verdict for f in self.figures} | {s.verdict for s in self.shares}
        order: tuple[Verdict, ...] = ("missed", "open", "met")
        return next((worst for worst in order if worst in found), None)

    def plain(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "bench": self.bench,
            "what": self.what,
            "how": HOW,
            "version": version(),
            "machine": machine(),
            "settings": self.settings,
            "figures": [
                {
                    "name": f.name,
                    "unit": f.unit,
                    **asdict(f.summary),
                    **_goal(f.goal, f.verdict),
                    "rounds": list(f.values),
                }
                for f in self.figures
            ],
            "ratios": [{"name": s.name, **asdict(s.ratio), **_goal(s.goal, s.verdict)} for s in self.shares],
            "notes": self.notes,
            "verdict": self.verdict,
            **self.extra,
        }

    def draw(self, console: Console) -> None:
        console.print(f"[bold]bench {self.bench}[/bold]: {escape(self.what)}", highlight=False)
        console.print(f"[dim]{escape(HOW)}[/dim]", highlight=False)
        for title, rows in self.sheets.items():
            console.print(_sheet(title, rows))
        if self.figures and not self.sheets:
            console.print(self._figure_table())
        if self.shares:
            console.print(self._share_table())
        for note in self.notes:
            console.print(f"- {escape(note)}", highlight=False)

    def _figure_table(self) -> Table:
        table = Table()
        for column in ("side", "median", "quartiles", "95%", "unit", "goal", ""):
            numbers = column in ("median", "quartiles", "95%")
            table.add_column(column, justify="right" if numbers else "left")
        for f in self.figures:
            s = f.summary
            table.add_row(
                escape(f.name),
                _number(s.median),
                f"{_number(s.q1)} - {_number(s.q3)}",
                f"{_number(s.low)} - {_number(s.high)}",
                f.unit,
                *_drawn_goal(f.goal, f.verdict),
            )
        return table

    def _share_table(self) -> Table:
        table = Table()
        for column in ("ratio", "paired", "95%", "rounds", "goal", ""):
            numbers = column in ("paired", "95%", "rounds")
            table.add_column(column, justify="right" if numbers else "left")
        for s in self.shares:
            r = s.ratio
            table.add_row(
                escape(s.name),
                f"{r.ratio:.3f}",
                f"{r.low:.3f} - {r.high:.3f}",
                str(r.n),
                *_drawn_goal(s.goal, s.verdict),
            )
        return table


def _sheet(title: str, rows: dict[str, dict[str, Figure]]) -> Table:
    """Medians, and the quartiles beneath them."""
    units = {column: figure.unit for row in rows.values() for column, figure in row.items()}
    table = Table(title=escape(title), title_justify="left")
    table.add_column("side")
    for column, unit in units.items():
        table.add_column(f"{escape(column)}\n{unit}", justify="right")
    for side, row in rows.items():
        table.add_row(escape(side), *(_cell(row[column]) if column in row else "" for column in units))
    return table


def _cell(figure: Figure) -> str:
    s = figure.summary
    return f"{_number(s.median)}\n[dim]{_number(s.q1)} - {_number(s.q3)}[/dim]"


def _goal(goal: Goal | None, found: Verdict | None) -> dict[str, Any]:
    return {"goal": asdict(goal) if goal else None, "verdict": found}


def _drawn_goal(goal: Goal | None, found: Verdict | None) -> tuple[str, str]:
    if goal is None or found is None:
        return "", ""
    return f"{goal.kind} {goal.limit:g}", f"[{_STYLE[found]}]{found}[/]"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cpu_facts() -> tuple[str, bool]:
    """The processor's name, and whether this is a virtual machine, as far as it says so."""
    name, virtual = platform.processor() or platform.machine(), False
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name, virtual
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            virtual = "hypervisor" in value.split()
    return name, virtual


def machine() -> dict[str, Any]:
    """Where this was measured: `virtual` is what the processor's flags say."""
    name, virtual = _cpu_facts()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": name,
        "cores": system.cores(),
        "virtual": virtual,
        "load_1min": os.getloadavg()[0],
    }
