"""Frames of `smoe-mp top`, without a terminal."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from smoe_mp.segments import CENSUS
from smoe_mp.top import CELLS, Sample, View, cells, draw, sparkline, wait_of

EMPTY, QUEUED, READING, READY, CONSUMED, FAILED = range(6)
HELD, GUESS = 8, 16


def chars(states: list[int], most: int = 80) -> str:
    return "".join(CELLS[n][0] for n in cells(np.array(states, np.uint8), most))


def sample(time: float = 1.0, **counters: int) -> Sample:
    names = ("hits", "joins", "promoted", "misses", "wait_ns", "device_bytes", "wanted_bytes", "reads")
    participants = [
        {"id": 32, "number": 0, "role": "worker", "pid": 7, "alive": True, "label": "", "reserved": 0,
         "current_slot": 2, "reading_s": 1.5},
        {"id": 33, "number": 1, "role": "worker", "pid": 8, "alive": True, "label": "", "reserved": 0,
         "current_slot": None, "reading_s": None},
        {"id": 0, "number": 0, "role": "client", "pid": 9, "alive": True, "label": "an [odd] label",
         "reserved": 3, "current_slot": None, "reading_s": None},
    ]  # fmt: skip
    states = np.array([EMPTY, QUEUED, READING, READY, CONSUMED, FAILED] * 50, np.uint8)
    figures = {**dict.fromkeys(names, 0), **counters}
    return Sample(time, "live", states, figures, (3, 1), participants, (2, 5, 10), {0: (4, 17)})


def test_a_cell_a_slot_where_there_is_room() -> None:
    states = [EMPTY, QUEUED, READING, READY, CONSUMED, FAILED]
    assert chars(states) == ".qro-x"
    assert chars([READY | HELD, CONSUMED | HELD, QUEUED | HELD, QUEUED | GUESS, READING | GUESS]) == "@@qgg"


def test_a_cell_of_many_slots_shows_the_most_telling() -> None:
    assert chars([EMPTY, CONSUMED, READY, READING, EMPTY, EMPTY, FAILED, EMPTY], 4) == "-r.x"
    assert len(chars([EMPTY] * 65_535, 640)) <= 640


def test_states_are_those_of_the_ring() -> None:
    assert CENSUS[:6] == ("empty", "queued", "reading", "ready", "consumed", "failed")


def test_a_sparkline_is_scaled_to_its_largest() -> None:
    assert sparkline([None, 0.0, 1.0, 2.0]) == " ▁▅█" or sparkline([None, 0.0, 1.0, 2.0]) == " ▁▄█"
    assert sparkline([None, 0.0], ascii_only=True) == " ."
    assert sparkline([]) == ""
    assert sparkline([5.0, 5.0], ascii_only=True) == "@@"


def test_the_wait_is_told_per_token() -> None:
    before, now = sample(), sample(hits=60, misses=20, wait_ns=4_000_000)
    assert wait_of(now, before, 40) == pytest.approx(2000)  # 80 experts are 2 tokens, 4 ms
    assert wait_of(now, before, 0) == pytest.approx(50)
    assert wait_of(now, now, 40) is None


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("colour", [True, False])
def test_a_frame_fits_80_columns_and_says_all(ascii_only: bool, colour: bool) -> None:
    view = View("demo", 9 << 20, 40)
    view.waits.extend([None, 10.0, 2500.0])
    now = sample(3.0, hits=30, misses=10, device_bytes=4_000_000_000, wanted_bytes=4_000_000_000, reads=10)
    console = Console(width=80, color_system="standard" if colour else None, force_terminal=colour)
    with console.capture() as capture:
        console.print(draw(view, now, sample(), ascii_only=ascii_only))
    shown = capture.get()
    if ascii_only and not colour:
        assert shown.isascii()
    if not colour:
        assert max(map(len, shown.splitlines())) <= 80
    for said in (
        "2.000 GB/s", "demand 3, speculative 1", "75.0% resident", "25.0% missed", "2.50 ms", "4:17 1.5s",
        "5 of 10", "an [odd] label", "3 slots", "300 slots of 9 MiB",
    ):  # fmt: skip
        assert said in shown


def test_65535_slots_and_127_workers_still_fit_a_screen() -> None:
    now = sample()
    many = [{**now.participants[0], "number": n} for n in range(127)]
    big = Sample(1.0, "live", np.zeros(65_535, np.uint8), now.counters, (0, 0), many, (0, 0, 0), {})
    text = draw(View("demo", 1 << 20, 0), big, big)
    assert len(text.plain.splitlines()) <= 32
    assert max(map(len, text.plain.splitlines())) <= 80
