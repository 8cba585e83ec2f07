"""gpt_oss as it is published, experts in MXFP4: the model that transformers makes of it, dequantised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tinymodels  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_families import assert_alike  # noqa: E402

from smoe_mp.errors import ModelError  # noqa: E402

WIDE = {"hidden_size": 64, "intermediate_size": 96}


def write_mxfp4(folder: Path) -> Path:
    """A random gpt_oss whose experts' matrices are blocks and scales."""
    tinymodels.write("gpt_oss", folder, torch.bfloat16, **WIDE)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=draw).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 127, shape, generator=draw).to(torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_logits_and_tokens_are_those_of_the_dequantised_model(
    tmp_path: Path, streamed: Callable[..., Any]
) -> None:
    path = write_mxfp4(tmp_path / "m")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        experts_implementation="eager",
    )
    experts = [p for name, p in reference.named_parameters() if name.endswith("gate_up_proj")]
    assert experts[0].dtype == torch.bfloat16
    assert experts[0].shape == (16, 64, 192)
    model = streamed(path, dtype=torch.bfloat16)
    assert not hasattr(model.config, "quantization_config")
    assert_alike(model, reference)


def test_another_quantisation_is_refused_by_name(tmp_path: Path, streamed: Callable[..., Any]) -> None:
    path = write_mxfp4(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised \(fp8\)"):
        streamed(path)
