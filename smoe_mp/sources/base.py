"""What every source of experts yields: files, experts, extents, tensors.

A source is opened once, checked in full, and closed again; it is a description and holds no descriptor.
Reading is the workers' business.  An expert's own bytes are its *extents* in order; each extent becomes
a *part* of the expert in its slot.  Experts whose tensors are alike share a *layout*: a tuple of tensors,
each at an offset inside one part.  Positions in `experts` are the expert indices of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

#: What the name of a vault's scout file, the model's other tensors, has in the place of ".smoe".
SCOUT_SUFFIX = ".scout.safetensors"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source, with the identity that readers compare before they trust it.

    `size` in bytes, `mtime_ns` in nanoseconds, `digest` 16 bytes over the file's header.
    """

    path: Path
    dev: int
    ino: int
    size: int
    mtime_ns: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes at `offset` of the source's file number `file`."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an expert: `nbytes` at `offset` of the expert's part number `part`.

    `dtype` is the format's own name for the element or block type ("SMOE_Q4", "BF16", "Q4_K", ...);
    `shape` is the logical shape in elements, row-major, at most four numbers.  The scales of a quantised
    tensor "gate" are a tensor of their own, named "gate.scales".  `tag`: what the format's rules say of the
    order of the elements, in words with commas between them (docs/formats.md lists them); "" where the
    dtype says it all, "unknown" where nothing does.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Expert:
    """One routed expert: `layout` indexes the source's `layouts`; `crc32c` 0 means none is known."""

    layer: int
    expert: int
    extents: tuple[Extent, ...]
    layout: int
    crc32c: int = 0


Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertTable(Sequence[Expert]):
    """Experts as columns: what a source of tens of thousands of them should give as its `experts`.

    One row an expert: `layer`, `expert`, `layout`, `crc32c`, and `first`, which has one row more: the extents
    of expert i are the rows first[i] to first[i + 1] of `file`, `offset` and `length`.  All of int64.
    """

    layer: Column
    expert: Column
    layout: Column
    crc32c: Column
    first: Column
    file: Column
    offset: Column
    length: Column

    @classmethod
    def of(cls, experts: Sequence[Expert]) -> Self:
        """The columns of `experts`, themselves if they are columns already."""
        if isinstance(experts, cls):
            return experts
        extents = [extent for expert in experts for extent in expert.extents]
        return cls(
            layer=_column(x.layer for x in experts),
            expert=_column(x.expert for x in experts),
            layout=_column(x.layout for x in experts),
            crc32c=_column(x.crc32c for x in experts),
            first=np.cumsum([0, *(len(x.extents) for x in experts)], dtype=np.int64),
            file=_column(e.file for e in extents),
            offset=_column(e.offset for e in extents),
            length=_column(e.length for e in extents),
        )

    @property
    def bytes(self) -> Column:
        """The bytes of each expert."""
        return np.diff(np.concatenate(([0], np.cumsum(self.length)))[self.first])

    def __len__(self) -> int:
        return len(self.layer)

    @overload
    def __getitem__(self, index: int) -> Expert: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Expert]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        at = range(len(self))[index]
        extents = tuple(
            Extent(int(self.file[i]), int(self.offset[i]), int(self.length[i]))
            for i in range(int(self.first[at]), int(self.first[at + 1]))
        )
        crc32c = int(self.crc32c[at])
        return Expert(int(self.layer[at]), int(self.expert[at]), extents, int(self.layout[at]), crc32c)

    def __iter__(self) -> Iterator[Expert]:
        files, offsets, lengths = self.file.tolist(), self.offset.tolist(), self.length.tolist()
        extents = [Extent(*row) for row in zip(files, offsets, lengths, strict=True)]
        first = self.first.tolist()
        columns = (c.tolist() for c in (self.layer, self.expert, self.layout, self.crc32c))
        for i, (layer, expert, layout, crc32c) in enumerate(zip(*columns, strict=True)):
            yield Expert(layer, expert, tuple(extents[first[i] : first[i + 1]]), layout, crc32c)


def _column(values: Iterator[int]) -> Column:
    return np.fromiter(values, np.int64)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the file says of its model; 0 or "" where it does not say."""

    model_type: str = ""
    num_layers: int = 0
    d_model: int = 0
    ffn_dim: int = 0
    vocab_size: int = 0
    top_k: int = 0
    extra: dict[str, float | int | str] = field(default_factory=dict)


class Source(Protocol):
    """A checked description of where a model's experts lie."""

    @property
    def format(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def files(self) -> Sequence[SourceFile]: ...
    @property
    def experts(self) -> Sequence[Expert]: ...
    @property
    def layouts(self) -> Sequence[tuple[Tensor, ...]]: ...
    @property
    def model(self) -> ModelFacts: ...


@dataclass(frozen=True)
class PlainSource:
    """A `Source` that is nothing beyond that."""

    format: str
    path: Path
    files: tuple[SourceFile, ...]
    experts: ExpertTable
    layouts: tuple[tuple[Tensor, ...], ...]
    model: ModelFacts
