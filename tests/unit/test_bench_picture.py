"""Reports as pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from smoe_mp.bench import Figure, Report, Share, picture
from smoe_mp.bench.cli import app
from smoe_mp.bench.stats import Goal
from smoe_mp.errors import SmoeError

PNG = b"\x89PNG\r\n\x1a\n"


def report() -> Report:
    goal = Goal("at most", 5.0)
    made = Report("some", "what is measured", {})
    made.figures = [
        Figure("quick", "ns", [1.0, 1.2, 1.1], goal),
        Figure("slow", "ns", [100.0, 130.0, 90.0]),
        Figure("rate", "GB/s", [0.0, 2.0]),
    ]
    made.shares = [Share("quick / slow", [1.0, 1.2, 1.1], [100.0, 130.0, 90.0], goal)]
    return made


def test_a_panel_for_each_unit_and_the_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    drawn = []
    monkeypatch.setattr("smoe_mp.plots.save", lambda figure, path: drawn.append(figure))
    picture.draw(report(), tmp_path / "x.png")
    ns, rate, ratios = drawn[0].axes
    assert [t.get_text() for t in ns.get_yticklabels()] == ["quick", "slow"]
    assert (ns.get_xscale(), rate.get_xscale(), ratios.get_xscale()) == ("log", "linear", "log")
    assert ns.get_xlabel() == "ns: rounds, median, interval, goal"
    assert rate.get_xlabel() == "GB/s: rounds, median, interval"
    assert [t.get_text() for t in ratios.get_yticklabels()] == ["quick / slow"]
    dots = next(line for line in ns.lines if list(line.get_xdata()) == [1.0, 1.2, 1.1])
    assert set(dots.get_ydata()) == {0}


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    for made in (report(), Report("empty", "nothing", {})):
        picture.draw(made, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes()[:8] == PNG
    with pytest.raises(SmoeError, match="the picture cannot be written"):
        picture.draw(report(), tmp_path / "x.nothing")


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    done = CliRunner().invoke(app, ["idle", "--plot", str(tmp_path / "none" / "x.png")])
    assert isinstance(done.exception, SmoeError)
    assert f"there is no folder {tmp_path}/none" in str(done.exception)


def test_every_benchmark_can_be_drawn() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        assert "plot" in command.callback.__annotations__, command.name
