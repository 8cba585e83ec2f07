"""Sources: the model files that experts are read from, behind one interface (`base.Source`)."""

from __future__ import annotations

from pathlib import Path

from smoe_mp.sources.base import Source
from smoe_mp.sources.smoe import open_smoe

__all__ = ["Source", "open_source"]


def open_source(path: str | Path) -> Source:
    """Open and check the model at `path`.

    Raises VaultError with the file, the tensor and the numbers where something does not add up.
    """
    return open_smoe(Path(path))
