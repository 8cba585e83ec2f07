"""`ring.lock`: the ring's pages are locked where that is allowed, and where not a start goes on without."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support
from systems import LIMIT_S, Up, assert_nothing_left, write_config

from smoe_mp import segments

LIMIT_BYTES = 65536


def test_a_locked_ring_is_said_to_be_so(up: Up) -> None:
    ring = up(more="ring.lock = true\n").status()["ring"]
    assert ring["locked_bytes"] in (0, ring["data_bytes"])  # 0: this user may lock too little, which is said
    assert ring["resident_bytes"] == ring["data_bytes"]


def test_unless_asked_for_nothing_is_locked(up: Up) -> None:
    assert up().status()["ring"]["locked_bytes"] == 0


def test_a_limit_that_is_too_small_is_said_once_and_the_start_goes_on(
    vault: Path, ring_name: str, tmp_path: Path
) -> None:
    for tool in ("prlimit", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    config = write_config(tmp_path / "c.toml", ring_name, vault, 16, 1, more="ring.lock = true\n")
    limited = ["prlimit", f"--memlock={LIMIT_BYTES}:{LIMIT_BYTES}", "setpriv", "--bounding-set=-ipc_lock"]
    command = [*limited, sys.executable, "-m", "smoe_mp", "up", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        process.terminate()
        process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    (said,) = [line for line in lines if "not locked" in line]
    assert f"{LIMIT_BYTES} bytes" in said
    assert "going on without" in said
    assert_nothing_left(ring_name)


@pytest.mark.parametrize("slots", [3, 12])
def test_how_much_of_a_ring_is_in_memory(tmp_path: Path, slots: int) -> None:
    """Of a ring of 48 MiB page by page, of one of 192 by a sample: pages that are gone are missed, here
    those of its first third, which were punched out of the file as nothing but swapping would do."""
    libc, mib = ctypes.CDLL(None, use_errno=True), 1 << 20
    if not hasattr(libc, "fallocate64"):
        pytest.skip("no fallocate here")
    name = support.ring_name()
    source = support.grid_source(tmp_path / "grid", 1, 8)
    made = segments.create(name, source, slots=slots, slot_bytes=16 * mib)
    try:
        assert made.resident_bytes() == made.data_bytes == slots * 16 * mib
        gone = made.data_bytes // 3
        with (support.SHM / f"smoe.{name}.d").open("r+b") as file:
            punched = libc.fallocate64(file.fileno(), 1 | 2, ctypes.c_int64(0), ctypes.c_int64(gone))
        assert punched == 0, os.strerror(ctypes.get_errno())
        seen = made.resident_bytes()
        assert abs(seen - (made.data_bytes - gone)) <= (0 if slots == 3 else 2 * mib)
    finally:
        made.remove()
