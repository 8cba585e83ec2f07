"""The scout file: every tensor of a checkpoint that is no routed expert, in one safetensors file.

It is what an engine keeps in memory beside a vault.  What an expert is, the source has decided: a tensor
whose bytes no expert has is the scout's, whatever its name.  The file is the one that the safetensors library
would write of the same tensors, to the byte (by type, widest first, then by name; no metadata; the header
padded with spaces to a multiple of 8), but copied in pieces: it can have tens of gigabytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from smoe_mp.errors import VaultError
from smoe_mp.partial import PartialFile
from smoe_mp.platform import system
from smoe_mp.sources.base import Source
from smoe_mp.sources.checkpoint import Checkpoint, SafetensorsFile, StoredTensor

__all__ = ["Scout"]

#: The library's order of types, of which it writes the last first.
TYPES = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
PIECE_BYTES = 8 << 20


class Scout:
    """The scout file of a checkpoint whose experts are `source`'s."""

    def __init__(self, checkpoint: Checkpoint, source: Source) -> None:
        rank = {name: i for i, name in enumerate(TYPES)}
        self._tensors = sorted(
            _dense(checkpoint, source), key=lambda found: (-rank.get(found[1].dtype, -1), found[1].name)
        )
        self._header = self._make_header()
        #: Bytes of the tensors, and of the whole file.
        self.data_bytes = sum(tensor.nbytes for _, tensor in self._tensors)
        self.file_size = len(self._header) + self.data_bytes

    def _make_header(self) -> bytes:
        fields, at = {}, 0
        for _, t in self._tensors:
            fields[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (at, at + t.nbytes)}
            at += t.nbytes
        text = msgspec.json.encode(fields)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(self, out: PartialFile, advance: Callable[[int], None]) -> None:
        """Write the file into `out`, without publishing it; `advance` is told the bytes copied.

        VaultError where a file of the checkpoint cannot be read or ends early.  That it is the one that was
        opened is seen afterwards, when the experts' reader compares all files.
        """
        out.write(self._header, 0)
        at = len(self._header)
        with _Files() as files:
            for file, tensor in self._tensors:
                for piece in files.pieces(file, tensor):
                    out.write(piece, at)
                    at += len(piece)
                    advance(len(piece))


def _dense(checkpoint: Checkpoint, source: Source) -> Iterator[tuple[SafetensorsFile, StoredTensor]]:
    """The tensors of which no byte is an expert's."""
    spans: dict[Path, list[tuple[int, int]]] = {}
    for expert in source.experts:
        for e in expert.extents:
            spans.setdefault(source.files[e.file].path, []).append((e.offset, e.offset + e.length))
    for file in checkpoint.files:
        taken = np.array(sorted(spans.get(file.path, [])), np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(taken[:, 1])
        # Of the spans that begin before a tensor's end, does the farthest reach past its beginning?
        before = np.searchsorted(taken[:, 0], file.offsets + file.sizes, "left")
        farthest = np.where(before > 0, np.concatenate(([0], ends))[before], 0)
        for row in np.flatnonzero((farthest <= file.offsets) | (file.sizes == 0)).tolist():
            yield file, file.tensor(row)


class _Files:
    """The checkpoint's files, one open at a time: there may be more than a process may have open."""

    def __init__(self) -> None:
        self._path, self._fd = Path(), -1
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def pieces(self, file: SafetensorsFile, tensor: StoredTensor) -> Iterator[memoryview]:
        """The tensor's bytes; each piece is written over by the next one."""
        fd, done = self._open(file.path), 0
        while done < tensor.nbytes:
            want = min(PIECE_BYTES, tensor.nbytes - done)
            try:
                got = os.preadv(fd, [self._buffer[:want]], tensor.offset + done)
            except OSError as error:
                raise VaultError(
                    f"{file.path}: tensor {tensor.name!r}: read of {want} bytes at {tensor.offset + done}:"
                    f" {error.strerror} (errno {error.errno})"
                ) from error
            if got == 0:
                raise VaultError(
                    f"{file.path}: tensor {tensor.name!r}: {tensor.nbytes} bytes at {tensor.offset}, but the"
                    f" file ended after {done}"
                )
            system.drop_cached(fd, tensor.offset + done, got)
            done += got
            yield self._buffer[:got]

    def _open(self, path: Path) -> int:
        if path != self._path or self._fd < 0:
            self.close()
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise VaultError(f"{path}: open: {error.strerror} (errno {error.errno})") from error
            self._path = path
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
