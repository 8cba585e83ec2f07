"""An expert's tensors as torch tensors: no copy, no warning, right for as long as they can be seen (field
report 55)."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from checkpoints import E, Made, Part, Recipe, make  # noqa: E402
from gguffiles import write_model  # noqa: E402
from support import LIMIT_S, Served, serve  # noqa: E402
from systems import make_vault  # noqa: E402

import smoe_mp  # noqa: E402
import smoe_mp.torch as views  # noqa: E402
from smoe_mp.errors import RingError  # noqa: E402
from smoe_mp.sources import open_source  # noqa: E402

CPU = torch.device("cpu")  # for what is done on another device, where there is no other
PARTS = (
    Part("mlp.experts.{e}.gate_proj.weight", "gate", "F8_E4M3", (6, 10)),
    Part("mlp.experts.{e}.gate_proj.weight_scale_inv", "gate.weight_scale_inv", "F32", (2, 3), "block=4x4"),
    Part("mlp.experts.{e}.up_proj.weight", "up", "BF16", (3, 5)),
    Part("mlp.experts.{e}.down_proj.weight", "down", "F16", (5, 3)),
    Part("mlp.experts.{e}.down_proj.bias", "down.bias", "F32", (3,)),
    Part("mlp.experts.{e}.five_two", "five_two", "F8_E5M2", (7,)),
    Part("mlp.experts.{e}.four", "four", "F4", (3, 4)),
    Part("mlp.experts.{e}.whole", "whole", "I32", (2, 2)),
    Part("mlp.experts.factor", "factor", "F32", ()),
)
TYPES = {
    "gate": torch.float8_e4m3fn,
    "gate.weight_scale_inv": torch.float32,
    "up": torch.bfloat16,
    "down": torch.float16,
    "down.bias": torch.float32,
    "five_two": torch.float8_e5m2,
    "four": torch.uint8,
    "whole": torch.int32,
    "factor": torch.float32,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    config = {"model_type": "olmoe", "num_hidden_layers": 1, "num_experts": E}
    config |= {"quantization_config": {"weight_block_size": [4, 4]}}
    return make(Recipe(config, PARTS, (0,), others=()), tmp_path_factory.mktemp("m") / "m")


@pytest.fixture
def served(made: Made) -> Iterator[Served]:
    with serve(open_source(made.folder), slots=E, workers=1) as served:
        yield served


@pytest.fixture
def ring(served: Served) -> Iterator[smoe_mp.Ring]:
    with served.attach() as ring:
        yield ring


def bytes_of(t: torch.Tensor) -> bytes:
    return t.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_type_is_seen_as_itself_without_a_warning(made: Made, ring: smoe_mp.Ring) -> None:
    with warnings.catch_warnings(), ring.fetch(0, range(E)) as batch:
        warnings.simplefilter("error")
        for expert in batch:
            seen = views.tensors(expert)
            assert set(seen) == set(TYPES)
            for name, (_, shape, _, data) in made.expected[0, expert.expert].items():
                t = seen[name]
                assert t.dtype == TYPES[name], name
                assert tuple(t.shape) == (shape if name != "four" else (len(data),)), name
                assert bytes_of(t) == data, name


def test_a_view_is_the_ring_and_a_copy_is_not(ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [1]) as batch:
        expert = batch[0]
        base = expert.parts[0].ctypes.data - ring._facts.parts(expert._hold().expert_index)[0][0]
        place = base + expert.tensors["up"].offset
        assert views.tensor(expert, "up").data_ptr() == place
        copy = views.tensor(expert, "up", copy=True)
        assert copy.data_ptr() != place
        before = bytes_of(views.tensor(expert, "up"))
        copy.add_(1)
        copy[0] = 7
        assert bytes_of(views.tensor(expert, "up")) == before


def test_a_view_holds_its_slot_for_as_long_as_it_can_be_seen(
    made: Made, served: Served, ring: smoe_mp.Ring
) -> None:
    with ring.fetch(0, [2]) as batch:
        row = views.tensor(batch[0], "up")[1]
    assert served.census()["held"] == 1
    assert bytes_of(row) == made.expected[0, 2]["up"][3][10:20]
    ring.close()
    assert bytes_of(row) == made.expected[0, 2]["up"][3][10:20]
    del row
    assert served.census()["held"] == 0


WRITER = """
import sys, smoe_mp, smoe_mp.torch as views
with smoe_mp.attach(sys.argv[1]) as ring, ring.fetch(0, [0]) as batch:
    t = views.tensor(batch[0], "up")
    print("writes", flush=True)
    exec(sys.argv[2])
    print("wrote", flush=True)
