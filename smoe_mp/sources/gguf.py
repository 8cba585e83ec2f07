"""GGUF models, whole or split, with their experts where they lie.

An expert's weights are slices of stacks: blk.N.ffn_{gate,up,down,gate_up}_exps.weight holds those of all
experts of layer N, the expert being the slowest dimension, so one expert is one run of bytes in each stack.
Whatever else carries the same name and one row an expert (biases, scales, vectors of one number an expert)
belongs to the expert as well.  Files of early 2024 have blk.N.ffn_gate.E.weight and so on, one tensor an
expert; they are read too.  Not taken: shared experts (_shexp), chunk experts (_chexps), the norm in front of
experts (ffn_norm_exps), the router, and a vector of one number that all experts share.

    expert    parts, in this order: gate, up, gate_up, down; then what else there is, by name
    tensor    "gate" for the weight, "gate.bias", "gate.scale", ... for the rest: the suffix is the file's own
    tag       "linear" for the weights, whose rows are outputs; gate_up is gate, then up: "concatenated"
    dtype     the block type's name ("Q4_K", "F32", ...); shape row-major: (rows, columns)

A split model is files NAME-00001-of-0000N.gguf; any of them opens it.  The part's number counts from 1 in
the name and from 0 in the metadata (split.no), split.tensors.count is the number of tensors of all parts
together, and only the first part says anything of the model.  A file that is only named like a part, without
that metadata, is a whole file.

Facts first.  A stack that is left out by mistake leaves a model that runs and talks nonsense, or an error
days later.  So what is found is held against what must be there: a layer that has a router or any part of
its experts has all of them; one that has a norm in front of a feed-forward network has that network, dense
or of experts; each stack has as many experts as the metadata says.  The first tensor that is missing is
named.  Draft layers that a file carries at its end are layers like any other.

Every layer may have block types of its own, as quantised files do: experts of one layer share a layout.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import ConfigError, VaultError
from smoe_mp.sources.base import Column, ExpertTable, ModelFacts, SourceFile, Tensor
from smoe_mp.sources.checks import MAX_EXPERTS, MAX_GRID_CELLS
from smoe_mp.sources.gguf_file import BLOCKS, GgufArray, GgufFile, GgufTensor, Value, read_gguf, shown, times

__all__ = ["GgufModel", "dequantize", "open_gguf"]

PARTS_MAX = 4096  # files that a ring can have

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)\.gguf")
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_SUFFIX = r"(?P<suffix>[A-Za-z0-9_.]{1,64})"
_STACK = re.compile(rf"blk\.{_NUMBER}\.ffn_(?P<role>gate_up|gate|up|down)_exps[._]{_SUFFIX}")
_SINGLE = re.compile(rf"blk\.{_NUMBER}\.ffn_(?P<role>gate|up|down)\.{_NUMBER}\.{_SUFFIX}")
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.(.+)")
_ROLES = ("gate", "up", "gate_up", "down")
#: Architectures whose experts have no gate: up, an activation, down.
_UNGATED = frozenset({"nemotron_h_moe", "nomic-bert-moe"})
#: What stands in front of a feed-forward network, under either name.
_NORMS = frozenset({"ffn_norm.weight", "post_attention_norm.weight"})
#: A feed-forward network that is no experts.
_DENSE = frozenset({"ffn_down.weight", "ffn_up.weight"})
#: Facts of the metadata that are shown as they stand, after the architecture's name.
_EXTRA = ("expert_count", "expert_shared_count", "leading_dense_block_count", "nextn_predict_layers")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A checked model: a `base.Source`.  `parts` are its files' headers, in the order of `files`."""

    path: Path
    files: tuple[SourceFile, ...]
    parts: tuple[GgufFile, ...]
    experts: ExpertTable
    layouts: tuple[tuple[Tensor, ...], ...]
    model: ModelFacts
    format: str = "gguf"


def open_gguf(path: Path) -> GgufModel:
    """Open the model at `path`: a GGUF file, any part of a split one, or a folder that holds one model.

    All is checked but the experts' bytes; symbolic links are followed, nothing stays open.  Raises VaultError
    with the file, the tensor and the figures.
    """
    if path.is_dir():
        path = _of_folder(path)
    return _Model(path, _read_parts(path)).build()


