"""Experts of safetensors checkpoints: every family's naming, and what is refused.

Field reports 8 (stacks or one by one), 9 (layout is never told from shapes), 10 (what goes with the weights).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import RECIPES, E, F, H, Made, Part, Recipe, each, make, stacks, write_folder
from safetensors import safe_open

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import Source
from smoe_mp.sources.safetensors import open_safetensors

QWEN = RECIPES["qwen3_moe"]


def check(source: Source, made: Made) -> None:
    """Names, types, shapes, tags and bytes are those that were written; nothing is there beside them."""
    assert [(x.layer, x.expert) for x in source.experts] == sorted(made.expected)
    for x in source.experts:
        wanted = made.expected[x.layer, x.expert]
        tensors = source.layouts[x.layout]
        assert {t.name for t in tensors} == set(wanted)
        for t in tensors:
            extent = x.extents[t.part]
            with source.files[extent.file].path.open("rb") as file:
                file.seek(extent.offset + t.offset)
                data = file.read(t.nbytes)
            assert t.offset + t.nbytes <= extent.length
            assert (t.dtype, t.shape, t.tag, data) == wanted[t.name], (x, t)


def refused(made: Made, *words: str) -> str:
    with pytest.raises(VaultError) as caught:
        open_safetensors(made.folder)
    message = str(caught.value)
    for word in (str(made.folder), *words):
        assert word in message, message
    return message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_every_family_s_names(tmp_path: Path, name: str, shards: int) -> None:
    made = make(RECIPES[name], tmp_path / "m", shards=shards)
    source = open_safetensors(made.folder)
    check(source, made)
    assert (source.model.d_model, source.model.ffn_dim, source.model.top_k) == (H, F, 2)
    assert source.model.extra["experts_per_layer"] == E


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model.", "a.b.c.d."])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss mxfp4", "gemma4", "granitemoe"])
def test_any_prefix(tmp_path: Path, name: str, prefix: str) -> None:
    made = make(RECIPES[name], tmp_path / "m", prefix=prefix)
    check(open_safetensors(made.folder), made)


@pytest.mark.parametrize("name", RECIPES)
def test_field_report_8_one_tensor_less_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """Of each kind of tensor one: a matrix, a scale, a bias, a row of a vector."""
    recipe = RECIPES[name]
    for number, part in enumerate(recipe.parts):
        gone = f"layers.{recipe.moe_layers[-1]}." + part.stored.format(e=2)
        made = make(recipe, tmp_path / str(number), drop=[gone])
        refused(made, repr(recipe.prefix + gone), "missing")


def test_all_experts_gone_is_refused_with_the_first_name(tmp_path: Path) -> None:
    every = [f"layers.{n}." + p.stored.format(e=e) for n in (0, 2) for p in QWEN.parts for e in range(E)]
    made = make(QWEN, tmp_path / "m", drop=every)
    refused(made, "'model.layers.0.mlp.experts.0.gate_proj.weight' is missing", "2 layers of 4 experts")


def test_a_whole_layer_gone_is_refused(tmp_path: Path) -> None:
    every = [f"layers.2.{p.stored.format(e=e)}" for p in QWEN.parts for e in range(E)]
    refused(make(QWEN, tmp_path / "m", drop=every), "'model.layers.2.mlp.experts.0.gate_proj.weight'")


def test_one_expert_gone_is_refused(tmp_path: Path) -> None:
    every = [f"layers.0.{p.stored.format(e=3)}" for p in QWEN.parts]
    message = refused(
        make(QWEN, tmp_path / "m", drop=every), "'model.layers.0.mlp.experts.3.gate_proj.weight'"
    )
    assert "tensors of 7 experts are there" in message


@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers"])
@pytest.mark.parametrize("change", [-1, 1])
def test_numbers_of_config_json_are_held_against_the_tensors(tmp_path: Path, key: str, change: int) -> None:
    recipe = Recipe(
        QWEN.config | {key: QWEN.config[key] + change, "mlp_only_layers": [1]}, QWEN.parts, (0, 2)
    )
    made = make(recipe, tmp_path / "m")
    if (key, change) == ("num_hidden_layers", -1):
        # The last layer is then one that only drafts, as some models have it behind the others.
        source = open_safetensors(made.folder)
        assert {x.layer for x in source.experts} == {0}
        assert source.model.extra["draft_tensors_left_out"] == 3 * E
        return
    refused(made, "config.json")


def test_field_report_8_draft_layers_and_shared_experts_are_not_counted(tmp_path: Path) -> None:
    recipe = RECIPES["deepseek_v3"]
    made = make(recipe, tmp_path / "a", draft=["model.layers.3.", "mtp.layers.0."])
    source = open_safetensors(made.folder)
    check(source, made)
    assert source.model.extra["draft_tensors_left_out"] == 6 * E


def test_two_models_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m", draft=["talker.model.layers.0."])
    refused(made, "'talker.model.'", "'model.'", "manifest")


@pytest.mark.parametrize("number", [None, 0, -4, 4.0, "4", True, [4]])
def test_a_config_without_a_number_of_experts_is_refused(tmp_path: Path, number: Any) -> None:
    recipe = Recipe(QWEN.config | {"num_experts": number}, QWEN.parts, QWEN.moe_layers)
    refused(make(recipe, tmp_path / "m"), "num_experts", "n_routed_experts")


def test_no_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m")
    (made.folder / "config.json").unlink()
    refused(made, "config.json", "manifest")


def test_numbers_in_config_json_take_no_memory(tmp_path: Path) -> None:
    """Two million experts claimed, 24 there."""
    recipe = Recipe(QWEN.config | {"num_experts": 600_000}, QWEN.parts, QWEN.moe_layers)
    refused(make(recipe, tmp_path / "m"), "'model.layers.0.mlp.experts.4.gate_proj.weight' is missing")
    recipe = Recipe(QWEN.config | {"num_experts": 2**30}, QWEN.parts, QWEN.moe_layers)
    refused(make(recipe, tmp_path / "n"), "1073741824 experts", "at most")
    recipe = Recipe(QWEN.config | {"num_hidden_layers": 2**30}, QWEN.parts, QWEN.moe_layers)
    refused(make(recipe, tmp_path / "o"), "1073741824 layers", "at most")


def test_field_report_9_a_square_stack_is_delivered_as_it_is(tmp_path: Path) -> None:
    """Nothing in a square says which way it lies: the tag says what the family's code says, or "unknown"."""
    square = (
        Part("mlp.experts.gate_up_proj", "gate_up", "U8", (H, H), ""),
        Part("mlp.experts.down_proj", "down", "U8", (H, H), ""),
    )
    tags = {}
    for model_type in ("qwen3_moe", "gpt_oss", "qwen3_vl_moe", "brandnew_moe"):
        recipe = Recipe(QWEN.config | {"model_type": model_type, "mlp_only_layers": []}, square, (0, 1, 2))
        made = make(recipe, tmp_path / model_type)
        source = open_safetensors(made.folder)
        tags[model_type] = [t.tag for t in source.layouts[0]]
        for x in source.experts:
            data = source.files[0].path.read_bytes()
            got = [data[e.offset : e.offset + e.length] for e in x.extents]
            wanted = made.expected[x.layer, x.expert]
            assert got == [wanted["gate_up"][3], wanted["down"][3]]
    assert tags == {
        "qwen3_moe": ["linear,concatenated", "linear"],
        "gpt_oss": ["transposed,interleaved", "transposed"],
        "qwen3_vl_moe": ["unknown", "unknown"],
        "brandnew_moe": ["unknown", "unknown"],
    }


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4"])
def test_field_report_10_block_scaled_weights_without_any_scales_are_refused(
    tmp_path: Path, dtype: str
) -> None:
    recipe = Recipe(QWEN.config, each("mlp.", dtype), QWEN.moe_layers)
    refused(make(recipe, tmp_path / "m"), "gate_proj.weight_scale_inv' is missing", dtype)


