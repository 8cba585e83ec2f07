"""What all versions of the `.smoe` vault have in common: the header, the expert table, and their checks.

The header's 64 bytes and the table's 48 bytes an expert have the same places in every version, so that a
reader of one version sees what another is before it reads on.  `smoe.py` reads versions 1 and 2, `smoe3.py`
reads version 3; each adds what its version has beside them.

Facts first.  A vault is tens of gigabytes of which the header is the first few hundred kilobytes; it comes
from a download, a conversion that may have been killed, or somebody else's tool; and the workers will read
into memory that others compute from, by the numbers that stand in it.  Hence: every number is checked once,
before anything is done by it, and what does not add up is refused by file, expert and figures.  No check
adds two numbers from the file before it knows that the sum cannot wrap (offsets are unsigned 64-bit:
`offset <= size` first, then `length <= size - offset`), and nothing is allocated by a number from the file
before that number has been held against the file's size.

The tables are checked as numpy arrays, a column at a time: a vault of 94 x 128 experts opens in a few
hundredths of a second.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import SourceFile
from smoe_mp.sources.checks import MAX_EXPERTS, MAX_GRID_CELLS
from smoe_mp.sources.files import LFS_POINTER

MAGIC = bytes.fromhex("534d4f45deea0001")
ALIGNMENT = 16384
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
assert (HEADER_DTYPE.itemsize, ENTRY_DTYPE.itemsize) == (64, 48)

Table = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]


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


class VaultFile:
    """One opening of one file; each step relies on what the steps before it have checked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.status = os.fstat(fd)
        self.size = self.status.st_size

    def refuse(self, what: str) -> VaultError:
        return VaultError(f"{self.path}: {what}")

    def read_exactly(self, offset: int, length: int, what: str) -> bytes:
        """`length` bytes at `offset`, which the caller has held against the file's size."""
        out = bytearray(length)
        view = memoryview(out)
        done = 0
        while done < length:
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if got == 0:
                raise self.refuse(f"{what}: {length} bytes at {offset}, but the file ended after {done}")
            done += got
        return bytes(out)

    def _check_file(self) -> None:
        mode = self.status.st_mode
        if stat.S_ISDIR(mode):
            raise self.refuse("a folder, not a .smoe vault")
        if not stat.S_ISREG(mode):
            raise self.refuse("not a regular file (a device, a pipe or a socket)")
        if self.size == 0:
            raise self.refuse("the file is empty (0 bytes)")
        start = self.read_exactly(0, min(self.size, 64), "the header")
        if start.startswith(LFS_POINTER):
            raise self.refuse(
                f"a Git LFS pointer of {self.size} bytes, not the vault itself; fetch it with `git lfs pull`"
            )
        if start[:8] in (MAGIC[::-1], MAGIC[3::-1] + MAGIC[:3:-1]):
            raise self.refuse("written in the other byte order (big-endian), which is not supported")
        if start[:8] != MAGIC[: len(start)]:
            raise self.refuse(f"not a .smoe vault: it begins with {start[:8].hex(' ')}, not {MAGIC.hex(' ')}")
        if self.size < HEADER_DTYPE.itemsize:
            raise self.refuse(
                f"the file has {self.size} bytes, the header alone has 64: {64 - self.size} bytes are missing"
            )

    def read_header(self) -> SmoeHeader:
        """The header as it stands, once the file is known to be a vault."""
        self._check_file()
        raw = np.frombuffer(self.read_exactly(0, HEADER_DTYPE.itemsize, "the header"), HEADER_DTYPE)[0]
        return SmoeHeader(**{name: int(raw[name]) for name in SmoeHeader.__slots__})

    def check_counts(self, h: SmoeHeader) -> None:
        for name in ("num_moe_layers", "max_experts_per_layer", "total_experts"):
            if getattr(h, name) == 0:
                raise self.refuse(f"header: {name} is 0")
        if h.total_experts > MAX_EXPERTS:
            raise self.refuse(f"header: {h.total_experts} experts, at most {MAX_EXPERTS} can be served")
        if h.total_experts > h.num_moe_layers * h.max_experts_per_layer:
            raise self.refuse(
                f"header: {h.total_experts} experts do not fit {h.num_moe_layers} layers of"
                f" {h.max_experts_per_layer}"
            )

    def check_places(self, h: SmoeHeader, bytes_an_expert: int) -> int:
        """Where the header says that tables and data begin; the end of the tables, `bytes_an_expert` each."""
        if h.table_offset != HEADER_DTYPE.itemsize:
            raise self.refuse(f"header: table_offset {h.table_offset}, must be 64")
        tables_end = h.table_offset + h.total_experts * bytes_an_expert
        if tables_end > self.size:
            raise self.refuse(
                f"the tables of {h.total_experts} experts end at {tables_end}, the file at {self.size}:"
                f" {tables_end - self.size} bytes are missing"
            )
        if h.data_offset % ALIGNMENT:
            raise self.refuse(f"header: data_offset {h.data_offset} is no multiple of {ALIGNMENT}")
        if h.data_offset > self.size:
            raise self.refuse(
                f"header: data_offset {h.data_offset} is past the end of the file at {self.size}:"
                f" {h.data_offset - self.size} bytes are missing"
            )
        return tables_end

    def check_slack(self, h: SmoeHeader, end: int) -> None:
        """What lies between the end of all tables and the data."""
        if h.data_offset < end:
            raise self.refuse(f"header: data_offset {h.data_offset} is inside the tables, which end at {end}")
        if h.data_offset - end > MAX_HEADER_SLACK_BYTES:
            raise self.refuse(
                f"header: data_offset {h.data_offset} is {h.data_offset - end} bytes behind the end of the"
                f" tables at {end}; at most {MAX_HEADER_SLACK_BYTES} are accepted"
            )

    def refuse_first(self, table: Table, bad: Mask | np.bool_, what: Callable[[int], str]) -> None:
        """Refuse the vault by its first bad expert, where there is one; `what` says the figures of one."""
        if not bad.any():
            return
        index = int(np.argmax(bad))
        entry = table[index]
        others = int(bad.sum()) - 1
        more = f" (and {others} more experts like it)" if others else ""
        raise self.refuse(
            f"expert {entry['expert_id']} of layer {entry['layer_id']} (entry {index}): {what(index)}{more}"
        )

    def check_ids(self, h: SmoeHeader, table: Table) -> None:
        layer = table["layer_id"].astype(np.uint64)
        expert = table["expert_id"].astype(np.uint64)
        self.refuse_first(
            table,
            expert >= h.max_experts_per_layer,
            lambda i: f"expert_id {expert[i]}, but the header says {h.max_experts_per_layer} experts a layer",
        )
        cells = (int(layer.max()) + 1) * (int(expert.max()) + 1)
        if cells > MAX_GRID_CELLS:
            at = int(np.argmax(layer))
            raise self.refuse(
                f"entry {at}: layer_id {layer[at]}, with expert_id up to {expert.max()}: a grid of {cells}"
                f" places, at most {MAX_GRID_CELLS} can be served"
            )
        layers = len(np.unique(layer))
        if layers > h.num_moe_layers:
            raise self.refuse(f"the table has {layers} different layers, the header says {h.num_moe_layers}")
        key = (layer << np.uint64(32)) | expert
        order = np.argsort(key, kind="stable")
        twice = np.flatnonzero(key[order][1:] == key[order][:-1])
        if twice.size:
            first, second = int(order[twice[0]]), int(order[twice[0] + 1])
            raise self.refuse(
                f"expert {expert[first]} of layer {layer[first]} is in the table twice, as entries {first}"
                f" and {second}"
            )

    def check_blobs(self, h: SmoeHeader, table: Table) -> None:
        offset, raw, padded = table["byte_offset"], table["raw_size"], table["padded_size"]
        self.refuse_first(
            table, offset % ALIGNMENT != 0, lambda i: f"byte_offset {offset[i]} is no multiple of {ALIGNMENT}"
        )
        self.refuse_first(
            table,
            (padded % ALIGNMENT != 0) | (padded == 0),
            lambda i: f"padded_size {padded[i]} is no multiple of {ALIGNMENT} above 0",
        )
        self.refuse_first(
            table,
            (raw > padded) | (raw == 0),
            lambda i: f"raw_size {raw[i]} with padded_size {padded[i]}",
        )
        self.refuse_first(
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
            raise self.refuse(
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
        self.refuse_first(
            table,
            past,
            lambda i: (
                f"{padded[i]} bytes at {offset[i]} end at {int(offset[i]) + int(padded[i])}, the file ends at"
                f" {self.size}; {need - self.size} bytes of the file are missing"
            ),
        )

    def identity(self, h: SmoeHeader, region: bytes) -> SourceFile:
        """The file's identity, with the digest over [0, data_offset).

        The tables are taken from `region`, the bytes that were checked, not read a second time.
        """
        digest = hashlib.blake2b(region, digest_size=16)
        digest.update(self.read_exactly(len(region), h.data_offset - len(region), "the end of the header"))
        after = os.fstat(self.fd)
        before = self.status
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise self.refuse("the file was changed while it was being opened")
        return SourceFile(
            path=self.path.absolute(),
            dev=before.st_dev,
            ino=before.st_ino,
            size=before.st_size,
            mtime_ns=before.st_mtime_ns,
            digest=digest.digest(),
        )


def figures(text: str, *columns: npt.NDArray[Any]) -> Callable[[int], str]:
    """A message for `refuse_first`: `text` with the numbers of the refused expert, one from each column."""
    return lambda i: text % tuple(int(column[i]) for column in columns)
