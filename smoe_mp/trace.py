"""Traces: what was asked of a ring, in order: recording, the file, and traces of other programs.

A trace is a list of records in the order in which they happened:

    demand     a batch of experts of one layer that a client acquired; each was there, or had to be read
    claim      a poll for one expert that found it
    ranks      what a router ranked behind the demand before it (`Ring.route`), best first
    guess      experts to be read ahead, by a client or the prewarm process; each queued, there, or dropped
    busy, idle a client's request begins, ends

`Recorder` reads them from a running system (csrc/trace.c); clients do not wait for it.  `read_trace` takes
its files, and the routing traces of two other projects: CSV (one row for each router choice) and JSON lines
(one line a token).  docs/formats.md describes all three.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import signal
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from smoe_mp._native import check, check_plain, ffi, lib, new_error
from smoe_mp.errors import ConfigError, RingError, VaultError
from smoe_mp.partial import PartialFile
from smoe_mp.segments import STATES
from smoe_mp.sources.checks import MAX_GRID_CELLS

__all__ = ["KINDS", "Recorder", "Trace", "TraceBuilder", "read_trace", "write_trace"]

#: Names of records' kinds by number; of entries' outcomes likewise.
KINDS = ("", "demand", "claim", "ranks", "guess", "busy", "idle")
ASKED, THERE, DROPPED = lib.SMOE_TRACE_ASKED, lib.SMOE_TRACE_THERE, lib.SMOE_TRACE_DROPPED
DEMAND, CLAIM, RANKS = lib.SMOE_TRACE_DEMAND, lib.SMOE_TRACE_CLAIM, lib.SMOE_TRACE_RANKS
GUESS, BUSY, IDLE = lib.SMOE_TRACE_GUESS, lib.SMOE_TRACE_BUSY, lib.SMOE_TRACE_IDLE

Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Trace:
    """A trace as columns.

    One row a record: `kind` (u1, index into KINDS), `who` (u1, participant), `layer` (u4), `time_us` (u8,
    since the first record), and `first` (i8, one row more): the entries of record i are the rows first[i] to
    first[i + 1] of `expert` (u4, id within its layer) and `outcome` (u1: 0 to be read, 1 there, 2 a guess
    that was dropped).  `layers` and `experts`: the model's numbers; `top_k` 0: unknown; `lost`: cells of the
    log that were written over before they were read, 0 in a trace that is whole.
    """

    kind: Column
    who: Column
    layer: Column
    time_us: Column
    first: Column
    expert: Column
    outcome: Column
    layers: int
    experts: int
    top_k: int = 0
    lost: int = 0
    note: str = ""

    def __len__(self) -> int:
        return len(self.kind)

    def entries(self, record: int) -> Column:
        """The experts of one record, in the order of the request."""
        part: Column = self.expert[self.first[record] : self.first[record + 1]]
        return part


@dataclass
class TraceBuilder:
    """Collects records one by one."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    expert: list[int] = field(default_factory=list)
    outcome: list[int] = field(default_factory=list)

    def add(
        self,
        kind: int,
        who: int,
        layer: int,
        time_us: int,
        *,
        experts: Sequence[int] = (),
        outcomes: Sequence[int] | None = None,
    ) -> None:
        """One record; `outcomes` left out: nothing is known, as if all had to be read."""
        self.rows.append((kind, who, layer, time_us))
        self.lengths.append(len(experts))
        self.expert.extend(experts)
        self.outcome.extend([ASKED] * len(experts) if outcomes is None else outcomes)

    def build(self, *, layers: int = 0, experts: int = 0, **more: Any) -> Trace:
        """The trace.  `layers` and `experts` 0: as many as are named."""
        kind, who, layer, time_us = np.array(self.rows, np.int64).reshape(-1, 4).T
        expert = np.array(self.expert, np.uint32)
        return Trace(
            kind=kind.astype(np.uint8),
            who=who.astype(np.uint8),
            layer=layer.astype(np.uint32),
            time_us=(time_us - (time_us.min() if len(time_us) else 0)).astype(np.uint64),
            first=np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))).astype(np.int64),
            expert=expert,
            outcome=np.array(self.outcome, np.uint8),
            layers=layers or int(layer.max(initial=-1)) + 1,
            experts=experts or int(expert.max(initial=0)) + 1,
            **more,
        )


