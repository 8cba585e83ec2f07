"""A report as a picture: all sides with their rounds, and the paired ratios.

One panel a unit, a side a row: its rounds as dots, its median as a stroke, its interval as a line, its goal
as a cross.  Times and rates of one unit may be far apart, and so they stand on a logarithmic axis where the
largest is more than thirty times the smallest.  A last panel has the ratios, with 1 marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoe_mp import plots
from smoe_mp.bench import Figure, Report, Share

__all__ = ["draw"]

WIDTH, ROW, HEAD = 10.0, 0.26, 1.0  # inches: of all, of a side, around a panel
FAR = 30.0


def draw(report: Report, path: Path) -> None:
    """Write the report's picture to `path`.  SmoeError where matplotlib is not here, or there is nothing to
    draw it on."""
    panels: dict[str, list[Figure]] = {}
    for figure in report.figures:
        panels.setdefault(figure.unit, []).append(figure)
    counts = [len(rows) for rows in panels.values()] + [len(report.shares)] * bool(report.shares)
    heights = [HEAD + ROW * count for count in counts]
    picture = plots.figure(WIDTH, sum(heights) or HEAD)
    picture.suptitle(f"bench {report.bench}", fontsize="medium")
    axes = iter(_panels(picture, heights))
    for unit, rows in panels.items():
        _sides(next(axes), unit, rows)
    if report.shares:
        _ratios(next(axes), report.shares)
    plots.save(picture, path)


def _panels(picture: Any, heights: Sequence[float]) -> list[Any]:
    if not heights:
        return []
    made = picture.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return [row[0] for row in made]


def _rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.tick_params(axis="x", which="both", labelsize="x-small")
    axes.grid(axis="x", alpha=0.3)


def _sides(axes: Any, unit: str, figures: Sequence[Figure]) -> None:
    _rows(axes, [f.name for f in figures])
    for at, f in enumerate(figures):
        s = f.summary
        axes.plot(f.values, [at] * len(f.values), ".", color="0.6", markersize=4)
        axes.plot([s.low, s.high], [at, at], "-", color="C0")
        axes.plot([s.median], [at], "|", color="C0", markersize=10)
        if f.goal is not None:
            axes.plot([f.goal.limit], [at], "x", color="C3")
    values = [value for f in figures for value in f.values]
    if min(values) > 0 and max(values) > FAR * min(values):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=min(0.0, *values))
    axes.set_xlabel(f"{unit}: rounds, median, interval" + (", goal" if any(f.goal for f in figures) else ""))


def _ratios(axes: Any, shares: Sequence[Share]) -> None:
    _rows(axes, [s.name for s in shares])
    for at, s in enumerate(shares):
        r = s.ratio
        axes.plot([r.low, r.high], [at, at], "-", color="C0")
        axes.plot([r.ratio], [at], "|", color="C0", markersize=10)
        if s.goal is not None:
            axes.plot([s.goal.limit], [at], "x", color="C3")
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("paired ratio, 95% interval" + (", goal" if any(s.goal for s in shares) else ""))
