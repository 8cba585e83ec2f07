"""Models that come with smoe-mp, each a folder: config.json, NAME.smoe, NAME.scout.safetensors.

`tiny` is the only one: docs/model-card.md.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["TINY"]

#: The folder of the small trained model.
TINY = Path(__file__).parent / "tiny"
