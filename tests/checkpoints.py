"""Small safetensors checkpoints for tests, in the naming of every family, with what a reader should find.

A recipe says what each MoE layer has: names with `{e}` for each expert, others as stacks, together with what
a client should see.  Bytes are random, so that bytes of another tensor, expert or place are never right.
What is written and what is expected come from the recipe alone; nothing of smoe_mp is used here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = {"BF16": 16, "F16": 16, "F32": 32, "U8": 8, "I8": 8, "I32": 32, "U32": 32, "F4": 4}
WIDTHS |= {"F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2": 8, "F8_NEW": 8}

#: Hidden size, width of an expert, experts a layer.
H, F, E = 32, 16, 4
Stored = tuple[str, tuple[int, ...], bytes]


def header_of(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The header's entries, the tensors one behind the other in the order given."""
    out: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        out[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    return out


def encode(header: object, data: bytes, *, data_at: int = 0, modulo: int = 4096) -> bytes:
    """A file of this header; spaces behind it make the data begin at `data_at` modulo `modulo`."""
    raw = json.dumps(header).encode()
    raw += b" " * ((data_at - 8 - len(raw)) % modulo if data_at >= 0 else 0)
    return len(raw).to_bytes(8, "little") + raw + data


def write_safetensors(path: Path, tensors: Mapping[str, Stored], *, data_at: int = -1) -> Path:
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(encode(header_of(tensors), data, data_at=data_at))
    return path


@dataclass(frozen=True)
class Part:
    """A tensor of an expert: `stored` behind "layers.N." and what a client should see."""

    stored: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    tag: str = "linear"

    @property
    def each(self) -> bool:
        return "{e}" in self.stored


@dataclass(frozen=True)
class Recipe:
    """A family's checkpoint: `config` as it stands in config.json, the layers that have experts, their parts,
    and the names of tensors that are none of theirs."""

    config: dict[str, Any]
    parts: tuple[Part, ...]
    moe_layers: tuple[int, ...] = (0, 1)
    others: tuple[str, ...] = ("layers.0.mlp.shared_experts.gate_proj.weight", "layers.1.mlp.gate.weight")
    prefix: str = "model."


@dataclass
class Made:
    """A checkpoint on disk.  `expected`: (layer, expert) to name to (dtype, shape, tag, bytes)."""

    folder: Path
    tensors: dict[str, Stored]
    expected: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...], str, bytes]]]
    config: dict[str, Any] = field(default_factory=dict)