def test_packed_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    oss = RECIPES["gpt_oss mxfp4"]
    recipe = Recipe(oss.config, tuple(p for p in oss.parts if "scales" not in p.stored))
    refused(make(recipe, tmp_path / "m"), "'model.layers.0.mlp.experts.gate_up_proj_scales' is missing")


GPTQ = {
    "qweight": ("I32", (4, 16)),
    "scales": ("F16", (1, 16)),
    "qzeros": ("I32", (1, 2)),
    "g_idx": ("I32", (32,)),
}


def test_all_that_another_quantiser_writes_belongs_to_the_expert(tmp_path: Path) -> None:
    """GPTQ: in an order that is not the matrix's."""
    parts = tuple(
        Part(f"mlp.experts.{{e}}.{name}_proj.{suffix}", f"{name}.{suffix}", dtype, shape, "unknown")
        for name in ("gate", "up", "down")
        for suffix, (dtype, shape) in GPTQ.items()
    )
    made = make(Recipe(QWEN.config, parts, QWEN.moe_layers), tmp_path / "m")
    check(open_safetensors(made.folder), made)
    recipe = Recipe(QWEN.config, tuple(p for p in parts if "scales" not in p.stored), QWEN.moe_layers)
    refused(make(recipe, tmp_path / "n"), "'model.layers.0.mlp.experts.0.gate_proj.scales' is missing")


