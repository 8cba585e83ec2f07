"""What must hold of any source's experts before a ring is made of them, whatever file they come from.

The checks are over columns (`base.ExpertTable`); no two numbers are added before it is known that the sum
stays below 2^63.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import ExpertTable, SourceFile, Tensor

__all__ = ["MAX_DIMENSIONS", "MAX_EXPERTS", "MAX_GRID_CELLS", "check_experts"]

# The slot word of the ring has 21 bits for the expert index, and all of them set means none.
MAX_EXPERTS = 2_097_151
# The ring finds an expert by layer and id in a dense table; this bounds that table.
MAX_GRID_CELLS = 1 << 24
# What the ring's record of a tensor has room for.
MAX_DIMENSIONS = 4
# More than any file holds.  A type that is not known has no size that would bound its shape.
MAX_ELEMENTS = 1 << 48

Column = npt.NDArray[np.int64]


def check_experts(
    path: Path, x: ExpertTable, files: Sequence[SourceFile], layouts: Sequence[tuple[Tensor, ...]]
) -> None:
    """Refuse experts that are none, twice, too many, or outside their files, and tensors outside their parts.

    `path` is named in the VaultError, with the expert and the figures.
    """
    _check_ids(path, x)
    _check_extents(path, x, files)
    _check_layouts(path, x, layouts)


def _refuse_first(path: Path, x: ExpertTable, bad: npt.NDArray[Any], what: Callable[[int], str]) -> None:
    """Refuse by the first expert that is bad, where there is one."""
    if not bad.any():
        return
    i = int(np.argmax(bad))
    others = int(bad.sum()) - 1
    more = f" (and {others} more experts like it)" if others else ""
    raise VaultError(f"{path}: expert {x.expert[i]} of layer {x.layer[i]}: {what(i)}{more}")


def _check_ids(path: Path, x: ExpertTable) -> None:
    if not 1 <= len(x) <= MAX_EXPERTS:
        raise VaultError(f"{path}: {len(x)} experts; 1 to {MAX_EXPERTS} can be served")
    cells = (int(x.layer.max()) + 1) * (int(x.expert.max()) + 1)
    if cells > MAX_GRID_CELLS:
        raise VaultError(
            f"{path}: layers up to {x.layer.max()} and experts up to {x.expert.max()}: a grid of {cells}"
            f" places, at most {MAX_GRID_CELLS} can be served"
        )
    _, first, counts = np.unique(
        x.layer << 32 | x.expert, return_index=True, return_counts=True
    )  # both are below 2^24 by the check of the grid
    twice = np.zeros(len(x), np.bool_)
    twice[first[counts > 1]] = True
    _refuse_first(path, x, twice, lambda i: "it is there twice")


def _check_extents(path: Path, x: ExpertTable, files: Sequence[SourceFile]) -> None:
    whose = np.repeat(np.arange(len(x)), np.diff(x.first))
    sizes = np.array([file.size for file in files], np.int64)

    def refuse(bad: npt.NDArray[Any], what: Callable[[int], str]) -> None:
        if bad.any():
            k = int(np.argmax(bad))
            i = int(whose[k])
            raise VaultError(
                f"{path}: expert {x.expert[i]} of layer {x.layer[i]}, part {k - x.first[i]}: {what(k)}"
            )

    _refuse_first(path, x, np.diff(x.first) == 0, lambda i: "it has no parts")
    refuse(
        (x.file < 0) | (x.file >= len(files)), lambda k: f"file {x.file[k]}, but there are {len(files)} files"
    )
    refuse((x.offset < 0) | (x.length <= 0), lambda k: f"{x.length[k]} bytes at {x.offset[k]}")
    size = sizes[x.file]
    refuse(
        (x.offset > size) | (x.length > size - np.minimum(x.offset, size)),
        lambda k: (
            f"{x.length[k]} bytes at {x.offset[k]} of {files[x.file[k]].path}, which has {size[k]}:"
            f" {int(x.offset[k]) + int(x.length[k]) - int(size[k])} bytes are missing"
        ),
    )


def _check_layouts(path: Path, x: ExpertTable, layouts: Sequence[tuple[Tensor, ...]]) -> None:
    _refuse_first(
        path,
        x,
        (x.layout < 0) | (x.layout >= len(layouts)),
        lambda i: f"layout {x.layout[i]}, but there are {len(layouts)}",
    )
    n_parts = np.diff(x.first)
    for number in np.unique(x.layout).tolist():
        rows = x.layout == number
        for t in layouts[number]:
            if len(t.shape) > MAX_DIMENSIONS:
                raise VaultError(
                    f"{path}: tensor {t.name!r} of layout {number} has {len(t.shape)} dimensions, at most"
                    f" {MAX_DIMENSIONS} can be served"
                )
            if any(n > MAX_ELEMENTS for n in t.shape):
                raise VaultError(
                    f"{path}: tensor {t.name!r} of layout {number} has shape {list(t.shape)}; at most"
                    f" {MAX_ELEMENTS} elements a dimension are accepted"
                )
            has = rows & (t.part < n_parts)
            _refuse_first(path, x, rows & ~has, _wrong_part(t, n_parts))
            length = np.zeros(len(x), np.int64)
            length[has] = x.length[x.first[:-1][has] + t.part]
            past = has & ((t.offset > length) | (t.nbytes > length - np.minimum(t.offset, length)))
            _refuse_first(path, x, past, _past_part(t, length))


def _wrong_part(t: Tensor, n_parts: Column) -> Callable[[int], str]:
    return lambda i: f"tensor {t.name!r} is in part {t.part}, but it has {n_parts[i]} parts"


def _past_part(t: Tensor, length: Column) -> Callable[[int], str]:
    return lambda i: (
        f"tensor {t.name!r}, {t.nbytes} bytes at {t.offset} of part {t.part}, which has {length[i]}"
    )
