"""What all tests share: the folder ../shared, and made-up sources of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import SHARED, StampedSource, stamped_source


@pytest.fixture
def shared() -> Path:
    """The folder with the original's vaults and the traces."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here")
    return SHARED


@pytest.fixture
def source(tmp_path: Path) -> StampedSource:
    """2 layers of 8 experts, of 1 to 3 extents at odd places of 3 files."""
    return stamped_source(tmp_path / "source")
