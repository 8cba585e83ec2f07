"""A random Qwen3-MoE model in bfloat16 in three forms, for `bench transformers`.

    python -m smoe_mp.bench.randommoe FOLDER SHAPE     SHAPE: JSON, the fields of `Shape`

    FOLDER/apart/         safetensors with each expert's tensors apart, as published
    FOLDER/fused/         safetensors in transformers' own layout, a stack of experts a tensor
    FOLDER/model.gguf     the same weights, matrices in BF16, without a vocabulary; where gguf-py is
    FOLDER/complete       JSON: how the experts' popularity came out

A program of its own, so that whoever measures has neither torch nor the weights in memory.

Routers of random weights pick all experts alike, and a trained model's do not.  So the first element of the
hidden state is made a constant, 1 in each token's embedding and written by no layer, and a router's weight
for it is -`skew` x log(rank), the ranks drawn anew for each layer: a bias that makes the experts' popularity
nearly Zipf's.  What that comes to is measured on random tokens and stands in the report.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: The scale of what a layer adds to the hidden state, so that the constant is not drowned in it.
ADDED = 0.3
SEEN_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """The model's shape, and the skew of its routers (0: none)."""

    layers: int = 12
    experts: int = 64
    top_k: int = 4
    hidden: int = 1024
    width: int = 512
    vocabulary: int = 32000
    skew: float = 0.9

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.width * 2

    @property
    def experts_bytes(self) -> int:
        """Of all experts."""
        return self.layers * self.experts * self.expert_bytes

    @property
    def dense_bytes(self) -> int:
        """Of the rest, but for trifles."""
        layer = self.hidden * (5 * self.hidden // 2 + self.experts)
        return 2 * (2 * self.vocabulary * self.hidden + self.layers * layer)

    @property
    def token_bytes(self) -> int:
        """Of the experts that one token wants."""
        return self.layers * self.top_k * self.expert_bytes


def write(folder: Path, shape: Shape) -> None:
    """Write all three forms into `folder`."""
    torch: Any = importlib.import_module("torch")
    model = build(shape)
    seen = _popularity(model, shape)
    # Each expert's tensors apart, under the names that are published: what save_pretrained does by default.
    model.save_pretrained(folder / "apart", save_original_format=True)
    model.save_pretrained(folder / "fused", save_original_format=False)
    if importlib.util.find_spec("gguf") is not None:
        with torch.no_grad():
            write_gguf(folder / "model.gguf", model, experts="BF16", dense="BF16")
    (folder / "complete").write_text(json.dumps(seen))


def build(shape: Shape, device: Any = "cpu") -> Any:
    """The model on `device`, with transformers' eager code for experts."""
    torch: Any = importlib.import_module("torch")
    hub: Any = importlib.import_module("transformers")
    config = hub.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 64),
        num_key_value_heads=max(1, shape.hidden // 256),
        head_dim=64,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        moe_intermediate_size=shape.width,
        intermediate_size=shape.width,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    with torch.device(device):
        model = hub.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        ).eval()
    random = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                _draw(torch, name, weights, random, shape)
    return model


def _draw(torch: Any, name: str, weights: Any, random: Any, shape: Shape) -> None:
    """Random weights, of a size that the hidden state keeps its own; its first element is the constant."""
    deviation = 1.0 if "embed_tokens" in name else weights.shape[-1] ** -0.5
    adds = name.endswith(("o_proj.weight", "down_proj"))
    weights.normal_(0, deviation * (ADDED if adds else 1), generator=random)
    if "embed_tokens" in name:
        weights[:, 0] = 1
    elif adds:
        weights[..., 0, :] = 0
    elif name.endswith("mlp.gate.weight"):
        ranks = torch.randperm(shape.experts, generator=random, device=weights.device) + 1
        weights[:, 0] = -shape.skew * ranks.log()


def _popularity(model: Any, shape: Shape) -> dict[str, float]:
    """Of random tokens, the mean over the layers: `quarter`, the share of demands for the most popular
    quarter of the experts; `overlap`, the share of a token's experts that the one before had."""
    torch: Any = importlib.import_module("torch")
    ids = torch.randint(0, shape.vocabulary, (1, SEEN_TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(ids, output_router_logits=True).router_logits
    quarter, overlap = [], []
    for layer in logits:
        picked = layer.topk(shape.top_k, -1).indices.numpy()
        counts = np.sort(np.bincount(picked.ravel(), minlength=shape.experts))[::-1]
        quarter.append(counts[: max(1, shape.experts // 4)].sum() / counts.sum())
        overlap.append(np.mean([np.isin(now, before).mean() for before, now in itertools.pairwise(picked)]))
    return {"quarter": float(np.mean(quarter)), "overlap": float(np.mean(overlap))}


def write_gguf(
    path: Path,
    model: Any,
    *,
    experts: str,
    dense: str,
    tokenizer: Callable[[Any, int], None] | None = None,
    split: int = 0,
) -> Path:
    """Write `model` (qwen3_moe) as a GGUF file, with experts and matrices in these block types; norms and
    routers are F32.  `tokenizer` adds one for that many tokens; without it the file says that it has none.
    `split`: in files of so many tensors, `path` with -0000N-of-0000M behind its stem."""
    gguf: Any = importlib.import_module("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)

    def add(name: str, values: Any, type_name: str) -> None:
        kind = gguf.GGMLQuantizationType[type_name]
        plain = np.ascontiguousarray(values.float().numpy())
        writer.add_tensor(name, gguf.quants.quantize(plain, kind), raw_dtype=kind)

    for name, tensor in model.state_dict().items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            half = tensor.shape[1] // 2
            add(f"{layer}.ffn_gate_exps.weight", tensor[:, :half], experts)
            add(f"{layer}.ffn_up_exps.weight", tensor[:, half:], experts)
        elif name.endswith("experts.down_proj"):
            add(f"{layer}.ffn_down_exps.weight", tensor, experts)
        else:
            plain = tensor.ndim < 2 or name.endswith("mlp.gate.weight")
            add(
                names.get_name(name.removesuffix(".weight")) + ".weight",
                tensor,
                "F32" if plain else dense,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])))