def test_a_bias_that_one_expert_lacks_is_refused(tmp_path: Path) -> None:
    recipe = RECIPES["rows and biases"]
    made = make(recipe, tmp_path / "m", drop=["layers.1.mlp.experts.1.gate_proj.bias"])
    refused(made, "'model.layers.1.mlp.experts.1.gate_proj.bias' is missing", "other experts like it")


def test_mixed_types_in_one_layer_have_a_layout_each(tmp_path: Path) -> None:
    """One expert is left in bfloat16: it has no scales, and that is right."""
    recipe = RECIPES["deepseek_v3 float8"]
    made = make(recipe, tmp_path / "m")
    for stored in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.2.{stored}.weight"
        _, shape, data = made.tensors[name]
        made.tensors[name] = ("BF16", shape, data * 2)
        del made.tensors[name + "_scale_inv"]
        short = stored.removesuffix("_proj")
        made.expected[1, 2][short] = ("BF16", shape, "linear", data * 2)
        del made.expected[1, 2][short + ".weight_scale_inv"]
    write_folder(made)
    source = open_safetensors(made.folder)
    check(source, made)
    assert len(source.layouts) == 2


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("layers.1.mlp.experts.0.gate_proj.weight", ["no experts in layer 1"]),
        ("layers.0.mlp.experts.4.gate_proj.weight", ["4 experts a layer"]),
        ("layers.0.mlp.experts.0.gate_proj", ["same part of an expert"]),
        ("layers.0.mlp.experts.gate_proj.weight", ["no stack of the 4 experts"]),
    ],
)
def test_what_should_not_be_there_is_refused_by_name(tmp_path: Path, extra: str, words: list[str]) -> None:
    made = make(Recipe(QWEN.config, QWEN.parts, QWEN.moe_layers, others=(extra,)), tmp_path / "m")
    refused(made, "model." + extra, *words)


def test_gate_and_up_that_follow_each_other_are_one_part(tmp_path: Path) -> None:
    """Names sort down, gate, up; and w1, w2, w3 put the down projection between them."""
    source = open_safetensors(make(QWEN, tmp_path / "a").folder)
    assert [(t.name, t.part) for t in source.layouts[0]] == [("gate", 0), ("up", 0), ("down", 1)]
    source = open_safetensors(make(RECIPES["mixtral"], tmp_path / "b").folder)
    assert [(t.name, t.part) for t in source.layouts[0]] == [("gate", 0), ("up", 1), ("down", 2)]
    source = open_safetensors(make(QWEN, tmp_path / "c", shards=3).folder)
    assert all(len(x.extents) == 3 for x in source.experts)


