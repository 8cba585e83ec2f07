"""A Qwen MoE model of transformers as a GGUF file, by gguf-py's writer: for comparison with transformers' own
loading of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    model: Any,
    *,
    experts: str = "Q8_0",
    dense: str = "F32",
    chat_template: str = "",
    split: int = 0,
) -> Path:
    """Write `model` (qwen3_moe) with experts and matrices in these block types; norms are F32.

    `split`: in files of so many tensors, `path` with -0000N-of-0000M behind its stem.
    """
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
    _add_tokenizer(writer, config.vocab_size)
    if chat_template:
        writer.add_chat_template(chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name.endswith("gate_up_proj"):
            half = values.shape[1] // 2
            layer = name.split(".")[2]
            _add(writer, f"blk.{layer}.ffn_gate_exps.weight", values[:, :half], experts)
            _add(writer, f"blk.{layer}.ffn_up_exps.weight", values[:, half:], experts)
        elif name.endswith("experts.down_proj"):
            _add(writer, f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values, experts)
        else:
            stem = name.removesuffix(".weight")
            _add(writer, names.get_name(stem) + ".weight", values, "F32" if values.ndim < 2 else dense)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, values: Any, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    values = np.ascontiguousarray(values)
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: Any, size: int) -> None:
    """A byte-level tokenizer without merges."""
    tokens = [f"<{i}>" for i in range(size)]
    for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz"):
        tokens[i + 10] = letter
    tokens[40] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
