"""The short form of `make chaos`: sixty random deaths and stops, and every byte looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parents[1] / "chaos" / "chaos.py"
LIMIT_S = 280  # a bound for what always happens, so that a fault ends the test


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the harness finds its victims by /proc and pidfd")
def test_sixty_rounds() -> None:
    done = subprocess.run(
        [sys.executable, str(CHAOS), "--rounds", "60"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong: 0\n" in done.stdout
    assert done.stdout.endswith("ok\n")
