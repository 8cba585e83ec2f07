"""Reading a source's experts by a process of its own: for `pack` and `verify`, not for serving.

Each file is opened once, compared with the source's record of it, and compared again at the end: what was
read in between is of the file that was checked, or there is an error.  Reads pass the page cache by where the
file system lets them; elsewhere the pages are dropped behind each read, so that a model of 400 GB read once
does not push out what the machine works with.  Any number of threads may read.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from smoe_mp import segments
from smoe_mp.errors import VaultError
from smoe_mp.platform import system
from smoe_mp.sources.base import Extent, Source, SourceFile

__all__ = ["ReadFault", "SourceReader"]


PAGE = 4096


class ReadFault(VaultError):
    """A range of one file could not be read.  `offset` in the file, bytes."""

    def __init__(self, path: object, offset: int, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.offset = offset


class SourceReader:
    """The files of `source`, open.  A context manager."""

    def __init__(self, source: Source) -> None:
        self._files: Sequence[SourceFile] = source.files
        self._fds: list[int] = []
        self._local = threading.local()
        _allow_files()
        try:
            found = [_mode(file) for file in self._files]
            self.modes = [mode for mode, _ in found]
            self._align = max(align for _, align in found)
            for file, mode in zip(self._files, self.modes, strict=True):
                self._fds.append(_open(file, direct=mode == "direct"))
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """VaultError where a file is not the one that the source was made of."""
        for file, fd in zip(self._files, self._fds, strict=True):
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns) != (
                file.dev, file.ino, file.size, file.mtime_ns,
            ):  # fmt: skip
                raise VaultError(f"{file.path}: the file was replaced or changed while it was being read")

    def read(self, extents: Sequence[Extent]) -> list[memoryview]:
        """The bytes of each extent.  Views into memory of this thread that its next call writes over.

        Raises ReadFault with file, offset and figures where bytes do not come.
        """
        align = self._align
        places, need = [], 0
        for e in extents:
            start = e.offset // align * align
            places.append((need, start))
            need += -(-(e.offset + e.length - start) // align) * align
        buffer = self._buffer(need)
        out = []
        for e, (place, start) in zip(extents, places, strict=True):
            lead = e.offset - start
            self._read_window(e, buffer[place:], start, lead + e.length)
            out.append(buffer[place + lead : place + lead + e.length])
        return out

    def _buffer(self, size: int) -> memoryview:
        """Page-aligned memory of this thread, at least so large."""
        held: memoryview | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))
            self._local.buffer = held
        return held

    def _read_window(self, e: Extent, to: memoryview, start: int, wanted: int) -> None:
        """Read `wanted` bytes at `start`, whole blocks at a time, to `to`."""
        fd, file = self._fds[e.file], self._files[e.file]
        whole = -(-wanted // self._align) * self._align
        done = 0
        while done < wanted:
            begin = done // self._align * self._align
            try:
                got = begin + os.preadv(fd, [to[begin:whole]], start + begin)
            except OSError as error:
                what = f"read of {whole - begin} bytes at {start + begin}"
                raise ReadFault(
                    file.path, e.offset, f"{what}: {error.strerror} (errno {error.errno})"
                ) from error
            if got <= done:
                lead = e.offset - start
                raise ReadFault(
                    file.path,
                    e.offset,
                    f"{e.length} bytes at {e.offset}, but the file ended after {max(done - lead, 0)}",
                )
            done = got
        if self.modes[e.file] not in ("direct", "memory"):
            system.drop_cached(fd, start, whole)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _allow_files() -> None:
    """Raise the limit of open files to what is allowed: a model may have more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS refuses "infinity"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _mode(file: SourceFile) -> tuple[str, int]:
    """How the file is read, and the alignment of that (bytes)."""
    try:
        found = segments.probe(file.path)
    except VaultError:
        # A bad block where it was tried.  That is no reason not to read the rest, and directly: a read
        # through the cache reads ahead, and fails for blocks that are good.
        return ("direct" if _reads_directly(file) else "buffered"), PAGE
    return found.mode, max(PAGE, found.offset_align)


def _reads_directly(file: SourceFile) -> bool:
    """Whether the file's first page can be read past the page cache."""
    if not system.O_DIRECT:
        return False
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | system.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [mmap.mmap(-1, PAGE)], 0) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def _open(file: SourceFile, *, direct: bool) -> int:
    try:
        return system.open_to_read(file.path, direct=direct)
    except OSError as error:
        raise VaultError(f"{file.path}: open: {error.strerror} (errno {error.errno})") from error
