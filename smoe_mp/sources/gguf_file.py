"""One GGUF file, versions 2 and 3: its header, checked against the file before anything is done by it.

    0        "GGUF", version u32, number of tensors u64, number of key-value pairs u64
             pairs: key, value type u32, value; an array is element type u32, count u64, elements
             tensors: name, dimensions u32, sizes u64 (the fastest first), block type u32, offset u64
             zeros up to a multiple of general.alignment (32 unless the pairs say otherwise)
    data     the tensors, each at its offset from here, a multiple of the alignment

A string is its length as u64 and as many bytes.

Facts first.  The header has no length of its own: only who has read it all knows where the data begin.  A
vocabulary of 250,000 words lies in the middle of it, and none of it is wanted here.  The file comes from
anywhere, and workers will read by its numbers.  Hence: the header is read in pieces and walked once; what
is wanted is kept, the rest is stepped over, checked all the same and hashed; each count and length is held
against what is left of the file before a byte is read by it, and nothing is allocated by one.  A header of
more than 128 MiB, ten times the largest that is known, is refused, and so is one of more than 65536
tensors or pairs.

Sizes come from the block types.  A type that this table does not know stops nothing as long as no expert
is made of it: its tensor then ends where it must, at the next one's offset.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from smoe_mp.sources.base import SourceFile
from smoe_mp.sources.files import InputFile, open_input

__all__ = [
    "BLOCKS",
    "MAGIC",
    "TYPE_NAMES",
    "GgufArray",
    "GgufFile",
    "GgufTensor",
    "Value",
    "read_gguf",
    "shown",
]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_MAX = 1 << 20
HEADER_BYTES_MAX = 128 << 20
ENTRIES_MAX = 65536  # tensors, or pairs, of one file
NAME_BYTES_MAX = 1024  # of a tensor; the format says 64
KEY_BYTES_MAX = 65535
KEPT_TEXT_BYTES = 4096  # longer texts (licences, chat templates) are stepped over
KEPT_ELEMENTS = 256  # longer arrays of numbers likewise
ARRAY_DEPTH_MAX = 4
DIMENSIONS_MAX = 4
ELEMENTS_MAX = (1 << 63) - 1
PIECE_BYTES = 1 << 20

#: Block types by number: name, elements in a block, bytes of a block.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
TYPE_NAMES = {number: name for number, (name, _, _) in _TYPES.items()}
#: Block types by name: elements in a block, bytes of a block.
BLOCKS = {name: (elements, size) for name, elements, size in _TYPES.values()}

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Value types of one size: number to the way it is unpacked.
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_PAIR_BYTES_LEAST = 8 + 4 + 1
_TENSOR_BYTES_LEAST = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata: how many elements, and the numbers themselves where they are few."""

    count: int
    numbers: tuple[int | float, ...] = ()


