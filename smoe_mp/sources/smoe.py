"""The `.smoe` vault, versions 1 and 2: the original system's own file of quantised experts.

    0              header, 64 bytes
    64             expert table, 48 bytes an expert
                   tensor descriptors, 3 x 44 bytes an expert, in table order: gate, up, down
                   arch block, 128 bytes at a multiple of 64 (version 2)
                   zeros
    data_offset    expert blobs, each at a multiple of 16384 and padded with zeros to one

How everything in it is checked is said in `smoe_file.py`.

An expert is one extent: its whole padded blob, so that a worker's direct read is aligned at both ends and
the checksum in the entry's reserved field (CRC-32C of the padded blob; 0, as the original writes, for none)
covers what is read.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import Expert, Extent, ModelFacts, SourceFile, Tensor
from smoe_mp.sources.files import open_readable
from smoe_mp.sources.smoe_file import (
    ALIGNMENT,
    ENTRY_DTYPE,
    HEADER_DTYPE,
    MAGIC,
    U64,
    SmoeHeader,
    Table,
    VaultFile,
    figures,
)

__all__ = [
    "ALIGNMENT",
    "ARCH_DTYPE",
    "DESCRIPTOR_DTYPE",
    "ENTRY_DTYPE",
    "HEADER_DTYPE",
    "MAGIC",
    "ArchBlock",
    "SmoeHeader",
    "SmoeVault",
    "open_smoe",
]

ARCH_MAGIC = b"SARC"
ARCH_ALIGNMENT = 64
GROUP_WEIGHTS = 64
TENSOR_NAMES = ("gate", "up", "down")

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
assert (DESCRIPTOR_DTYPE.itemsize, ARCH_DTYPE.itemsize) == (44, 128)


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


class _Reader(VaultFile):
    """One opening of one vault of version 1 or 2."""

    def read(self) -> SmoeVault:
        header = self.read_header()
        region = self.read_exactly(0, self._check_header(header), "the tables")
        count = header.total_experts
        table = np.frombuffer(region, ENTRY_DTYPE, count, header.table_offset)
        descriptors = np.frombuffer(
            region, DESCRIPTOR_DTYPE, 3 * count, header.table_offset + count * ENTRY_DTYPE.itemsize
        ).reshape(count, 3)
        arch = self._read_arch(header, region)
        self.check_ids(header, table)
        self._check_groups(table)
        self.check_blobs(header, table)
        self._check_descriptors(header, table, descriptors)
        layouts, layout_of = _layouts(descriptors, header.bits)
        return SmoeVault(
            path=self.path,
            files=(self.identity(header, region),),
            header=header,
            arch=arch,
            table=table,
            descriptors=descriptors,
            experts=_experts(table, layout_of),
            layouts=layouts,
            model=_model_facts(header, arch, descriptors),
        )

    def _check_header(self, h: SmoeHeader) -> int:
        """Check the header alone; the number of bytes from the start of the file to the end of its tables."""
        self._check_kind(h)
        self.check_counts(h)
        tables_end = self.check_places(h, ENTRY_DTYPE.itemsize + 3 * DESCRIPTOR_DTYPE.itemsize)
        end = self._check_arch_offset(h, tables_end)
        self.check_slack(h, end)
        return end

    def _check_kind(self, h: SmoeHeader) -> None:
        """The version and the quantisation are ones that this program knows."""
        if h.version & 0xFFFF == 0 and h.version:
            swapped = int.from_bytes(h.version.to_bytes(4, "little"), "big")
            raise self.refuse(
                f"version {h.version} is {swapped} in the other byte order (big-endian), which is not"
                " supported"
            )
        if h.version not in (1, 2):
            known = (
                "; `open_vault` reads it" if h.version == 3 else "; this program reads versions 1, 2 and 3"
            )
            raise self.refuse(f"version {h.version} of the format{known}")
        if h.group_size != GROUP_WEIGHTS:
            raise self.refuse(f"header: group_size {h.group_size}, and only 64 exists")
        if h.bits not in (2, 4):
            raise self.refuse(f"header: {h.bits} bits a weight, and only 2 and 4 exist")

    def _check_arch_offset(self, h: SmoeHeader, tables_end: int) -> int:
        """The end of the tables with the arch block, where there is one."""
        if h.arch_offset == 0:
            return tables_end
        if h.version == 1:
            raise self.refuse(f"header: arch_offset {h.arch_offset} in version 1, which has no arch block")
        if h.arch_offset % ARCH_ALIGNMENT:
            raise self.refuse(f"header: arch_offset {h.arch_offset} is no multiple of {ARCH_ALIGNMENT}")
        end = h.arch_offset + ARCH_DTYPE.itemsize
        if h.arch_offset < tables_end or end > h.data_offset:
            raise self.refuse(
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
            raise self.refuse(f"{where}: begins with {bytes(raw['magic'])!r}, not {ARCH_MAGIC!r}")
        if raw["block_version"] != 1:
            raise self.refuse(f"{where}: block_version {raw['block_version']}, and only 1 is known")
        if raw["block_size"] != ARCH_DTYPE.itemsize:
            raise self.refuse(f"{where}: block_size {raw['block_size']}, must be 128")
        for name in ("rope_theta", "rms_norm_eps"):
            if not math.isfinite(raw[name]):
                raise self.refuse(f"{where}: {name} is {raw[name]}")
        if raw["moe_top_k"] > h.max_experts_per_layer:
            raise self.refuse(
                f"{where}: moe_top_k {raw['moe_top_k']} of {h.max_experts_per_layer} experts a layer"
            )
        model_type = bytes(raw["model_type"]).decode("utf-8", "replace")
        if not model_type.isprintable() or "\ufffd" in model_type:
            raise self.refuse(f"{where}: model_type {bytes(raw['model_type'])!r} is no printable text")
        numbers: dict[str, Any] = {
            name: raw[name].item() for name in ArchBlock.__slots__ if name != "model_type"
        }
        return ArchBlock(model_type=model_type, **numbers)

    def _check_groups(self, table: Table) -> None:
        self.refuse_first(
            table,
            table["group_size"] != GROUP_WEIGHTS,
            lambda i: f"group_size {table['group_size'][i]}, and only 64 exists",
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
            self.refuse_first(
                table,
                d["scales_size"] != 2 * scales,
                figures(f"{name}: %d bytes of scales for %d groups of 64", d["scales_size"], scales),
            )
            for part in ("packed", "scales"):
                offset, size = d[f"{part}_offset"], d[f"{part}_size"]
                self.refuse_first(
                    table,
                    (offset > raw) | (size > raw - np.minimum(offset, raw)),
                    figures(f"{name}: {part} bytes, %d at %d of a blob of raw_size %d", size, offset, raw),
                )
                spans.append((offset, size))
        self.refuse_first(
            table,
            table["num_groups"] != groups,
            figures("num_groups %d, but its tensors have %d", table["num_groups"], groups),
        )
        begin = np.stack([offset for offset, _ in spans], axis=1)
        order = np.argsort(begin, axis=1, kind="stable")
        begin = np.take_along_axis(begin, order, axis=1)
        length = np.take_along_axis(np.stack([size for _, size in spans], axis=1), order, axis=1)
        self.refuse_first(
            table,
            np.any(begin[:, 1:] < begin[:, :-1] + length[:, :-1], axis=1),
            lambda i: f"its tensors overlap: they begin at {begin[i]} with {length[i]} bytes",
        )

    def _check_tensor_shape(self, h: SmoeHeader, table: Table, d: Table, number: int) -> None:
        name = TENSOR_NAMES[number]
        self.refuse_first(
            table,
            d["tensor_type"] != number,
            figures(f"descriptor {number}: tensor_type %d, must be {number} ({name})", d["tensor_type"]),
        )
        self.refuse_first(table, d["ndim"] != 2, figures(f"{name}: ndim %d, must be 2", d["ndim"]))
        rows, cols = d["rows"].astype(np.uint64), d["cols"].astype(np.uint64)
        self.refuse_first(
            table, (rows == 0) | (cols == 0), figures(f"{name}: a shape of %d x %d", rows, cols)
        )
        weights_a_byte = 8 // h.bits
        elements = rows * cols
        self.refuse_first(
            table,
            (elements % weights_a_byte != 0) | (d["packed_size"] != elements // weights_a_byte),
            figures(
                f"{name}: %d bytes of codes, but %d x %d weights of {h.bits} bits",
                d["packed_size"],
                rows,
                cols,
            ),
        )


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
