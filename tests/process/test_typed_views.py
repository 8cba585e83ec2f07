"""Views of every element type through a ring, and what becomes float32."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from checkpoints import E, Made, Part, Recipe, make
from support import serve

import smoe_mp
from smoe_mp.errors import RingError
from smoe_mp.sources import open_source

BLOCK = "block=4x4"
FP8 = Part("mlp.experts.{e}.gate_proj.weight", "gate", "F8_E4M3", (6, 10))
PARTS = (
    FP8,
    Part("mlp.experts.{e}.gate_proj.weight_scale_inv", "gate.weight_scale_inv", "F32", (2, 3), BLOCK),
    Part("mlp.experts.{e}.up_proj.weight", "up", "BF16", (3, 5)),
    Part("mlp.experts.{e}.down_proj.weight", "down", "F16", (5, 3)),
    Part("mlp.experts.{e}.down_proj.bias", "down.bias", "F32", (3,)),
    Part("mlp.experts.{e}.five_two", "five_two", "F8_E5M2", (7,)),
    Part("mlp.experts.{e}.exponents", "exponents", "F8_E8M0", (9,)),
    Part("mlp.experts.{e}.four", "four", "F4", (3, 4)),
    Part("mlp.experts.{e}.new", "new", "F8_NEW", (11,)),
    Part("mlp.experts.{e}.whole", "whole", "I32", (2, 2)),
    Part("mlp.experts.factor", "factor", "F32", ()),
)
TYPES = {
    "gate": ml_dtypes.float8_e4m3fn,
    "gate.weight_scale_inv": np.float32,
    "up": ml_dtypes.bfloat16,
    "down": np.float16,
    "down.bias": np.float32,
    "five_two": ml_dtypes.float8_e5m2,
    "exponents": ml_dtypes.float8_e8m0fnu,
    "whole": np.int32,
    "factor": np.float32,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    config = {"model_type": "olmoe", "num_hidden_layers": 1, "num_experts": E}
    config |= {"quantization_config": {"weight_block_size": [4, 4]}}
    return make(Recipe(config, PARTS, (0,), others=()), tmp_path_factory.mktemp("m") / "m")


@pytest.fixture
def ring(made: Made) -> Iterator[smoe_mp.Ring]:
    with serve(open_source(made.folder), slots=E, workers=1) as served, served.attach() as ring:
        yield ring


def test_every_type_is_seen_as_itself(made: Made, ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, range(E)) as batch:
        for expert in batch:
            for name, (_, shape, _, data) in made.expected[0, expert.expert].items():
                view = expert[name]
                assert isinstance(view, np.ndarray)
                assert view.dtype == TYPES.get(name, np.uint8)
                assert view.shape == (shape if name in TYPES else (len(data),))
                assert view.tobytes() == data
                assert not view.flags.writeable
            assert expert.tensors["gate.weight_scale_inv"].tag == "linear," + BLOCK
            assert expert.tensors["four"].dtype == "F4"


def test_a_view_of_another_package_s_type_holds_its_slot(made: Made, ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [2]) as batch:
        view = batch[0]["up"]
    assert isinstance(view, np.ndarray)
    assert ring.stats()["census"]["held"] == 1
    assert view.tobytes() == made.expected[0, 2]["up"][3]
    del view
    assert ring.stats()["census"]["held"] == 0


def test_floating_point_becomes_float32(made: Made, ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [1]) as batch:
        expert, wanted = batch[0], made.expected[0, 1]
        for name in ("up", "down", "down.bias"):
            _, shape, _, data = wanted[name]
            right = np.frombuffer(data, TYPES[name]).reshape(shape).astype(np.float32)
            got = expert.dequantize(name)
            assert got.dtype == np.float32
            assert got.tobytes() == right.tobytes()


def test_float8_is_multiplied_by_its_blocks_scales(made: Made, ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [3]) as batch:
        got = batch[0].dequantize("gate")
    weights = np.frombuffer(made.expected[0, 3]["gate"][3], TYPES["gate"]).reshape(6, 10)
    scales = np.frombuffer(made.expected[0, 3]["gate.weight_scale_inv"][3], np.float32).reshape(2, 3)
    right = weights.astype(np.float32) * np.kron(scales, np.ones((4, 4), np.float32))[:6, :10]
    assert got.tobytes() == right.astype(np.float32).tobytes()


@pytest.mark.parametrize("name", ["whole", "four", "exponents", "new", "five_two"])
def test_what_cannot_become_float32_says_why(ring: smoe_mp.Ring, name: str) -> None:
    """Whole numbers, packed ones, exponents alone, types not known, float8 without scales."""
    if name == "new":  # may be one of GGUF's types
        pytest.importorskip("smoe_mp.sources.gguf")
    with ring.fetch(0, [0]) as batch, pytest.raises(RingError, match=f"expert 0 of layer 0: '{name}'"):
        batch[0].dequantize(name)
