"""GGUF files for tests: real ones by gguf-py's writer, and ones made byte by byte, which may be wrong.

real     `write_model(path, ...)`: a small model with experts of any block types, split on request
by hand  `HandMade(...)`: pairs and tensors as they shall stand in the file, then `bytes()`
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from smoe_mp.sources.gguf_file import BLOCKS, TYPE_NAMES

NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
D_MODEL, D_FFN = 64, 32
ROLES = ("gate", "up", "down")


# --- by gguf-py ------------------------------------------------------------------------------------------


def stack(type_name: str, experts: int, rows: int, cols: int, seed: int) -> npt.NDArray[np.uint8]:
    """The bytes of a stack of quantised matrices, (experts, rows, bytes of a row): real weights where gguf-py
    can quantise to the type, any bytes where it cannot."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[type_name]
    block, block_bytes = BLOCKS[type_name]
    try:
        weights = rng.standard_normal((experts, rows, cols), np.float32)
        return gguf.quants.quantize(weights, kind).view(np.uint8).reshape(experts, rows, -1)
    except NotImplementedError:
        return rng.integers(0, 256, (experts, rows, cols // block * block_bytes), np.uint8)


def write_model(
    path: Path,
    types: Sequence[Mapping[str, str]] = ({"gate": "Q4_0", "up": "Q4_0", "down": "Q8_0"},) * 2,
    *,
    experts: int = 4,
    d_model: int = D_MODEL,
    d_ffn: int = D_FFN,
    alignment: int = 32,
    version: int = 3,
    biases: bool = False,
    scales: bool = False,
    dense_layers: int = 0,
    tensors_a_part: int = 0,
    arch: str = "qwen3moe",
    tokens: int = 50,
) -> list[Path]:
    """Write a model whose MoE layers have these block types by role; the files, in order.

    `tensors_a_part` > 0 splits it; `path` then gives the stem.  `biases`: one row an expert; `scales`: one
    float32 an expert.  `dense_layers` come first.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_part)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(dense_layers + len(types))
    writer.add_embedding_length(d_model)
    writer.add_expert_feed_forward_length(d_ffn)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_name("a small model")
    writer.add_token_list([f"word {i}" for i in range(tokens)])
    seeds = itertools.count(1)

    def plain(name: str, *shape: int) -> None:
        values = np.random.default_rng(next(seeds)).standard_normal(shape, np.float32)
        writer.add_tensor(name, values)

    plain("token_embd.weight", tokens, d_model)
    for layer in range(dense_layers):
        plain(f"blk.{layer}.ffn_norm.weight", d_model)
        for role in ROLES:
            plain(f"blk.{layer}.ffn_{role}.weight", d_ffn, d_model)
    for layer, by_role in enumerate(types, dense_layers):
        plain(f"blk.{layer}.ffn_norm.weight", d_model)
        plain(f"blk.{layer}.ffn_gate_inp.weight", experts, d_model)
        plain(f"blk.{layer}.ffn_up_shexp.weight", d_ffn, d_model)
        for role, type_name in by_role.items():
            rows, cols = (d_model, d_ffn) if role == "down" else (d_ffn, d_model)
            rows *= 2 if role == "gate_up" else 1
            name = f"blk.{layer}.ffn_{role}_exps"
            kind = gguf.GGMLQuantizationType[type_name]
            data = stack(type_name, experts, rows, cols, next(seeds))
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
            if biases:
                plain(f"{name}.bias", experts, rows)
            if scales:
                plain(f"{name}.scale", experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if tensors_a_part else [path]
    if version != 3:
        for file in files:
            with file.open("r+b") as f:
                f.seek(4)
                f.write(struct.pack("<I", version))
    return files


# --- byte by byte ----------------------------------------------------------------------------------------

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True))


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, it: Any) -> bytes:
    """A value of the metadata: for STRING text or bytes, for ARRAY (kind, elements)."""
    if kind == STRING:
        return text(it)
    if kind == ARRAY:
        inner, elements = it
        return struct.pack("<IQ", inner, len(elements)) + b"".join(value(inner, e) for e in elements)
    return struct.pack(f"<{_FORMS[kind]}", it)


@dataclass
class HandTensor:
    """A tensor as the table shall have it; `offset` None: behind the one before it."""

    name: str | bytes
    sizes: tuple[int, ...]
    type: int = 0
    offset: int | None = None
    nbytes: int | None = None
    data: bytes | None = None  # else what lies there

    @property
    def length(self) -> int:
        if self.data is not None:
            return len(self.data)
        if self.nbytes is not None:
            return self.nbytes
        block, size = BLOCKS[TYPE_NAMES[self.type]]
        return int(np.prod(self.sizes, dtype=object)) // block * size


def _pairs() -> dict[str, tuple[int, Any]]:
    return {
        "general.architecture": (STRING, "qwen3moe"),
        "qwen3moe.block_count": (U32, 2),
        "qwen3moe.embedding_length": (U32, 32),
        "qwen3moe.expert_feed_forward_length": (U32, 16),
        "qwen3moe.expert_count": (U32, 3),
        "qwen3moe.expert_used_count": (U32, 2),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "bc", "", "def"])),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.5, 1.0])),
    }


def _tensors() -> list[HandTensor]:
    tensors = [HandTensor("token_embd.weight", (32, 4))]
    for layer in range(2):
        tensors.append(HandTensor(f"blk.{layer}.ffn_norm.weight", (32,)))
        tensors.append(HandTensor(f"blk.{layer}.ffn_gate_inp.weight", (32, 3)))
        for role in ROLES:
            # (columns, rows, experts): the fastest dimension first.
            sizes = (16, 32, 3) if role == "down" else (32, 16, 3)
            kind = NUMBERS["F16" if role == "down" else "Q8_0"]
            tensors.append(HandTensor(f"blk.{layer}.ffn_{role}_exps.weight", sizes, kind))
    return tensors


@dataclass
class HandMade:
    """A GGUF file to be: 2 layers of 3 experts unless changed.  What is None is worked out."""

    pairs: dict[str, tuple[int, Any]] = field(default_factory=_pairs)
    tensors: list[HandTensor] = field(default_factory=_tensors)
    alignment: int = 32
    version: int = 3
    magic: bytes = b"GGUF"
    tensor_count: int | None = None
    pair_count: int | None = None
    more_pairs: bytes = b""  # as they stand, behind the others
    missing: int = 0  # bytes cut off at the end

    def without(self, *names: str) -> HandMade:
        """Less these tensors."""
        self.tensors = [t for t in self.tensors if t.name not in names]
        return self

    def tensor(self, name: str) -> HandTensor:
        return next(t for t in self.tensors if t.name == name)

    def _places(self) -> list[int]:
        """The offset of each tensor in the data."""
        end, offsets = 0, []
        for t in self.tensors:
            offsets.append(end if t.offset is None else t.offset)
            if t.offset is None:
                end = -(-(end + t.length) // self.alignment) * self.alignment
        return offsets

    def head(self) -> bytes:
        """All in front of the data."""
        table = b""
        for t, offset in zip(self.tensors, self._places(), strict=True):
            table += text(t.name) + struct.pack("<I", len(t.sizes))
            table += b"".join(struct.pack("<Q", size) for size in t.sizes)
            table += struct.pack("<IQ", t.type, offset)
        pairs = b"".join(text(key) + struct.pack("<I", kind) + value(kind, it)
                         for key, (kind, it) in self.pairs.items())  # fmt: skip
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        pair_count = len(self.pairs) if self.pair_count is None else self.pair_count
        head = self.magic + struct.pack("<IQQ", self.version, tensor_count, pair_count)
        head += pairs + self.more_pairs + table
        return head + bytes(-len(head) % self.alignment)

    def bytes(self) -> bytes:
        placed = list(zip(self.tensors, self._places(), strict=True))
        follow = [(t, offset) for t, offset in placed if t.offset is None]
        given = [(t.data, offset) for t, offset in placed if t.data is not None]
        end = max([offset + t.length for t, offset in follow], default=0)
        end = max([-(-end // self.alignment) * self.alignment, *(at + len(raw) for raw, at in given)])
        data = bytearray((np.arange(end, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8).tobytes())
        for raw, at in given:
            data[at : at + len(raw)] = raw
        whole = self.head() + bytes(data)
        return whole[: len(whole) - self.missing]

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


# --- at given places -------------------------------------------------------------------------------------

#: By layer in turn: name, type, columns, rows (0: a vector; neither: one number) of an expert's tensors.
_PLACED = (
    (("gate", "Q8_0", 32, 3), ("up", "Q4_0", 32, 5), ("down", "F32", 5, 7), ("down.scale", "F32", 0, 0)),
    (("gate", "Q5_1", 32, 3), ("up", "BF16", 3, 5), ("down", "F64", 5, 3), ("gate.scale", "F32", 3, 0)),
)


def placed_model(
    layers: Sequence[int],
    experts: int,
    remainders: Sequence[int],
    *,
    alignment: int,
    more: Mapping[str, tuple[int, Any]] | None = None,
) -> tuple[HandMade, dict[tuple[int, int], dict[str, bytes]]]:
    """A file with the layers `layers`, whose stacks begin at `remainders` (modulo 4096; rounded down to what
    the alignment allows), and the bytes of each expert's tensors by name.  `more` pairs make it a part."""
    rng = np.random.default_rng(layers[0])
    made = HandMade(alignment=alignment, tensors=[])
    made.pairs |= {
        "general.alignment": (U32, alignment),
        "qwen3moe.expert_count": (U32, experts),
        "qwen3moe.block_count": (U32, 0),
        **(more or {}),
    }
    wanted: dict[tuple[int, int], dict[str, bytes]] = {(i, e): {} for i in layers for e in range(experts)}
    for layer in layers:
        for name, type_name, cols, rows in _PLACED[layer % 2]:
            role, _, suffix = name.partition(".")
            block, size = BLOCKS[type_name]
            share = max(cols, 1) // block * size * max(rows, 1)
            data = rng.bytes(share * experts)
            sizes = (*(n for n in (cols, rows) if n), experts)
            stored = f"blk.{layer}.ffn_{role}_exps.{suffix or 'weight'}"
            made.tensors.append(HandTensor(stored, sizes, NUMBERS[type_name], 0, data=data))
            for expert in range(experts):
                wanted[layer, expert][name] = data[expert * share : (expert + 1) * share]
    at = begin = len(made.head())  # which has the same length wherever the tensors lie
    for tensor, remainder in zip(made.tensors, _each(remainders, layers), strict=True):
        at += (remainder // alignment * alignment - at) % 4096
        tensor.offset = at - begin
        at += tensor.length
    return made, wanted


def _each(remainders: Sequence[int], layers: Sequence[int]) -> list[int]:
    """A remainder for each tensor: that of its layer."""
    by_layer = zip(layers, remainders, strict=True)
    return [remainder for layer, remainder in by_layer for _ in _PLACED[layer % 2]]
