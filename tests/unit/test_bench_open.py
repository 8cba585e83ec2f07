"""The models that `bench open` makes are what their format's reader takes for whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from smoe_mp import tables
from smoe_mp.bench import open as opening
from smoe_mp.bench.open import BUILDERS, run
from smoe_mp.errors import ConfigError
from smoe_mp.sources import open_source


@pytest.mark.parametrize("name", BUILDERS)
def test_models_open(name: str, tmp_path: Path) -> None:
    source = open_source(BUILDERS[name](tmp_path, 3, 5))
    assert [(x.layer, x.expert) for x in source.experts] == [(n, e) for n in range(3) for e in range(5)]


@pytest.mark.parametrize("name", BUILDERS)
def test_an_index_of_94_x_128_experts_takes_less_than_100_mb(name: str, tmp_path: Path) -> None:
    path = BUILDERS[name](tmp_path, 94, 128)
    tracemalloc.start()
    try:
        tables.build(open_source(path))
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_format_that_is_none() -> None:
    with pytest.raises(ConfigError, match="tar"):
        run(lambda *_: None, formats=("tar",))


@pytest.mark.parametrize("name", BUILDERS)
def test_a_model_is_measured_in_processes_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "GRIDS", ((2, 3),))
    monkeypatch.setattr(opening, "QUICK_ROUNDS", 2)
    report = run(lambda *_: None, quick=True, formats=(name,))
    assert [f.name for f in report.figures] == [
        f"{name}, 2 x 3: {what}" for what in ("open and plan", "of it, plans", "memory")
    ]
    whole, plans, _ = (f.values for f in report.figures)
    assert len(whole) == 2
    assert all(0 < part < both for part, both in zip(plans, whole, strict=True))
