"""Read plans: from a source's extents to the tables that lie in shared memory.

An extent starts and ends where the file's format put it; a direct read starts and ends on multiples of
`read_align`.  So each extent is widened to its enclosing window; windows of one file that touch or
overlap are merged; the windows are placed one after the other in the slot, and the expert's parts start
at the remainders.  A slot is as large as the largest plan, not the largest expert.

A part is moved inside the slot, after the reads, only where a view of one of its tensors would not be
aligned to its item, or a float32 view not to 16 bytes: CPU matrix kernels choose their code by the
address modulo 16, and a float32 result then differs in the last bits from the resident model's.  A moved
part has a place of its own, counted in the plan.

The dtypes below are the records of csrc/shm_layout.h; a test holds them against the C sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_mp.sources.base import ExpertTable, Extent, Source, Tensor

SLOT_ALIGN = 16384
#: Alignment of a moved part's own place.
PART_ALIGN = 64

EXPERT = np.dtype(
    [
        ("layer", "<u4"),
        ("expert", "<u4"),
        ("layout", "<u4"),
        ("first_window", "<u4"),
        ("n_windows", "<u4"),
        ("first_part", "<u4"),
        ("n_parts", "<u4"),
        ("first_move", "<u4"),
        ("n_moves", "<u4"),
        ("crc32c", "<u4"),
        ("bytes", "<u8"),
    ]
)
WINDOW = np.dtype(
    [
        ("file_offset", "<u8"),
        ("length", "<u8"),
        ("need", "<u8"),
        ("slot_offset", "<u8"),
        ("file", "<u4"),
        ("reserved", "<u4"),
    ]
)
PART = np.dtype(
    [("file_offset", "<u8"), ("bytes", "<u8"), ("slot_offset", "<u8"), ("file", "<u4"), ("reserved", "<u4")]
)
MOVE = np.dtype([("from", "<u8"), ("to", "<u8"), ("bytes", "<u8")])
LAYOUT = np.dtype([("first_tensor", "<u4"), ("n_tensors", "<u4")])
TENSOR = np.dtype(
    [
        ("name", "<u4"),
        ("dtype", "<u4"),
        ("tag", "<u4"),
        ("part", "<u4"),
        ("ndim", "<u4"),
        ("reserved", "<u4"),
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("shape", "<u8", (4,)),
    ]
)
FILE = np.dtype(
    [
        ("dev", "<u8"),
        ("ino", "<u8"),
        ("size", "<u8"),
        ("mtime_ns", "<i8"),
        ("digest", "u1", (16,)),
        ("path", "<u4"),
        ("reserved", "<u4"),
    ]
)
#: In the order of smoe_sizeof().
RECORDS = (EXPERT, WINDOW, PART, MOVE, LAYOUT, TENSOR, FILE)

_ALIGN = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 16, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2,
}  # fmt: skip


def alignment_of(dtype: str) -> int:
    """What the address of a view of this dtype must be a multiple of (bytes)."""
    return _ALIGN.get(dtype, 1)


@dataclass(frozen=True, slots=True)
class Window:
    file: int
    offset: int
    length: int
    need: int
    place: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How one expert is read: windows, then moves; `places` is where its parts end up in the slot."""

    windows: tuple[Window, ...]
    places: tuple[int, ...]
    moves: tuple[tuple[int, int, int], ...]
    bytes: int


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


Column = npt.NDArray[np.int64]
#: Rows with these fields: windows with `_WINDOW`, parts with `_PART`, moves with `_MOVE`.
_WINDOW = ("file_offset", "length", "need", "slot_offset", "file")


@dataclass(slots=True)
class _Plans:
    """The plans of experts that are alike: one row an expert, one column a window, part or move.

    A window or move that a row does not have is left out by its mask; those that it has stand in order.
    """

    windows: dict[str, Column]
    has_window: npt.NDArray[np.bool_]
    places: Column
    moves: dict[str, Column]
    has_move: npt.NDArray[np.bool_]
    bytes: Column


