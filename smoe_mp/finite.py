"""Numbers of the command line.  nan and inf are floats, and nan passes any range: no option means them."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """The callback of an option that takes a float."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value