#: A value of the metadata; None for a text that is too long to be kept.
Value = int | float | str | GgufArray | None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: `sizes` in elements, the fastest dimension first, as in the file; `type` the number of its
    block type; `offset` in bytes from the file's start; `nbytes` None where the type is not known."""

    name: str
    sizes: tuple[int, ...]
    type: int
    offset: int
    nbytes: int | None

    @property
    def type_name(self) -> str:
        return TYPE_NAMES.get(self.type, f"number {self.type}")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked file: every tensor of a known type lies inside it, and no two overlap.

    The identity's digest is BLAKE2b (16 bytes) over the header, up to the end of the tensor table.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data_offset: int
    identity: SourceFile


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of the GGUF file at `path`.  Symbolic links are followed; nothing stays open.

    Raises VaultError with the file, the key or tensor and the figures.
    """
    with open_input(path, "a GGUF file") as file:
        return _Reader(file).read()


def shown(name: str) -> str:
    """A name from a file as it may stand in a message: escaped and cut where it is odd."""
    return name if name.isprintable() and len(name) <= 100 else f"{name[:100]!r}"


class _Header:
    """The header's bytes in order: a window of the file that moves on, hashed as it passes.

    `at` counts in the window.  Every step is held against `limit`, the end of the file or of the longest
    header that is accepted.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._limit = min(file.size, HEADER_BYTES_MAX)
        self._hash = hashlib.blake2b(digest_size=16)
        self._window, self._base, self._at = bytearray(), 0, 0

    @property
    def position(self) -> int:
        """Bytes from the file's start."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """Bytes that the header may still have."""
        return self._limit - self.position

    def require(self, length: int, what: str) -> None:
        """Refuse where fewer than `length` bytes are left."""
        if length <= self.left:
            return
        if self._limit < self._file.size:
            raise self._file.refuse(
                f"{what}: {length} bytes at {self.position} make a header of more than"
                f" {HEADER_BYTES_MAX} bytes, which is not accepted"
            )
        raise self._file.refuse(
            f"{what}: {length} bytes at {self.position}, but the file ends at {self._file.size}:"
            f" {length - self.left} bytes are missing"
        )

    def _move_on(self, wanted: int) -> None:
        """Let the window begin where it is read, with at least `wanted` bytes, which are left."""
        self._hash.update(memoryview(self._window)[: self._at])
        kept = self._window[self._at :]
        self._base, self._at = self.position, 0
        start = self._base + len(kept)
        length = min(max(PIECE_BYTES, wanted - len(kept)), self._limit - start)
        self._window = kept + self._file.read(start, length, "the header")

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes, which the caller has bounded."""
        self.require(length, what)
        if self._at + length > len(self._window):
            self._move_on(length)
        start = self._at
        self._at += length
        return bytes(self._window[start : self._at])

    def number(self, form: struct.Struct, what: str) -> int:
        return int(form.unpack(self.take(form.size, what))[0])

    def skip(self, length: int, what: str) -> None:
        """Step over `length` bytes."""
        self.require(length, what)
        while self._at + length > len(self._window):
            length -= len(self._window) - self._at
            self._at = len(self._window)
            self._move_on(1)
        self._at += length

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; the caller has held `count` against what is left."""
        unpack = _U64.unpack_from
        done = 0
        while done < count:
            if self._at + 8 > len(self._window):
                self.require(8, what)
                self._move_on(8)
            window, at, last = self._window, self._at, len(self._window) - 8
            while done < count and at <= last:
                length = unpack(window, at)[0]
                at += 8 + length
                done += 1
            # Only the last step may have left the window: it is taken back and done with care.
            if at > len(window):
                self._at = at - length
                self.skip(length, f"{what}: element {done - 1}, a string of {length} bytes")
            else:
                self._at = at

    def text(self, most: int, what: str) -> str:
        """A string of at most `most` bytes."""
        length = self.number(_U64, what)
        self.require(length, f"{what}: a string of {length} bytes")
        if length > most:
            raise self._file.refuse(f"{what}: a string of {length} bytes, at most {most} are accepted")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._file.refuse(f"{what}: byte {error.start} of {raw[:100]!r} is not UTF-8") from None

    def digest(self) -> bytes:
        """Of all that was read so far."""
        whole = self._hash.copy()
        whole.update(memoryview(self._window)[: self._at])
        return whole.digest()


class _Reader:
    """One reading of one file; each step relies on what the steps before it have checked."""

    def __init__(self, file: InputFile) -> None:
        self.file, self.header = file, _Header(file)
        self.arrays = 0  # read so far, those inside of others included

    def read(self) -> GgufFile:
        version, tensor_count, pair_count = self._read_start()
        metadata = self._read_pairs(pair_count)
        alignment = self._alignment(metadata)
        entries = self._read_tensors(tensor_count, alignment)
        data_offset = -(-self.header.position // alignment) * alignment
        tensors = {
            name: GgufTensor(name, sizes, type_, data_offset + offset, nbytes)
            for name, (sizes, type_, offset, nbytes) in entries.items()
        }
        self._check_places(tensors)
        digest = self.header.digest()
        return GgufFile(
            self.file.path, version, alignment, metadata, tensors, data_offset, self.file.identity(digest)
        )

    # --- the start ---

    def _read_start(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of pairs."""
        start = bytes(self.file.read(0, min(4, self.file.size), "the magic number"))
        if start != MAGIC:
            raise self.file.refuse(f"not a GGUF file: it begins with {start.hex(' ')}, not {MAGIC.hex(' ')}")
        self.header.take(4, "the magic number")
        version = self._check_version(self.header.number(_U32, "the version"))
        tensors = self.header.number(_U64, "the number of tensors")
        pairs = self.header.number(_U64, "the number of key-value pairs")
        self._check_count(pairs, "key-value pairs", _PAIR_BYTES_LEAST)
        self._check_count(tensors, "tensors", _TENSOR_BYTES_LEAST)
        return version, tensors, pairs

    def _check_version(self, version: int) -> int:
        if version and version & 0xFFFF == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise self.file.refuse(
                f"version {version} is {swapped} in the other byte order (big-endian), which is not"
                " supported; convert the file with gguf_convert_endian.py of gguf-py"
            )
        if version not in (2, 3):
            raise self.file.refuse(
                f"version {version} of the format; this program reads versions 2 and 3"
                + ("; quantise the model anew, 1 was given up in 2023" if version == 1 else "")
            )
        return version

    def _check_count(self, count: int, what: str, least: int) -> None:
        if count > ENTRIES_MAX:
            raise self.file.refuse(f"{count} {what}; at most {ENTRIES_MAX} are accepted")
        if count * least > self.header.left:
            raise self.file.refuse(
                f"{count} {what} take at least {count * least} bytes, the file has {self.header.left} left"
            )

    # --- the pairs ---

    def _read_pairs(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for number in range(count):
            key = self.header.text(KEY_BYTES_MAX, f"key {number} of {count}")
            if key in metadata:
                raise self.file.refuse(f"{shown(key)} is there twice")
            type_ = self.header.number(_U32, f"{shown(key)}: its type")
            metadata[key] = self._read_value(key, type_)
        return metadata

    def _read_value(self, key: str, type_: int) -> Value:
        what = shown(key)
        if type_ in _SCALARS:
            form = _SCALARS[type_]
            value: int | float = form.unpack(self.header.take(form.size, what))[0]
            return value
        if type_ == _STRING:
            return self._read_text(what)
        if type_ == _ARRAY:
            return self._read_array(what, 1)
        raise self.file.refuse(f"{what}: value type {type_}, and there are 0 to 12")

    def _read_text(self, what: str) -> str | None:
        length = self.header.number(_U64, what)
        what = f"{what}: a text of {length} bytes"
        if length > KEPT_TEXT_BYTES:
            self.header.skip(length, what)
            return None
        return self.header.take(length, what).decode("utf-8", "replace")

    def _read_array(self, what: str, depth: int) -> GgufArray:
        self.arrays += 1
        if self.arrays > ENTRIES_MAX:
            raise self.file.refuse(f"{what}: more than {ENTRIES_MAX} arrays")
        type_ = self.header.number(_U32, f"{what}: the elements' type")
        count = self.header.number(_U64, f"{what}: the number of elements")
        what = f"{what}: an array of {count} elements"
        if type_ in _SCALARS:
            return self._read_numbers(what, type_, count)
        if type_ not in (_STRING, _ARRAY):
            raise self.file.refuse(f"{what} of type {type_}, and there are 0 to 12")
        least = 8 if type_ == _STRING else 12
        self.header.require(count * least, what)
        if type_ == _STRING:
            self.header.skip_strings(count, what)
        elif depth == ARRAY_DEPTH_MAX:
            raise self.file.refuse(f"{what}: arrays in arrays, more than {ARRAY_DEPTH_MAX} deep")
        else:
            for _ in range(count):
                self._read_array(what[:200], depth + 1)
        return GgufArray(count)

    def _read_numbers(self, what: str, type_: int, count: int) -> GgufArray:
        form = _SCALARS[type_]
        if count > KEPT_ELEMENTS:
            self.header.skip(count * form.size, what)
            return GgufArray(count)
        raw = self.header.take(count * form.size, what)
        return GgufArray(count, tuple(value for (value,) in form.iter_unpack(raw)))

    def _alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 0 < value <= ALIGNMENT_MAX or value & (value - 1):
            raise self.file.refuse(
                f"general.alignment is {value!r}: it must be a power of two, at most {ALIGNMENT_MAX}"
            )
        return value

    # --- the tensors ---

    def _read_tensors(
        self, count: int, alignment: int
    ) -> dict[str, tuple[tuple[int, ...], int, int, int | None]]:
        """By name: sizes, type, offset in the data, bytes."""
        entries: dict[str, tuple[tuple[int, ...], int, int, int | None]] = {}
        self._check_count(count, "tensors", _TENSOR_BYTES_LEAST)  # again: the pairs are behind us
        for number in range(count):
            name = self.header.text(NAME_BYTES_MAX, f"the name of tensor {number} of {count}")
            if name in entries:
                raise self.file.refuse(f"tensor {shown(name)} is there twice")
            entries[name] = self._read_tensor(shown(name), alignment)
        return entries

    def _read_tensor(self, name: str, alignment: int) -> tuple[tuple[int, ...], int, int, int | None]:
        dimensions = self.header.number(_U32, f"{name}: the number of dimensions")
        if dimensions > DIMENSIONS_MAX:
            raise self.file.refuse(f"{name}: {dimensions} dimensions, and there are at most {DIMENSIONS_MAX}")
        raw = self.header.take(8 * dimensions, f"{name}: its sizes")
        sizes = tuple(size for (size,) in _U64.iter_unpack(raw))
        type_ = self.header.number(_U32, f"{name}: its type")
        offset = self.header.number(_U64, f"{name}: its offset")
        if offset % alignment:
            raise self.file.refuse(f"{name}: its offset {offset} is no multiple of the alignment {alignment}")
        return sizes, type_, offset, self._tensor_bytes(name, sizes, type_)

    def _tensor_bytes(self, name: str, sizes: tuple[int, ...], type_: int) -> int | None:
        elements = 1
        for size in sizes:
            elements *= size
            if elements > ELEMENTS_MAX:
                raise self.file.refuse(f"{name}: {times(sizes)} elements are more than a file can have")
        if elements == 0 or type_ not in _TYPES:
            return None if elements else 0
        type_name, block, block_bytes = _TYPES[type_]
        row = sizes[0] if sizes else 1
        if row % block:
            raise self.file.refuse(
                f"{name}: rows of {row} elements are no whole number of {type_name} blocks of {block}"
            )
        return elements // block * block_bytes

    def _check_places(self, tensors: dict[str, GgufTensor]) -> None:
        """Every tensor inside the file, none over another."""
        for t in tensors.values():
            end = t.offset + (t.nbytes or 0)
            if end > self.file.size:
                raise self.file.refuse(
                    f"{shown(t.name)}: {t.nbytes or 0} bytes at {t.offset} end at {end}, the file at"
                    f" {self.file.size}: {end - self.file.size} bytes are missing; fetch it anew"
                )
        sized = sorted((t for t in tensors.values() if t.nbytes != 0), key=lambda t: t.offset)
        for a, b in pairwise(sized):
            end = a.offset + (a.nbytes or 0)
            if end > b.offset or a.offset == b.offset:
                raise self.file.refuse(
                    f"{shown(a.name)}: {a.nbytes or 0} bytes at {a.offset} overlap {shown(b.name)} at"
                    f" {b.offset}"
                )


def times(sizes: Sequence[int]) -> str:
    """ "2 x 3" """
    return " x ".join(map(str, sizes))
