"""Short forms of `bench speculate` and `bench prewarm`: that they run and add up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import SHM
from typer.testing import CliRunner

from smoe_mp import models
from smoe_mp.bench import prewarm, speculate
from smoe_mp.bench.cli import app
from smoe_mp.errors import ConfigError

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")

SMALL: dict[str, Any] = {"tokens": 5, "ring": 10, "shape": (64, 256), "dense_bytes": 1 << 18}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert [p.name for p in SHM.glob(f"smoe.bench-{os.getpid()}-*")] == []


def quiet(what: str, done: float, total: float) -> None:
    assert 0 <= done <= total


def command(*words: str) -> dict[str, Any]:
    """What `smoe-mp bench` prints as JSON."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    plain: dict[str, Any] = json.loads(done.stdout)
    return plain


def test_the_speculate_command(disk: Path) -> None:
    words = ("--quick", "--guesses", "2", "--bits", "2", "--ring", "10", "--scratch", str(disk))
    plain = command("speculate", str(models.TINY / "traces" / "tests.trace"), *words)
    assert (plain["bench"], plain["settings"]["bits"], plain["settings"]["rounds"]) == ("speculate", [2], 2)
    assert [share["name"] for share in plain["ratios"]] == ["Q2: token, 2 of the ranks behind / no guesses"]
    at_best = {row["n"]: row["coverage"] for row in plain["coverage_at_best"]}
    assert set(at_best) == {0, 2}
    assert all(0 < share < 1 for share in at_best.values())


def test_speculate(disk: Path) -> None:
    trace = models.TINY / "traces" / "headers.trace"
    settings = speculate.Settings(rounds=2, **SMALL)
    report = speculate.run(quiet, disk / "scratch", trace, settings)
    assert report.settings["slots"] == 51
    sides = ["no guesses", "4 of the ranks behind", "8 of the ranks behind"]
    assert [list(rows) for rows in report.sheets.values()] == [sides, sides]
    values = {f.name: f.values for f in report.figures}
    assert all(len(found) == 2 for found in values.values())
    for bits in ("Q4", "Q2"):
        for side in sides[1:]:
            more = {name: values[f"{bits}, {side}: more of {name}"] for name in ("wait", "compute")}
            parts = [values[f"{bits}, {side}: more of wait, {part}"] for part in ("number", "length")]
            assert [sum(pair) for pair in zip(*parts, strict=True)] == pytest.approx(more["wait"])
            with_guesses, without = (values[f"{bits}, {s}: compute"] for s in (side, sides[0]))
            assert [a - b for a, b in zip(with_guesses, without, strict=True)] == more["compute"]
        assert any(note.startswith(f"{bits}, no guesses: 0 guesses were read") for note in report.notes)
        assert values[f"{bits}, no guesses: read in vain"] == pytest.approx([0, 0])
        assert min(values[f"{bits}, {sides[2]}: read in vain"]) > 0
    assert [s.name for s in report.shares] == [
        f"{bits}: token, {side} / no guesses" for bits in ("Q4", "Q2") for side in sides[1:]
    ]


def test_speculate_looking_ahead(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "TEXT_BYTES", 30)
    settings = speculate.Settings(bits=(2,), rounds=1, guesses=(0,), told=("first", "last"), **SMALL)
    report = speculate.run(quiet, disk / "scratch", None, settings)
    (rows,) = report.sheets.values()
    ahead = [f"{n} by looking ahead{when}" for n in (4, 6, 8) for when in ("", ", told at the last")]
    assert list(rows) == ["no guesses", *ahead]
    named = {(row["way"], row["n"]): row["of_demands"] for row in report.extra["named"]}
    assert named["ahead", 4] < named["ahead", 6] < named["ahead", 8] < 1
    assert named["behind", 4] < named["last", 4] < named["ahead", 4] < named["late", 4]


def test_speculate_refuses(disk: Path, tmp_path: Path) -> None:
    def run(path: Path, **more: Any) -> None:
        speculate.run(quiet, disk, path, speculate.Settings(**more))

    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"tok": 0, "layers": [[1, 2], [3, 4]]}\n')
    with pytest.raises(ConfigError, match="records no ranks"):
        run(bare)
    trace = models.TINY / "traces" / "headers.trace"
    with pytest.raises(ConfigError, match="--bits 3"):
        run(trace, bits=(3,))
    with pytest.raises(ConfigError, match="--told soon: wanted is first or last"):
        run(trace, told=("soon",))
    with pytest.raises(ConfigError, match="--guesses 9: 8 ranks are known"):
        run(trace, guesses=(0, 9))
    with pytest.raises(ConfigError, match="2000 tokens with ranks"):
        run(trace, tokens=3000, shape=(64, 256))


def test_prewarm(runtime_dir: Path) -> None:
    """Counts only, which are the same wherever this runs: the model and the prompts come along."""
    plain = command("prewarm", "--quick", "--rounds", "1")
    figures = {f["name"]: f["rounds"] for f in plain["figures"]}
    assert len(figures) == len(prewarm.SIDES) * 5

    def of(side: str, column: str) -> float:
        (value,) = figures[f"prompts of 8 bytes: {side}, {column}"]
        return float(value)

    reads = {side: of(side, "reads, first token") for side in prewarm.SIDES}
    assert 0 < reads["popularity"] < reads["none"]
    assert 0 < reads["table order"] < reads["none"]
    for side, n in reads.items():  # an empty ring reads all that the prompt wants
        assert of(side, "hits, first token") == pytest.approx(100 * (1 - n / reads["none"]))
        assert of(side, "reads, turn") >= n
    loaded = [note for note in plain["notes"] if " experts were loaded before the turn" in note]
    assert [note.split(": ")[2].split()[0] for note in loaded] == ["128", "128", "0"]


def test_prewarm_wants_room() -> None:
    with pytest.raises(ConfigError, match="too small for prewarming"):
        prewarm.run(quiet, quick=True, rounds=1, slots=128)
