"""GGUF models: the configuration out of the header, and the dense weights, tensor by tensor.

transformers says how an architecture's header becomes a configuration and how its tensors are named and
turned; that is used as it is.  What it does not do is leave the experts out: it would decode all of them
to float32.  So the dense tensors are read here, from places that the header's own reader has checked,
decoded one at a time by smoe_mp.dequant, and given to the model in the wanted type.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig

from smoe_mp import dequant
from smoe_mp.errors import ModelError, VaultError
from smoe_mp.sources.gguf import GgufModel
from smoe_mp.sources.gguf_file import GgufFile, GgufTensor
from smoe_mp.transformers.experts import IMPLEMENTATION

__all__ = ["ARCHITECTURES", "config_of", "dense_weights", "dtype_of"]

#: GGUF's names of the architectures that were tested.
ARCHITECTURES = ("qwen2moe", "qwen3moe")
_PLAIN: dict[str, npt.DTypeLike] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def config_of(source: GgufModel) -> Any:
    """The configuration that the header describes.  ModelError for an architecture that was not tested."""
    first = source.parts[0]
    architecture = first.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source.path}: GGUF architecture {architecture!r} is not one of those whose models can be run:"
            f" {', '.join(ARCHITECTURES)}"
        )
    config = AutoConfig.from_pretrained(
        str(first.path.parent), gguf_file=first.path.name, local_files_only=True
    )
    if source.model.ffn_dim:
        config.moe_intermediate_size = source.model.ffn_dim  # a key that transformers does not look at
    return config


def dtype_of(given: Any) -> torch.dtype:
    """The type to compute in: the one that is asked for, else bfloat16, as block types say nothing of it."""
    if given is None or given == "auto":
        return torch.bfloat16
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype={given!r}: not one of torch's")
    return dtype


def dense_weights(source: GgufModel, config: Any, cls: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor that the class `cls`, which has no experts, has a place for, by the place's name."""
    legacy: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    named = copy.deepcopy(config)
    named._experts_implementation = IMPLEMENTATION
    with torch.device("meta"):
        skeleton = cls(named)
    architecture = source.parts[0].metadata["general.architecture"]
    processor = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)(config=config.to_dict())
    places = legacy.get_gguf_hf_weights_map(skeleton, processor)
    weights = {}
    for part in source.parts:
        for tensor in part.tensors.values():
            if tensor.name in places:
                turned = processor.process(weights=read_weights(part, tensor), name=tensor.name)
                # The turned array may be a view that is not contiguous.
                made = torch.from_numpy(np.ascontiguousarray(turned.weights)).to(dtype)
                weights[places[turned.name]] = made
    return weights


def read_weights(part: GgufFile, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """A tensor as float32, row-major.  VaultError where the file is shorter by now, or the type not known."""
    if tensor.nbytes is None:
        raise VaultError(f"{part.path}: {tensor.name}: its type {tensor.type_name} is not known")
    raw = _read(part.path, tensor.offset, tensor.nbytes, tensor.name)
    shape = tuple(reversed(tensor.sizes))
    if tensor.type_name in _PLAIN:
        return raw.view(_PLAIN[tensor.type_name]).reshape(shape).astype(np.float32)
    if (tensor.type_name, False) in dequant.TYPES:
        weights: npt.NDArray[np.float32] = dequant.dequantize(tensor.type_name, raw, shape)
        return weights
    gguf: Any = importlib.import_module("smoe_mp.sources.gguf")
    decoded: npt.NDArray[np.float32] = gguf.dequantize(tensor.type_name, raw, shape)
    return decoded


def _read(path: Path, offset: int, nbytes: int, name: str) -> npt.NDArray[np.uint8]:
    try:
        raw = np.fromfile(path, np.uint8, nbytes, offset=offset)
    except OSError as error:
        raise VaultError(f"{path}: {name}: {error.strerror} (errno {error.errno})") from error
    if raw.size != nbytes:
        raise VaultError(f"{path}: {name}: {raw.size} bytes at {offset}, the header says {nbytes}")
    return raw
