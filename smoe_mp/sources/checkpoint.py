"""safetensors files and the folders that hold a model of them: every tensor's place, checked in full.

    0        n, u64
    8        header: n bytes of JSON, name -> dtype, shape, data_offsets [begin, end)
    8 + n    the tensors' bytes, without a gap, in any order

Facts first.  The header is somebody's JSON of up to 100 MB, of 140 000 entries in a large model; a shard may
be cut short by a download that broke off; a folder may hold copies, other people's files and pointers of Git
LFS.  Hence: every entry is held against the file's size and its own shape before it is believed, more
strictly than the format's library does (no gap, no overlap, nothing behind the last tensor); sizes come from
the offsets, so that an element type which this program does not know stops nobody who only moves its bytes;
and all files of a checkpoint are looked at before short ones are refused, since a broken download breaks
several.

Which files.  The index file decides, where there is one; else the `.safetensors` files of the folder itself,
never of a folder below or above it.  A tensor that two files have is refused, also where the index names one
of them: nobody can say which is right.

A header is decoded once, into columns: what stays of an entry is its name and a row of numbers.

The format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import SourceFile
from smoe_mp.sources.dtypes import BITS
from smoe_mp.sources.files import InputFile, open_input, open_readable

__all__ = ["Checkpoint", "SafetensorsFile", "StoredTensor", "open_folder", "read_header"]

#: The format's own limit, and ours for an index file.
MAX_JSON_BYTES = 100_000_000
MAX_CONFIG_BYTES = 16 << 20
#: More dimensions than any tensor has; it bounds the product.
MAX_DIMENSIONS = 32
INDEX_NAME = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG_NAME = "config.json"
#: How many faults one refusal lists.
LISTED = 12

_SHARD = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors")
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it stands in a file: `nbytes` at `offset` from the start of the file; `dtype` and `shape`
    (row-major) as the header has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile(Mapping[str, StoredTensor]):
    """A file with a checked header: its tensors by name, in the order of their bytes.

    `source`: the file's identity, with the digest over all bytes before the tensors.  `names`, `offsets`,
    `sizes` (bytes; offsets from the start of the file) and `kinds` are columns of one row a tensor; `kinds`
    indexes `kind_table`, the different (dtype, shape) pairs.
    """

    __slots__ = ("_row", "kind_table", "kinds", "names", "offsets", "sizes", "source")

    def __init__(
        self,
        source: SourceFile,
        *,
        names: list[str],
        offsets: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int32],
        kind_table: list[tuple[str, tuple[int, ...]]],
    ) -> None:
        self.source = source
        self.names = names
        self.offsets = offsets
        self.sizes = sizes
        self.kinds = kinds
        self.kind_table = kind_table
        self._row: dict[str, int] | None = None

    @property
    def path(self) -> Path:
        return self.source.path

    def tensor(self, row: int) -> StoredTensor:
        """The tensor of one row of the columns."""
        dtype, shape = self.kind_table[self.kinds[row]]
        return StoredTensor(self.names[row], dtype, shape, int(self.offsets[row]), int(self.sizes[row]))

    def __getitem__(self, name: str) -> StoredTensor:
        if self._row is None:
            self._row = {name: row for row, name in enumerate(self.names)}
        return self.tensor(self._row[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Checkpoint(Mapping[str, tuple[SafetensorsFile, StoredTensor]]):
    """All tensors of a model by name, each with the file that has it.

    `path`: the folder, or the one file that was named.  `config`: config.json as plain data, {} where there
    is none.  `files`: in the order of their names.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], files: Sequence[SafetensorsFile], rows: dict[str, int]
    ) -> None:
        self.path = path
        self.config = config
        self.files = tuple(files)
        self._rows = rows
        self._starts = np.cumsum([0, *map(len, self.files)])

    def place(self, name: str) -> tuple[int, int]:
        """The number of the file in `files` that has the tensor, and its row there."""
        row = self._rows[name]
        file = int(np.searchsorted(self._starts, row, "right")) - 1
        return file, row - int(self._starts[file])

    def __getitem__(self, name: str) -> tuple[SafetensorsFile, StoredTensor]:
        file, row = self.place(name)
        return self.files[file], self.files[file].tensor(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


# --- one file ----------------------------------------------------------------------------------------------


def read_header(path: Path) -> SafetensorsFile:
    """The checked header of the safetensors file at `path`.  Nothing stays open.

    Raises VaultError with the file, the tensor and the figures where it does not add up.
    """
    with open_input(path, "a safetensors file") as file:
        return _Header(file).read()


class _Header:
    """One reading of one header; each step relies on what the steps before it have checked."""

    def __init__(self, file: InputFile) -> None:
        self.file = file

    def read(self) -> SafetensorsFile:
        file = self.file
        head = file.read(0, 8, "the header's length")
        length = int.from_bytes(head, "little")
        if length > MAX_JSON_BYTES:
            raise file.refuse(
                f"the header's length is {length} bytes, at most {MAX_JSON_BYTES} are accepted; this is no"
                " safetensors file, or it is damaged"
            )
        raw = file.read(8, length, "the header")
        if not raw.startswith(b"{"):
            raise file.refuse(f"the header is no JSON object: it begins with {bytes(raw[:8])!r}")
        entries, texts = self._decode(raw)
        self._check_twice(raw, entries, texts)
        digest = hashlib.blake2b(head, digest_size=16)
        digest.update(raw)
        return self._columns(entries, 8 + length, digest.digest())

    def _decode(self, raw: bytearray) -> tuple[dict[str, _Entry], list[str]]:
        """The tensors by name, and all keys and values of the file's own metadata."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            own = fields.pop("__metadata__", None)
            metadata = msgspec.json.decode(own, type=dict[str, str]) if own is not None else {}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.file.refuse(f"the header is no safetensors header: {error}") from error
        decode = msgspec.json.Decoder(_Entry).decode
        entries: dict[str, _Entry] = {}
        for name, field in fields.items():
            try:
                entries[name] = decode(field)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self.file.refuse(f"tensor {name!r}: {error}") from error
        return entries, [*metadata, *metadata.values()]

    def _check_twice(self, raw: bytearray, entries: dict[str, _Entry], texts: list[str]) -> None:
        """No name stands twice.  A decoded object no longer shows that; but each entry has "data_offsets"
        once, and inside a longer string a quotation mark is written differently."""
        word = "data_offsets"
        found = raw.count(b'"data_offsets"')
        wanted = len(entries) + (word in entries) + texts.count(word)
        if found != wanted:
            raise self.file.refuse(
                f'the header has "{word}" {found} times for {len(entries)} tensors: a name or a key stands'
                " there twice, or is written with escapes"
            )

    def _columns(self, entries: dict[str, _Entry], start: int, digest: bytes) -> SafetensorsFile:
        """The entries as columns, ordered by place, with every size checked."""
        file = self.file
        kinds: dict[tuple[str, tuple[int, ...]], tuple[int, int | None]] = {}
        kind_of: list[int] = []
        for name, entry in entries.items():
            key = entry.dtype, entry.shape
            known = kinds.get(key)
            if known is None:
                known = kinds[key] = len(kinds), self._bytes_of(name, entry)
            begin, end = entry.data_offsets
            if begin > end:
                raise file.refuse(f"tensor {name!r}: data_offsets [{begin}, {end}] end before they begin")
            if known[1] is not None and known[1] != end - begin:
                raise file.refuse(
                    f"tensor {name!r}: {end - begin} bytes by its data_offsets [{begin}, {end}], but"
                    f" {entry.dtype} of shape {list(entry.shape)} has {known[1]}"
                )
            kind_of.append(known[0])
        spans = [entry.data_offsets for entry in entries.values()]
        order = sorted(range(len(spans)), key=spans.__getitem__)
        names = list(entries)
        self._check_places([names[i] for i in order], [spans[i] for i in order], start)
        table = np.array([spans[i] for i in order], np.int64).reshape(-1, 2)
        return SafetensorsFile(
            file.identity(digest),
            names=[names[i] for i in order],
            offsets=table[:, 0] + start,
            sizes=table[:, 1] - table[:, 0],
            kinds=np.array(kind_of, np.int32)[np.array(order, np.intp)],
            kind_table=list(kinds),
        )

    def _bytes_of(self, name: str, entry: _Entry) -> int | None:
        """Bytes by type and shape; None where the type is not known."""
        if len(entry.shape) > MAX_DIMENSIONS:
            raise self.file.refuse(
                f"tensor {name!r}: {len(entry.shape)} dimensions, at most {MAX_DIMENSIONS} are accepted"
            )
        bits = BITS.get(entry.dtype)
        if bits is None:
            return None
        whole = math.prod(entry.shape) * bits  # of Python's integers: nothing wraps
        if whole % 8:
            raise self.file.refuse(
                f"tensor {name!r}: {entry.dtype} of shape {list(entry.shape)} has {whole} bits, no whole"
                " number of bytes"
            )
        return whole // 8

    def _check_places(self, names: list[str], spans: list[tuple[int, int]], start: int) -> None:
        """Sorted spans cover the data from its first to its last byte, once."""
        file, at, before = self.file, 0, ""
        for name, (begin, end) in zip(names, spans, strict=True):
            if begin < at:
                raise file.refuse(
                    f"tensors {before!r} and {name!r} overlap: the first ends at {at} of the data, the second"
                    f" begins at {begin}"
                )
            if begin > at:
                raise file.refuse(
                    f"tensor {name!r} begins at {begin} of the data, but what is before it ends at {at}: a"
                    f" hole of {begin - at} bytes"
                )
            at, before = end, name
        have = file.size - start
        if at > have:
            raise ShortFile(
                f"{file.path}: tensor {before!r} ends at {start + at}, the file at {file.size}:"
                f" {at - have} bytes are missing"
            )
        if at < have:
            raise file.refuse(f"{have - at} bytes behind the last tensor, which ends at {start + at}")


class ShortFile(VaultError):
    """A file that ends before its header says; the other files of its checkpoint are worth a look too."""


# --- a folder ----------------------------------------------------------------------------------------------


def open_folder(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a folder, its config.json, its index file or one `.safetensors` file.

    One file is a checkpoint of its own, unless its name says that it is a part of several.  All headers are
    read and checked; nothing stays open.  Raises VaultError with files, tensors and figures.
    """
    folder, index, files = _find_files(path)
    if index is not None:
        weight_map = _read_index(index)
        files = _indexed_files(index, weight_map)
    _check_parts(folder, files)
    headers = _read_headers(files)
    rows = _unite(headers)
    if index is not None:
        _check_index(index, weight_map, rows, headers)
    one = len(files) == 1 and path.suffix == ".safetensors"
    return Checkpoint(path if one else folder, _read_config(folder / CONFIG_NAME), headers, rows)


def _find_files(path: Path) -> tuple[Path, Path | None, list[Path]]:
    """The folder, its index file if it has one, else the files to take."""
    try:
        if path.is_dir():
            folder = path
        elif path.name.endswith(INDEX_SUFFIX):
            return path.parent, path, []
        elif path.suffix == ".safetensors" and not _SHARD.fullmatch(path.name):
            return path.parent, None, [path]
        else:
            os.close(open_readable(path))  # what names the folder must be there itself
            folder = path.parent
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise VaultError(f"{path}: {error.strerror} (errno {error.errno})") from error
    except ValueError as error:  # a NUL in the name
        raise VaultError(f"{str(path)!r}: not a file name: {error}") from error
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if INDEX_NAME in indexes:
        indexes = [INDEX_NAME]
    if len(indexes) > 1:
        raise VaultError(f"{folder}: several index files, {', '.join(indexes)}: name the one that is meant")
    if indexes:
        return folder, folder / indexes[0], []
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise VaultError(f"{folder}: no .safetensors file in this folder (folders below it are not searched)")
    return folder, None, files


def _read_index(path: Path) -> dict[str, str]:
    raw = _read_whole(path, "an index file", MAX_JSON_BYTES)
    try:
        weight_map = msgspec.json.decode(raw, type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise VaultError(f"{path}: no index of safetensors files: {error}") from error
    if not weight_map:
        raise VaultError(f"{path}: the index names no tensor")
    return weight_map


def _indexed_files(index: Path, weight_map: dict[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name.isprintable() or "/" in name or name in ("", ".", ".."):
            raise VaultError(f"{index}: {name!r} is no name of a file beside the index")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not os.path.lexists(file)]
    if missing:
        raise VaultError(
            f"{index.parent}: {_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing:"
            f" {index.name} names {len(files)} files, {len(files) - len(missing)} are there"
        )
    return files


def _check_parts(folder: Path, files: list[Path]) -> None:
    """Where names say that they are parts of several, all parts are there."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            found.setdefault((match["stem"], int(match["parts"])), set()).add(int(match["part"]))
    for (stem, parts), numbers in found.items():
        if len(numbers) < parts:
            missing = [n for n in range(1, parts + 1) if n not in numbers]
            names = [f"{stem}-{n:05}-of-{parts:05}.safetensors" for n in missing]
            raise VaultError(
                f"{folder}: {_listed(names)} {'is' if len(names) == 1 else 'are'} missing: by their names"
                f" there are {parts} files, {len(numbers)} are there"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _read_headers(files: list[Path]) -> list[SafetensorsFile]:
    headers, short = [], []
    for file in files:
        try:
            headers.append(read_header(file))
        except ShortFile as error:
            short.append(str(error))
    if short:
        more = f"; and {len(short) - LISTED} more files" if len(short) > LISTED else ""
        raise VaultError("; ".join(short[:LISTED]) + more + "; fetch what is short again")
    return headers


def _unite(headers: list[SafetensorsFile]) -> dict[str, int]:
    """Name to row, counted through all files."""
    rows: dict[str, int] = {}
    for header in headers:
        first = len(rows)
        rows.update(zip(header.names, range(first, first + len(header)), strict=True))
        if len(rows) != first + len(header):
            _refuse_twice(headers)
    return rows


def _refuse_twice(headers: list[SafetensorsFile]) -> None:
    seen: dict[str, Path] = {}
    for header in headers:
        for name in header:
            if name in seen:
                raise VaultError(
                    f"{header.path}: tensor {name!r} is also in {seen[name].name}: remove the copy, or put"
                    " files of other models elsewhere"
                )
            seen[name] = header.path


def _check_index(
    index: Path, weight_map: dict[str, str], rows: dict[str, int], headers: list[SafetensorsFile]
) -> None:
    """Every tensor of the index is in the file that the index names."""
    ends = np.cumsum([len(header) for header in headers]).tolist()
    span_of = {header.path.name: (end - len(header), end) for header, end in zip(headers, ends, strict=True)}
    for name, file in weight_map.items():
        begin, end = span_of[file]
        if not begin <= rows.get(name, -1) < end:
            raise VaultError(f"{index}: tensor {name!r} should be in {file}, which does not have it")


def _read_whole(path: Path, kind: str, limit: int) -> bytearray:
    with open_input(path, kind) as file:
        if file.size > limit:
            raise file.refuse(f"{file.size} bytes, at most {limit} are accepted of {kind}")
        return file.read(0, file.size, kind)


def _read_config(path: Path) -> dict[str, Any]:
    """config.json as plain data; {} where there is none.  NaN and Infinity, which some have, are read."""
    if not os.path.lexists(path):
        return {}
    raw = _read_whole(path, "a config.json", MAX_CONFIG_BYTES)
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise VaultError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise VaultError(f"{path}: a JSON {type(config).__name__}, not an object")
    return config
