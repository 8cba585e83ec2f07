"""expert_freq.bin: how often each expert was asked for, kept from one session to the next.

    0        magic 53 46 52 51 ("SFRQ")                                       ┐
    4        u32 version, 1                                                   │ the original's file;
    8        u32 n, 65536                                                     │ it reads no further
    12       n u32 counts, of expert e in layer l at l x 512 + e              ┘
    262156   magic 53 4D 4F 45 46 51 00 01                                    ┐
    262164   u32 version of the trailer, 1                                    │
    262168   u32 experts of the model                                         │ ours
    262172   the model's fingerprint, 16 bytes                                │
    262188   u32 m, experts outside the 128 x 512 of the counts               │
    262192   m x (u32 layer, u32 expert, u32 count), in table order           │
    ...      u32 CRC-32 (zlib) over all that stands before it                 ┘

All integers are little-endian.  A file that ends with the counts is the original's: it names no model, and
the counts of experts that this model has are taken.

Facts first.  The file is a comfort: without it a start is cold, and no fault in it may cost more than that.
So reading never raises for what it finds: what is damaged, foreign or absurd is renamed to NAME.bad (or
.bad.1 to .bad.9; an earlier one is never overwritten) and the reason returned as a line to be shown.  And a
save is killed now and then, so it writes NAME's temporary in the same folder, syncs it, renames it over the
file and syncs the folder: the file is the old one or the new one, whole, at any moment.

The temporary has one fixed name, so that what a killed save left is overwritten by the next; whoever writes
it holds its flock, and has looked that the name still means the file that it locked (a rename takes the
locked file away to be the real one, under whoever waits for it).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import HistogramError
from smoe_mp.partial import lock_file, sync_folder
from smoe_mp.runtime import state_folder
from smoe_mp.sources.base import Source

MAGIC = b"SFRQ"
VERSION = 1
LAYERS, LAYER_EXPERTS = 128, 512
CELLS = LAYERS * LAYER_EXPERTS
FINGERPRINT_BYTES = 16
COUNT_MAX = 2**32 - 1

_HEADER = struct.Struct("<4sII")
#: The original's file, to the byte.
ORIGINAL_BYTES = _HEADER.size + 4 * CELLS
_TRAILER = struct.Struct("<8sII16sI")
_TRAILER_MAGIC = b"SMOEFQ\0\x01"
_TRAILER_VERSION = 1
_ENTRY = np.dtype([("layer", "<u4"), ("expert", "<u4"), ("count", "<u4")])
# The ring's expert index has 21 bits: no model has more experts.
_FILE_MOST = ORIGINAL_BYTES + _TRAILER.size + (1 << 21) * _ENTRY.itemsize + 4

SUFFIX = ".expert_freq.bin"
ORIGINAL_NAME = "expert_freq.bin"
#: Files that are set aside and kept, at most.
BAD_KEPT = 10

_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.02

Counts = npt.NDArray[np.uint32]
#: (layer, expert) of every expert of the model, in the order of the source's table.
Pairs = Sequence[tuple[int, int]] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """`counts` of the model's experts, in table order.  `original`: from the original's file."""

    counts: Counts
    original: bool = False

    def order(self) -> npt.NDArray[np.intp]:
        """Expert indices, most popular first; ties in table order."""
        return np.argsort(-self.counts.astype(np.int64), kind="stable")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the histogram, or None; `notes` to be shown, one line each; `found`: whether there
    was a file at all; `path`: the file that the histogram is from."""

    histogram: Histogram | None
    notes: tuple[str, ...] = ()
    found: bool = False
    path: Path | None = None


# --- whose it is, and where it lies ------------------------------------------------------------------------


def fingerprint(source: Source) -> bytes:
    """16 bytes by which a model's content is known: format, header digest and size of every file.

    No path, inode or time goes in, so a copied vault keeps its popularity.
    """
    h = blake2b(digest_size=FINGERPRINT_BYTES, person=b"smoe-mp freq")
    for part in (source.format.encode(), *(f.size.to_bytes(8, "little") + f.digest for f in source.files)):
        h.update(len(part).to_bytes(4, "little") + part)
    return h.digest()


@dataclass(frozen=True, slots=True)
class Places:
    """`path`: where the histogram is written, and read first.  `imports` are read, and never moved or
    written, where there is none."""

    path: Path
    imports: tuple[Path, ...]


