"""Which tensors of an expert make which parameter, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.nn.functional import linear  # noqa: E402

from smoe_mp.errors import ModelError  # noqa: E402
from smoe_mp.sources.base import Tensor  # noqa: E402
from smoe_mp.transformers.experts import Rows, recipe_for  # noqa: E402

PLAIN = SimpleNamespace(is_concatenated=True, is_transposed=False)
GPT_OSS = SimpleNamespace(is_concatenated=False, is_transposed=True)


def tensors(**tags: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    named = {name.replace("__", "."): value for name, value in tags.items()}
    return {name: Tensor(name, "BF16", shape, 0, 0, 0, tag) for name, (tag, shape) in named.items()}


EACH = tensors(gate=("linear", (6, 8)), up=("linear", (6, 8)), down=("linear", (8, 6)))
FUSED = tensors(gate_up=("linear,concatenated", (12, 8)), down=("linear", (8, 6)))
TURNED = tensors(
    gate_up=("transposed,interleaved", (8, 12)),
    down=("transposed", (6, 8)),
    gate_up__bias=("interleaved", (12,)),
    down__bias=("", (8,)),
)
VAULT = tensors(gate=("", (6, 8)), up=("", (6, 8)), down=("", (8, 6)))


@pytest.mark.parametrize(
    ("module", "parameter", "shape", "of", "wanted"),
    [
        (PLAIN, "gate_up_proj", (12, 8), EACH, ("gate", "up")),
        (PLAIN, "gate_up_proj", (12, 8), VAULT, ("gate", "up")),
        (PLAIN, "gate_up_proj", (12, 8), FUSED, ("gate_up",)),
        (PLAIN, "down_proj", (8, 6), EACH, ("down",)),
        (GPT_OSS, "gate_up_proj", (8, 12), TURNED, ("gate_up",)),
        (GPT_OSS, "gate_up_proj_bias", (12,), TURNED, ("gate_up.bias",)),
        (GPT_OSS, "down_proj_bias", (8,), TURNED, ("down.bias",)),
    ],
)
def test_recipes(
    module: SimpleNamespace,
    parameter: str,
    shape: tuple[int, ...],
    of: dict[str, Tensor],
    wanted: tuple[str, ...],
) -> None:
    assert recipe_for(module, parameter, shape, of) == wanted


SQUARE = tensors(gate_up=("unknown", (8, 8)), down=("transposed", (8, 8)))


@pytest.mark.parametrize(
    ("module", "parameter", "shape", "of", "message"),
    [
        (PLAIN, "gate_up_proj", (8, 8), SQUARE, r"gate_up: the order of its elements is not known"),
        (
            PLAIN,
            "down_proj",
            (8, 8),
            SQUARE,
            r"down is 'transposed', the model's code takes it the other way",
        ),
        (GPT_OSS, "down_proj", (8, 6), EACH, r"down is 'linear'"),
        (PLAIN, "gate_up_proj_bias", (12,), TURNED, r"gate and up in another order"),
        (
            PLAIN,
            "gate_up_proj",
            (12, 9),
            EACH,
            r"gate, up: makes a slice of shape \[12, 8\], .* has \[12, 9\]",
        ),
        (PLAIN, "gate_up_proj_bias", (12,), EACH, r"no such tensor among gate, up, down"),
        (PLAIN, "w13", (12, 8), EACH, r"no such tensor"),
        (
            SimpleNamespace(is_concatenated=False, is_transposed=False),
            "gate_up_proj",
            (12, 8),
            EACH,
            r"gate and up lie apart",
        ),
    ],
)
def test_what_does_not_fit(
    module: SimpleNamespace, parameter: str, shape: tuple[int, ...], of: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        recipe_for(module, parameter, shape, of)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_in_two_places_are_the_weight_as_a_whole(rows: int) -> None:
    gate, up = torch.randn(2, 16, 32).bfloat16()
    x, whole, apart = torch.randn(rows, 32).bfloat16(), torch.cat((gate, up)), Rows((gate, up))
    assert torch.equal(linear(x, apart), linear(x, whole))
    assert torch.equal(torch.matmul(x, apart.t()), torch.matmul(x, whole.t()))
    assert torch.equal(torch.abs(apart), torch.abs(whole))
    assert apart.shape == whole.shape