# --- recording -------------------------------------------------------------------------------------------

_ROOM = 1 << 17
_LIVE = STATES.index("live")


class Recorder:
    """Records what the clients of the ring `name` ask for, from `__enter__` to `__exit__`; then `trace`.

    One recorder at a time: RingError where there is another.  NoSuchRing and the other errors of attaching.
    `poll` has to be called a few times a second; a client that asks for more than the log holds in between
    loses the oldest records, which `trace.lost` says.
    """

    #: How long a record may stay unfinished: its writer was killed, or stopped for good.
    GRACE_S = 1.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._ring: Any = None
        self._cells: list[Column] = []
        self._room = ffi.new("uint64_t[]", _ROOM)
        self._position, self._lost = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self.records_cells = 0
        self._unfinished = (-1, 0.0)  # where a record is not whole, and when that was seen first

    def __enter__(self) -> Self:
        out, error = ffi.new("smoe_ring **"), new_error()
        code = lib.smoe_attach(self._name.encode(), lib.SMOE_ROLE_TRACE, 0, b"trace", out, error)
        if code == lib.SMOE_ETAKEN:
            raise RingError(f"ring {self._name}: somebody records a trace of it already: one at a time")
        check(code, error, self._name)
        self._ring = out[0]
        self._position[0] = check_plain(lib.smoe_trace_record(self._ring, 1), self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.smoe_trace_record(self._ring, 0)
        try:
            if error is None:
                self._drain_to(int(lib.smoe_trace_record(self._ring, 0)))
                self.trace = self._build()
        finally:
            lib.smoe_detach(self._ring)
            self._ring = None

    @property
    def alive(self) -> bool:
        """Whether the ring is served still."""
        return bool(lib.smoe_ring_state(self._ring) == _LIVE)

    def poll(self) -> int:
        """Take what there is; how many cells of the log that was."""
        got = self._read(pass_over=False)
        if got or lib.smoe_trace_head(self._ring) == self._position[0]:
            self._unfinished = (-1, 0.0)
        elif self._unfinished[0] != self._position[0]:  # seen for the first time
            self._unfinished = (int(self._position[0]), time.monotonic())
        elif time.monotonic() - self._unfinished[1] > self.GRACE_S:
            got = self._read(pass_over=True)
        return got

    def _read(self, *, pass_over: bool) -> int:
        got = lib.smoe_trace_read(self._ring, pass_over, self._position, self._lost, self._room, _ROOM)
        check_plain(got, self._name)
        if got:
            self._cells.append(np.frombuffer(ffi.buffer(self._room, got * 8), np.uint64).copy())
            self.records_cells += got
        return int(got)

    def _drain_to(self, end: int) -> None:
        """Up to the position `end`, behind which nothing is written any more."""
        while self._position[0] < end:
            if not self.poll():
                time.sleep(0.005)

    def _build(self) -> Trace:
        cells = np.concatenate(self._cells) if self._cells else np.empty(0, np.uint64)
        info = ffi.new("smoe_info *")
        lib.smoe_get_info(self._ring, info)
        return _from_cells(
            cells,
            _pairs(self._ring, int(info.n_experts)),
            layers=int(info.grid_layers),
            experts=int(info.grid_experts),
            top_k=int(info.top_k),
            lost=int(self._lost[0]),
        )


def _pairs(ring: Any, n: int) -> Column:
    """The expert ids by index."""
    pair = ffi.new("uint32_t[2]")
    ids = np.empty(n, np.uint32)
    for index in range(n):
        lib.smoe_expert_pair(ring, index, pair, pair + 1)
        ids[index] = pair[1]
    return ids


def _from_cells(cells: Column, ids: Column, **more: Any) -> Trace:
    """The columns of a log's cells: see csrc/trace.c for their bits."""
    is_first = (cells >> 12 & 1).astype(bool)
    at = np.flatnonzero(is_first)
    heads = cells[at]
    counts = (heads >> 24 & 0xFFFF).astype(np.int64)
    is_entry = ~is_first
    is_entry[at + 1] = False
    times = cells[at + 1] >> 13
    entries = cells[is_entry]
    kinds, indices = heads >> 13 & 7, entries >> 13 & 0x1FFFFF
    if (
        counts.sum() != len(entries)
        or (kinds == 0).any()
        or (kinds == 7).any()
        or (indices >= len(ids)).any()
    ):
        raise RingError("the trace's log in shared memory does not add up: somebody wrote over it")
    return Trace(
        kind=kinds.astype(np.uint8),
        who=(heads >> 16 & 0xFF).astype(np.uint8),
        layer=(heads >> 40).astype(np.uint32),
        time_us=times - (times.min() if len(times) else np.uint64(0)),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        expert=ids[indices.astype(np.int64)],
        outcome=(entries >> 34 & 3).astype(np.uint8),
        **more,
    )


# --- the file --------------------------------------------------------------------------------------------

MAGIC = b"SMOETRC\0"
VERSION = 1
_HEADER_MOST = 1 << 20
_ROWS_MOST = 1 << 28
_Natural = msgspec.Meta(ge=0, le=_ROWS_MOST)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands before the columns, as JSON.  `stored`: bytes of each compressed column, in order."""

    version: int
    records: int
    entries: int
    layers: int
    experts: int
    top_k: int
    lost: int
    note: str
    stored: list[int]


#: The columns in their order in the file: name, type, and whether there is one row an entry.
_COLUMNS = (
    ("kind", "<u1", False),
    ("who", "<u1", False),
    ("layer", "<u4", False),
    ("time_us", "<u8", False),
    ("count", "<u4", False),
    ("expert", "<u4", True),
    ("outcome", "<u1", True),
)


def _planes(values: Column) -> bytes:
    """First bytes of all numbers, then all second bytes, and so on: alike ones lie together."""
    width = values.dtype.itemsize
    return values.view(np.uint8).reshape(-1, width).T.tobytes()


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` to a new or old file; VaultError where it cannot be written."""
    try:
        path.write_bytes(_packed(trace))
    except OSError as error:
        raise VaultError(f"{path}: the trace cannot be written: {error.strerror}") from error


def _packed(trace: Trace) -> bytes:
    """The file's bytes."""
    columns = {
        "time_us": np.diff(trace.time_us.astype(np.int64), prepend=0).astype(np.int64),
        "count": np.diff(trace.first),
    }
    packed = [
        zlib.compress(_planes(np.ascontiguousarray(columns.get(name, getattr(trace, name, None)), dtype)), 9)
        for name, dtype, _ in _COLUMNS
    ]
    header = msgspec.json.encode(
        _Header(
            VERSION,
            len(trace),
            len(trace.expert),
            trace.layers,
            trace.experts,
            trace.top_k,
            trace.lost,
            trace.note,
            [len(p) for p in packed],
        )
    )
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *packed])


