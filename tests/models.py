"""Made-up safetensors checkpoints: the same random experts in the layouts and types that models have."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from smoe_mp.sources.dtypes import NUMPY

Array = npt.NDArray[Any]
NAMES = {dtype: name for name, dtype in NUMPY.items() if name != "BOOL"} | {np.dtype(np.bool_): "BOOL"}
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> Path:
    """The tensors in the order given, without a gap."""
    header, at = {}, 0
    for name, array in tensors.items():
        offsets = [at, at := at + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            out.write(array.tobytes())
    return path


@dataclass
class Model:
    """`weights[layer, expert]` has gate, up and down as float32 that its type holds exactly."""

    layers: int = 2
    experts: int = 4
    hidden: int = 128
    width: int = 64
    dtype: np.dtype[Any] = BF16
    seed: int = 1
    weights: dict[tuple[int, int], dict[str, Array]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shapes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden)}
        shapes["down"] = (self.hidden, self.width)
        self.weights = {
            pair: {
                name: rng.standard_normal(shape, np.float32).astype(self.dtype)
                for name, shape in shapes.items()
            }
            for pair in itertools.product(range(self.layers), range(self.experts))
        }

    @property
    def dense(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed + 1000)
        out = {"model.embed_tokens.weight": rng.standard_normal((96, self.hidden), np.float32).astype(BF16)}
        for layer in range(self.layers):
            router = rng.standard_normal((self.experts, self.hidden), np.float32)
            out[f"model.layers.{layer}.mlp.gate.weight"] = router.astype(BF16)
            out[f"model.layers.{layer}.input_layernorm.weight"] = router[0]
        return out

    def config(self, model_type: str, **more: Any) -> dict[str, Any]:
        return {
            "model_type": model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.width,
            "moe_intermediate_size": self.width,
            "num_attention_heads": 4,
            "num_experts": self.experts,
            "num_local_experts": self.experts,
            "num_experts_per_tok": 2,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": 96,
            **more,
        }

    def folder(self, path: Path, model_type: str, tensors: Mapping[str, Array], **config: Any) -> Path:
        """A folder of one file with the dense tensors and these."""
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config(model_type, **config)))
        write_safetensors(path / "model.safetensors", {**self.dense, **tensors})
        return path

    def per_expert(self, path: Path) -> Path:
        """As qwen3_moe has them."""
        tensors = {
            f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": array
            for (layer, expert), arrays in self.weights.items()
            for name, array in arrays.items()
        }
        return self.folder(path, "qwen3_moe", tensors)

    def concatenated(self, path: Path) -> Path:
        """As granitemoe has them: stacks, gate above up."""
        tensors = {}
        for layer in range(self.layers):
            module = f"model.layers.{layer}.block_sparse_moe"
            tensors[f"{module}.input_linear.weight"] = self._stack(
                layer, lambda w: np.concatenate([w["gate"], w["up"]])
            )
            tensors[f"{module}.output_linear.weight"] = self._stack(layer, lambda w: w["down"])
        return self.folder(path, "granitemoe", tensors)

    def interleaved(self, path: Path, *, bias: bool = False) -> Path:
        """As gpt_oss has them: transposed stacks, gate and up column by column in turn."""
        tensors = {}
        for layer in range(self.layers):
            module = f"model.layers.{layer}.mlp.experts"
            tensors[f"{module}.gate_up_proj"] = self._stack(
                layer,
                lambda w: np.ascontiguousarray(
                    np.stack([w["gate"], w["up"]], axis=1).reshape(-1, self.hidden).T
                ),
            )
            tensors[f"{module}.down_proj"] = self._stack(layer, lambda w: np.ascontiguousarray(w["down"].T))
            if bias:
                rng = np.random.default_rng(layer)
                shape = (self.experts, 2 * self.width)
                tensors[f"{module}.gate_up_proj_bias"] = rng.standard_normal(shape, np.float32).astype(BF16)
                tensors[f"{module}.down_proj_bias"] = np.zeros((self.experts, self.hidden), BF16)
        return self.folder(path, "gpt_oss", tensors)

    def float8(self, path: Path, block: tuple[int, int] = (48, 32)) -> Path:
        """As deepseek_v3 has them: float8, and a factor a block.  Sets the weights to what that means."""
        rng = np.random.default_rng(self.seed + 7)
        tensors: dict[str, Array] = {}
        for (layer, expert), arrays in self.weights.items():
            for name, array in arrays.items():
                shape = tuple(-(-n // b) for n, b in zip(array.shape, block, strict=True))
                factors = rng.uniform(0.5, 2, shape).astype(np.float32)
                small = array.astype(np.float32).astype(F8)
                wide = np.kron(factors, np.ones(block, np.float32))[: array.shape[0], : array.shape[1]]
                arrays[name] = small.astype(np.float32) * wide
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                tensors[stem], tensors[stem + "_scale_inv"] = small, factors
        quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
        return self.folder(path, "deepseek_v3", tensors, n_routed_experts=self.experts,
                           first_k_dense_replace=0, quantization_config=quantization)  # fmt: skip

    def _stack(self, layer: int, make: Any) -> Array:
        return np.stack([make(self.weights[layer, expert]) for expert in range(self.experts)])