"""


@pytest.mark.parametrize("statement", ["t[0] = 1", "t.add_(1)", "t.view(-1).copy_(t.view(-1) * 2)"])
def test_a_write_hurts_only_the_process_that_writes(
    made: Made, served: Served, ring: smoe_mp.Ring, statement: str
) -> None:
    command = [sys.executable, "-c", WRITER, served.name, statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (-11, "writes\n"), done.stderr
    with ring.fetch(0, [0]) as batch:
        assert bytes_of(views.tensor(batch[0], "up")) == made.expected[0, 0]["up"][3]


@pytest.mark.parametrize("shift", range(1, 16))
def test_what_lies_at_an_odd_place_is_copied(made: Made, ring: smoe_mp.Ring, shift: int) -> None:
    with ring.fetch(0, [0]) as batch:
        expert = batch[0]
        for name, size in (("up", 2), ("down.bias", 16)):
            info = replace(expert.tensors[name], offset=expert.tensors[name].offset + shift)
            t = views.over(expert, info)
            first = expert.tensors[name].offset
            whole = expert._view(first, (info.nbytes + shift,), "|u1")
            assert bytes_of(t) == whole[shift:].tobytes()
            in_place = t.data_ptr() == whole.ctypes.data + shift
            assert in_place == (shift % size == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_the_float32_ones_rounded_once(ring: smoe_mp.Ring, dtype: torch.dtype) -> None:
    with ring.fetch(0, range(E)) as batch:
        for expert in batch:
            for name in ("gate", "up", "down", "down.bias"):
                wanted = torch.from_numpy(expert.dequantize(name)).to(dtype)
                seen = views.dequantize(expert, name, dtype)
                there = views._dequantize_there(expert, expert.tensors[name], dtype, 1, CPU)
                assert torch.equal(torch.nan_to_num(there), torch.nan_to_num(seen))
                assert seen.dtype == dtype
                assert torch.equal(torch.nan_to_num(seen), torch.nan_to_num(wanted)), name


def test_a_tensor_that_is_of_the_type_already_is_no_copy(ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [0]) as batch:
        same = views.dequantize(batch[0], "up", torch.bfloat16)
        assert same.data_ptr() == views.tensor(batch[0], "up").data_ptr()


def test_what_is_no_number_is_refused(ring: smoe_mp.Ring) -> None:
    with ring.fetch(0, [0]) as batch:
        with pytest.raises(RingError, match=r"'four' is F4"):
            views.dequantize(batch[0], "four")
        with pytest.raises(KeyError, match=r"no 'gates': gate, "):
            views.tensor(batch[0], "gates")
        with pytest.raises(ValueError, match=r"dtype torch.int8"):
            views.dequantize(batch[0], "up", torch.int8)
        expert = batch[0]
    with pytest.raises(RingError, match=r"its block has ended"):
        views.tensor(expert, "up")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_types_become_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    types = [{"gate": "Q4_0", "up": "Q8_0", "down": "Q5_0"}]
    sources = [make_vault(tmp_path / "v.smoe"), *write_model(tmp_path / "m.gguf", types)]
    for path in sources:
        with (
            serve(open_source(path), slots=4) as served,
            served.attach() as ring,
            ring.fetch(0, [3]) as batch,
        ):
            for _ in [0]:
                for name in ("gate", "up", "down"):
                    wanted = torch.from_numpy(batch[0].dequantize(name)).to(dtype)
                    for threads in (1, 2):
                        seen = views.dequantize(batch[0], name, dtype, threads=threads)
                        there = views._dequantize_there(batch[0], batch[0].tensors[name], dtype, 1, CPU)
                        assert torch.equal(torch.nan_to_num(there), torch.nan_to_num(seen))
                        assert seen.dtype == dtype
                        assert torch.equal(seen, wanted), (path.suffix, name)
    assert np.isfinite(wanted.float().numpy()).all()
