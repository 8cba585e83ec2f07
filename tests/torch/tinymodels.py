"""Tiny random models of many families, on disk, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SMALL = {"num_experts_per_tok": 4, "moe_intermediate_size": 48, "intermediate_size": 96}
_ROUTED = {**_SMALL, "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}

#: Family to the stem of its classes and what its configuration has beyond COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {**_SMALL, "num_experts": 16, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3Moe", {**_SMALL, "num_experts": 16, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_next": (
        "Qwen3Next",
        {**_SMALL, **_LINEAR, "num_experts": 16, "shared_expert_intermediate_size": 48, "head_dim": 16},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5Moe",
        {**_SMALL, **_LINEAR, "num_experts": 16, "shared_expert_intermediate_size": 48, "head_dim": 16},
    ),
    "mixtral": ("Mixtral", _MIXTRAL),
    "olmoe": ("Olmoe", {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 48}),
    "deepseek_v2": ("DeepseekV2", {**_ROUTED, **_MLA, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3", {**_ROUTED, **_MLA, "n_group": 4, "topk_group": 2}),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, "head_dim": 16}),
    "dots1": ("Dots1", {**_ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 48,
            "head_dim": 16,
            "sliding_window": 32,
        },
    ),
    "gemma4_text": (
        "Gemma4",
        {
            **_SMALL,
            "enable_moe_block": True,
            "num_experts": 16,
            "top_k_experts": 4,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
    ),
    "granitemoe": ("GraniteMoe", _MIXTRAL),
    "phimoe": ("Phimoe", _MIXTRAL),
    "minimax": ("MiniMax", {**_MIXTRAL, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2", {**_MIXTRAL, "head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**_SMALL, "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 1},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **_SMALL,
            "num_experts": 16,
            "num_dense_layers": 1,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 96,
            "use_mamba_kernels": False,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 8,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 48,
            "intermediate_size": 96,
            "head_dim": 16,
            "layers_block_type": ["attention", "moe"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def build(family: str, dtype: Any, **more: Any) -> Any:
    """A random model of the family; wide enough weights that greedy tokens differ from each other."""
    stem, extra = FAMILIES[family]
    config_class = getattr(transformers, f"{stem}{'TextConfig' if family.endswith('_text') else 'Config'}")
    config = config_class(**{**COMMON, **extra, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.15)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model.to(dtype).eval()


def write(family: str, folder: Path, dtype: Any, *, fused: bool = False, **more: Any) -> Path:
    """Save such a model: as the family's published checkpoints are, or in transformers' own layout."""
    build(family, dtype, **more).save_pretrained(folder, save_original_format=not fused)
    return folder
