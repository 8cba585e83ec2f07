"""Read plans made one expert and one extent after the other: slow, plain, what `tables` is held against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from smoe_mp.sources.base import Expert, Extent, Source, Tensor
from smoe_mp.tables import EXPERT, MOVE, PART, PART_ALIGN, WINDOW, Plan, Window, alignment_of


def _up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def windows(extents: Sequence[Extent], align: int) -> list[Window]:
    spans: list[list[int]] = []  # file, start, last wanted byte
    for x in sorted(extents, key=lambda x: (x.file, x.offset)):
        start, wanted = x.offset // align * align, x.offset + x.length
        if spans and spans[-1][0] == x.file and start <= _up_to(spans[-1][2], align):
            spans[-1][2] = max(spans[-1][2], wanted)
        else:
            spans.append([x.file, start, wanted])
    out: list[Window] = []
    place = 0
    for file, start, wanted in spans:
        length = _up_to(wanted, align) - start
        out.append(Window(file, start, length, wanted - start, place))
        place += length
    return out


def plan(extents: Sequence[Extent], tensors: Sequence[Tensor], align: int) -> Plan:
    def wrong(part: int, place: int) -> bool:
        return any((place + t.offset) % alignment_of(t.dtype) for t in tensors if t.part == part)

    read = windows(extents, align)
    end = read[-1].place + read[-1].length
    places, moves = [], []
    for part, x in enumerate(extents):
        w = next(w for w in read if w.file == x.file and w.offset <= x.offset < w.offset + w.length)
        place = w.place + x.offset - w.offset
        if wrong(part, place):
            base = _up_to(end, PART_ALIGN)
            own = next((base + k for k in range(PART_ALIGN) if not wrong(part, base + k)), base)
            moves.append((place, own, x.length))
            place, end = own, own + x.length
        places.append(place)
    return Plan(tuple(read), tuple(places), tuple(moves), end)


def _row(x: Expert, counts: Sequence[int], p: Plan) -> tuple[int, ...]:
    first_window, first_part, first_move = counts
    return (
        *(x.layer, x.expert, x.layout, first_window, len(p.windows), first_part, len(p.places)),
        *(first_move, len(p.moves), x.crc32c, sum(e.length for e in x.extents)),
    )


def build(source: Source, align: int) -> tuple[dict[str, npt.NDArray[np.void]], int]:
    """The tables that grow with the experts, and the largest plan's bytes."""
    experts, reads, parts, moves, most = [], [], [], [], 0
    for x in source.experts:
        p = plan(x.extents, source.layouts[x.layout], align)
        experts.append(_row(x, (len(reads), len(parts), len(moves)), p))
        reads += [(w.offset, w.length, w.need, w.place, w.file, 0) for w in p.windows]
        parts += [(e.offset, e.length, at, e.file, 0) for e, at in zip(x.extents, p.places, strict=True)]
        moves += p.moves
        most = max(most, p.bytes)
    made = {
        "experts": (experts, EXPERT),
        "windows": (reads, WINDOW),
        "parts": (parts, PART),
        "moves": (moves, MOVE),
    }
    return {name: np.array(rows, dtype) for name, (rows, dtype) in made.items()}, most
