"""What `bench speculate` makes of its readings; the readings themselves are in tests/process."""

from __future__ import annotations

from pathlib import Path

import pytest

from smoe_mp.bench import Figure, Report
from smoe_mp.bench.speculate import _Found, expert_bytes, plot, split, words
from smoe_mp.bench.stats import Ratio


def found(wait: list[float], late: list[float], compute: list[float]) -> _Found:
    n = len(wait)
    return _Found(
        token=[sum(pair) for pair in zip(wait, compute, strict=True)],
        compute=compute,
        wait=wait,
        telling=[0.5] * n,
        hits=[50.0] * n,
        late=late,
        wasted=[7.0] * n,
    )


def test_a_slow_down_is_split_without_a_rest() -> None:
    base = found([40.0, 44.0], [20.0, 22.0], [10.0, 11.0])
    guessed = found([30.0, 66.0], [10.0, 22.0], [12.0, 10.0])
    assert split(base, guessed) == {
        "compute": [2.0, -1.0],
        "wait": [-10.0, 22.0],
        "wait, number": [-20.0, 0.0],  # half as many at 2 ms; as many as before
        "wait, length": [10.0, 22.0],  # 3 ms each; likewise
        "telling": [0.0, 0.0],
    }


def test_nothing_to_wait_for_without_guesses() -> None:
    change = split(found([0.0], [0.0], [1.0]), found([3.0], [2.0], [1.0]))
    assert (change["wait, number"], change["wait, length"]) == ([0.0], [3.0])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.8, 0.95, ": it pays."),
        (1.1, 1.4, ": it does not pay."),
        (0.9, 1.1, ": whether it pays cannot be told."),
    ],
)
def test_the_verdict_is_the_whole_intervals(low: float, high: float, verdict: str) -> None:
    base, guessed = found([40.0], [20.0], [10.0]), found([30.0], [10.0], [12.0])
    said = words(Ratio(3, 1.0, low, high), base, guessed, split(base, guessed))
    assert verdict in said
    for part in ("Compute +2.00 ms", "waits -10.00 ms", "number -20.00", "guesses, +10.00", "7.0 MB a token"):
        assert part in said


def test_sizes_of_experts() -> None:
    """Of Qwen3-30B-A3B: 4,718,592 weights, a float16 scale for each 64."""
    assert expert_bytes((768, 2048), 4) == 4718592 // 2 + 4718592 // 64 * 2
    assert expert_bytes((768, 2048), 2) == 4718592 // 4 + 4718592 // 64 * 2
    assert expert_bytes((64, 256), 2) == 16384


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    columns = {c: Figure(c, "ms", [1.0, 2.0]) for c in ("token", "compute", "wait")}
    report = Report("speculate", "", {}, sheets={f"Q{n}": {"none": columns, "4": columns} for n in (4, 2)})
    plot(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
