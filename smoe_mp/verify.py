"""`smoe-mp verify`: read all of a model's experts and say which are bad.

Opening a source has checked its structure.  Here every expert's bytes are read, and looked at for what can be
known of them:

    checksum     CRC-32C, where the vault has one
    padding      of a `.smoe` vault: what no tensor has of a blob is zeros
    numbers      a scale or a weight of a float type is neither infinite nor NaN

The last is a suspicion: a model may have been trained into one, but a torn or overwritten file shows so too,
and an expert with a NaN scale computes NaN.  A bad expert stops nothing; all are named at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from smoe_mp._native import ffi, lib
from smoe_mp.parallel import byte_bar, cores, run_all
from smoe_mp.reader import ReadFault, SourceReader
from smoe_mp.sources.base import Expert, Source, Tensor
from smoe_mp.sources.smoe import SmoeVault
from smoe_mp.sources.smoe3 import RawVault

__all__ = ["BadExpert", "Report", "verify"]

#: Reads in flight, at least: a disk gives its rate only to several.
MIN_THREADS = 8

U8 = npt.NDArray[np.uint8]

# By type: bytes of a number, its bits without the sign, and the least of them that is no finite number.
_FLOATS: dict[str, tuple[int, int, int]] = {
    "F64": (8, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": (2, 0x7FFF, 0x7C00),
    "BF16": (2, 0x7FFF, 0x7F80),
    "F8_E4M3": (1, 0x7F, 0x7F),
    "F8_E5M2": (1, 0x7F, 0x7C),
    "F8_E8M0": (1, 0xFF, 0xFF),
}


@dataclass(frozen=True, slots=True)
class BadExpert:
    """One fault of one expert: `offset` and `length` in bytes of the file `path`."""

    layer: int
    expert: int
    path: str
    offset: int
    length: int
    fault: str


@dataclass(slots=True)
class Report:
    """What was read and found.  `modes`: how the files were read; `checked`: experts held against a checksum;
    `bytes` of the experts; `seconds` that it took."""

    path: str
    format: str
    experts: int
    checked: int = 0
    bytes: int = 0
    seconds: float = 0.0
    modes: list[str] = field(default_factory=list)
    bad: list[BadExpert] = field(default_factory=list)


def verify(
    source: Source,
    *,
    shown: bool = True,
    threads: int = 0,
    before: Callable[[], None] = lambda: None,
    after: Callable[[int, Sequence[BadExpert]], None] = lambda index, bad: None,
) -> Report:
    """Read and check every expert of `source`; a progress bar on stderr if `shown` and that is a terminal.

    `before` is called before each read, by the thread that reads; `after` with each expert's index in the
    source's table and what is wrong with it, by the caller's thread.

    Raises VaultError where a file cannot be opened, or changes meanwhile; what is wrong with an expert is in
    the report.
    """
    report = Report(str(source.path), source.format, len(source.experts))
    sizes = [sum(e.length for e in expert.extents) for expert in source.experts]
    began = time.monotonic()
    with (
        SourceReader(source) as reader,
        byte_bar("verify", sum(sizes), shown=shown) as advance,
    ):
        report.modes = sorted(set(reader.modes))
        check = _Check(source, reader)

        def note(found: tuple[int, list[BadExpert]]) -> None:
            index, bad = found
            report.bytes += sizes[index]
            report.checked += source.experts[index].crc32c != 0
            report.bad += bad
            advance(sizes[index])
            after(index, bad)

        def look(index: int) -> tuple[int, list[BadExpert]]:
            before()
            return check.expert(index)

        run_all(len(sizes), look, note, threads or max(MIN_THREADS, cores()))
        reader.check_unchanged()
    report.seconds = time.monotonic() - began
    report.bad.sort(key=lambda b: (b.layer, b.expert))
    return report


class _Check:
    """The checks of one expert; any thread."""

    def __init__(self, source: Source, reader: SourceReader) -> None:
        self._source, self._reader = source, reader
        self._padded = isinstance(source, SmoeVault | RawVault)

    def expert(self, index: int) -> tuple[int, list[BadExpert]]:
        expert = self._source.experts[index]
        first = expert.extents[0]
        try:
            parts = [np.frombuffer(part, np.uint8) for part in self._reader.read(expert.extents)]
        except ReadFault as fault:
            return index, [self._bad(expert, 0, fault.offset, str(fault))]
        bad = []
        if expert.crc32c and (got := _crc32c(parts)) != expert.crc32c:
            what = f"CRC-32C {got:08x}, the vault says {expert.crc32c:08x}"
            bad.append(self._bad(expert, 0, first.offset, what))
        tensors = self._source.layouts[expert.layout]
        if self._padded:
            bad += self._padding(expert, parts[0], tensors)
        bad += self._numbers(expert, parts, tensors)
        return index, bad

    def _padding(self, expert: Expert, blob: U8, tensors: Sequence[Tensor]) -> list[BadExpert]:
        at = 0
        spans = sorted((t.offset, t.offset + t.nbytes) for t in tensors)
        for begin, end in [*spans, (len(blob), len(blob))]:
            gap = blob[at:begin]
            if gap.any():
                place = at + int(np.flatnonzero(gap)[0])
                what = f"byte {place} of the blob is padding and not zero"
                return [self._bad(expert, 0, expert.extents[0].offset + place, what)]
            at = end
        return []

    def _numbers(self, expert: Expert, parts: list[U8], tensors: Sequence[Tensor]) -> list[BadExpert]:
        bad = []
        for t in tensors:
            if t.dtype not in _FLOATS:
                continue
            place = _first_not_finite(parts[t.part][t.offset : t.offset + t.nbytes], t.dtype)
            if place is not None:
                offset = expert.extents[t.part].offset + t.offset + place
                what = f"{t.name} ({t.dtype}) has an infinity or NaN, the first at byte {place}: suspicious"
                bad.append(self._bad(expert, t.part, offset, what))
        return bad

    def _bad(self, expert: Expert, part: int, offset: int, fault: str) -> BadExpert:
        extent = expert.extents[part]
        path = str(self._source.files[extent.file].path)
        return BadExpert(expert.layer, expert.expert, path, offset, extent.length, fault)


def _crc32c(parts: Sequence[U8]) -> int:
    crc = 0
    for part in parts:
        crc = lib.smoe_crc32c(crc, ffi.from_buffer(part), part.size)
    return crc


def _first_not_finite(raw: U8, dtype: str) -> int | None:
    """Where in `raw` the first infinity or NaN is (bytes), None where there is none."""
    place: int = lib.smoe_find_not_finite(ffi.from_buffer(raw), raw.size, *_FLOATS[dtype])
    return place if place >= 0 else None
