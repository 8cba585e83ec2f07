"""Vaults: the dense weights are in a scout file beside, `<name>.scout.safetensors`, under the names that the
checkpoint had for them.  The configuration is a config.json beside the vault, where there is one; else it is
made from the arch block, which says enough for the family that the format was made for, and for no other.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from smoe_mp.errors import ModelError, VaultError
from smoe_mp.sources.base import SCOUT_SUFFIX, ExpertTable, Source
from smoe_mp.sources.safetensors import read_header

__all__ = ["config_of", "dense_weights", "scout_path"]

#: Flags of the arch block.
RENORMALISE, QK_NORM = 1, 2
#: The family whose configuration an arch block is enough for.
_FAMILY = "qwen3_moe"


def scout_path(vault: Path) -> Path:
    """Where the scout file of a vault is."""
    return vault.with_name(vault.stem + SCOUT_SUFFIX)


def config_of(source: Source) -> Any:
    """The configuration of a vault's model.  ModelError where nothing says enough."""
    beside = source.path.parent / "config.json"
    if beside.is_file():
        return AutoConfig.from_pretrained(str(source.path.parent), local_files_only=True)
    facts = source.model
    extra: dict[str, Any] = dict(facts.extra)
    if "flags" not in extra:  # a vault of unchanged weights says of its model what the source did
        raise ModelError(f"{source.path}: no config.json beside it, and it has no arch block: give config=")
    if facts.model_type != _FAMILY or not facts.num_layers:
        raise ModelError(
            f"{source.path}: no config.json beside it, and its arch block (model type {facts.model_type!r})"
            f" is enough for {_FAMILY} only: give config="
        )
    if not extra["flags"] & QK_NORM:
        raise ModelError(f"{source.path}: its arch block says no q/k norm, which {_FAMILY} has: give config=")
    table = ExpertTable.of(source.experts)
    layers = set(table.layer.tolist())
    counts = np.unique(np.bincount(table.layer)[sorted(layers)])
    if len(counts) != 1:
        raise ModelError(f"{source.path}: {counts.min()} to {counts.max()} experts a layer: give config=")
    return AutoConfig.for_model(
        _FAMILY,
        hidden_size=facts.d_model,
        vocab_size=facts.vocab_size,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=extra["num_heads"],
        num_key_value_heads=extra["num_kv_heads"],
        head_dim=extra["head_dim"],
        num_experts=int(counts[0]),
        num_experts_per_tok=facts.top_k,
        moe_intermediate_size=facts.ffn_dim,
        intermediate_size=extra["dense_ffn_dim"],
        norm_topk_prob=bool(extra["flags"] & RENORMALISE),
        rms_norm_eps=_shortest(extra["rms_norm_eps"]),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(extra["rope_theta"])},
        mlp_only_layers=[n for n in range(facts.num_layers) if n not in layers],
        tie_word_embeddings="lm_head.weight" not in read_header(_existing(source)).names,
    )


def dense_weights(source: Source) -> dict[str, Any]:
    """The scout file's tensors by name.  They are as they lie in the file, mapped."""
    safetensors: Any = importlib.import_module("safetensors.torch")
    path = _existing(source)
    read_header(path)
    weights: dict[str, Any] = safetensors.load_file(str(path))
    return weights


def _existing(source: Source) -> Path:
    path = scout_path(source.path)
    if not path.is_file():
        raise VaultError(
            f"{source.path}: no {path.name} beside it, which has the weights that are no experts"
        )
    return path


def _shortest(value: float) -> float:
    """A float32 as the number that was meant: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
