"""The models that `bench open` makes are what their format's reader takes for whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from smoe_mp import tables
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
