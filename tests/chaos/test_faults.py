"""The short form of faults.py: each kind of fault once, while processes are killed and stopped."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import GROUP_BYTES, KINDS

from smoe_mp.bench.cgroup import memory_group
from smoe_mp.errors import SmoeError

FAULTS = Path(__file__).resolve().with_name("faults.py")
LIMIT_S = 600  # a bound for what always happens, so that a fault ends the test


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the harness finds its victims by /proc and pidfd")
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_under_load(kind: str) -> None:
    if kind in ("full", "readonly"):
        probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "smoe-test", "/mnt"]
        if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
            pytest.skip(f"{kind}: nothing can be mounted: needs root")
    if kind in ("memory", "oom"):
        try:
            with memory_group(GROUP_BYTES):
                pass
        except SmoeError as error:
            pytest.skip(f"{kind}: {error}")
    if kind == "clock" and shutil.which("cc") is None:
        pytest.skip("clock: cc is not installed")
    command = [sys.executable, str(FAULTS), kind, "--rounds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^bytes checked: [1-9]\d*, wrong: 0$", done.stdout, re.MULTILINE)
    assert f"\nfaults: 1 {kind};" in done.stdout