def _read_own(path: Path, raw: bytes) -> Trace:
    header, at = _read_header(path, raw)
    columns: dict[str, Column] = {}
    for (name, dtype, of_entries), stored in zip(_COLUMNS, header.stored, strict=True):
        rows = header.entries if of_entries else header.records
        columns[name] = _column(path, name, np.dtype(dtype), rows, raw[at : at + stored])
        at += stored
    counts = columns.pop("count").astype(np.int64)
    if int(counts.sum()) != header.entries:
        raise VaultError(f"{path}: the records have {int(counts.sum())} entries, the trace {header.entries}")
    for name, limit in (("kind", len(KINDS)), ("outcome", DROPPED + 1)):
        if (most := int(columns[name].max(initial=0))) >= limit:
            raise VaultError(f"{path}: {name} {most} is out of range, there are {limit}")
    return Trace(
        **{**columns, "time_us": np.cumsum(columns["time_us"].view(np.int64)).astype(np.uint64)},
        first=np.concatenate(([0], np.cumsum(counts))),
        layers=header.layers,
        experts=header.experts,
        top_k=header.top_k,
        lost=header.lost,
        note=header.note,
    )


def _read_header(path: Path, raw: bytes) -> tuple[_Header, int]:
    length = int.from_bytes(raw[8:12], "little")
    if len(raw) < 12 or length > min(_HEADER_MOST, len(raw) - 12):
        raise VaultError(f"{path}: a header of {length} bytes, but the file has {len(raw)}: it is cut short")
    try:
        version = json.loads(raw[12 : 12 + length]).get("version")
        if version != VERSION:
            raise VaultError(f"{path}: trace version {version!r}, this smoe-mp reads {VERSION}")
        header = msgspec.json.decode(raw[12 : 12 + length], type=_Header)
    except (ValueError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise VaultError(f"{path}: the trace's header is damaged: {error}") from error
    numbers = (header.records, header.entries, header.layers, header.experts, header.top_k, header.lost)
    if not all(0 <= n <= _ROWS_MOST for n in numbers[:5]) or header.lost < 0:
        raise VaultError(f"{path}: a trace of {numbers} records, entries, layers, experts: out of range")
    stored = header.stored
    if len(stored) != len(_COLUMNS) or min(stored) < 0 or sum(stored) != len(raw) - 12 - length:
        raise VaultError(
            f"{path}: columns of {stored} bytes, but {len(raw) - 12 - length} bytes follow: it is damaged"
        )
    return header, 12 + length


def _column(path: Path, name: str, dtype: np.dtype[Any], rows: int, packed: bytes) -> Column:
    """One column; no more is ever unpacked than its rows have bytes."""
    size = rows * dtype.itemsize
    unpack = zlib.decompressobj()
    try:
        plain = unpack.decompress(packed, size) if size else b""
        whole = size == 0 or (len(plain) == size and not unpack.decompress(unpack.unconsumed_tail, 1))
    except zlib.error as error:
        raise VaultError(f"{path}: the column {name} is damaged: {error}") from error
    if not whole:
        raise VaultError(f"{path}: the column {name} should have {rows} rows of {dtype.itemsize} bytes")
    planes = np.frombuffer(plain, np.uint8).reshape(dtype.itemsize, rows)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


# --- traces of others ------------------------------------------------------------------------------------


def read_trace(path: Path) -> Trace:
    """The trace at `path`: one of ours, a routing CSV or routing JSON lines, these two gzipped or not.

    VaultError with the file, the line and the figures where it is none of them or does not add up.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise VaultError(f"{path}: the trace cannot be read: {error.strerror}") from error
    trace = _read_own(path, raw) if raw.startswith(MAGIC) else _read_other(path, raw)
    _check_grid(path, trace)
    return trace


def _read_other(path: Path, raw: bytes) -> Trace:
    try:
        text = _unzip(path, raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise VaultError(f"{path}: no trace: {error}") from error
    if text.startswith("{"):
        return _read_lines(path, text.splitlines())
    return _read_csv(path, text)


def _check_grid(path: Path, trace: Trace) -> None:
    """Who looks at a trace makes tables of its layers x experts, and takes every row to be in them."""
    layers, experts = trace.layers, trace.experts
    if max(layers, 1) * max(experts, 1) > MAX_GRID_CELLS:
        raise VaultError(
            f"{path}: {layers} layers of {experts} experts: at most {MAX_GRID_CELLS} in all can be served"
        )
    for name, ids, limit in (("layer", trace.layer, layers), ("expert", trace.expert, experts)):
        if len(ids) and (most := int(ids.max())) >= limit:
            raise VaultError(f"{path}: {name} {most} is out of range, there are {limit}")


_TEXT_MOST = 1 << 30


def _unzip(path: Path, raw: bytes) -> bytes:
    if not raw.startswith(b"\x1f\x8b"):
        return raw
    with gzip.open(io.BytesIO(raw)) as file:
        text = file.read(_TEXT_MOST + 1)
    if len(text) > _TEXT_MOST:
        raise VaultError(f"{path}: more than {_TEXT_MOST} bytes of text: no trace is that long")
    return text


_CSV_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")


def _read_csv(path: Path, text: str) -> Trace:
    """Rows of turn, phase, step, layer, slot, expert: a record for each token and layer, a request a turn."""
    lines = text.splitlines()
    facts = _csv_facts(lines)
    begin = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    names = lines[begin].split(",") if begin < len(lines) else []
    if missing := [name for name in _CSV_COLUMNS if name not in names]:
        raise VaultError(f"{path}: line {begin + 1}: no trace: there is no column {', '.join(missing)}")
    columns = [names.index(name) for name in _CSV_COLUMNS]
    builder, now, group = TraceBuilder(), (-1, -1, -1, -1), list[int]()
    turn = -1

    def finish() -> None:
        if group:
            builder.add(DEMAND, 0, now[3], len(builder.rows), experts=group)
            group.clear()

    for number, row in _csv_rows(path, lines, begin + 1):
        try:
            *key, slot, expert = (int(row[c]) for c in columns)
        except (ValueError, IndexError) as error:
            raise VaultError(f"{path}: line {number}: {','.join(row)[:80]!r}: {error}") from error
        if min(*key, slot, expert) < 0 or max(key[3], expert) > _ROWS_MOST:
            raise VaultError(f"{path}: line {number}: a layer or expert out of range")
        if tuple(key) != now:
            finish()
        if key[0] != turn:
            _new_turn(builder, turn >= 0)
            turn = key[0]
        now = (key[0], key[1], key[2], key[3])
        group.append(expert)
    finish()
    if turn >= 0:
        builder.add(IDLE, 0, 0, len(builder.rows))
    return builder.build(experts=facts.get("n_expert", 0), top_k=facts.get("n_expert_used", 0))


def _csv_rows(path: Path, lines: Sequence[str], begin: int) -> Iterator[tuple[int, list[str]]]:
    """The rows from the line with the index `begin` on, with their lines' numbers."""
    try:
        yield from enumerate(csv.reader(lines[begin:]), begin + 1)
    except csv.Error as error:
        raise VaultError(f"{path}: no trace: {error}") from error


def _new_turn(builder: TraceBuilder, ends_another: bool) -> None:
    if ends_another:
        builder.add(IDLE, 0, 0, len(builder.rows))
    builder.add(BUSY, 0, 0, len(builder.rows))


def _csv_facts(lines: Iterable[str]) -> dict[str, int]:
    """The numbers of the comment line that describes the model."""
    line = next((line for line in lines if line.startswith("# model=")), "")
    pairs = (word.split("=", 1) for word in line.split() if "=" in word)
    # Nobody has as many as ten digits name, and int() refuses thousands of them.
    return {key: int(value[:10]) for key, value in pairs if value.isascii() and value.isdigit()}


def _read_lines(path: Path, lines: Sequence[str]) -> Trace:
    """One JSON object a token: "layers", a list of expert ids for each layer."""
    builder, decode = TraceBuilder(), msgspec.json.Decoder(_Token).decode
    builder.add(BUSY, 0, 0, 0)
    for number, line in enumerate(lines, 1):
        try:
            layers = decode(line).layers
        except msgspec.MsgspecError as error:
            raise VaultError(f"{path}: line {number}: no token of a trace: {error}") from error
        for layer, experts in enumerate(layers):
            if experts and not 0 <= min(experts) <= max(experts) <= _ROWS_MOST:
                raise VaultError(f"{path}: line {number}: layer {layer} has an expert out of range")
            builder.add(DEMAND, 0, layer, number, experts=experts)
    builder.add(IDLE, 0, 0, len(lines))
    return builder.build()


class _Token(msgspec.Struct):
    layers: list[list[int]]


def record(
    name: str, path: Path, seconds: float, say: Callable[[str], None], *, force: bool = False
) -> Trace:
    """Record the ring `name` for `seconds` (0: until Ctrl-C or SIGTERM), or until it ends, and write `path`.

    ConfigError where there is a file already, unless by `force`; VaultError where none can be written, both
    before anything is recorded.  For the main thread, which alone can take signals: they end it between two
    polls, so that they cost none of what one has taken out of the log, and not the file in the making either.
    """
    target = Path(os.path.realpath(path))
    _check_place(target, force)
    end = time.monotonic() + seconds if seconds else float("inf")
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, lambda number, frame: stopped.set())
            stack.callback(signal.signal, number, before)
        with Recorder(name) as recorder:
            out = PartialFile(target, 0, "trace")
            stack.callback(out.abort)  # of one that is published: nothing
            say(f"recording {name}: Ctrl-C ends it")
            while recorder.alive and not stopped.is_set() and time.monotonic() < end:
                recorder.poll()
                time.sleep(0.01)
        out.write(_packed(recorder.trace), 0)
        out.publish()
    return recorder.trace


def _check_place(path: Path, force: bool) -> None:
    """Nothing is there, or a file that may be replaced."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise VaultError(f"{path}: the trace cannot be written: {error.strerror}") from error
    if not stat.S_ISREG(there.st_mode):
        raise ConfigError(f"{path}: in the way, and no ordinary file: name another")
    if not force:
        raise ConfigError(f"{path}: there already; --force replaces it")