def random_bytes(rng: np.random.Generator, dtype: str, shape: Sequence[int]) -> bytes:
    return rng.bytes(math.prod(shape) * WIDTHS[dtype] // 8)


def make(
    recipe: Recipe,
    folder: Path,
    *,
    prefix: str | None = None,
    shards: int = 1,
    data_at: Callable[[int], int] = lambda shard: -1,
    seed: int = 0,
    drop: Sequence[str] = (),
    by_layer: bool = False,
    draft: Sequence[str] = (),
) -> Made:
    """Write the recipe's checkpoint.  `data_at`: where each shard's data begins modulo 4096, -1 anywhere.
    `drop`: names of tensors (without prefix) left out.  `by_layer`: one shard a layer, whatever `shards` is.
    `draft`: prefixes of further layers ("mtp.layers.0.") with the same parts, which belong to no expert."""
    rng = np.random.default_rng(seed)
    before = recipe.prefix if prefix is None else prefix
    tensors: dict[str, Stored] = {}
    expected: dict[tuple[int, int], dict[str, tuple[str, tuple[int, ...], str, bytes]]] = {}
    for other in ("embed_tokens.weight", *recipe.others):
        tensors[before + other] = ("BF16", (3, 5), rng.bytes(30))
    places = [(before + f"layers.{layer}.", layer) for layer in recipe.moe_layers]
    for where, layer in [*places, *((place, -1) for place in draft)]:
        for part in recipe.parts:
            data = [random_bytes(rng, part.dtype, part.shape) for _ in range(E)]
            if part.each:
                for e in range(E):
                    tensors[where + part.stored.format(e=e)] = (part.dtype, part.shape, data[e])
            else:
                tensors[where + part.stored] = (part.dtype, (E, *part.shape), b"".join(data))
            for e in range(E if layer >= 0 else 0):
                seen = (part.dtype, part.shape, part.tag, data[e])
                expected.setdefault((layer, e), {})[part.name] = seen
    for name in drop:
        del tensors[before + name]
    tensors = dict(sorted(tensors.items()))
    made = Made(folder, tensors, expected, recipe.config)
    write_folder(made, shards=shards, data_at=data_at, by_layer=by_layer)
    return made


def write_folder(
    made: Made,
    *,
    shards: int = 1,
    data_at: Callable[[int], int] = lambda shard: -1,
    by_layer: bool = False,
) -> None:
    """Write files, index (where there are several files) and config.json."""
    folder, names = made.folder, list(made.tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config))
    groups = [names[i::shards] for i in range(shards)] if not by_layer else _by_layer(names)
    if len(groups) == 1:
        write_safetensors(folder / "model.safetensors", made.tensors, data_at=data_at(0))
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        write_safetensors(folder / file, {n: made.tensors[n] for n in group}, data_at=data_at(number))
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _by_layer(names: Sequence[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        _, found, rest = name.partition("layers.")
        groups.setdefault(rest.partition(".")[0] if found else "", []).append(name)
    return list(groups.values())


# --- recipes -----------------------------------------------------------------------------------------------


def each(module: str, dtype: str = "BF16", names: str = "proj") -> tuple[Part, ...]:
    """Gate, up and down, one tensor an expert."""
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if names == "proj" else ("w1", "w3", "w2")
    return (
        Part(f"{module}experts.{{e}}.{gate}.weight", "gate", dtype, (F, H)),
        Part(f"{module}experts.{{e}}.{up}.weight", "up", dtype, (F, H)),
        Part(f"{module}experts.{{e}}.{down}.weight", "down", dtype, (H, F)),
    )


def stacks(module: str, dtype: str = "BF16") -> tuple[Part, ...]:
    """What transformers itself holds."""
    return (
        Part(f"{module}experts.gate_up_proj", "gate_up", dtype, (2 * F, H), "linear,concatenated"),
        Part(f"{module}experts.down_proj", "down", dtype, (H, F)),
    )


def _config(model_type: str, experts: str = "num_experts", **more: Any) -> dict[str, Any]:
    base = {"model_type": model_type, "num_hidden_layers": 2, "hidden_size": H, "num_experts_per_tok": 2}
    return base | {"moe_intermediate_size": F, "vocab_size": 99, experts: E} | more


def _scales(parts: Sequence[Part], block: int) -> tuple[Part, ...]:
    """DeepSeek's scales for float8 parts."""
    return tuple(
        Part(
            p.stored + "_scale_inv",
            p.name + ".weight_scale_inv",
            "F32",
            tuple(-(-n // block) for n in p.shape),
            f"linear,block={block}x{block}",
        )
        for p in parts
    )


_GPT_OSS = _config("gpt_oss", "num_local_experts")
_FP8 = each("mlp.", "F8_E4M3")
_DEEPSEEK = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_hidden_layers": 3}

RECIPES: dict[str, Recipe] = {
    "qwen2_moe": Recipe(
        _config("qwen2_moe", decoder_sparse_step=2, num_hidden_layers=4), each("mlp."), moe_layers=(1, 3)
    ),
    "qwen3_moe": Recipe(
        _config("qwen3_moe", mlp_only_layers=[1], num_hidden_layers=3), each("mlp."), moe_layers=(0, 2)
    ),
    "qwen3_moe stacks": Recipe(_config("qwen3_moe", "num_local_experts"), stacks("mlp.")),
    "qwen3_5_moe": Recipe(
        {"model_type": "qwen3_5_moe", "text_config": _config("qwen3_5_moe_text")},
        stacks("mlp."),
        prefix="model.language_model.",
    ),
    "qwen3_vl_moe": Recipe(
        {"model_type": "qwen3_vl_moe", "text_config": _config("qwen3_vl_moe_text")},
        (
            Part("mlp.experts.gate_up_proj", "gate_up", "BF16", (H, 2 * F), "unknown"),
            Part("mlp.experts.down_proj", "down", "BF16", (F, H), "unknown"),
        ),
    ),
    "mixtral": Recipe(
        _config("mixtral", "num_local_experts"), each("block_sparse_moe.", "F16", "w"), others=()
    ),
    "olmoe": Recipe(_config("olmoe"), each("mlp.", "F32")),
    "deepseek_v3": Recipe(
        _config("deepseek_v3", "n_routed_experts", **_DEEPSEEK), each("mlp."), moe_layers=(1, 2)
    ),
    "deepseek_v3 float8": Recipe(
        _config(
            "deepseek_v3",
            "n_routed_experts",
            **_DEEPSEEK,
            quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]},
        ),
        (*_FP8, *_scales(_FP8, 8)),
        moe_layers=(1, 2),
    ),
    "glm4_moe": Recipe(
        _config("glm4_moe", "n_routed_experts", first_k_dense_replace=1, num_hidden_layers=3),
        each("mlp."),
        moe_layers=(1, 2),
    ),
    "gpt_oss": Recipe(
        _GPT_OSS,
        (
            Part("mlp.experts.gate_up_proj", "gate_up", "BF16", (H, 2 * F), "transposed,interleaved"),
            Part("mlp.experts.down_proj", "down", "BF16", (F, H), "transposed"),
            Part("mlp.experts.gate_up_proj_bias", "gate_up.bias", "BF16", (2 * F,), "interleaved"),
            Part("mlp.experts.down_proj_bias", "down.bias", "BF16", (H,), ""),
        ),
    ),
    "gpt_oss mxfp4": Recipe(
        _GPT_OSS,
        (
            Part(
                "mlp.experts.gate_up_proj_blocks",
                "gate_up.blocks",
                "U8",
                (2 * F, 1, 16),
                "linear,interleaved",
            ),
            Part("mlp.experts.gate_up_proj_scales", "gate_up.scales", "U8", (2 * F, 1), "linear,interleaved"),
            Part("mlp.experts.down_proj_blocks", "down.blocks", "U8", (H, 1, 16), "linear"),
            Part("mlp.experts.down_proj_scales", "down.scales", "U8", (H, 1), "linear"),
            Part("mlp.experts.gate_up_proj_bias", "gate_up.bias", "BF16", (2 * F,), "interleaved"),
            Part("mlp.experts.down_proj_bias", "down.bias", "BF16", (H,), ""),
        ),
    ),
    "gemma4": Recipe(
        {
            "model_type": "gemma4",
            "text_config": _config("gemma4_text", enable_moe_block=True, top_k_experts=2),
        },
        (*stacks(""), Part("router.per_expert_scale", "router_scale", "BF16", (), "")),
        prefix="model.language_model.",
        others=("layers.0.mlp.gate_proj.weight", "layers.0.router.proj.weight"),
    ),
    "granitemoe": Recipe(
        _config("granitemoe", "num_local_experts"),
        (
            Part(
                "block_sparse_moe.input_linear.weight", "gate_up", "BF16", (2 * F, H), "linear,concatenated"
            ),
            Part("block_sparse_moe.output_linear.weight", "down", "BF16", (H, F)),
        ),
    ),
    "jamba": Recipe(
        _config("jamba", expert_layer_period=2, expert_layer_offset=1, num_hidden_layers=4),
        each("feed_forward."),
        moe_layers=(1, 3),
    ),
    "lfm2_moe": Recipe(
        _config("lfm2_moe", num_dense_layers=1, num_hidden_layers=3),
        each("feed_forward.", names="w"),
        moe_layers=(1, 2),
    ),
    "nemotron_h": Recipe(
        _config("nemotron_h", "n_routed_experts", hybrid_override_pattern="ME*E", num_hidden_layers=4),
        (
            Part("mixer.experts.{e}.up_proj.weight", "up", "BF16", (F, H)),
            Part("mixer.experts.{e}.down_proj.weight", "down", "BF16", (H, F)),
        ),
        moe_layers=(1, 3),
        prefix="backbone.",
    ),
    "ernie4_5_moe": Recipe(
        _config(
            "ernie4_5_moe",
            "moe_num_experts",
            moe_layer_start_index=1,
            moe_layer_end_index=-1,
            moe_layer_interval=1,
            num_hidden_layers=3,
        ),
        each("mlp."),
        moe_layers=(1, 2),
    ),
    "deepseek_v4": Recipe(_config("deepseek_v4", "n_routed_experts"), each("ffn.", names="w")),
    "an unknown type": Recipe(
        _config("brandnew_moe"),
        tuple(Part(p.stored, p.name, p.dtype, p.shape, "unknown") for p in each("mlp.")),
    ),
    "rows and biases": Recipe(
        _config("qwen3_moe"),
        (
            *each("mlp."),
            Part("mlp.experts.{e}.gate_proj.bias", "gate.bias", "F32", (F,), ""),
            Part("mlp.experts.output_factor", "output_factor", "F32", (), "unknown"),
            Part("mlp.experts.{e}.note", "note", "F8_NEW", (3,), "unknown"),
        ),
    ),
}
