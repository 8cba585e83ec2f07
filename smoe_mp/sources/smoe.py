"""The `.smoe` vault, versions 1 and 2: the original system's own file of quantised experts.

    0              header, 64 bytes
    64             expert table, 48 bytes an expert
                   tensor descriptors, 3 x 44 bytes an expert, in table order: gate, up, down
                   arch block, 128 bytes at a multiple of 64 (version 2)
                   zeros
    data_offset    expert blobs, each at a multiple of 16384 and padded with zeros to one

Facts first.  A vault is tens of gigabytes of which the header is the first few hundred kilobytes; it comes
from a download, a conversion that may have been killed, or somebody else's tool; and the workers will read
into memory that others compute from, by the numbers that stand in it.  Hence: every number is checked here,
once, before anything is done by it, and what does not add up is refused by file, expert and figures.  No
check adds two numbers from the file before it knows that the sum cannot wrap (offsets are unsigned 64-bit:
`offset <= size` first, then `length <= size - offset`), and nothing is allocated by a number from the file
before that number has been held against the file's size.

The tables are checked as numpy arrays, a column at a time: a vault of 94 x 128 experts opens in a few
hundredths of a second.

An expert is one extent: its whole padded blob, so that a worker's direct read is aligned at both ends and
the checksum in the entry's reserved field (CRC-32C of the padded blob; 0, as the original writes, for none)
covers what is read.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import Expert, Extent, ModelFacts, SourceFile, Tensor
from smoe_mp.sources.files import LFS_POINTER, open_readable

__all__ = [
    "ALIGNMENT",
    "ARCH_DTYPE",
    "DESCRIPTOR_DTYPE",
    "ENTRY_DTYPE",
    "HEADER_DTYPE",
    "MAGIC",
    "MAX_EXPERTS",
    "MAX_GRID_CELLS",
    "ArchBlock",
    "SmoeHeader",
    "SmoeVault",
    "open_smoe",
]

MAGIC = bytes.fromhex("534d4f45deea0001")
ARCH_MAGIC = b"SARC"
ALIGNMENT = 16384
ARCH_ALIGNMENT = 64
GROUP_WEIGHTS = 64
TENSOR_NAMES = ("gate", "up", "down")

# The slot word of the ring has 21 bits for the expert index, and all of them set means none.
MAX_EXPERTS = 2_097_151
# The ring finds an expert by layer and id in a dense table; this bounds that table.
MAX_GRID_CELLS = 1 << 24
# Between the tables and the data there is nothing but zeros up to the next multiple of 16384.  More than
# that may be somebody's reserve, but not without bound: the digest covers it.
MAX_HEADER_SLACK_BYTES = 64 << 20

HEADER_DTYPE = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("num_moe_layers", "<u4"),
        ("max_experts_per_layer", "<u4"),
        ("total_experts", "<u4"),
        ("table_offset", "<u8"),
        ("data_offset", "<u8"),
        ("group_size", "<u4"),
        ("bits", "<u4"),
        ("d_model", "<u4"),
        ("vocab_size", "<u4"),
        ("ffn_dim", "<u4"),
        ("arch_offset", "<u4"),
    ]
)
ENTRY_DTYPE = np.dtype(
    [
        ("layer_id", "<u4"),
        ("expert_id", "<u4"),
        ("byte_offset", "<u8"),
        ("raw_size", "<u8"),
        ("padded_size", "<u8"),
        ("group_size", "<u4"),
        ("num_groups", "<u8"),
        ("crc32c", "<u4"),
    ]
)
DESCRIPTOR_DTYPE = np.dtype(
    [
        ("tensor_type", "u1"),
        ("ndim", "u1"),
        ("zero", "<u2"),
        ("rows", "<u4"),
        ("cols", "<u4"),
        ("packed_offset", "<u8"),
        ("packed_size", "<u8"),
        ("scales_offset", "<u8"),
        ("scales_size", "<u8"),
    ]
)
ARCH_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("block_version", "<u4"),
        ("block_size", "<u4"),
        ("flags", "<u4"),
        ("rope_theta", "<f4"),
        ("num_heads", "<u4"),
        ("num_kv_heads", "<u4"),
        ("head_dim", "<u4"),
        ("moe_top_k", "<u4"),
        ("moe_ffn_dim", "<u4"),
        ("dense_ffn_dim", "<u4"),
        ("shared_expert_ffn_dim", "<u4"),
        ("activation", "<u4"),
        ("num_hidden_layers", "<u4"),
        ("rms_norm_eps", "<f4"),
        ("model_type", "S24"),
        ("zeros", "V44"),
    ]
)
assert (HEADER_DTYPE.itemsize, ENTRY_DTYPE.itemsize) == (64, 48)
assert (DESCRIPTOR_DTYPE.itemsize, ARCH_DTYPE.itemsize) == (44, 128)

Table = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ArchBlock:
    """The arch block of version 2: what the checkpoint's config.json said of the model.

    Sizes in elements; `activation` 0 is SiLU.  `flags`: 1 renormalise the top-k weights, 2 q/k norm, 4 a
    dense layer 0.
    """

    flags: int
    rope_theta: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe_top_k: int
    moe_ffn_dim: int
    dense_ffn_dim: int
    shared_expert_ffn_dim: int
    activation: int
    num_hidden_layers: int
    rms_norm_eps: float
    model_type: str

    @property
    def renormalise_top_k(self) -> bool:
        return bool(self.flags & 1)

    @property
    def qk_norm(self) -> bool:
        return bool(self.flags & 2)

    @property
    def dense_layer_0(self) -> bool:
        return bool(self.flags & 4)


@dataclass(frozen=True, slots=True)
class SmoeHeader:
    """The header's fields as they stand; offsets in bytes from the start of the file."""

    version: int
    num_moe_layers: int
    max_experts_per_layer: int
    total_experts: int
    table_offset: int
    data_offset: int
    group_size: int
    bits: int
    d_model: int
    vocab_size: int
    ffn_dim: int
    arch_offset: int


