"""Every family on streamed experts against the resident model with the same kernel: equal to the bit.

The resident model's experts are cloned: from transformers' own layout they are mapped at the file's odd
offsets, and a product of a row in float32 depends on the address modulo 16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tinymodels  # noqa: E402

import smoe_mp.transformers  # noqa: E402

NEW_TOKENS = 4


def resident(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data = parameter.data.clone()
    return model


def prompt(rows: int = 2, length: int = 9, seed: int = 1) -> Any:
    return torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def assert_alike(streamed: Any, reference: Any) -> None:
    """Logits of a prompt, greedy tokens, and the logits of those."""
    ids = prompt()
    assert torch.equal(streamed(ids).logits, reference(ids).logits)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    wanted = reference.generate(ids, **settings)
    assert torch.equal(streamed.generate(ids, **settings), wanted)
    assert torch.equal(streamed(wanted).logits, reference(wanted).logits)


def test_every_supported_family_is_tested_here() -> None:
    assert set(tinymodels.FAMILIES) == set(smoe_mp.transformers.MODEL_TYPES)


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [("bfloat16", False), ("bfloat16", True), ("float32", False), ("float32", True)],
    ids=["bf16", "bf16 fused", "f32", "f32 fused"],
)
@pytest.mark.parametrize("family", tinymodels.FAMILIES)
def test_logits_and_tokens_are_those_of_the_resident_model(
    family: str, dtype: str, fused: bool, tmp_path: Path, streamed: Callable[..., Any]
) -> None:
    path = tinymodels.write(family, tmp_path / "model", getattr(torch, dtype), fused=fused)
    model, reference = streamed(path), resident(path)
    assert type(model).__name__ == type(reference).__name__
    assert isinstance(model, type(reference))
    assert model.dtype == reference.dtype
    # Of the experts there is nothing: what is there beside them is all that the model has.
    dense = sum(p.numel() for name, p in reference.named_parameters() if ".experts." not in name)
    assert sum(p.numel() for p in model.parameters()) == dense
    assert_alike(model, reference)


@pytest.mark.parametrize("family", tinymodels.FAMILIES)
def test_looking_ahead_changes_no_token(family: str, tmp_path: Path, streamed: Callable[..., Any]) -> None:
    """Routers differ in what they take and give; each is asked ahead of time by its own way."""
    path = tinymodels.write(family, tmp_path / "model", torch.bfloat16)
    model, reference = streamed(path, look_ahead=2), resident(path)
    ring, told = smoe_mp.transformers.ring_of(model), []
    speculate = ring.speculate
    ring.speculate = lambda layer, experts: told.append(layer) or speculate(layer, experts)
    assert_alike(model, reference)
    assert set(told) == set(sorted(model._smoe_layers)[1:])
