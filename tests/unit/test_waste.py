"""What experts of different sizes waste of a ring."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import grid_source

from smoe_mp import segments, tables

KIB = 1024


@pytest.mark.parametrize(
    ("sizes", "slot_kib", "wasted_kib"),
    [
        ((16 * KIB,), 16, 0),
        ((12 * KIB,), 16, 0),  # what a step of the slot size leaves is nobody's fault
        ((16 * KIB, 48 * KIB), 48, 160),
        ((16 * KIB, 32 * KIB, 48 * KIB, 16 * KIB), 48, 200),
        ((16 * KIB,), 64, 480),  # as asked for by slot_mb
    ],
)
def test_waste(tmp_path: Path, sizes: tuple[int, ...], slot_kib: int, wasted_kib: int) -> None:
    t = tables.build(grid_source(tmp_path / "v", 2, 4, sizes))
    assert segments.wasted_bytes(t, 10, slot_kib * KIB) == wasted_kib * KIB