def places(
    vault: Path, model: bytes, configured: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Places:
    """Where the histogram of the model with fingerprint `model` lies.

    `configured` ([prewarm] histogram), else VAULT.expert_freq.bin beside the vault (a file or a folder),
    or, where that folder cannot be written, FINGERPRINT.expert_freq.bin in the state folder
    ($XDG_STATE_HOME/smoe-mp or ~/.local/state/smoe-mp), which is made.  Imported: the one beside the vault,
    and the original's expert_freq.bin in the vault's folder.
    """
    beside = vault.with_name(vault.name + SUFFIX)
    original = (vault if vault.is_dir() else vault.parent) / ORIGINAL_NAME
    path = configured or beside
    if configured is None and not os.access(vault.parent, os.W_OK | os.X_OK):
        folder = state_folder(environ)
        if folder is not None:
            path = folder / (model.hex() + SUFFIX)
            with contextlib.suppress(OSError):  # what is wrong with it is said by the first save
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Places(path, tuple(p for p in (beside, original) if p != path))


# --- reading -----------------------------------------------------------------------------------------------


def recall(where: Places, model: bytes, known: Pairs) -> Loaded:
    """The histogram at its place, or, where there is none, the first that can be imported.

    `known`: see `Pairs`.  Never raises for what the files are or say.
    """
    loaded = load(where.path, model, known)
    if loaded.found:
        return loaded
    notes = list(loaded.notes)
    for path in where.imports:
        got = load(path, model, known, set_aside=False)
        notes += got.notes
        if got.histogram is not None:
            return Loaded(got.histogram, (*notes, f"histogram: imported from {path}"), True, path)
    return Loaded(None, tuple(notes))


def load(path: Path, model: bytes, known: Pairs, *, set_aside: bool = True) -> Loaded:
    """The histogram in the file at `path`, if it is of the model with fingerprint `model`.

    `known`: see `Pairs`; counts of others are ignored.
    Never raises for what the file is or says.  One that is damaged, foreign or absurd is set aside (with
    `set_aside` False: left where it is), which a note says.  One that cannot be read is left.
    """
    target = Path(os.path.realpath(path))
    try:
        raw = _read(target)
    except FileNotFoundError:
        return Loaded(None)
    except OSError as error:
        return Loaded(None, (f"histogram {path}: {error.strerror}; starting cold",), True)
    except _Bad as bad:
        raw, reason = b"", str(bad)
    else:
        try:
            counts, ignored = _decode(raw, model, np.asarray(known, np.int64).reshape(-1, 2))
        except _Bad as bad:
            reason = str(bad)
        else:
            notes = (f"histogram {path}: {ignored} counts of experts that the model has not, ignored",)
            own = Histogram(counts, original=len(raw) == ORIGINAL_BYTES)
            return Loaded(own, notes if ignored else (), True, path)
    outcome = f"{_set_aside(target)}; starting cold" if set_aside else "not imported"
    return Loaded(None, (f"histogram {path}: {reason}; {outcome}",), True)


class _Bad(Exception):
    """Not a histogram of this model; the text says why."""


def _read(path: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size > _FILE_MOST:
            raise _Bad(f"{found.st_size} bytes, and no histogram has more than {_FILE_MOST}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(_FILE_MOST + 1)
    finally:
        os.close(fd)


def _decode(raw: bytes, model: bytes, known: npt.NDArray[np.int64]) -> tuple[Counts, int]:
    """The counts of the known experts, and how many counts (not 0) others have."""
    _check_head(raw)
    grid = np.frombuffer(raw, "<u4", CELLS, _HEADER.size)
    entries = np.empty(0, _ENTRY)
    if len(raw) > ORIGINAL_BYTES:
        entries = _trailer(raw, model, len(known))
    inside = _inside(known)
    counts = np.zeros(len(known), np.uint32)
    cells = known[inside] @ (LAYER_EXPERTS, 1)
    counts[inside] = grid[cells]
    beyond = {(int(e["layer"]), int(e["expert"])): int(e["count"]) for e in entries}
    for i in np.flatnonzero(~inside):
        counts[i] = beyond.pop((int(known[i, 0]), int(known[i, 1])), 0)
    ignored = np.count_nonzero(grid) - np.count_nonzero(grid[cells]) + np.count_nonzero([*beyond.values()])
    return counts, int(ignored)


def _inside(known: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which experts have a cell in the original's counts."""
    return np.asarray((known[:, 0] < LAYERS) & (known[:, 1] < LAYER_EXPERTS))


def _check_head(raw: bytes) -> None:
    if not raw:
        raise _Bad("empty (0 bytes)")
    if raw[:4] != MAGIC[: len(raw)]:
        raise _Bad(f"no histogram: begins with {raw[:4].hex(' ')}, not {MAGIC.hex(' ')}")
    if len(raw) >= _HEADER.size:
        _, version, cells = _HEADER.unpack_from(raw)
        if version != VERSION:
            raise _Bad(f"version {version}, and only {VERSION} is known")
        if cells != CELLS:
            raise _Bad(f"{cells} counts, and there are always {CELLS}")
    if len(raw) < ORIGINAL_BYTES:
        raise _Bad(f"cut: {len(raw)} bytes of at least {ORIGINAL_BYTES}")


def _trailer(raw: bytes, model: bytes, experts: int) -> npt.NDArray[np.void]:
    """The entries of our trailer, all of it checked."""
    if len(raw) < ORIGINAL_BYTES + _TRAILER.size + 4:
        raise _Bad(f"cut: {len(raw)} bytes end inside the trailer")
    magic, version, its_experts, its_model, entries = _TRAILER.unpack_from(raw, ORIGINAL_BYTES)
    if magic != _TRAILER_MAGIC:
        raise _Bad(f"{len(raw) - ORIGINAL_BYTES} bytes behind the counts that are not ours")
    if version != _TRAILER_VERSION:
        raise _Bad(f"trailer of version {version}, and only {_TRAILER_VERSION} is known")
    start = ORIGINAL_BYTES + _TRAILER.size
    wanted = start + entries * _ENTRY.itemsize + 4
    if len(raw) != wanted:
        raise _Bad(f"{len(raw)} bytes, and with {entries} experts in the trailer it must be {wanted}")
    stored, right = int.from_bytes(raw[-4:], "little"), zlib.crc32(memoryview(raw)[:-4])
    if stored != right:
        raise _Bad(f"damaged: checksum {stored:08x}, must be {right:08x}")
    if its_model != model:
        raise _Bad(f"of another model: fingerprint {its_model.hex()}, this model's is {model.hex()}")
    if its_experts != experts:
        raise _Bad(f"of {its_experts} experts, and the model has {experts}")
    return np.frombuffer(raw, _ENTRY, entries, start)


def _set_aside(path: Path) -> str:
    """Rename `path` to the first .bad name that is free; what came of it, in words."""
    for number in range(BAD_KEPT):
        bad = path.with_name(f"{path.name}.bad" + (f".{number}" if number else ""))
        try:
            os.close(os.open(bad, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        except OSError as error:
            return f"it cannot be set aside: {error.strerror}"
        try:
            path.rename(bad)  # over the empty file that took the name
        except OSError as error:
            with contextlib.suppress(OSError):
                bad.unlink()
            return f"it cannot be set aside: {error.strerror}"
        return f"set aside as {bad.name}"
    return f"not set aside, since {BAD_KEPT} such files are kept already; the next save replaces it"


# --- writing -----------------------------------------------------------------------------------------------


def save(path: Path, model: bytes, known: Pairs, counts: Sequence[int] | npt.NDArray[np.integer]) -> None:
    """Write the counts of the experts `known`, in the same order, whole or not at all.

    Counts above 2^32 - 1 become that.  Raises HistogramError where the file cannot be written; the old one
    is then untouched and no temporary is left (where only the folder cannot be synced, the new one is there,
    and may be the old one again after a power failure).
    """
    data = encode(model, known, counts)
    target = Path(os.path.realpath(path))
    try:
        with _temporary(target) as (fd, temporary):
            _write(fd, data)
            os.fsync(fd)
            os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        failed = HistogramError(f"histogram {path}: not saved: {error.strerror} (errno {error.errno})")
        failed.os_error = error.errno or 0
        raise failed from error


def encode(model: bytes, known: Pairs, counts: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """The file's bytes."""
    if len(model) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(model)}")
    pairs, values = np.asarray(known, np.int64).reshape(-1, 2), _saturated(counts)
    if len(pairs) != len(values):
        raise ValueError(f"{len(values)} counts for {len(pairs)} experts")
    inside = _inside(pairs)
    grid = np.zeros(CELLS, "<u4")
    grid[pairs[inside] @ (LAYER_EXPERTS, 1)] = values[inside]
    entries = np.zeros(np.count_nonzero(~inside), _ENTRY)
    entries["layer"], entries["expert"] = pairs[~inside].T
    entries["count"] = values[~inside]
    head = _HEADER.pack(MAGIC, VERSION, CELLS) + grid.tobytes()
    trailer = _TRAILER.pack(_TRAILER_MAGIC, _TRAILER_VERSION, len(pairs), model, len(entries))
    data = head + trailer + entries.tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def _saturated(counts: Sequence[int] | npt.NDArray[np.integer]) -> Counts:
    if isinstance(counts, np.ndarray):
        return np.asarray(np.clip(counts, 0, COUNT_MAX), np.uint32)
    return np.fromiter((min(max(int(n), 0), COUNT_MAX) for n in counts), np.uint32)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[int, Path]]:
    """The empty temporary of `target`, locked; it is gone at the end, renamed or removed."""
    path = target.with_name(f".{target.name}.tmp")
    fd = _lock(path)
    try:
        os.ftruncate(fd, 0)  # what a killed save left
        yield fd, path
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def _lock(path: Path) -> int:
    """A descriptor of the file at `path`, made if need be, and locked while it has that name."""
    for _ in range(_LOCK_TRIES):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EEXIST, f"{path} is in the way")
            # Without locks a second writer's mixture is found by its checksum.
            if lock_file(fd) and _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(_LOCK_PAUSE_S)
    raise OSError(errno.EAGAIN, f"another process is saving it ({path} is locked)")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
