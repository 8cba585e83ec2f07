"""The benchmarks' command lines: what is said comes to what measures, --quick only where nothing is said; the
report as JSON."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smoe_mp.bench import (
    Figure,
    Report,
    control,
    cuda,
    formats,
    hit,
    idle,
    io,
    miss,
    peers,
    prewarm,
    speculate,
    transformers,
    wake,
)
from smoe_mp.bench import open as opening
from smoe_mp.bench.cli import app
from smoe_mp.errors import ConfigError, SmoeError


@pytest.mark.parametrize(
    ("module", "words", "wanted"),
    [
        (transformers, "", {"rounds": 3, "layers": 12, "experts": 64, "skew": 0.9}),
        (transformers, "--quick", {"rounds": 1, "layers": 4, "experts": 32, "skew": 0.9}),
        (transformers, "--quick --rounds 5 --layers 7 --skew 0", {"rounds": 5, "layers": 7, "skew": 0}),
        (speculate, "", {"tokens": 12, "rounds": 12, "shape": speculate.SHAPE}),
        (speculate, "--quick", {"tokens": 6, "rounds": 2, "shape": (64, 256), "dense_bytes": 1 << 20}),
        (speculate, "--quick --tokens 9 --rounds 1", {"tokens": 9, "rounds": 1, "shape": (64, 256)}),
    ],
)
def test_what_is_given_wins_over_quick(
    module: Any, words: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def run(*arguments: Any) -> None:
        seen.append(arguments[-1])
        raise SmoeError

    monkeypatch.setattr(module, "run", run)
    ended = CliRunner().invoke(app, [module.__name__.rpartition(".")[2], *words.split()])
    assert isinstance(ended.exception, SmoeError)
    (settings,) = seen
    found = {**vars(settings.shape), **vars(settings)} if module is transformers else vars(settings)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("module", "words", "wanted"),
    [
        (io, "--sizes 3,9 --workers 2 --quick", {"sizes_mib": (3, 9), "workers": (2,), "quick": True}),
        (io, "--clients 2 --batches 4", {"sizes_mib": (), "asking": io.asked((2,), (4,), python=False)}),
        (
            io,
            "--full",
            {"sizes_mib": io.SIZES_MIB_FULL, "workers": io.WORKERS_FULL, "asking": io.ASKING_FULL},
        ),
        (hit, "--slots 64,4096 --clients 3", {"slots": (64, 4096), "clients": (3,), "quick": False}),
        (hit, "--full", {"slots": hit.SLOTS, "clients": (1, 2, 4)}),
        (miss, "--slots 4096 --hits 0,300 --quick", {"slots": (4096,), "hits": (0, 300), "quick": True}),
        (miss, "--full", {"slots": miss.SLOTS_FULL, "hits": miss.HITS}),
        (wake, "--workers 1,16 --scratch here", {"workers": (1, 16), "scratch": Path("here")}),
        (wake, "--full", {"workers": wake.WORKERS_FULL}),
        (control, "--quick", {"quick": True}),
        (idle, "--workers 3", {"workers": (3,)}),
        (opening, "--formats smoe,gguf", {"formats": ("smoe", "gguf")}),
        (formats, "--workers 5 --scratch here", {"workers": (5,), "scratch": Path("here")}),
        (peers, "--rounds 3 --workers 2", {"rounds": 3, "workers": 2}),
        (cuda, "--quick --rounds 4", {"rounds": 4, "quick": True}),
        (prewarm, "--prompts 30,300 --slots 200", {"prompts": (30, 300), "slots": 200}),
    ],
)
def test_what_is_said_is_what_is_measured(
    module: Any, words: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    signature = inspect.signature(module.run)

    def run(*arguments: Any, **named: Any) -> Report:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        seen.append(bound.arguments)
        bound.arguments["progress"]("half", 1, 2)
        return Report("x", "what it is about", {})

    monkeypatch.setattr(module, "run", run)
    ended = CliRunner().invoke(app, [module.__name__.rpartition(".")[2], *words.split(), "--json"])
    assert ended.exit_code == 0, ended.exception
    assert json.loads(ended.stdout)["bench"] == "x"
    assert {name: seen[0][name] for name in wanted} == wanted


def test_a_report_with_sheets_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = {"the ring": {"rate": Figure("a", "MiB/s", [2.0, 4.0, 3.0])}, "mmap": {}}
    report = Report("idle", "what it is about", {}, sheets={"in 1 [GiB]": sheet}, notes=["a [note]"])
    monkeypatch.setattr(idle, "run", lambda *_, **__: report)
    drawn = CliRunner().invoke(app, ["idle"]).stdout
    for words in (
        "bench idle",
        "what it is about",
        "in 1 [GiB]",
        "the ring",
        "mmap",
        "MiB/s",
        "3",
        "a [note]",
    ):
        assert words in drawn


@pytest.mark.parametrize(
    "words", ["io --sizes 3,x", "hit --slots 7", "miss --hits -1", "prewarm --prompts 0"]
)
def test_numbers_that_are_none_are_refused_by_name(words: str) -> None:
    ended = CliRunner().invoke(app, words.split())
    assert isinstance(ended.exception, ConfigError)
    assert f"{words.split()[1]} {words.split()[2]}" in str(ended.exception)
