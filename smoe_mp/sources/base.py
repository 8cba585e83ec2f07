"""What every source of experts yields: files, experts, extents, tensors.

A source is opened once, checked in full, and closed again; it is a description and holds no descriptor.
Reading is the workers' business.  An expert's own bytes are its *extents* in order; each extent becomes
a *part* of the expert in its slot.  Experts whose tensors are alike share a *layout*: a tuple of tensors,
each at an offset inside one part.  Positions in `experts` are the expert indices of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


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
    tensor "gate" are a tensor of their own, named "gate.scales".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Expert:
    """One routed expert: `layout` indexes the source's `layouts`; `crc32c` 0 means none is known."""

    layer: int
    expert: int
    extents: tuple[Extent, ...]
    layout: int
    crc32c: int = 0


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
