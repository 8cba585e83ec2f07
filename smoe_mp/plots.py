"""Pictures, drawn by matplotlib, which is an extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from smoe_mp.errors import SmoeError

__all__ = ["figure", "save"]


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.  SmoeError where matplotlib is not here."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise SmoeError("--plot needs matplotlib: pip install 'smoe-mp[plot]'") from error
    return figures.Figure(figsize=(width, height), layout="constrained")


def save(picture: Any, path: Path) -> None:
    """Write a figure to a file of the kind that its name says.  SmoeError where that cannot be."""
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise SmoeError(f"{path}: the picture cannot be written: {error}") from error
