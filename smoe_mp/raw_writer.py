"""Writing version-3 vaults: the experts of any source, their weights unchanged.

As with `VaultWriter` all offsets are known before the first expert is there, so entries may be written in any
order by several threads, and the table goes last into a file that is renamed into its place only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from smoe_mp._native import ffi, lib
from smoe_mp.errors import VaultError
from smoe_mp.partial import PartialFile
from smoe_mp.sources.base import ModelFacts, Source, Tensor
from smoe_mp.sources.smoe3 import (
    DESCRIPTION_ALIGNMENT,
    DESCRIPTION_HEAD,
    DESCRIPTION_MAGIC,
    TENSOR_ALIGNMENT,
    VERSION,
    Description,
    Model,
    Origin,
    OriginFile,
    TensorRecord,
)
from smoe_mp.sources.smoe_file import ALIGNMENT, ENTRY_DTYPE, HEADER_DTYPE, MAGIC
from smoe_mp.vault_writer import check_pairs, up_to

__all__ = ["RawWriter", "lay_out"]

_FIRST = ("gate", "up")
_HEADER_FACTS = ("d_model", "vocab_size", "ffn_dim")


def lay_out(tensors: Sequence[Tensor]) -> tuple[TensorRecord, ...]:
    """The tensors as they will lie in a blob: gate, up, then the others in their order, each at a multiple of
    64 bytes."""
    first = [t for name in _FIRST for t in tensors if t.name == name]
    place, out = 0, []
    for t in [*first, *(t for t in tensors if t.name not in _FIRST)]:
        out.append(TensorRecord(t.name, t.dtype, t.shape, place, t.nbytes, t.tag))
        place = up_to(place + t.nbytes, TENSOR_ALIGNMENT)
    return tuple(out)


class RawWriter:
    """Writes the vault `path` with the experts of `source`, replacing what is there when all is written.

    `scout`: the name of the file with the model's other tensors, "" where they stay where they are.  Nothing
    is touched before `begin()`.  A context manager, as `VaultWriter`.  VaultError as there.
    """

    def __init__(self, path: Path, source: Source, scout: str = "") -> None:
        self.path = path
        self._source = source
        check_pairs(path, [(x.layer, x.expert) for x in source.experts])
        #: By the source's layout: where its tensors will lie.
        self.records = [lay_out(tensors) for tensors in source.layouts]
        self._lay_out(scout)
        self._written = [False] * len(source.experts)
        self._file: PartialFile | None = None

    def begin(self) -> None:
        """Open the file that is written, after a look at the free space."""
        self._file = PartialFile(self.path, self.file_size, "vault")

    def _lay_out(self, scout: str) -> None:
        different = list(dict.fromkeys(self.records))
        number = {record: i for i, record in enumerate(different)}
        description = Description(tuple(different), _model(self._source.model), self._origin(scout))
        self._text = msgspec.json.encode(description)
        experts = self._source.experts
        self._description_at = up_to(
            HEADER_DTYPE.itemsize + len(experts) * ENTRY_DTYPE.itemsize, DESCRIPTION_ALIGNMENT
        )
        end = self._description_at + DESCRIPTION_HEAD.size + len(self._text)
        self._data_offset = up_to(end, ALIGNMENT)
        ends = [records[-1].offset + records[-1].nbytes for records in self.records]
        table = np.zeros(len(experts), ENTRY_DTYPE)
        table["layer_id"] = [x.layer for x in experts]
        table["expert_id"] = [x.expert for x in experts]
        table["raw_size"] = [ends[x.layout] for x in experts]
        padded = [up_to(ends[x.layout], ALIGNMENT) for x in experts]
        table["padded_size"] = padded
        table["byte_offset"] = self._data_offset + np.concatenate(([0], np.cumsum(padded[:-1], dtype="u8")))
        table["group_size"] = [number[self.records[x.layout]] for x in experts]
        self.table = table
        #: Bytes of the whole vault.
        self.file_size = self._data_offset + sum(padded)

    def _origin(self, scout: str) -> Origin:
        files = tuple(OriginFile(f.path.name, f.size, f.digest.hex()) for f in self._source.files)
        return Origin(self._source.format, files, scout)

    def write_blob(self, index: int, blob: bytearray) -> None:
        """Write entry `index` as a whole: its `padded_size` bytes.  Any order, any thread."""
        if self._file is None or self._file.closed:
            raise VaultError(f"{self.path}: this writer is closed")
        if len(blob) != self.table["padded_size"][index]:
            raise VaultError(
                f"{self.path}: entry {index}: {len(blob)} bytes, must be {self.table['padded_size'][index]}"
            )
        self._file.write(blob, int(self.table["byte_offset"][index]))
        self.table["crc32c"][index] = lib.smoe_crc32c(0, ffi.from_buffer(blob), len(blob))
        self._written[index] = True

    def close(self, before: Callable[[], None] | None = None) -> None:
        """Finish the vault and put it in its place; nothing on a writer that is closed.  `before` is called
        when nothing but the rename is left to do.

        VaultError where experts are missing; then, and at any other error, what was written is removed.
        """
        if self._file is None or self._file.closed:
            return
        try:
            if not all(self._written):
                missing = self._source.experts[self._written.index(False)]
                raise VaultError(
                    f"{self.path}: {sum(self._written)} of {len(self._written)} experts were written; expert"
                    f" {missing.expert} of layer {missing.layer} is the first that is missing"
                )
            self._file.write(self._head(), 0)
            self._file.publish(before)
        except BaseException:
            self.abort()
            raise

    def _head(self) -> bytearray:
        """All bytes before the blobs."""
        model, experts = _model(self._source.model), self._source.experts
        header = np.zeros((), HEADER_DTYPE)
        fields = {
            "magic": MAGIC,
            "version": VERSION,
            "num_moe_layers": len({x.layer for x in experts}),
            "max_experts_per_layer": 1 + max(x.expert for x in experts),
            "total_experts": len(experts),
            "table_offset": HEADER_DTYPE.itemsize,
            "data_offset": self._data_offset,
            "d_model": model.d_model,
            "vocab_size": model.vocab_size,
            "ffn_dim": model.ffn_dim,
            "arch_offset": self._description_at,
        }
        for name, value in fields.items():
            header[name] = value
        text = self._text
        crc = lib.smoe_crc32c(0, ffi.from_buffer(text), len(text))
        described = DESCRIPTION_HEAD.pack(DESCRIPTION_MAGIC, crc, len(text)) + text
        head = bytearray(self._data_offset)
        tables = header.tobytes() + self.table.tobytes()
        head[: len(tables)] = tables
        head[self._description_at : self._description_at + len(described)] = described
        return head

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


def _model(facts: ModelFacts) -> Model:
    """The facts as they are described; a number that the header's 32 bits cannot hold counts as not known."""
    known = {name: n if 0 <= n < 2**32 else 0 for name in _HEADER_FACTS if (n := getattr(facts, name))}
    return Model(
        model_type=facts.model_type,
        num_layers=facts.num_layers,
        top_k=facts.top_k,
        extra=facts.extra,
        **known,
    )
