"""Which model families run on streamed experts.  Data, no code.

A family is here when its tiny models gave, with the releases named in docs/transformers.md, the same logits
and tokens as the resident model with the family's eager experts code (tests/torch/test_families.py).  One
that is not here may well work; but a wrong guess of the order of gate and up computes fluent nonsense, so it
is refused by name.
"""

from __future__ import annotations

__all__ = ["MODEL_TYPES"]

#: `model_type` of config.json, of the part of it that has the experts.
MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "gemma4_text",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "lfm2_moe",
    "minimax",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
