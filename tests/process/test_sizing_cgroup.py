"""Sizing in a real memory cgroup of 256 MB: what does not fit is refused with figures, and nobody is killed.

Field report 25: MemAvailable says 21 GB there, and filling the ring ends in SIGKILL.  The child is in the
cgroup before Python starts in it, so that all it uses is counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support import LIMIT_S, until

from smoe_mp.errors import SegmentSpaceError

LIMIT_MB = 256

ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
CHILD = """
import sys
from smoe_mp import sizing
from smoe_mp.errors import SmoeError

slot_mb, slots = map(int, sys.argv[1:])
try:
    made = sizing.size(
        sizing.read_memory(), sizing.Reserve(), slot_bytes=slot_mb << 20, n_experts=94 * 128, layers=94,
        top_k=8, slots_given=slots, control_bytes=2 << 20,
    )
except SmoeError as error:
    print(error)
    sys.exit(error.exit_code)
print(made.line, *made.warnings, *made.notes, sep="\\n")
"""


def _homes() -> Iterator[tuple[Path, str]]:
    """Folders where a memory cgroup may be made, with the name of its limit file."""
    if sys.platform != "linux":
        return
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point, kind = Path(left.split(" ")[4]), right.split(" ")
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield point / own.get("memory", "/").lstrip("/"), "memory.limit_in_bytes"
            yield point, "memory.limit_in_bytes"
        elif kind[0] == "cgroup2":
            yield point, "memory.max"  # one with processes in it hands no controller down, save the root


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:  # EBUSY as long as its last process is being reaped
        return False
    return True


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 256 MB."""
    tried = []
    for home, limit in _homes():
        made = home / f"smoe-mp-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError as error:
            tried.append(f"{home}: {error.strerror}")
            continue
        try:
            (made / limit).write_text(str(LIMIT_MB << 20))
        except OSError as error:
            made.rmdir()
            tried.append(f"{made / limit}: {error.strerror}")
            continue
        yield made
        until(partial(_removed, made), "an end of the cgroup")
        return
    pytest.skip(f"no memory cgroup, v1 or v2, can be made here: {'; '.join(tried) or 'none is mounted'}")


def _kills(group: Path) -> list[str]:
    """The lines in which the kernel counts its kills."""
    text = "".join((group / n).read_text() for n in _KILL_FILES if (group / n).exists())
    return [line for line in text.splitlines() if line.startswith("oom_kill ")]


_KILL_FILES = ("memory.oom_control", "memory.events")


def inside(group: Path, slot_mb: int, slots: int) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", ENTER, "sh", str(group), sys.executable, "-c", CHILD, str(slot_mb), str(slots)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.root
def test_a_ring_larger_than_the_cgroup_is_refused_and_not_killed(group: Path) -> None:
    given = inside(group, 4, 256)
    assert given.returncode == SegmentSpaceError.exit_code, (given.stdout, given.stderr)
    assert "256 x 4 MiB + 2 MiB control = 1.0 GiB, but " in given.stdout
    assert group.name in given.stdout
    assert f"{LIMIT_MB} MiB - use " in given.stdout
    assert "give at most slots = " in given.stdout
    assert given.stderr == ""

    automatic = inside(group, 10, 0)  # also the 64 slots that the clamp asks for
    assert automatic.returncode == SegmentSpaceError.exit_code, (automatic.stdout, automatic.stderr)
    assert "ring of 64 slots (the least that is taken)" in automatic.stdout

    fits = inside(group, 1, 32)  # so that it was the size that was refused
    assert fits.returncode == 0, (fits.stdout, fits.stderr)
    assert fits.stdout.startswith("32 slots x 1 MiB = 32 MiB, as given")

    assert _kills(group) == ["oom_kill 0"]
