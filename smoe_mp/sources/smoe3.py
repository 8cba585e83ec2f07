"""The `.smoe` vault, version 3: ours, for experts of any type, weights unchanged.

    0              header, 64 bytes: as in version 2, with version 3; group_size and bits are 0, and the last
                   field says where the description begins
    64             expert table, 48 bytes an expert: as in version 2; the group_size field holds the number of
                   the expert's layout, num_groups is 0
                   description, at a multiple of 64: "SV3D", CRC-32C of the text u32, its length u64, the text
                   zeros
    data_offset    expert blobs, each at a multiple of 16384 and padded with zeros to one

Versions 1 and 2 know three quantised matrices an expert, with a binary record for each.  Experts as they come
have biases, block scales, fused matrices and element types that nobody has thought of yet; but a model has
few different kinds of experts.  So the tensors are described once a kind, a *layout*, in JSON that says
itself what it is: name, type, shape, offset and size of each.  It is small, and checked like the rest before
anything is done by it: typed decoding, then every number against the experts' sizes.

In its blob each tensor begins at a multiple of 64, gate first and up right behind it, so that both are one
view where gate's size is a multiple of 64.  An expert is one extent, its padded blob, and the CRC-32C in its
entry covers that.  docs/formats.md has the format in full.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from smoe_mp._native import ffi, lib
from smoe_mp.errors import VaultError
from smoe_mp.quant import packed_sizes
from smoe_mp.sources.base import Expert, Extent, ModelFacts, SourceFile, Tensor
from smoe_mp.sources.dtypes import BITS
from smoe_mp.sources.files import open_readable
from smoe_mp.sources.smoe import SmoeVault, open_smoe
from smoe_mp.sources.smoe_file import (
    ENTRY_DTYPE,
    SmoeHeader,
    Table,
    VaultFile,
    figures,
)

__all__ = [
    "DESCRIPTION_ALIGNMENT",
    "DESCRIPTION_HEAD",
    "DESCRIPTION_MAGIC",
    "TENSOR_ALIGNMENT",
    "Description",
    "Origin",
    "OriginFile",
    "RawVault",
    "TensorRecord",
    "open_raw",
    "open_vault",
]

VERSION = 3
DESCRIPTION_MAGIC = b"SV3D"
DESCRIPTION_HEAD = struct.Struct("<4sIQ")  # magic, CRC-32C of the text, its length
DESCRIPTION_ALIGNMENT = 64
MAX_DESCRIPTION_BYTES = 16 << 20
TENSOR_ALIGNMENT = 64

_CODE_BITS = {"SMOE_Q4": 4, "SMOE_Q2": 2}

Text = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]


class TensorRecord(Struct, frozen=True):
    """One tensor: `shape` in elements, row-major; `offset` from the blob's start and `nbytes` in bytes; `tag`
    as in `base.Tensor`."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Positive, ...], Meta(max_length=4)]
    offset: Count
    nbytes: Positive
    tag: Annotated[str, Meta(max_length=256)] = ""


class Model(Struct, frozen=True):
    """`base.ModelFacts`."""

    model_type: str = ""
    num_layers: Count = 0
    d_model: Count = 0
    ffn_dim: Count = 0
    vocab_size: Count = 0
    top_k: Count = 0
    extra: dict[str, float | int | str] = {}


class OriginFile(Struct, frozen=True):
    """A file that the experts were taken from: its bare name, size in bytes and header digest (hex)."""

    name: Text
    bytes: Count
    header_digest: str


class Origin(Struct, frozen=True):
    """Where the experts were taken from.  A model's other tensors are still there, or in the scout file."""

    format: Text
    files: tuple[OriginFile, ...]
    scout: str = ""


class Description(Struct, frozen=True):
    """The text of the description."""

    layouts: Annotated[tuple[tuple[TensorRecord, ...], ...], Meta(min_length=1)]
    model: Model
    origin: Origin


@dataclass(frozen=True)
class RawVault:
    """A checked vault of version 3: a `base.Source`, and where its experts came from.

    `table`: the expert table as it stands in the file, records of ENTRY_DTYPE, read-only.
    """

    path: Path
    files: tuple[SourceFile, ...]
    header: SmoeHeader
    table: Table
    origin: Origin
    experts: tuple[Expert, ...]
    layouts: tuple[tuple[Tensor, ...], ...]
    model: ModelFacts
    format: str = "smoe"