def test_stacks_and_single_tensors_in_one_model(tmp_path: Path) -> None:
    """A layer saved by transformers 5, a layer as it was."""
    one, two = make(QWEN, tmp_path / "a"), make(Recipe(QWEN.config, stacks("mlp."), (0, 2)), tmp_path / "b")
    made = Made(tmp_path / "c", {}, {}, QWEN.config)
    for source, layer in ((one, 0), (two, 2)):
        made.tensors |= {n: t for n, t in source.tensors.items() if f"layers.{layer}.mlp.experts" in n}
        made.expected |= {key: x for key, x in source.expected.items() if key[0] == layer}
    write_folder(made)
    check(open_safetensors(made.folder), made)


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "config.json", "model-00002-of-00003.safetensors"]
)
def test_any_file_of_a_folder_names_it(tmp_path: Path, name: str) -> None:
    made = make(QWEN, tmp_path / "m", shards=3)
    source = open_safetensors(made.folder / name)
    check(source, made)
    assert source.path == made.folder


def test_a_single_file_names_itself(tmp_path: Path) -> None:
    made = make(QWEN, tmp_path / "m")
    (made.folder / "other.safetensors").write_bytes(b"damaged")
    source = open_safetensors(made.folder / "model.safetensors")
    check(source, made)
    assert source.path == made.folder / "model.safetensors"


def test_too_many_dimensions_for_a_client_are_refused(tmp_path: Path) -> None:
    parts = (*each("mlp."), Part("mlp.experts.{e}.deep", "deep", "U8", (1, 1, 1, 1, 2), "unknown"))
    refused(make(Recipe(QWEN.config, parts, QWEN.moe_layers), tmp_path / "m"), "'deep'", "5 dimensions")


def test_a_shape_of_a_type_that_is_not_known_is_bounded(tmp_path: Path) -> None:
    """Found by fuzzing: its bytes say nothing of its shape, and 2^64 - 1 does not fit a ring's record."""
    parts = (*each("mlp."), Part("mlp.experts.{e}.new", "new", "F8_NEW", (3,), "unknown"))
    made = make(Recipe(QWEN.config, parts, QWEN.moe_layers), tmp_path / "m")
    name = "model.layers.0.mlp.experts.2.new"
    made.tensors[name] = ("F8_NEW", (2**64 - 1,), made.tensors[name][2])
    write_folder(made)
    refused(made, "'new'", "18446744073709551615")


def test_a_tensor_without_bytes_is_refused(tmp_path: Path) -> None:
    parts = (*each("mlp."), Part("mlp.experts.{e}.empty", "empty", "U8", (0,), "unknown"))
    message = refused(make(Recipe(QWEN.config, parts, QWEN.moe_layers), tmp_path / "m"))
    assert re.search(r"expert 0 of layer 0, part \d: 0 bytes at", message)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", '{"num_experts":', "nul", "[" * 100_000, '{"num_experts": 1e999999}', "9" * 5000],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    made = make(QWEN, tmp_path / "m")
    (made.folder / "config.json").write_text(text)
    refused(made)


def test_infinity_in_config_json_is_read(tmp_path: Path) -> None:
    """Python's json writes it, and published configs of hybrid models have it."""
    made = make(
        Recipe(QWEN.config | {"time_step_limit": [0.0, float("inf")]}, QWEN.parts, (0, 2)), tmp_path / "m"
    )
    assert "Infinity" in (made.folder / "config.json").read_text()
    check(open_safetensors(made.folder), made)


def test_the_reference_checkpoint(shared: Path) -> None:
    """Places by the format's own library."""
    folder = shared / "vaults/qwen3-tiny"
    source = open_safetensors(folder)
    config = json.loads((folder / "config.json").read_text())
    assert len(source.experts) == config["num_hidden_layers"] * config["num_experts"]
    data = (folder / "model.safetensors").read_bytes()
    with safe_open(folder / "model.safetensors", "np") as library:
        for x in source.experts:
            for t in source.layouts[x.layout]:
                at = x.extents[t.part].offset + t.offset
                name = f"model.layers.{x.layer}.mlp.experts.{x.expert}.{t.name}_proj.weight"
                assert data[at : at + t.nbytes] == library.get_tensor(name).tobytes()
                assert t.shape == library.get_tensor(name).shape
