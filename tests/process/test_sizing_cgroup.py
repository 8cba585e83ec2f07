"""Sizing in a real memory cgroup of 256 MB: what does not fit is refused with figures, and nobody is killed.

Field report 25: MemAvailable says 21 GB there, and filling the ring ends in SIGKILL.  The child is in the
cgroup before Python starts in it, so that all it uses is counted.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import LIMIT_S

from smoe_mp.bench.cgroup import MemoryGroup, memory_group
from smoe_mp.errors import SegmentSpaceError, SmoeError

LIMIT_MB = 256

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


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A memory cgroup of 256 MB."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(memory_group(LIMIT_MB << 20))
        except SmoeError as error:
            pytest.skip(str(error))
        yield made


def inside(group: MemoryGroup, slot_mb: int, slots: int) -> subprocess.CompletedProcess[str]:
    command = group.inside([sys.executable, "-c", CHILD, str(slot_mb), str(slots)])
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.root
def test_a_ring_larger_than_the_cgroup_is_refused_and_not_killed(group: MemoryGroup) -> None:
    given = inside(group, 4, 256)
    assert given.returncode == SegmentSpaceError.exit_code, (given.stdout, given.stderr)
    assert "256 x 4 MiB + 2 MiB control = 1.0 GiB, but " in given.stdout
    assert group.path.name in given.stdout
    assert f"{LIMIT_MB} MiB - use " in given.stdout
    assert "give at most slots = " in given.stdout
    assert given.stderr == ""

    automatic = inside(group, 10, 0)  # also the 64 slots that the clamp asks for
    assert automatic.returncode == SegmentSpaceError.exit_code, (automatic.stdout, automatic.stderr)
    assert "ring of 64 slots (the least that is taken)" in automatic.stdout

    fits = inside(group, 1, 32)  # so that it was the size that was refused
    assert fits.returncode == 0, (fits.stdout, fits.stderr)
    assert fits.stdout.startswith("32 slots x 1 MiB = 32 MiB, as given")

    assert group.kills() == 0


@pytest.mark.root
def test_a_group_counts_what_it_kills_and_what_cannot_be_dropped(group: MemoryGroup) -> None:
    """So that the assertion above is one."""
    half = f"held = b'x' * {LIMIT_MB << 19}; print(open('/proc/self/cgroup').read()); input()"
    with subprocess.Popen(
        group.inside([sys.executable, "-c", half]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert group.path.name.encode() in b"".join(iter(child.stdout.readline, b"\n"))
        assert LIMIT_MB << 19 < group.held_bytes() <= LIMIT_MB << 20
        child.kill()
    assert (group.peak_bytes() or LIMIT_MB << 20) >= LIMIT_MB << 19
    assert group.kills() == 0
    whole = group.inside([sys.executable, "-c", f"b'x' * {LIMIT_MB << 20}"])
    assert subprocess.run(whole, timeout=LIMIT_S, check=False).returncode == -signal.SIGKILL
    assert group.kills() == 1