def open_vault(path: Path) -> SmoeVault | RawVault:
    """Open the `.smoe` vault at `path`, of whatever version.  Raises VaultError as `open_smoe` does."""
    with _reading(path) as fd:
        version = VaultFile(path, fd).read_header().version
    return open_raw(path) if version == VERSION else open_smoe(path)


def open_raw(path: Path) -> RawVault:
    """Open the `.smoe` vault at `path`, version 3, and check all of it but the experts' bytes.

    Raises VaultError with the file, the place in it and the figures, where the file cannot be read or its
    numbers do not add up.
    """
    with _reading(path) as fd:
        return _Reader(path, fd).read()


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    fd = open_readable(path)
    try:
        yield fd
    except OSError as error:
        raise VaultError(f"{path}: read: {os.strerror(error.errno or 0)} (errno {error.errno})") from error
    finally:
        os.close(fd)


class _Reader(VaultFile):
    """One opening of one vault of version 3."""

    def read(self) -> RawVault:
        header = self.read_header()
        end = self._check_header(header)
        region = self.read_exactly(0, end, "the tables")
        table = np.frombuffer(region, ENTRY_DTYPE, header.total_experts, header.table_offset)
        description = self._description(header, region)
        self.check_ids(header, table)
        self.check_blobs(header, table)
        for number, layout in enumerate(description.layouts):
            self._check_layout(number, layout)
        self._check_entries(table, description)
        self._check_facts(header, description.model)
        return RawVault(
            path=self.path,
            files=(self.identity(header, region),),
            header=header,
            table=table,
            origin=description.origin,
            experts=_experts(table),
            layouts=tuple(
                tuple(Tensor(t.name, t.dtype, t.shape, 0, t.offset, t.nbytes, t.tag) for t in layout)
                for layout in description.layouts
            ),
            model=ModelFacts(**msgspec.structs.asdict(description.model)),
        )

    def _check_header(self, h: SmoeHeader) -> int:
        """Check the header alone; the end of the description."""
        if h.version != VERSION:
            raise self.refuse(f"version {h.version} of the format, not {VERSION}")
        if (h.group_size, h.bits) != (0, 0):
            raise self.refuse(f"header: group_size {h.group_size} and bits {h.bits}, 0 and 0 in version 3")
        self.check_counts(h)
        tables_end = self.check_places(h, ENTRY_DTYPE.itemsize)
        at = h.arch_offset
        if at % DESCRIPTION_ALIGNMENT:
            raise self.refuse(f"header: description at {at}, no multiple of {DESCRIPTION_ALIGNMENT}")
        if at < tables_end or h.data_offset - at < DESCRIPTION_HEAD.size or at > h.data_offset:
            raise self.refuse(
                f"header: the description at {at} is not between the end of the table at {tables_end} and"
                f" data_offset {h.data_offset}"
            )
        length = self._description_length(h)
        end = at + DESCRIPTION_HEAD.size + length
        self.check_slack(h, end)
        return end

    def _description_length(self, h: SmoeHeader) -> int:
        magic, _, length = DESCRIPTION_HEAD.unpack(
            self.read_exactly(h.arch_offset, DESCRIPTION_HEAD.size, "the description")
        )
        where = f"description at {h.arch_offset}"
        if magic != DESCRIPTION_MAGIC:
            raise self.refuse(f"{where}: begins with {magic!r}, not {DESCRIPTION_MAGIC!r}")
        room = h.data_offset - h.arch_offset - DESCRIPTION_HEAD.size
        if length > room:
            raise self.refuse(f"{where}: {length} bytes, but data_offset {h.data_offset} leaves {room}")
        if length > MAX_DESCRIPTION_BYTES:
            raise self.refuse(f"{where}: {length} bytes, at most {MAX_DESCRIPTION_BYTES} are accepted")
        return int(length)

    def _description(self, h: SmoeHeader, region: bytes) -> Description:
        at = h.arch_offset + DESCRIPTION_HEAD.size
        text = region[at:]
        _, wanted, _ = DESCRIPTION_HEAD.unpack_from(region, h.arch_offset)
        if (got := lib.smoe_crc32c(0, ffi.from_buffer(text), len(text))) != wanted:
            raise self.refuse(
                f"description at {h.arch_offset}: CRC-32C {got:08x}, the file says {wanted:08x}: damaged"
            )
        try:
            return msgspec.json.decode(text, type=Description)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise self.refuse(f"description at {h.arch_offset}: {error}") from error

    def _check_entries(self, table: Table, description: Description) -> None:
        """What each entry says of its layout."""
        layout = table["group_size"]
        count = len(description.layouts)
        self.refuse_first(
            table, layout >= count, figures(f"layout %d, but the description has {count}", layout)
        )
        self.refuse_first(
            table, table["num_groups"] != 0, figures("num_groups %d, 0 in version 3", table["num_groups"])
        )
        ends = [max(t.offset + t.nbytes for t in tensors) for tensors in description.layouts]
        end = np.array(ends, np.uint64)[layout]
        self.refuse_first(
            table,
            table["raw_size"] != end,
            figures("raw_size %d, but its layout's tensors end at %d", table["raw_size"], end),
        )

    def _check_layout(self, number: int, layout: tuple[TensorRecord, ...]) -> None:
        by_name = {tensor.name: tensor for tensor in layout}
        if len(by_name) != len(layout) or not layout:
            raise self.refuse(f"layout {number}: {len(layout)} tensors with {len(by_name)} names")
        for tensor in layout:
            where = f"layout {number}, tensor {tensor.name!r}"
            if not (tensor.name + tensor.dtype + tensor.tag).isprintable():
                raise self.refuse(
                    f"{where}: name, type {tensor.dtype!r} or tag {tensor.tag!r} is no printable text"
                )
            if tensor.offset % TENSOR_ALIGNMENT:
                raise self.refuse(f"{where}: offset {tensor.offset} is no multiple of {TENSOR_ALIGNMENT}")
            self._check_size(where, tensor, by_name)
        ordered = sorted(layout, key=lambda tensor: tensor.offset)
        for one, two in pairwise(ordered):
            if two.offset < one.offset + one.nbytes:
                raise self.refuse(
                    f"layout {number}: {one.name!r} and {two.name!r} overlap: {one.nbytes} bytes at"
                    f" {one.offset}, {two.nbytes} at {two.offset}"
                )

    def _check_size(self, where: str, tensor: TensorRecord, by_name: dict[str, TensorRecord]) -> None:
        """The tensor's size is what its type and shape make it, where the type is known."""
        elements = prod(tensor.shape)
        if width := BITS.get(tensor.dtype):
            if elements * width != tensor.nbytes * 8:
                raise self.refuse(
                    f"{where}: {tensor.nbytes} bytes, but {elements} elements of {tensor.dtype} are"
                    f" {elements * width} bits"
                )
        elif bits := _CODE_BITS.get(tensor.dtype):
            self._check_quantised(where, tensor, bits, by_name.get(tensor.name + ".scales"))

    def _check_quantised(
        self, where: str, tensor: TensorRecord, bits: int, scales: TensorRecord | None
    ) -> None:
        try:
            codes_bytes, scales_bytes = packed_sizes(prod(tensor.shape), bits)
        except ValueError as error:
            raise self.refuse(f"{where}: {error}") from error
        found = (tensor.nbytes, scales.nbytes if scales else 0, scales.dtype if scales else "none")
        if found != (codes_bytes, scales_bytes, "F16"):
            raise self.refuse(
                f"{where}: {found[0]} bytes of codes and {found[1]} of scales ({found[2]}), but shape"
                f" {tensor.shape} needs {codes_bytes} and {scales_bytes} (F16)"
            )

    def _check_facts(self, h: SmoeHeader, model: Model) -> None:
        for name in ("d_model", "vocab_size", "ffn_dim"):
            if getattr(h, name) != getattr(model, name):
                raise self.refuse(
                    f"header: {name} {getattr(h, name)}, but the description says {getattr(model, name)}"
                )


def _experts(table: Table) -> tuple[Expert, ...]:
    names = ("layer_id", "expert_id", "byte_offset", "padded_size", "group_size", "crc32c")
    columns = (table[name].tolist() for name in names)
    return tuple(
        Expert(layer, expert, (Extent(0, offset, padded),), layout, crc32c)
        for layer, expert, offset, padded, layout, crc32c in zip(*columns, strict=True)
    )
