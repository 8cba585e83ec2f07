"""The short form of `bench dequant`: that it runs and adds up; never how fast anything was."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from smoe_mp.bench import dequant
from smoe_mp.bench.cli import app
from smoe_mp.errors import ConfigError

SIDES = ("float32, new arrays", "float32", "float16", "bfloat16")


def test_report() -> None:
    steps: list[tuple[float, float]] = []
    report = dequant.run(
        lambda _, done, total: steps.append((done, total)), quick=True, types=("MXFP4", "SMOE_Q4")
    )
    titles = {"MXFP4": "gguf-py", "MXFP4, scales apart": "gguf-py", "SMOE_Q4": "smoe_mp.quant"}
    wanted = [f"{t}, {side}" for t, by in titles.items() for side in (by, *SIDES, "blocks to float32")]
    assert [f.name for f in report.figures] == wanted
    assert [s.name for s in report.shares] == [
        f"{t}: {by} / {side}" for t, by in titles.items() for side in SIDES
    ]
    assert all(len(f.values) == report.settings["rounds"] and min(f.values) > 0 for f in report.figures)
    judged = [s.name for s in report.shares if s.goal]
    assert judged == ["MXFP4: gguf-py / float32", "MXFP4, scales apart: gguf-py / float32"]
    assert [done for done, _ in steps] == list(range(1, 16))
    assert {total for _, total in steps} == {15}


def test_bytes_a_second_are_those_of_the_blocks() -> None:
    report = dequant.run(lambda *_: None, quick=True, types=("Q8_0",))
    by_name = {f.name: f.values for f in report.figures}
    for ms, speed in zip(by_name["Q8_0, float32"], by_name["Q8_0, blocks to float32"], strict=True):
        assert speed * ms == pytest.approx(3 * 2048 * 768 * 34 / 32 / 1e6)


def test_command() -> None:
    ran = CliRunner().invoke(app, ["dequant", "--quick", "--types", "Q8_0", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["bench"] == "dequant"


def test_unknown_type() -> None:
    with pytest.raises(ConfigError, match=r"'Q9' is none of Q4_0, .*SMOE_Q2, BF16, F16"):
        dequant.run(lambda *_: None, types=("Q9",))
