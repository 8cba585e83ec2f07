"""The small trained model as a checkpoint, for comparison of what is streamed from its vault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_mp import models
from smoe_mp.engine import ResidentExperts
from smoe_mp.sources.checkpoint import read_header
from smoe_mp.sources.dtypes import NUMPY

VAULT = models.TINY / "tiny.smoe"


def write_trained(folder: Path) -> Path:
    """Write its weights into `folder`, in float32, experts as Q4 gives them back."""
    numpy_files: Any = pytest.importorskip("safetensors.numpy", reason="safetensors is not here")
    shutil.copy(models.TINY / "config.json", folder / "config.json")
    scout = models.TINY / "tiny.scout.safetensors"
    weights = {
        name: np.fromfile(scout, NUMPY[t.dtype], t.nbytes // NUMPY[t.dtype].itemsize, offset=t.offset)
        .reshape(t.shape)
        .astype(np.float32)
        for name, t in read_header(scout).items()
    }
    config, experts = json.loads((folder / "config.json").read_text()), ResidentExperts(VAULT)
    for layer in range(config["num_hidden_layers"]):
        for expert in experts.as_ready(layer, range(config["num_experts"])):
            for part in ("gate", "up", "down"):
                name = f"model.layers.{layer}.mlp.experts.{expert.expert}.{part}_proj.weight"
                weights[name] = expert.dequantize(part)
    numpy_files.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
