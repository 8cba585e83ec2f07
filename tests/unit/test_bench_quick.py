"""What --quick sets where nothing else is said, and that what is said wins."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from smoe_mp.bench import speculate, transformers
from smoe_mp.bench.cli import app
from smoe_mp.errors import SmoeError


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
