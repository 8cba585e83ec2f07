"""4 clients x 16 workers x a ring of the least size, random batches, and every byte looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import support
from support import serve, stamped_source


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "rounds"), [(3, 250), (4, 500), (9, 500)])
def test_no_foreign_byte_and_no_deadlock(tmp_path: Path, slots: int, rounds: int) -> None:
    """Field report 40.  Batches are of 1 to 3 experts, so 3 slots are the least that can serve one."""
    source = stamped_source(tmp_path / "source", layers=3, experts=12, tags=True)
    expected = source.save(tmp_path / "expected.json")
    with serve(source, slots=slots, workers=16) as served:
        clients = [
            subprocess.Popen(
                [
                    sys.executable,
                    support.__file__,
                    "stress",
                    served.name,
                    str(expected),
                    str(rounds),
                    str(seed),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for seed in range(4)
        ]
        try:
            for c in clients:
                assert c.stdout is not None
                assert c.stdout.readline() == b"there\n"
            for c in clients:
                assert c.stdin is not None
                c.stdin.close()  # all begin together
            assert [c.wait() for c in clients] == [0, 0, 0, 0]
        finally:
            for c in clients:
                c.kill()
                c.wait()
        counters = served.counters()
        assert counters["evictions"] > rounds
        assert counters["failed_reads"] == counters["timeouts"] == counters["read_errors"] == 0
        # A guess that nobody wants may lose its slot to a demand before it is read; a demand may not.
        asked = counters["misses"] + counters["promoted"]
        assert asked <= counters["reads"]
        # A call that a signal interrupted counts nothing; asked again, it finds its own reads and joins them.
        assert counters["reads"] <= counters["misses"] + counters["joins"] + counters["guesses"]
        served.assert_quiet()
        assert served.segments.recover()["clients"] == 0


def test_a_foreign_byte_would_be_seen(tmp_path: Path) -> None:
    """The check of the check: at one address of a slot no two experts have the same byte."""
    pages = [support.tagged(tag, 0, support.PAGE) for tag in range(256)]
    for at in (0, 1, 777, 4095):
        assert len({int(page[at]) for page in pages}) == 256
    source = stamped_source(tmp_path / "s", layers=1, experts=3, tags=True)
    expected = support.load_expected(source.save(tmp_path / "expected.json"))
    assert [[p.tobytes() for p in expected[0, e]] for e in range(3)] == [source.expected(e) for e in range(3)]