@dataclass(frozen=True)
class SmoeVault:
    """A checked vault: a `base.Source`, and the format's own structures beside it.

    `table`: the expert table as it stands in the file, one record of ENTRY_DTYPE an expert, in the order of
    `experts`.  `descriptors`: shape (experts, 3), records of DESCRIPTOR_DTYPE.  Both are read-only.
    """

    path: Path
    files: tuple[SourceFile, ...]
    header: SmoeHeader
    arch: ArchBlock | None
    table: Table
    descriptors: Table
    experts: tuple[Expert, ...]
    layouts: tuple[tuple[Tensor, ...], ...]
    model: ModelFacts
    format: str = "smoe"


def open_smoe(path: Path) -> SmoeVault:
    """Open the `.smoe` vault at `path`, version 1 or 2, and check all of it but the experts' bytes.

    Symbolic links are followed.  Nothing stays open.  Raises VaultError with the file, the place in it and
    the figures, where the file cannot be read or its numbers do not add up.
    """
    fd = open_readable(path)
    try:
        return _Reader(path, fd).read()
    except OSError as error:
        raise VaultError(f"{path}: read: {os.strerror(error.errno or 0)} (errno {error.errno})") from error
    finally:
        os.close(fd)


class _Reader:
    """One opening of one file; each step relies on what the steps before it have checked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.status = os.fstat(fd)
        self.size = self.status.st_size

    def read(self) -> SmoeVault:
        self._check_file()
        header = self._read_header()
        region = self._read_exactly(0, self._check_header(header), "the tables")
        count = header.total_experts
        table = np.frombuffer(region, ENTRY_DTYPE, count, header.table_offset)
        descriptors = np.frombuffer(
            region, DESCRIPTOR_DTYPE, 3 * count, header.table_offset + count * ENTRY_DTYPE.itemsize
        ).reshape(count, 3)
        arch = self._read_arch(header, region)
        self._check_ids(header, table)
        self._check_blobs(header, table)
        self._check_descriptors(header, table, descriptors)
        layouts, layout_of = _layouts(descriptors, header.bits)
        return SmoeVault(
            path=self.path,
            files=(self._identity(header, region),),
            header=header,
            arch=arch,
            table=table,
            descriptors=descriptors,
            experts=_experts(table, layout_of),
            layouts=layouts,
            model=_model_facts(header, arch, descriptors),
        )

    def _refuse(self, what: str) -> VaultError:
        return VaultError(f"{self.path}: {what}")

    def _read_exactly(self, offset: int, length: int, what: str) -> bytes:
        """`length` bytes at `offset`, which the caller has held against the file's size."""
        out = bytearray(length)
        view = memoryview(out)
        done = 0
        while done < length:
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if got == 0:
                raise self._refuse(f"{what}: {length} bytes at {offset}, but the file ended after {done}")
            done += got
        return bytes(out)

    def _check_file(self) -> None:
        mode = self.status.st_mode
        if stat.S_ISDIR(mode):
            raise self._refuse("a folder, not a .smoe vault")
        if not stat.S_ISREG(mode):
            raise self._refuse("not a regular file (a device, a pipe or a socket)")
        if self.size == 0:
            raise self._refuse("the file is empty (0 bytes)")
        start = self._read_exactly(0, min(self.size, 64), "the header")
        if start.startswith(LFS_POINTER):
            raise self._refuse(
                f"a Git LFS pointer of {self.size} bytes, not the vault itself; fetch it with `git lfs pull`"
            )
        if start[:8] in (MAGIC[::-1], MAGIC[3::-1] + MAGIC[:3:-1]):
            raise self._refuse("written in the other byte order (big-endian), which is not supported")
        if start[:8] != MAGIC[: len(start)]:
            raise self._refuse(
                f"not a .smoe vault: it begins with {start[:8].hex(' ')}, not {MAGIC.hex(' ')}"
            )
        if self.size < HEADER_DTYPE.itemsize:
            raise self._refuse(
                f"the file has {self.size} bytes, the header alone has 64: {64 - self.size} bytes are missing"
            )

    def _read_header(self) -> SmoeHeader:
        raw = np.frombuffer(self._read_exactly(0, HEADER_DTYPE.itemsize, "the header"), HEADER_DTYPE)[0]
        return SmoeHeader(**{name: int(raw[name]) for name in SmoeHeader.__slots__})

    def _check_header(self, h: SmoeHeader) -> int:
        """Check the header alone; the number of bytes from the start of the file to the end of its tables."""
        self._check_kind(h)
        for name in ("num_moe_layers", "max_experts_per_layer", "total_experts"):
            if getattr(h, name) == 0:
                raise self._refuse(f"header: {name} is 0")
        if h.total_experts > MAX_EXPERTS:
            raise self._refuse(f"header: {h.total_experts} experts, at most {MAX_EXPERTS} can be served")
        if h.total_experts > h.num_moe_layers * h.max_experts_per_layer:
            raise self._refuse(
                f"header: {h.total_experts} experts do not fit {h.num_moe_layers} layers of"
                f" {h.max_experts_per_layer}"
            )
        return self._check_places(h)

    def _check_places(self, h: SmoeHeader) -> int:
        """Where the header says the parts lie; the end of the tables."""
        if h.table_offset != HEADER_DTYPE.itemsize:
            raise self._refuse(f"header: table_offset {h.table_offset}, must be 64")
        tables_end = h.table_offset + h.total_experts * (ENTRY_DTYPE.itemsize + 3 * DESCRIPTOR_DTYPE.itemsize)
        if tables_end > self.size:
            raise self._refuse(
                f"the tables of {h.total_experts} experts end at {tables_end}, the file at {self.size}:"
                f" {tables_end - self.size} bytes are missing"
            )
        if h.data_offset % ALIGNMENT:
            raise self._refuse(f"header: data_offset {h.data_offset} is no multiple of {ALIGNMENT}")
        if h.data_offset > self.size:
            raise self._refuse(
                f"header: data_offset {h.data_offset} is past the end of the file at {self.size}:"
                f" {h.data_offset - self.size} bytes are missing"
            )
        end = self._check_arch_offset(h, tables_end)
        if h.data_offset < end:
            raise self._refuse(
                f"header: data_offset {h.data_offset} is inside the tables, which end at {end}"
            )
        if h.data_offset - end > MAX_HEADER_SLACK_BYTES:
            raise self._refuse(
                f"header: data_offset {h.data_offset} is {h.data_offset - end} bytes behind the end of the"
                f" tables at {end}; at most {MAX_HEADER_SLACK_BYTES} are accepted"
            )
        return end

    def _check_kind(self, h: SmoeHeader) -> None:
        """The version and the quantisation are ones that this program knows."""
        if h.version & 0xFFFF == 0 and h.version:
            swapped = int.from_bytes(h.version.to_bytes(4, "little"), "big")
            raise self._refuse(
                f"version {h.version} is {swapped} in the other byte order (big-endian), which is not"
                " supported"
            )
        if h.version not in (1, 2):
            raise self._refuse(f"version {h.version} of the format; this program reads versions 1 and 2")
        if h.group_size != GROUP_WEIGHTS:
            raise self._refuse(f"header: group_size {h.group_size}, and only 64 exists")
        if h.bits not in (2, 4):
            raise self._refuse(f"header: {h.bits} bits a weight, and only 2 and 4 exist")

    def _check_arch_offset(self, h: SmoeHeader, tables_end: int) -> int:
        """The end of the tables with the arch block, where there is one."""
        if h.arch_offset == 0:
            return tables_end
        if h.version == 1:
            raise self._refuse(f"header: arch_offset {h.arch_offset} in version 1, which has no arch block")
        if h.arch_offset % ARCH_ALIGNMENT:
            raise self._refuse(f"header: arch_offset {h.arch_offset} is no multiple of {ARCH_ALIGNMENT}")
        end = h.arch_offset + ARCH_DTYPE.itemsize
        if h.arch_offset < tables_end or end > h.data_offset:
            raise self._refuse(
                f"header: the arch block of 128 bytes at {h.arch_offset} is not between the end of the tables"
                f" at {tables_end} and data_offset {h.data_offset}"
            )
        return end

    def _read_arch(self, h: SmoeHeader, region: bytes) -> ArchBlock | None:
        if h.arch_offset == 0:
            return None
        raw = np.frombuffer(region, ARCH_DTYPE, 1, h.arch_offset)[0]
        where = f"arch block at {h.arch_offset}"
        if raw["magic"] != ARCH_MAGIC:
            raise self._refuse(f"{where}: begins with {bytes(raw['magic'])!r}, not {ARCH_MAGIC!r}")
        if raw["block_version"] != 1:
            raise self._refuse(f"{where}: block_version {raw['block_version']}, and only 1 is known")
        if raw["block_size"] != ARCH_DTYPE.itemsize:
            raise self._refuse(f"{where}: block_size {raw['block_size']}, must be 128")
        for name in ("rope_theta", "rms_norm_eps"):
            if not math.isfinite(raw[name]):
                raise self._refuse(f"{where}: {name} is {raw[name]}")
        if raw["moe_top_k"] > h.max_experts_per_layer:
            raise self._refuse(
                f"{where}: moe_top_k {raw['moe_top_k']} of {h.max_experts_per_layer} experts a layer"
            )
        model_type = bytes(raw["model_type"]).decode("utf-8", "replace")
        if not model_type.isprintable() or "\ufffd" in model_type:
            raise self._refuse(f"{where}: model_type {bytes(raw['model_type'])!r} is no printable text")
        numbers: dict[str, Any] = {
            name: raw[name].item() for name in ArchBlock.__slots__ if name != "model_type"
        }
        return ArchBlock(model_type=model_type, **numbers)

    def _refuse_first(self, table: Table, bad: Mask | np.bool_, what: Callable[[int], str]) -> None:
        """Refuse the vault by its first bad expert, where there is one; `what` says the figures of one."""
        if not bad.any():
            return
        index = int(np.argmax(bad))
        entry = table[index]
        others = int(bad.sum()) - 1
        more = f" (and {others} more experts like it)" if others else ""
        raise self._refuse(
            f"expert {entry['expert_id']} of layer {entry['layer_id']} (entry {index}): {what(index)}{more}"
        )

    def _check_ids(self, h: SmoeHeader, table: Table) -> None:
        layer = table["layer_id"].astype(np.uint64)
        expert = table["expert_id"].astype(np.uint64)
        self._refuse_first(
            table,
            expert >= h.max_experts_per_layer,
            lambda i: f"expert_id {expert[i]}, but the header says {h.max_experts_per_layer} experts a layer",
        )
        cells = (int(layer.max()) + 1) * (int(expert.max()) + 1)
        if cells > MAX_GRID_CELLS:
            at = int(np.argmax(layer))
            raise self._refuse(
                f"entry {at}: layer_id {layer[at]}, with expert_id up to {expert.max()}: a grid of {cells}"
                f" places, at most {MAX_GRID_CELLS} can be served"
            )
        layers = len(np.unique(layer))
        if layers > h.num_moe_layers:
            raise self._refuse(f"the table has {layers} different layers, the header says {h.num_moe_layers}")
        key = (layer << np.uint64(32)) | expert
        order = np.argsort(key, kind="stable")
        twice = np.flatnonzero(key[order][1:] == key[order][:-1])
        if twice.size:
            first, second = int(order[twice[0]]), int(order[twice[0] + 1])
            raise self._refuse(
                f"expert {expert[first]} of layer {layer[first]} is in the table twice, as entries {first}"
                f" and {second}"
            )

    def _check_blobs(self, h: SmoeHeader, table: Table) -> None:
        offset, raw, padded = table["byte_offset"], table["raw_size"], table["padded_size"]
        self._refuse_first(
            table,
            table["group_size"] != GROUP_WEIGHTS,
            lambda i: f"group_size {table['group_size'][i]}, and only 64 exists",
        )
        self._refuse_first(
            table, offset % ALIGNMENT != 0, lambda i: f"byte_offset {offset[i]} is no multiple of {ALIGNMENT}"
        )
        self._refuse_first(
            table,
            (padded % ALIGNMENT != 0) | (padded == 0),
            lambda i: f"padded_size {padded[i]} is no multiple of {ALIGNMENT} above 0",
        )
        self._refuse_first(
            table,
            (raw > padded) | (raw == 0),
            lambda i: f"raw_size {raw[i]} with padded_size {padded[i]}",
        )
        self._refuse_first(
            table,
            offset < h.data_offset,
            lambda i: f"byte_offset {offset[i]} lies before data_offset {h.data_offset}",
        )
        self._check_blob_ends(table, offset, padded)
        order = np.argsort(offset, kind="stable")
        begin, end = offset[order], (offset + padded)[order]
        overlap = np.flatnonzero(begin[1:] < end[:-1])
        if overlap.size:
            one, two = (int(i) for i in order[overlap[0] : overlap[0] + 2])
            raise self._refuse(
                f"entries {one} and {two} overlap: bytes {offset[one]} to {offset[one] + padded[one]} and"
                f" {offset[two]} to {offset[two] + padded[two]}"
            )

    def _check_blob_ends(self, table: Table, offset: U64, padded: U64) -> None:
        """Every blob ends within the file; else say how much of the file is missing in all."""
        size = np.uint64(self.size)
        past = (offset > size) | (padded > size - np.minimum(offset, size))
        if not past.any():
            return
        # Python's integers: what overflows 64 bits must be named, not wrapped.
        need = max(int(offset[i]) + int(padded[i]) for i in np.flatnonzero(past))
        self._refuse_first(
            table,
            past,
            lambda i: (
                f"{padded[i]} bytes at {offset[i]} end at {int(offset[i]) + int(padded[i])}, the file ends at"
                f" {self.size}; {need - self.size} bytes of the file are missing"
            ),
        )

    def _check_descriptors(self, h: SmoeHeader, table: Table, descriptors: Table) -> None:
        raw = table["raw_size"]
        groups = np.zeros(len(table), np.uint64)
        spans: list[tuple[U64, U64]] = []
        for number, name in enumerate(TENSOR_NAMES):
            d = descriptors[:, number]
            self._check_tensor_shape(h, table, d, number)
            rows, cols = d["rows"].astype(np.uint64), d["cols"].astype(np.uint64)
            elements = rows * cols  # of two 32-bit numbers: cannot wrap
            scales = elements // GROUP_WEIGHTS + (elements % GROUP_WEIGHTS != 0)
            groups += scales
            self._refuse_first(
                table,
                d["scales_size"] != 2 * scales,
                _figures(f"{name}: %d bytes of scales for %d groups of 64", d["scales_size"], scales),
            )
            for part in ("packed", "scales"):
                offset, size = d[f"{part}_offset"], d[f"{part}_size"]
                self._refuse_first(
                    table,
                    (offset > raw) | (size > raw - np.minimum(offset, raw)),
                    _figures(f"{name}: {part} bytes, %d at %d of a blob of raw_size %d", size, offset, raw),
                )
                spans.append((offset, size))
        self._refuse_first(
            table,
            table["num_groups"] != groups,
            _figures("num_groups %d, but its tensors have %d", table["num_groups"], groups),
        )
        begin = np.stack([offset for offset, _ in spans], axis=1)
        order = np.argsort(begin, axis=1, kind="stable")
        begin = np.take_along_axis(begin, order, axis=1)
        length = np.take_along_axis(np.stack([size for _, size in spans], axis=1), order, axis=1)
        self._refuse_first(
            table,
            np.any(begin[:, 1:] < begin[:, :-1] + length[:, :-1], axis=1),
            lambda i: f"its tensors overlap: they begin at {begin[i]} with {length[i]} bytes",
        )

    def _check_tensor_shape(self, h: SmoeHeader, table: Table, d: Table, number: int) -> None:
        name = TENSOR_NAMES[number]
        self._refuse_first(
            table,
            d["tensor_type"] != number,
            _figures(f"descriptor {number}: tensor_type %d, must be {number} ({name})", d["tensor_type"]),
        )
        self._refuse_first(table, d["ndim"] != 2, _figures(f"{name}: ndim %d, must be 2", d["ndim"]))
        rows, cols = d["rows"].astype(np.uint64), d["cols"].astype(np.uint64)
        self._refuse_first(
            table, (rows == 0) | (cols == 0), _figures(f"{name}: a shape of %d x %d", rows, cols)
        )
        weights_a_byte = 8 // h.bits
        elements = rows * cols
        self._refuse_first(
            table,
            (elements % weights_a_byte != 0) | (d["packed_size"] != elements // weights_a_byte),
            _figures(
                f"{name}: %d bytes of codes, but %d x %d weights of {h.bits} bits",
                d["packed_size"],
                rows,
                cols,
            ),
        )

    def _identity(self, h: SmoeHeader, region: bytes) -> SourceFile:
        """The file's identity, with the digest over [0, data_offset).

        The tables are taken from `region`, the bytes that were checked, not read a second time.
        """
        digest = hashlib.blake2b(region, digest_size=16)
        digest.update(self._read_exactly(len(region), h.data_offset - len(region), "the end of the header"))
        after = os.fstat(self.fd)
        before = self.status
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise self._refuse("the file was changed while it was being opened")
        return SourceFile(
            path=self.path.absolute(),
            dev=before.st_dev,
            ino=before.st_ino,
            size=before.st_size,
            mtime_ns=before.st_mtime_ns,
            digest=digest.digest(),
        )


def _figures(text: str, *columns: npt.NDArray[Any]) -> Callable[[int], str]:
    """A message for `_refuse_first`: `text` with the numbers of the refused expert, one from each column."""
    return lambda i: text % tuple(int(column[i]) for column in columns)


def _layouts(descriptors: Table, bits: int) -> tuple[tuple[tuple[Tensor, ...], ...], list[int]]:
    """The different layouts in order of their first expert, and each expert's layout."""
    seen: dict[bytes, int] = {}
    layouts: list[tuple[Tensor, ...]] = []
    layout_of: list[int] = []
    raw = descriptors.tobytes()
    size = 3 * DESCRIPTOR_DTYPE.itemsize
    for index in range(len(descriptors)):
        number = seen.setdefault(raw[index * size : (index + 1) * size], len(layouts))
        if number == len(layouts):
            layouts.append(_layout(descriptors[index], bits))
        layout_of.append(number)
    return tuple(layouts), layout_of


def _layout(descriptors: Table, bits: int) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    for name, d in zip(TENSOR_NAMES, descriptors, strict=True):
        shape = (int(d["rows"]), int(d["cols"]))
        packed = int(d["packed_offset"]), int(d["packed_size"])
        scales = int(d["scales_offset"]), int(d["scales_size"])
        tensors.append(Tensor(name, f"SMOE_Q{bits}", shape, 0, *packed))
        tensors.append(Tensor(f"{name}.scales", "F16", (scales[1] // 2,), 0, *scales))
    return tuple(tensors)


def _experts(table: Table, layout_of: list[int]) -> tuple[Expert, ...]:
    names = ("layer_id", "expert_id", "byte_offset", "padded_size", "crc32c")
    columns = (table[name].tolist() for name in names)
    return tuple(
        Expert(layer, expert, (Extent(0, offset, padded),), layout, crc32c)
        for layer, expert, offset, padded, crc32c, layout in zip(*columns, layout_of, strict=True)
    )


def _model_facts(h: SmoeHeader, arch: ArchBlock | None, descriptors: Table) -> ModelFacts:
    """The facts of the header and the arch block.

    The expert width is taken from the gate's rows.  The header's ffn_dim is not it: the original fills it
    from the first expert tensor of the checkpoint by name, which is the down projection, so that it holds
    the hidden size.
    """
    rest = set(ArchBlock.__slots__) - {"model_type", "num_hidden_layers", "moe_top_k"}
    return ModelFacts(
        model_type=arch.model_type if arch else "",
        num_layers=arch.num_hidden_layers if arch else 0,
        d_model=h.d_model,
        ffn_dim=int(descriptors[0, 0]["rows"]),
        vocab_size=h.vocab_size,
        top_k=arch.moe_top_k if arch else 0,
        extra={name: getattr(arch, name) for name in ArchBlock.__slots__ if arch and name in rest},
    )
