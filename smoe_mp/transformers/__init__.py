"""Hugging Face transformers on streamed experts (the extra `smoe-mp[transformers]`).

    import smoe_mp.transformers
    model = smoe_mp.transformers.load("path/to/model")             starts a private system
    model = smoe_mp.transformers.load("path/to/model", ring="mine")  uses one that runs
    tokenizer = smoe_mp.transformers.load_tokenizer("path/to/model")
    model.generate(**tokenizer("...", return_tensors="pt"))

What `load` gives is the family's own class of transformers, loaded by `from_pretrained`, with everything but
the routed experts in memory: those come from a ring, one by one, while the family's own eager code runs.
The results are those of the resident model with `experts_implementation="eager"`, to the last bit.

    experts      the hook: streamed weights, passes, recipes
    model        the class whose experts are never allocated, and what it refuses
    checkpoint   folders, hub ids, GGUF files, vaults
    gguf, scout  the dense part of the latter two
    families     what is supported

docs/transformers.md says what is refused and what was tested.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smoe_mp.errors import ModelError
from smoe_mp.launch import PrivateSystem, private_system
from smoe_mp.ring import Ring, attach
from smoe_mp.segments import difference_to
from smoe_mp.transformers.checkpoint import (
    Checkpoint,
    folder_of,
    load_tokenizer,
    missing_weights,
    open_checkpoint,
)
from smoe_mp.transformers.experts import IMPLEMENTATION
from smoe_mp.transformers.families import MODEL_TYPES
from smoe_mp.transformers.model import bind, ring_of, streamed_class

__all__ = ["MODEL_TYPES", "cache_of", "load", "load_tokenizer", "ring_of"]

#: Arguments of from_pretrained that would load, place or quantise weights in other ways, and why not.
_REFUSED = {
    "experts_implementation": f"it is {IMPLEMENTATION!r} here",
    "state_dict": "weights come from the path",
    "gguf_file": "give the file as the path",
    "subfolder": "give the folder as the path",
    "revision": "give the snapshot's folder as the path",
    "quantization_config": "experts come as they are stored",
    "tp_plan": "one process runs one model",
    "tp_size": "one process runs one model",
    "distributed_config": "one process runs one model",
    "offload_folder": "only experts are kept out of memory",
    "output_loading_info": "what is missing is an error",
    "ignore_mismatched_sizes": "what does not fit is an error",
}


def load(
    path: str | Path,
    ring: str | None = None,
    *,
    config: Any = None,
    system: Mapping[str, Any] | None = None,
    threads: int = 1,
    device: str = "cpu",
    gpu_cache_gb: float | None = None,
    look_ahead: int = 0,
    **kwargs: Any,
) -> Any:
    """The model at `path` as an ordinary PreTrainedModel whose routed experts come from a ring.

    `path`: a folder, a hub id in the local cache, a GGUF file, or a `.smoe` vault with its scout file beside
    it.  `ring`: the name of a running system of the same files; None starts one for this model alone, with
    `system` as the options of `smoe_mp.launch.private_system`, and stops it with the model.  `config`: in
    place of the model's own.  `threads`: of the dequantisation of experts in block types.  `kwargs`: those of
    `from_pretrained` (`dtype`, `attn_implementation`, ...).

    `device`: "cpu", or "cuda" ("cuda:1"): then the dense part lies on the GPU, and before the ring is a cache
    of experts in GPU memory of `gpu_cache_gb` (10^9 bytes; None: as many as there are, at most half of what
    is free); its results are those of `experts_implementation="grouped_mm"`.

    `look_ahead`: at decode, so many experts of the next layer are guessed for each sequence, by asking that
    layer's router ahead of time; 0: none.  It changes when experts are read, and nothing else.

    Raises ModelError for a family, an argument or a device that is not supported and for a ring of another
    model; VaultError for files that do not add up or lack weights; and what `attach` raises.
    """
    _check_arguments(kwargs)
    where = _check_device(device, gpu_cache_gb)
    if look_ahead < 0:
        raise ModelError(f"look_ahead={look_ahead!r}: a number of experts is wanted, 0 for none")
    checkpoint = open_checkpoint(path, config)
    owner = private_system(checkpoint.path, **(system or {})) if ring is None else None
    try:
        attached = attach(owner.name if owner else str(ring), label="transformers")
        _check_ring(attached, checkpoint)
        model = _load(checkpoint, kwargs)
        model._smoe_stream.threads = threads
        bind(model, attached, look_ahead)
        if where.type != "cpu":
            _onto(model, attached, where, gpu_cache_gb)
    except BaseException:
        if owner is not None:
            owner.stop()
        raise
    if owner is not None:
        weakref.finalize(model, _stop, owner)  # also at the interpreter's exit
    return model


def _stop(owner: PrivateSystem) -> None:
    owner.stop()


def _check_device(device: str, gpu_cache_gb: float | None) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device={device!r}: {error}") from None
    if where.type not in ("cpu", "cuda"):
        raise ModelError(f"device={device!r}: streamed experts run on the CPU and with CUDA")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device={device!r}: there is no CUDA device here, or torch was built without CUDA")
    if where.type == "cuda" and (where.index or 0) >= (count := torch.cuda.device_count()):
        raise ModelError(f"device={device!r}: the last CUDA device here is 'cuda:{count - 1}'")
    if gpu_cache_gb is not None and (where.type == "cpu" or not 0 < gpu_cache_gb < math.inf):
        raise ModelError(f"gpu_cache_gb={gpu_cache_gb!r}: a finite size above 0, for device='cuda'")
    return where


def _onto(model: Any, ring: Ring, device: torch.device, gpu_cache_gb: float | None) -> None:
    """The dense part to the GPU, and a cache of experts before the ring."""
    cuda: Any = importlib.import_module("smoe_mp.cuda")
    torch.nn.Module.to(model, device)
    whole = ring.experts * (ring.slot_bytes + cuda.PADDING)
    if gpu_cache_gb is None:
        free, _ = torch.cuda.mem_get_info(device)
        nbytes = min(whole, free // 2)
    else:
        nbytes = int(min(whole, gpu_cache_gb * 1e9))
    model._smoe_stream.cache = cuda.ExpertCache(ring, nbytes, device, cuda.pin(ring))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True  # a pass asks for experts, which no graph can hold


def cache_of(model: Any) -> Any:
    """The cache in GPU memory of a model of `load(..., device="cuda")`: its `stats`, or None on the CPU."""
    ring_of(model)
    return model._smoe_stream.cache


def _check_arguments(kwargs: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ModelError(f"{name}={kwargs[name]!r} cannot be used with streamed experts: {why}")
    device_map = kwargs.get("device_map")
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for device in devices:
        if device is not None and str(device) != "cpu":
            raise ModelError(f"device_map={device_map!r}: give device={str(device)!r} instead")


def _check_ring(ring: Ring, checkpoint: Checkpoint) -> None:
    """The ring is one of this very model: files, experts, tensors."""
    if why := difference_to(ring._open().ptr, ring.name, checkpoint.source):
        raise ModelError(
            f"ring {ring.name}: of another model than {checkpoint.path}: {why}; start `smoe-mp up` for this"
            " one, or load without a ring"
        )


def _load(checkpoint: Checkpoint, kwargs: dict[str, Any]) -> Any:
    """The dense part, by from_pretrained of the class that has no experts."""
    if not checkpoint.model_class._can_set_experts_implementation():
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.model_class.__name__} of this transformers takes no experts"
            " implementation of another's (transformers>=5.8 is needed)"
        )
    cls = streamed_class(checkpoint.model_class, checkpoint.source)
    where, dense = _dense(checkpoint, cls, kwargs)
    model, info = cls.from_pretrained(
        where,
        config=checkpoint.config,
        state_dict=dense,
        experts_implementation=IMPLEMENTATION,
        output_loading_info=True,
        **kwargs,
    )
    if info["missing_keys"]:
        raise missing_weights(checkpoint.path, info["missing_keys"])
    return model


def _dense(
    checkpoint: Checkpoint, cls: Any, kwargs: dict[str, Any]
) -> tuple[str | None, dict[str, Any] | None]:
    """What from_pretrained is given: a folder, or weights by name."""
    source = checkpoint.source
    if source.format == "safetensors":
        return str(folder_of(source)), None
    if source.format == "smoe":
        scout: Any = importlib.import_module("smoe_mp.transformers.scout")
        return None, scout.dense_weights(source)
    gguf: Any = importlib.import_module("smoe_mp.transformers.gguf")
    kwargs["dtype"] = gguf.dtype_of(kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None))
    return None, gguf.dense_weights(source, checkpoint.config, cls, kwargs["dtype"])
