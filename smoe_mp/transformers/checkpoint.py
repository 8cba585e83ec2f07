"""Where a model's parts are, whatever its files are: configuration, dense weights, tokenizer, experts.

    folder, hub id     config.json, safetensors files: transformers reads them itself, experts aside
    GGUF file          gguf.py: header to configuration, dense tensors one by one
    .smoe vault        scout.py: the vault's arch block or a config.json, `<name>.scout.safetensors`

The experts come from the very same files through `smoe_mp.sources`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from smoe_mp.errors import ModelError, VaultError
from smoe_mp.models import resolve
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source
from smoe_mp.transformers.families import MODEL_TYPES

__all__ = ["Checkpoint", "folder_of", "load_tokenizer", "missing_weights", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files: `path` as given or resolved, its experts as `source`, its configuration and the
    class of its architecture."""

    path: Path
    source: Source
    config: Any
    model_class: Any


def open_checkpoint(path: str | Path, config: Any = None) -> Checkpoint:
    """Open and check the model at `path`.  `config`: a PreTrainedConfig, its fields, or the path of a
    config.json, in place of the model's own."""
    where = resolve(path)
    source = open_source(where)
    chosen = _given(config) if config is not None else _own_config(source)
    model_class = _class_of(chosen, source)
    _check_family(chosen, source)
    _settle_quantization(chosen, source)
    return Checkpoint(where, source, chosen, model_class)


def load_tokenizer(path: str | Path, **kwargs: Any) -> Any:
    """The tokenizer of the model at `path`: of a folder or hub id its own, of a GGUF file the one in it, of a
    vault the one whose files lie beside it.  ModelError where there is none."""
    where = resolve(path)
    folder = where if where.is_dir() else where.parent
    if where.suffix == ".gguf" or not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        source: Any = open_source(where)
        if source.format != "gguf":
            raise ModelError(
                f"{path}: no tokenizer with it: none of {', '.join(_TOKENIZER_FILES)} is in {folder}"
            )
        first = source.parts[0].path  # of a split model the part that has more than tensors
        folder, kwargs["gguf_file"] = first.parent, first.name
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **kwargs)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def _given(config: Any) -> Any:
    if isinstance(config, PreTrainedConfig):
        return config
    if isinstance(config, Mapping):
        fields = dict(config)
        model_type = fields.pop("model_type", "")
        if not model_type:
            raise ModelError("config=: fields without model_type")
        return AutoConfig.for_model(model_type, **fields)
    return AutoConfig.from_pretrained(str(config), local_files_only=True)


def _own_config(source: Source) -> Any:
    if source.format == "safetensors":
        return AutoConfig.from_pretrained(str(folder_of(source)), local_files_only=True)
    if source.format == "gguf":
        gguf: Any = importlib.import_module("smoe_mp.transformers.gguf")
        return gguf.config_of(source)
    if source.format == "smoe":
        scout: Any = importlib.import_module("smoe_mp.transformers.scout")
        return scout.config_of(source)
    raise ModelError(
        f"{source.path}: a {source.format} has experts only; a model needs its other weights as well: give"
        " the folder, GGUF file or vault"
    )


def folder_of(source: Source) -> Path:
    """The folder of a safetensors model."""
    return source.path if source.path.is_dir() else source.path.parent


def _class_of(config: Any, source: Source) -> Any:
    """The causal language model's class of a configuration."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise ModelError(
            f"{source.path}: model type {config.model_type!r} has no causal language model in transformers"
            f" {transformers.__version__}"
        )
    return known[type(config)]


def _check_family(config: Any, source: Source) -> None:
    model_type = config.get_text_config().model_type
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{source.path}: model type {model_type!r} is not one of those whose experts can be streamed:"
            f" {', '.join(MODEL_TYPES)}"
        )


def _settle_quantization(config: Any, source: Source) -> None:
    """MXFP4 is of experts alone, which are decoded as they are used: to transformers the model is plain."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and source.format == "safetensors":
        fields = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
        if fields.get("quant_method") == "mxfp4":
            del config.quantization_config
            return
        raise ModelError(
            f"{source.path}: its weights are quantised ({fields.get('quant_method')}), which is not supported"
            " yet in a folder: take the unquantised model, a GGUF file of it, or a vault"
        )


def missing_weights(path: Path, missing: Any) -> VaultError:
    """Weights of the model that its files do not have."""
    names = sorted(missing)
    return VaultError(
        f"{path}: no {names[0]} in its files, nor {len(names) - 1} more weights of the model"
        if len(names) > 1
        else f"{path}: no {names[0]} in its files"
    )
