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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smoe_mp.sources.base import Expert, Extent, Source, Tensor

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
        ("part", "<u4"),
        ("ndim", "<u4"),
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
    "F64": 8, "I64": 8, "U64": 8, "F32": 16, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
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


def _windows(extents: Sequence[Extent], align: int) -> list[Window]:
    """Merged aligned windows around the extents, each placed behind the other."""
    spans: list[list[int]] = []  # file, start, end, last wanted byte
    for x in sorted(extents, key=lambda x: (x.file, x.offset)):
        start, wanted = x.offset // align * align, x.offset + x.length
        if spans and spans[-1][0] == x.file and start <= spans[-1][2]:
            spans[-1][3] = max(spans[-1][3], wanted)
        else:
            spans.append([x.file, start, 0, wanted])
        spans[-1][2] = _round_up(spans[-1][3], align)
    place, out = 0, []
    for file, start, end, wanted in spans:
        out.append(Window(file, start, end - start, wanted - start, place))
        place += end - start
    return out


def _misaligned(tensors: Iterable[Tensor], part: int, place: int) -> bool:
    return any((place + t.offset) % alignment_of(t.dtype) for t in tensors if t.part == part)


def plan(extents: Sequence[Extent], tensors: Sequence[Tensor], align: int) -> Plan:
    """The read plan of one expert.  `align`: bytes, a power of two of at least 512."""
    windows = _windows(extents, align)
    end = windows[-1].place + windows[-1].length
    places, moves = [], []
    for i, x in enumerate(extents):
        w = next(w for w in windows if w.file == x.file and w.offset <= x.offset < w.offset + w.length)
        place = w.place + x.offset - w.offset
        if _misaligned(tensors, i, place):
            base = _round_up(end, PART_ALIGN)
            at = (base + k for k in range(PART_ALIGN))
            own = next((place for place in at if not _misaligned(tensors, i, place)), base)
            moves.append((place, own, x.length))
            place, end = own, own + x.length
        places.append(place)
    return Plan(tuple(windows), tuple(places), tuple(moves), end)


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
            rows.append(
                (strings.add(t.name), strings.add(t.dtype), t.part, len(t.shape), t.offset, t.nbytes, shape)
            )
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


class _Rows:
    """Rows of windows, parts and moves as they grow."""

    def __init__(self) -> None:
        self.experts: list[tuple[int, ...]] = []
        self.windows: list[tuple[int, ...]] = []
        self.parts: list[tuple[int, ...]] = []
        self.moves: list[tuple[int, ...]] = []

    def add(self, x: Expert, p: Plan) -> None:
        self.experts.append(
            (
                x.layer,
                x.expert,
                x.layout,
                len(self.windows),
                len(p.windows),
                len(self.parts),
                len(p.places),
                len(self.moves),
                len(p.moves),
                x.crc32c,
                sum(e.length for e in x.extents),
            )
        )
        self.windows += [(w.offset, w.length, w.need, w.place, w.file, 0) for w in p.windows]
        self.parts += [
            (e.offset, e.length, place, e.file, 0) for e, place in zip(x.extents, p.places, strict=True)
        ]
        self.moves += p.moves


def build(source: Source, read_align: int = 4096) -> Tables:
    """The tables of a source.  `read_align`: the largest alignment (bytes) that its files' direct reads
    ask for, and at least 4096."""
    strings, rows, slot_bytes = _Strings(), _Rows(), 0
    for x in source.experts:
        p = plan(x.extents, source.layouts[x.layout], read_align)
        slot_bytes = max(slot_bytes, p.bytes)
        rows.add(x, p)
    layouts, tensors = _layout_tables(source.layouts, strings)
    files = _file_table(source, strings)
    return Tables(
        experts=np.array(rows.experts, EXPERT),
        windows=np.array(rows.windows, WINDOW),
        parts=np.array(rows.parts, PART),
        moves=np.array(rows.moves, MOVE),
        layouts=layouts,
        tensors=tensors,
        files=files,
        strings=bytes(strings.blob),
        grid_layers=max(x.layer for x in source.experts) + 1,
        grid_experts=max(x.expert for x in source.experts) + 1,
        slot_bytes=_round_up(slot_bytes, SLOT_ALIGN),
        read_align=read_align,
    )
