"""Writing `.smoe` vaults: one expert after the other, a whole file or none.

The sizes of all experts follow from the tensors' shapes and the bits, so the header, the table and every
offset are known before the first expert is there.  Experts may therefore be written in any order and by
several threads at once, and no more is in memory than they are working on.  The table is written last of
all, into a file that is renamed into its place only then (`PartialFile`).

With an arch block the file is version 2; without one it is version 1, byte for byte what version 1 is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from smoe_mp.errors import VaultError
from smoe_mp.partial import PartialFile
from smoe_mp.quant import F16, F32, GROUP_WEIGHTS, U8, packed_sizes, quantize_q2, quantize_q4
from smoe_mp.sources.checks import MAX_EXPERTS, MAX_GRID_CELLS
from smoe_mp.sources.smoe import (
    ALIGNMENT,
    ARCH_ALIGNMENT,
    ARCH_DTYPE,
    ARCH_MAGIC,
    DESCRIPTOR_DTYPE,
    ENTRY_DTYPE,
    HEADER_DTYPE,
    MAGIC,
    TENSOR_NAMES,
    ArchBlock,
)

__all__ = ["VaultWriter", "check_pairs", "up_to"]

Packed = tuple[U8, F16]
_PACKED_DTYPES = (np.dtype(np.uint8), np.dtype(np.float16))


def up_to(value: int, multiple: int) -> int:
    """The least multiple that is no less than `value`."""
    return -(-value // multiple) * multiple


def check_pairs(path: Path, experts: Sequence[tuple[int, int]]) -> None:
    """VaultError where a vault, or a ring, cannot hold the (layer, expert) pairs."""
    if not 1 <= len(experts) <= MAX_EXPERTS:
        raise VaultError(f"{path}: {len(experts)} experts; a vault holds 1 to {MAX_EXPERTS}")
    if len(set(experts)) != len(experts):
        raise VaultError(f"{path}: an expert is in the list twice")
    layers, ids = zip(*experts, strict=True)
    if min(*layers, *ids) < 0 or (max(layers) + 1) * (max(ids) + 1) > MAX_GRID_CELLS:
        raise VaultError(
            f"{path}: layers {min(layers)} to {max(layers)} and experts {min(ids)} to {max(ids)}:"
            f" not a grid of 1 to {MAX_GRID_CELLS} places"
        )


class VaultWriter:
    """Writes the vault `path`, replacing what is there when all of it is written.

    `experts`: the (layer, expert) pairs in the order in which they will be added.  `bits`: 4 or 2.
    `shapes`: (rows, cols) of "gate", "up" and "down", alike for all experts.  `d_model`, `vocab_size` and
    `ffn_dim` go into the header as they are; `arch`, if any, makes it version 2.  `checksum`: a function of
    the padded blob's bytes giving its CRC-32C, for the entries' reserved field; without it the field is 0.
    `begin` false: only the sizes are worked out, and nothing is touched before `begin()`.

    A context manager: leaving it in order closes the writer, leaving it by an exception removes what was
    written.  VaultError where the experts or shapes cannot be, where the space is not there, where another
    process is writing the same vault, and where the file system fails, with the figures.
    """

    def __init__(
        self,
        path: Path,
        experts: Sequence[tuple[int, int]],
        *,
        bits: int,
        shapes: Mapping[str, tuple[int, int]],
        d_model: int,
        vocab_size: int,
        ffn_dim: int,
        arch: ArchBlock | None = None,
        checksum: Callable[[memoryview], int] | None = None,
        begin: bool = True,
    ) -> None:
        self.path = path
        self.bits = bits
        self.shapes = {name: shapes[name] for name in TENSOR_NAMES}
        self._experts = list(experts)
        self._checksum = checksum
        self._crcs: list[int | None] = [None] * len(self._experts)  # None: not written
        self._next = 0  # for `add`
        self._check()
        self._sizes = {name: packed_sizes(prod(shape), bits) for name, shape in self.shapes.items()}
        self.raw_size = sum(sum(sizes) for sizes in self._sizes.values())
        self.padded_size = up_to(self.raw_size, ALIGNMENT)
        self._lay_out(d_model, vocab_size, ffn_dim, arch)
        self._file: PartialFile | None = None
        if begin:
            self.begin()

    def begin(self) -> None:
        """Open the file that is written, after a look at the free space."""
        self._file = PartialFile(self.path, self.file_size, "vault")

    @property
    def file_size(self) -> int:
        """Bytes of the whole vault."""
        return self._data_offset + len(self._experts) * self.padded_size

    def add(self, layer: int, expert: int, gate: F32, up: F32, down: F32) -> None:
        """Quantise and write the next expert; float32 arrays of the writer's shapes."""
        quantise = quantize_q4 if self.bits == 4 else quantize_q2
        packed: list[Packed] = []
        for name, weights in zip(TENSOR_NAMES, (gate, up, down), strict=True):
            if weights.shape != self.shapes[name]:
                raise VaultError(
                    f"{self.path}: {name} of expert {expert} of layer {layer} has shape {weights.shape}, not"
                    f" {self.shapes[name]}"
                )
            try:
                packed.append(quantise(weights))
            except ValueError as error:
                raise VaultError(
                    f"{self.path}: {name} of expert {expert} of layer {layer}: {error}"
                ) from error
        self.add_packed(layer, expert, *packed)

    def add_packed(self, layer: int, expert: int, gate: Packed, up: Packed, down: Packed) -> None:
        """Write the next expert from (codes, scales) of each tensor, as `quant` makes them."""
        index = self._next
        self._open_file()
        if index == len(self._experts):
            raise VaultError(f"{self.path}: all {index} experts are written; ({layer}, {expert}) is too many")
        if (layer, expert) != self._experts[index]:
            raise VaultError(
                f"{self.path}: expert {expert} of layer {layer} was added where entry {index}, expert"
                f" {self._experts[index][1]} of layer {self._experts[index][0]}, is next"
            )
        blob = bytearray(self.padded_size)
        place = 0
        for name, tensor in zip(TENSOR_NAMES, (gate, up, down), strict=True):
            what = f"{name} of expert {expert} of layer {layer}"
            parts: tuple[U8 | F16, U8 | F16] = tensor
            for array, dtype, size in zip(parts, _PACKED_DTYPES, self._sizes[name], strict=True):
                if array.dtype != dtype or array.nbytes != size:
                    raise VaultError(
                        f"{self.path}: {what}: {array.nbytes} bytes of {array.dtype}, must be {size} of"
                        f" {dtype}"
                    )
                blob[place : place + size] = array.tobytes()
                place += size
        self.write_blob(index, blob)
        self._next += 1

    def places(self, name: str) -> tuple[int, int]:
        """Where in its blob an expert's tensor `name` has its codes and its scales (bytes)."""
        codes = sum(sum(self._sizes[before]) for before in TENSOR_NAMES[: TENSOR_NAMES.index(name)])
        return codes, codes + self._sizes[name][0]

    def write_blob(self, index: int, blob: bytearray) -> None:
        """Write entry `index` as a whole: `padded_size` bytes, what the tensors leave of it zeros.  Any
        order, any thread; an entry is written by one thread."""
        file = self._open_file()
        if len(blob) != self.padded_size:
            raise VaultError(f"{self.path}: entry {index}: {len(blob)} bytes, must be {self.padded_size}")
        file.write(blob, self._data_offset + index * self.padded_size)
        self._crcs[index] = self._checksum(memoryview(blob)) if self._checksum else 0

    def _open_file(self) -> PartialFile:
        if self._file is None or self._file.closed:
            raise VaultError(f"{self.path}: this writer is closed")
        return self._file

    def close(self, before: Callable[[], None] | None = None) -> None:
        """Finish the vault and put it in its place; nothing on a writer that is closed.  `before` is called
        when nothing but the rename is left to do.

        VaultError where experts are missing; then, and at any other error, what was written is removed.
        """
        if self._file is None or self._file.closed:
            return
        try:
            if None in self._crcs:
                layer, expert = self._experts[self._crcs.index(None)]
                written = sum(crc is not None for crc in self._crcs)
                raise VaultError(
                    f"{self.path}: {written} of {len(self._experts)} experts were written; expert"
                    f" {expert} of layer {layer} is the first that is missing"
                )
            self._table["crc32c"] = self._crcs
            self._file.write(self._head(), 0)
            self._file.publish(before)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; the file that was in the vault's place stays."""
        if self._file is not None:
            self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _check(self) -> None:
        check_pairs(self.path, self._experts)
        for name, shape in self.shapes.items():
            if min(shape) <= 0 or prod(shape) % GROUP_WEIGHTS:
                raise VaultError(
                    f"{self.path}: {name} of shape {shape} is not a whole number of groups of {GROUP_WEIGHTS}"
                    " weights, which the format's quantisation needs"
                )

    def _lay_out(self, d_model: int, vocab_size: int, ffn_dim: int, arch: ArchBlock | None) -> None:
        count = len(self._experts)
        tables_end = HEADER_DTYPE.itemsize + count * (ENTRY_DTYPE.itemsize + 3 * DESCRIPTOR_DTYPE.itemsize)
        arch_offset = up_to(tables_end, ARCH_ALIGNMENT) if arch else 0
        end = arch_offset + ARCH_DTYPE.itemsize if arch else tables_end
        self._data_offset = up_to(end, ALIGNMENT)
        self._header = np.zeros((), HEADER_DTYPE)
        fields = {
            "magic": MAGIC,
            "version": 2 if arch else 1,
            "num_moe_layers": len({layer for layer, _ in self._experts}),
            "max_experts_per_layer": 1 + max(expert for _, expert in self._experts),
            "total_experts": count,
            "table_offset": HEADER_DTYPE.itemsize,
            "data_offset": self._data_offset,
            "group_size": GROUP_WEIGHTS,
            "bits": self.bits,
            "d_model": d_model,
            "vocab_size": vocab_size,
            "ffn_dim": ffn_dim,
            "arch_offset": arch_offset,
        }
        for name, value in fields.items():
            self._header[name] = value
        self._table = np.zeros(count, ENTRY_DTYPE)
        self._table["layer_id"] = [layer for layer, _ in self._experts]
        self._table["expert_id"] = [expert for _, expert in self._experts]
        self._table["byte_offset"] = self._data_offset + np.arange(count, dtype=np.uint64) * self.padded_size
        self._table["raw_size"] = self.raw_size
        self._table["padded_size"] = self.padded_size
        self._table["group_size"] = GROUP_WEIGHTS
        self._table["num_groups"] = sum(scales // 2 for _, scales in self._sizes.values())
        self._descriptors = np.tile(self._descriptors_of_one(), count)
        try:
            self._arch = _arch_record(arch)
        except (OverflowError, ValueError) as error:
            raise VaultError(f"{self.path}: the arch block cannot hold {arch}: {error}") from error
        self._arch_offset = arch_offset

    def _descriptors_of_one(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        out = np.zeros(3, DESCRIPTOR_DTYPE)
        place = 0
        for number, (name, shape) in enumerate(self.shapes.items()):
            codes, scales = self._sizes[name]
            out[number] = (number, 2, 0, *shape, place, codes, place + codes, scales)
            place += codes + scales
        return out

    def _head(self) -> bytearray:
        """All bytes before the blobs."""
        head = bytearray(self._data_offset)
        tables = self._header.tobytes() + self._table.tobytes() + self._descriptors.tobytes()
        head[: len(tables)] = tables
        head[self._arch_offset : self._arch_offset + len(self._arch)] = self._arch
        return head


def _arch_record(arch: ArchBlock | None) -> bytes:
    """The 128 bytes of the arch block, none without one."""
    if arch is None:
        return b""
    record = np.zeros((), ARCH_DTYPE)
    record["magic"], record["block_version"], record["block_size"] = ARCH_MAGIC, 1, ARCH_DTYPE.itemsize
    for name, value in asdict(arch).items():
        record[name] = value.encode() if isinstance(value, str) else value
    if record["model_type"].item() != arch.model_type.encode():
        raise ValueError(f"model_type {arch.model_type!r} is longer than 24 bytes")
    return record.tobytes()
