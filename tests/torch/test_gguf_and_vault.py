"""Models out of GGUF files and vaults, against what transformers makes of the same weights."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

import tinymodels  # noqa: E402
from ggufmodels import add_tokenizer  # noqa: E402
from support import serve  # noqa: E402
from test_families import assert_alike, resident  # noqa: E402
from trained import VAULT, write_trained  # noqa: E402

import smoe_mp.transformers  # noqa: E402
from smoe_mp.bench.randommoe import write_gguf  # noqa: E402
from smoe_mp.errors import ModelError, VaultError  # noqa: E402
from smoe_mp.pack import pack  # noqa: E402
from smoe_mp.sources import open_source  # noqa: E402

Load = Callable[..., Any]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 96}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "dense"), [("Q8_0", "Q8_0"), ("Q4_0", "F16"), ("F32", "F32")])
def test_a_gguf_file_is_the_model_that_transformers_makes_of_it(
    tmp_path: Path, streamed: Load, experts: str, dense: str, dtype: torch.dtype
) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        tinymodels.build("qwen3_moe", torch.float32, **WIDE),
        experts=experts,
        dense=dense,
        tokenizer=add_tokenizer,
    )
    model = streamed(path, dtype=dtype)
    assert model.config.moe_intermediate_size == 96
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        config=model.config,
        dtype=dtype,
        experts_implementation="eager",
    )
    assert_alike(model, reference)


def test_a_gguf_file_has_its_tokenizer(tmp_path: Path) -> None:
    model = tinymodels.build("qwen3_moe", torch.float32, **WIDE)
    path = write_gguf(tmp_path / "model.gguf", model, experts="Q8_0", dense="F32", tokenizer=add_tokenizer)
    tokenizer = smoe_mp.transformers.load_tokenizer(path)
    ids = tokenizer("cabbage").input_ids
    assert tokenizer.decode(ids) == "cabbage"
    assert 40 in ids  # "ab", by the merge that the file has


def test_a_gguf_architecture_that_was_not_tested_is_named(tmp_path: Path) -> None:
    from gguffiles import write_model  # noqa: PLC0415

    path = write_model(tmp_path / "model.gguf", arch="deepseek2")[0]
    with pytest.raises(ModelError, match=r"architecture 'deepseek2' is not one of .*: qwen2moe, qwen3moe"):
        smoe_mp.transformers.load(path, ring="none")


# --- vaults ------------------------------------------------------------------------------------------------


def write_vault(folder: Path, dtype: Any, *, raw: bool = False) -> tuple[Path, Any]:
    """A packed model, with its scout file; and the model itself."""
    checkpoint = tinymodels.write("qwen3_moe", folder / "checkpoint", dtype)
    pack(checkpoint, folder / "model.smoe", raw=raw)
    return folder / "model.smoe", resident(checkpoint)


def decoded(model: Any, path: Path) -> Any:
    """The model with the vault's experts in the place of its own."""
    with serve(open_source(path), slots=8) as served, served.attach() as ring, torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for expert in ring.as_ready(number, range(model.config.num_experts)):
                gate, up, down = (torch.from_numpy(expert.dequantize(x)) for x in ("gate", "up", "down"))
                layer.mlp.experts.gate_up_proj[expert.expert] = torch.cat((gate, up))
                layer.mlp.experts.down_proj[expert.expert] = down
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_vault_with_its_scout_file(
    tmp_path: Path, streamed: Load, dtype: torch.dtype, threads: int
) -> None:
    path, original = write_vault(tmp_path, dtype)
    model = streamed(path, threads=threads)
    assert model.dtype == dtype
    assert_alike(model, decoded(original, path))


#: Text of the kind that the small model was trained on, and that it has not seen.
PYTHON = b"""\
def sum_of_squares(numbers):
    \"\"\"Return the sum of the squares of a list of numbers.\"\"\"
    total = 0
    for number in numbers:
        total += number * number
    return total


class TestSumOfSquares(unittest.TestCase):
    def test_"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [0, 4])
def test_the_trained_model_on_real_text(
    trained: Path, streamed: Load, dtype: torch.dtype, ranks: int
) -> None:
    """The prompt wants more experts of each layer than the ring has slots."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        trained, dtype=dtype, experts_implementation="eager"
    )
    for parameter in reference.parameters():
        parameter.data = parameter.data.clone()  # float32 from the file's own places need not be aligned
    model = streamed(VAULT, slots=40, speculation_ranks=ranks, dtype=dtype)
    ids, rows = torch.tensor([[0, *PYTHON]]), torch.tensor([[0, *PYTHON[:100]], [0, *PYTHON[-100:]]])
    with torch.no_grad():
        wanted = reference(ids).logits
        assert torch.equal(model(ids).logits, wanted)
        assert torch.equal(model(rows).logits, reference(rows).logits)
    likeliest = wanted[0, :-1].argmax(-1)
    assert (likeliest == ids[0, 1:]).float().mean() > 0.7  # it has learned something
    settings = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), reference.generate(ids, **settings))
    ring = smoe_mp.transformers.ring_of(model)
    assert (ring.stats()["guesses"] > 0) == (ranks > 0)


def test_a_vault_of_unchanged_weights(tmp_path: Path, streamed: Load) -> None:
    path, original = write_vault(tmp_path, torch.bfloat16, raw=True)
    with pytest.raises(ModelError, match=r"no config.json beside it, and it has no arch block: give config="):
        smoe_mp.transformers.load(path, ring="none")
    assert_alike(streamed(path, config=original.config), original)


def test_a_configuration_beside_a_vault_or_given(tmp_path: Path, streamed: Load) -> None:
    path, original = write_vault(tmp_path, torch.bfloat16)
    reference = decoded(original, path)
    assert_alike(streamed(path, config=original.config), reference)
    assert_alike(streamed(path, config=original.config.to_dict()), reference)
    assert_alike(streamed(path, config=str(tmp_path / "checkpoint")), reference)
    shutil.copy(tmp_path / "checkpoint/config.json", tmp_path)
    assert_alike(streamed(path), reference)


def test_an_arch_block_of_another_family_is_not_enough(tmp_path: Path) -> None:
    checkpoint = tinymodels.write("olmoe", tmp_path / "checkpoint", torch.bfloat16)
    pack(checkpoint, tmp_path / "model.smoe")
    with pytest.raises(ModelError, match=r"'olmoe'\) is enough for qwen3_moe only: give config="):
        smoe_mp.transformers.load(tmp_path / "model.smoe", ring="none")


def test_a_vault_without_its_scout_file(tmp_path: Path) -> None:
    path, _ = write_vault(tmp_path, torch.bfloat16)
    (tmp_path / "model.scout.safetensors").unlink()
    with pytest.raises(VaultError, match=r"no model.scout.safetensors beside it"):
        smoe_mp.transformers.load(path, ring="none")


def test_the_originals_vault_lacks_weights(tmp_path: Path, shared: Path) -> None:
    """The original's example has few of the dense weights: what is missing is not made up."""
    path = Path(shutil.copy(shared / "vaults/qwen3-tiny.q4.smoe", tmp_path))
    shutil.copy(shared / "vaults/qwen3-tiny.scout.safetensors", tmp_path / "qwen3-tiny.q4.scout.safetensors")
    with serve(open_source(path), slots=8) as served:
        with pytest.raises(
            VaultError, match=r"no model.layers.0.input_layernorm.weight .* nor \d+ more weights"
        ):
            smoe_mp.transformers.load(path, ring=served.name)
        gc.collect()