def _plan_windows(file: Column, offset: Column, length: Column, align: int) -> tuple[_Plans, Column]:
    """Merged aligned windows around the extents, each placed behind the other, and the extents' places in
    them.  One row an expert, one column an extent."""
    rows, n = offset.shape
    order = np.lexsort((offset, file), axis=1)
    file, offset, length = (np.take_along_axis(a, order, 1) for a in (file, offset, length))
    start = offset // align * align
    fields = {name: np.zeros((rows, n), np.int64) for name in _WINDOW}
    has = np.zeros((rows, n), np.bool_)
    number = np.zeros(rows, np.int64)  # of each row's last window, at which the extents so far end
    window_of = np.zeros((rows, n), np.int64)
    every = np.arange(rows)
    wanted = np.zeros(rows, np.int64)
    for j in range(n):
        if j:
            end = -(-wanted // align) * align
            joins = (file[:, j] == file[:, j - 1]) & (start[:, j] <= end)
            number = number + ~joins
            wanted = np.where(joins, wanted, 0)
        new = ~has[every, number]
        has[every, number] = True
        for name, value in (("file", file[:, j]), ("file_offset", start[:, j])):
            fields[name][every, number] = np.where(new, value, fields[name][every, number])
        wanted = np.maximum(wanted, offset[:, j] + length[:, j])
        fields["need"][every, number] = wanted - fields["file_offset"][every, number]
        window_of[:, j] = number
    fields["length"] = -(-fields["need"] // align) * align
    ends = np.cumsum(fields["length"], axis=1)
    fields["slot_offset"] = np.where(has, ends - fields["length"], 0)
    sorted_places = offset + np.take_along_axis(fields["slot_offset"] - fields["file_offset"], window_of, 1)
    places = np.empty_like(sorted_places)
    np.put_along_axis(places, order, sorted_places, 1)
    none = np.zeros((rows, n), np.int64)
    moves = {"from": none, "to": none.copy(), "bytes": none.copy()}
    return _Plans(fields, has, places, moves, np.zeros_like(has), ends[:, -1]), places


def _shift(needs: Sequence[tuple[int, int]]) -> int:
    """How far behind a multiple of PART_ALIGN a moved part lies, so that its views are aligned; 0 where no
    place makes all of them so.  `needs`: offset in the part and alignment of each view."""
    right = (k for k in range(PART_ALIGN) if not any((k + offset) % to for offset, to in needs))
    return next(right, 0)


def _plan_alike(
    file: Column, offset: Column, length: Column, tensors: Sequence[Tensor], align: int
) -> _Plans:
    """The plans of experts of one layout with the same number of extents: arrays of one row an expert."""
    plans, places = _plan_windows(file, offset, length, align)
    for part in range(offset.shape[1]):
        needs = [(t.offset, alignment_of(t.dtype)) for t in tensors if t.part == part]
        needs = [(at, to) for at, to in dict.fromkeys(needs) if to > 1]
        if not needs:
            continue
        moved = np.any([(places[:, part] + at) % to != 0 for at, to in needs], axis=0)
        own = -(-plans.bytes // PART_ALIGN) * PART_ALIGN + _shift(needs)
        plans.has_move[:, part] = moved
        plans.moves["from"][:, part] = places[:, part]
        plans.moves["to"][:, part] = own
        plans.moves["bytes"][:, part] = length[:, part]
        plans.places[:, part] = np.where(moved, own, places[:, part])
        plans.bytes = np.where(moved, own + length[:, part], plans.bytes)
    return plans


def plan(extents: Sequence[Extent], tensors: Sequence[Tensor], align: int) -> Plan:
    """The read plan of one expert.  `align`: bytes, a power of two of at least 512."""
    rows = np.array([(x.file, x.offset, x.length) for x in extents], np.int64)
    p = _plan_alike(rows[None, :, 0], rows[None, :, 1], rows[None, :, 2], tensors, align)
    has, moved = p.has_window[0], p.has_move[0]
    names = ("file", "file_offset", "length", "need", "slot_offset")
    windows = zip(*(p.windows[name][0][has].tolist() for name in names), strict=True)
    moves = zip(*(p.moves[name][0][moved].tolist() for name in ("from", "to", "bytes")), strict=True)
    return Plan(
        tuple(Window(*w) for w in windows), tuple(p.places[0].tolist()), tuple(moves), int(p.bytes[0])
    )


class _Strings:
    """A pool of NUL-terminated strings; equal ones are stored once."""

    def __init__(self) -> None:
        self.blob = bytearray()
        self._at: dict[bytes, int] = {}

    def add(self, value: str) -> int:
        raw = value.encode("utf-8", "surrogateescape")
        if raw not in self._at:
            self._at[raw] = len(self.blob)
            self.blob += raw + b"\0"
        return self._at[raw]


@dataclass(frozen=True)
class Tables:
    """The arrays that `smoe_create` copies into the control segment, and the slot size they need."""

    experts: npt.NDArray[np.void]
    windows: npt.NDArray[np.void]
    parts: npt.NDArray[np.void]
    moves: npt.NDArray[np.void]
    layouts: npt.NDArray[np.void]
    tensors: npt.NDArray[np.void]
    files: npt.NDArray[np.void]
    strings: bytes
    grid_layers: int
    grid_experts: int
    slot_bytes: int
    read_align: int


def _layout_tables(
    layouts: Sequence[tuple[Tensor, ...]], strings: _Strings
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    heads: list[tuple[int, int]] = []
    rows: list[tuple[object, ...]] = []
    for tensors in layouts:
        heads.append((len(rows), len(tensors)))
        for t in tensors:
            shape = tuple(t.shape) + (0,) * (4 - len(t.shape))
            words = strings.add(t.name), strings.add(t.dtype), strings.add(t.tag)
            rows.append((*words, t.part, len(t.shape), 0, t.offset, t.nbytes, shape))
    return np.array(heads, LAYOUT), np.array(rows, TENSOR)


def _file_table(source: Source, strings: _Strings) -> npt.NDArray[np.void]:
    rows = [
        (
            f.dev,
            f.ino,
            f.size,
            f.mtime_ns,
            np.frombuffer(f.digest.ljust(16, b"\0")[:16], np.uint8),
            strings.add(str(f.path)),
            0,
        )
        for f in source.files
    ]
    return np.array(rows, FILE)


@dataclass
class _Rows:
    """The growing rows of one record, of experts in any order; `expert` is whose each one is."""

    dtype: np.dtype[np.void]
    expert: list[Column]
    fields: list[dict[str, Column]]

    def add(self, experts: Column, fields: dict[str, Column], has: npt.NDArray[np.bool_]) -> None:
        """Add the rows that `has` shows; it and `fields` have one row an expert, in order."""
        self.expert.append(np.repeat(experts, has.sum(axis=1)))
        self.fields.append({name: values[has] for name, values in fields.items()})

    def table(self, n_experts: int) -> tuple[npt.NDArray[np.void], Column, Column]:
        """The record's table in the order of the experts, and where each expert's rows begin, and how many
        they are."""
        whose = np.concatenate(self.expert)
        order = np.argsort(whose, kind="stable")
        out = np.zeros(len(whose), self.dtype)
        for name in self.fields[0]:
            out[name] = np.concatenate([fields[name] for fields in self.fields])[order]
        counts = np.bincount(whose, minlength=n_experts)
        return out, np.cumsum(counts) - counts, counts


def _rows(dtype: np.dtype[np.void]) -> _Rows:
    return _Rows(dtype, [], [])


def _groups(x: ExpertTable) -> Iterator[tuple[int, Column]]:
    """Layout and rows of the experts that have it and the same number of extents."""
    n_extents = np.diff(x.first)
    kinds, of = np.unique(np.stack([x.layout, n_extents], axis=1), axis=0, return_inverse=True)
    order = np.argsort(of.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(of.reshape(-1), minlength=len(kinds)))
    for (layout, _), rows in zip(kinds.tolist(), np.split(order, ends[:-1]), strict=True):
        yield layout, rows


def build(source: Source, read_align: int = 4096) -> Tables:
    """The tables of a source.  `read_align`: the largest alignment (bytes) that its files' direct reads
    ask for, and at least 4096."""
    x, strings, slot_bytes = ExpertTable.of(source.experts), _Strings(), 0
    windows, parts, moves = _rows(WINDOW), _rows(PART), _rows(MOVE)
    for layout, rows in _groups(x):
        at = x.first[rows, None] + np.arange(x.first[rows[0] + 1] - x.first[rows[0]])
        file, offset, length = x.file[at], x.offset[at], x.length[at]
        p = _plan_alike(file, offset, length, source.layouts[layout], read_align)
        windows.add(rows, p.windows, p.has_window)
        place = {"file_offset": offset, "bytes": length, "slot_offset": p.places, "file": file}
        parts.add(rows, place, np.ones(at.shape, np.bool_))
        moves.add(rows, p.moves, p.has_move)
        slot_bytes = max(slot_bytes, int(p.bytes.max()))
    experts = np.zeros(len(x), EXPERT)
    for name, column in (("layer", x.layer), ("expert", x.expert), ("layout", x.layout)):
        experts[name] = column
    experts["crc32c"], experts["bytes"] = x.crc32c, x.bytes
    table = {}
    for name, made in (("window", windows), ("part", parts), ("move", moves)):
        table[name], experts[f"first_{name}"], experts[f"n_{name}s"] = made.table(len(x))
    layouts, tensors = _layout_tables(source.layouts, strings)
    files = _file_table(source, strings)
    return Tables(
        experts=experts,
        windows=table["window"],
        parts=table["part"],
        moves=table["move"],
        layouts=layouts,
        tensors=tensors,
        files=files,
        strings=bytes(strings.blob),
        grid_layers=int(x.layer.max()) + 1,
        grid_experts=int(x.expert.max()) + 1,
        slot_bytes=_round_up(slot_bytes, SLOT_ALIGN),
        read_align=read_align,
    )