def dequantize(type_name: str, data: npt.NDArray[np.uint8], shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """A new float32 array of `shape` (row-major) from the bytes of whole blocks of the type `type_name`.

    The arithmetic is llama.cpp's own, by its Python package gguf.  Raises ConfigError where that is not
    installed, VaultError for a type or a number of bytes that does not fit.
    """
    if type_name not in BLOCKS:
        raise VaultError(f"type {type_name!r} is none of GGUF's: {', '.join(BLOCKS)}")
    block, block_bytes = BLOCKS[type_name]
    rows, row = int(np.prod(shape[:-1], dtype=np.int64)), int(shape[-1])
    want = rows * (row // block) * block_bytes
    if row % block or data.nbytes != want:
        raise VaultError(f"{type_name}: {data.nbytes} bytes for {times(shape)} elements, which take {want}")
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError(
            f"{type_name} is dequantised by the package gguf, which is not installed:"
            " pip install 'smoe-mp[gguf]'"
        ) from error
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(rows, row // block * block_bytes)
    try:
        values = gguf.quants.dequantize(flat, gguf.GGMLQuantizationType[type_name])
    except (KeyError, NotImplementedError) as error:
        raise VaultError(f"{type_name}: the installed package gguf cannot dequantise it: {error}") from error
    return np.array(values, np.float32).reshape(tuple(shape))  # a copy: F32 comes back as it is


# --- which files -----------------------------------------------------------------------------------------


def _of_folder(folder: Path) -> Path:
    """The one model of a folder: a file of it.  Sub-folders are not looked into."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".gguf"))
    except OSError as error:
        raise VaultError(f"{folder}: cannot list the folder: {error.strerror}") from error
    models: dict[str, str] = {}
    for name in names:
        part = _PART_NAME.fullmatch(name)
        models.setdefault(f"{part['stem']}-of-{part['count']}" if part else name, name)
    if len(models) > 1:  # image and audio encoders lie beside the model that they are for
        models = {key: name for key, name in models.items() if not name.startswith("mmproj")} or models
    if not models:
        raise VaultError(f"{folder}: no GGUF file (*.gguf) in this folder; sub-folders are not searched")
    if len(models) > 1:
        listed = ", ".join(list(models.values())[:5])
        raise VaultError(f"{folder}: {len(models)} GGUF models ({listed}): give the file of one of them")
    return folder / next(iter(models.values()))


def _read_parts(path: Path) -> tuple[GgufFile, ...]:
    """The file, or all parts of the split model that it is a part of."""
    file = read_gguf(path)
    count = _whole(file, "split.count") or 1
    if count == 1:
        return (file,)
    name = _PART_NAME.fullmatch(path.name)
    number = (_whole(file, "split.no") or 0) + 1
    if name is None:
        raise VaultError(
            f"{path}: part {number} of {count}, but not named like one: the parts are found by their names,"
            f" NAME-{number:05}-of-{count:05}.gguf; give them their own names again"
        )
    if (int(name["number"]), int(name["count"])) != (number, count):
        raise VaultError(
            f"{path}: its metadata says part {number} of {count}, its name part {int(name['number'])} of"
            f" {int(name['count'])}; give it its own name again"
        )
    if count > PARTS_MAX:
        raise VaultError(f"{path}: one of {count} parts; at most {PARTS_MAX} files can be served")
    paths = [path.with_name(_part_name(name, i)) for i in range(1, count + 1)]
    _check_present(path, paths)
    parts = tuple(file if i == number else read_gguf(p) for i, p in enumerate(paths, 1))
    _check_parts(parts)
    return parts


def _part_name(name: re.Match[str], number: int) -> str:
    """Of part `number`, with as many digits as the name has."""
    return f"{name['stem']}-{number:0{len(name['number'])}}-of-{name['count']}.gguf"


def _check_present(path: Path, paths: list[Path]) -> None:
    missing = [p.name for p in paths if not os.path.lexists(p)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise VaultError(
            f"{path}: one of {len(paths)} parts, of which {len(missing)} are missing:"
            f" {', '.join(missing[:3])}{more}; they must lie in the same folder"
        )


def _check_parts(parts: tuple[GgufFile, ...]) -> None:
    """The parts are of one model, in order, and have all its tensors, each once."""
    total = sum(len(part.tensors) for part in parts)
    where: dict[str, GgufFile] = {}
    for number, part in enumerate(parts):
        said = _whole(part, "split.no"), _whole(part, "split.count")
        if said != (number, len(parts)):
            raise VaultError(
                f"{part.path}: split.no is {said[0]} and split.count {said[1]}, but it is named as part"
                f" {number + 1} of {len(parts)}, so they must be {number} and {len(parts)}"
            )
        expected = _whole(part, "split.tensors.count")
        if expected is not None and expected != total:
            raise VaultError(
                f"{part.path}: split.tensors.count says that the parts have {expected} tensors, they have"
                f" {total}: a part is of another model, or was made anew"
            )
        for name in part.tensors:
            if name in where:
                raise VaultError(f"{part.path}: tensor {shown(name)} is in {where[name].path.name} as well")
            where[name] = part


def _whole(file: GgufFile, key: str) -> int | None:
    """A whole number of the metadata, None where it is not there or is none."""
    value = file.metadata.get(key)
    return value if type(value) is int else None


# --- which tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a layer's experts: that of all experts (`expert` None), or of one.

    `name` is what clients call it; `stride` bytes are one expert's share, of the shape `shape` (row-major).
    """

    name: str
    expert: int | None
    file: int
    tensor: GgufTensor
    shape: tuple[int, ...]
    stride: int

    @property
    def count(self) -> int:
        """How many experts it is of."""
        return 1 if self.expert is not None else (self.tensor.sizes or (1,))[-1]

    @property
    def order(self) -> tuple[bool, int, str]:
        """Weights first, gate before up, so that both can be one view where they touch."""
        role, _, suffix = self.name.partition(".")
        return suffix != "", _ROLES.index(role), suffix


def _client_name(role: str, suffix: str) -> str:
    return role if suffix == "weight" else f"{role}.{suffix}"


@dataclass(slots=True)
class _Found:
    """What the tensors' names say of one layer: its experts' tensors, and the names of the others."""

    pieces: list[_Piece] = field(default_factory=list)
    others: set[str] = field(default_factory=set)

    @property
    def has_experts(self) -> bool:
        return bool(self.pieces) or "ffn_gate_inp.weight" in self.others


@dataclass(frozen=True, slots=True)
class _Columns:
    """The experts of one layer, from 0 on: `file`, `offset` and `length` have one row an expert and one
    column a part."""

    layer: int
    layout: int
    file: Column
    offset: Column
    length: Column


class _Model:
    """The source that the parts make up."""

    def __init__(self, path: Path, parts: tuple[GgufFile, ...]) -> None:
        self.path, self.parts = path, parts
        self.metadata: dict[str, Value] = parts[0].metadata
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise VaultError(f"{parts[0].path}: general.architecture is missing, which every model has")
        self.arch = arch

    def build(self) -> GgufModel:
        found = self._find()
        count = self._expert_count(found)
        self._check_complete(found, count)
        layers = {number: layer.pieces for number, layer in sorted(found.items()) if layer.pieces}
        layouts: dict[tuple[Tensor, ...], int] = {}
        blocks = [self._columns(number, count, pieces, layouts) for number, pieces in layers.items()]
        return GgufModel(
            path=self.path,
            files=tuple(part.identity for part in self.parts),
            parts=self.parts,
            experts=_table(blocks),
            layouts=tuple(layouts),
            model=self._facts(layouts),
        )

    def _refuse(self, what: str, file: int | None = None) -> VaultError:
        return VaultError(f"{self.path if file is None else self.parts[file].path}: {what}")

    def _number(self, key: str) -> int | None:
        """A whole number of the architecture's metadata."""
        return _whole(self.parts[0], f"{self.arch}.{key}")

    def _find(self) -> dict[int, _Found]:
        """By layer, the tensors of its experts and the names of its others."""
        found: dict[int, _Found] = {}
        for file, part in enumerate(self.parts):
            for name, tensor in part.tensors.items():
                if (match := _STACK.fullmatch(name)) is not None:
                    piece = self._stack(file, tensor, match)
                elif (match := _SINGLE.fullmatch(name)) is not None:
                    piece = self._single(file, tensor, match)
                elif (match := _BLOCK.fullmatch(name)) is not None:
                    found.setdefault(int(match[1]), _Found()).others.add(match[2])
                    continue
                else:
                    continue
                if piece is not None:
                    found.setdefault(int(match[1]), _Found()).pieces.append(piece)
        return found

    def _stack(self, file: int, tensor: GgufTensor, match: re.Match[str]) -> _Piece | None:
        """A tensor of all experts of a layer; None where it is one number for all of them."""
        suffix, sizes = match["suffix"], tensor.sizes or (1,)
        nbytes = self._sized(file, tensor)
        if suffix != "weight" and sizes == (1,) and self._number("expert_count") != 1:
            return None
        if suffix == "weight" and len(sizes) != 3:
            raise self._refuse(
                f"{tensor.name}: {len(sizes)} dimensions, a stack of the experts' matrices has 3", file
            )
        if len(sizes) == 1 and BLOCKS[tensor.type_name][0] > 1:
            raise self._refuse(f"{tensor.name}: a block of {tensor.type_name} is of several experts", file)
        shape = tuple(reversed(sizes[:-1])) or (1,)
        return _Piece(_client_name(match["role"], suffix), None, file, tensor, shape, nbytes // sizes[-1])

    def _single(self, file: int, tensor: GgufTensor, match: re.Match[str]) -> _Piece:
        """A tensor of one expert."""
        nbytes = self._sized(file, tensor)
        shape = tuple(reversed(tensor.sizes)) or (1,)
        name = _client_name(match["role"], match["suffix"])
        return _Piece(name, int(match[3]), file, tensor, shape, nbytes)

    def _sized(self, file: int, tensor: GgufTensor) -> int:
        """The bytes of a tensor of experts: known, and more than none."""
        if tensor.nbytes is None:
            raise self._refuse(
                f"{tensor.name}: block type {tensor.type_name} is not known to this version, so it"
                " cannot tell where an expert begins",
                file,
            )
        if tensor.nbytes == 0:
            raise self._refuse(f"{tensor.name}: {times(tensor.sizes)} elements: empty", file)
        return tensor.nbytes

    # --- is all there ---

    def _expert_count(self, found: dict[int, _Found]) -> int:
        """Experts of a layer: what the metadata says, and what every stack must have."""
        pieces = [piece for layer in found.values() for piece in layer.pieces]
        said = self._number("expert_count") or 0
        if not pieces:
            layer = min((n for n, x in found.items() if x.has_experts), default=self._leading_dense())
            raise self._refuse(
                f"no tensors of experts: {self.arch}.expert_count is {said or 'missing'}, and"
                f" blk.{layer}.ffn_down_exps.weight is missing; a dense model needs no streaming"
            )
        stacks = [piece for piece in pieces if piece.expert is None]
        count = said or (stacks[0].count if stacks else 0)
        if count < 1:
            raise self._refuse(f"{self.arch}.expert_count is {said or 'missing'}")
        for piece in stacks:
            if piece.count != count:
                raise self._refuse(
                    f"{piece.tensor.name}: {piece.count} experts, but there are {count} ({self.arch}"
                    ".expert_count)",
                    piece.file,
                )
        layers = [number for number, layer in found.items() if layer.pieces]
        if count * len(layers) > MAX_EXPERTS or (max(layers) + 1) * count > MAX_GRID_CELLS:
            raise self._refuse(
                f"{len(layers)} layers, the last of them {max(layers)}, of {count} experts: at most"
                f" {MAX_EXPERTS} experts and {MAX_GRID_CELLS} pairs of layer and expert can be served"
            )
        return count

    def _leading_dense(self) -> int:
        return self._number("leading_dense_block_count") or 0

    def _check_complete(self, found: dict[int, _Found], count: int) -> None:
        """Every layer of experts has all that the others have; none is without its network."""
        wanted = self._wanted(found)
        # The range ends at the first layer that is missing, however many the metadata claims.
        for number in sorted({*range(min(self._layers(), len(found) + 1)), *found}):
            layer = found.get(number)
            if layer is not None and layer.has_experts:
                self._check_layer(number, layer, wanted, count)
            elif layer is None or (layer.others & _NORMS and not layer.others & _DENSE):
                raise self._missing(number, "down", None)

    def _layers(self) -> int:
        """How many layers must be there: those that the metadata counts, less draft layers at the end, which
        may have been left out."""
        return (self._number("block_count") or 0) - (self._number("nextn_predict_layers") or 0)

    def _wanted(self, found: dict[int, _Found]) -> list[str]:
        """What each layer's experts must have: the weights of a whole network, and whatever weights and
        biases any layer has.  Scales go with a layer's block type."""
        have = {piece.name for layer in found.values() for piece in layer.pieces}
        wanted = {name for name in have if name in _ROLES or name.endswith(".bias")} | {"down"}
        if "gate_up" not in have:
            wanted |= {"up"} if self.arch in _UNGATED else {"gate", "up"}
        return sorted(wanted)

    def _check_layer(self, number: int, layer: _Found, wanted: list[str], count: int) -> None:
        singles = {piece.expert for piece in layer.pieces if piece.expert is not None}
        if singles and any(piece.expert is None for piece in layer.pieces):
            raise self._refuse(f"layer {number} has experts both in stacks and one by one")
        if singles and max(singles) >= count:
            raise self._refuse(
                f"layer {number} has an expert {max(singles)}, but {self.arch}.expert_count is {count}"
            )
        have = {(piece.name, piece.expert) for piece in layer.pieces}
        if len(have) < len(layer.pieces):
            raise self._refuse(f"layer {number} has a tensor of its experts under two names")
        for expert in range(count) if singles else (None,):
            for name in wanted:
                if (name, expert) not in have:
                    raise self._missing(number, name, expert)

    def _missing(self, layer: int, name: str, expert: int | None) -> VaultError:
        role, _, suffix = name.partition(".")
        stem = f"ffn_{role}_exps" if expert is None else f"ffn_{role}.{expert}"
        return self._refuse(
            f"blk.{layer}.{stem}.{suffix or 'weight'} is missing: experts that are there in part are not"
            " served; the file was cut or converted wrongly, fetch it anew"
        )

    # --- the source ---

    def _columns(
        self, number: int, count: int, pieces: list[_Piece], layouts: dict[tuple[Tensor, ...], int]
    ) -> _Columns:
        """The experts of a checked layer; their layout is added to `layouts`."""
        by_expert: dict[int | None, list[_Piece]] = {}
        for piece in sorted(pieces, key=lambda p: p.order):
            by_expert.setdefault(piece.expert, []).append(piece)
        rows = [by_expert.get(None) or by_expert[expert] for expert in range(count)]
        first = rows[0]
        tensors = _tensors(first)
        for expert, row in enumerate(rows):
            if row is not first and _tensors(row) != tensors:
                raise self._refuse(
                    f"layer {number}: the tensors of expert {expert} are not like those of expert 0"
                )
        length = np.array([piece.stride for piece in first], np.int64)
        offset = np.array([[piece.tensor.offset for piece in row] for row in rows], np.int64)
        if None in by_expert:
            offset += np.arange(count)[:, None] * length
        return _Columns(
            layer=number,
            layout=layouts.setdefault(tensors, len(layouts)),
            file=np.array([[piece.file for piece in row] for row in rows], np.int64),
            offset=offset,
            length=np.broadcast_to(length, offset.shape),
        )

    def _facts(self, layouts: dict[tuple[Tensor, ...], int]) -> ModelFacts:
        extra: dict[str, float | int | str] = {}
        for key in _EXTRA:
            if (value := self._number(key)) is not None:
                extra[key] = value
        if isinstance(name := self.metadata.get("general.name"), str):
            extra["name"] = name
        if (file_type := _whole(self.parts[0], "general.file_type")) is not None:
            extra["file_type"] = file_type
        down = next(tensor for tensor in next(iter(layouts)) if tensor.name == "down")
        words = self.metadata.get("tokenizer.ggml.tokens")
        return ModelFacts(
            model_type=self.arch,
            num_layers=self._number("block_count") or 0,
            d_model=self._number("embedding_length") or 0,
            ffn_dim=self._number("expert_feed_forward_length") or down.shape[-1],
            vocab_size=self._number("vocab_size") or (words.count if isinstance(words, GgufArray) else 0),
            top_k=self._number("expert_used_count") or 0,
            extra=extra,
        )


def _tensors(pieces: Sequence[_Piece]) -> tuple[Tensor, ...]:
    """The layout of an expert with these pieces, each of them a part."""
    return tuple(
        Tensor(piece.name, piece.tensor.type_name, piece.shape, part, 0, piece.stride, _tag(piece.name))
        for part, piece in enumerate(pieces)
    )


def _tag(name: str) -> str:
    """What is known of the order of a tensor's elements."""
    role, _, suffix = name.partition(".")
    order = "concatenated" if role == "gate_up" and suffix in ("", "bias") else ""
    return ",".join(filter(None, ("" if suffix else "linear", order)))


def _table(blocks: list[_Columns]) -> ExpertTable:
    """All experts, in the order of layers and numbers."""
    counts = [len(block.offset) for block in blocks]
    parts = np.repeat([block.offset.shape[1] for block in blocks], counts)
    return ExpertTable(
        layer=np.repeat([block.layer for block in blocks], counts),
        expert=np.concatenate([np.arange(count) for count in counts]),
        layout=np.repeat([block.layout for block in blocks], counts),
        crc32c=np.zeros(len(parts), np.int64),
        first=np.concatenate(([0], np.cumsum(parts))),
        file=np.concatenate([block.file.ravel() for block in blocks]),
        offset=np.concatenate([block.offset.ravel() for block in blocks]),
        length=np.concatenate([block.length.ravel() for block in blocks]),
    )
