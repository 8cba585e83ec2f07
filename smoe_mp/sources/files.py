"""Opening a model file and reading from it by numbers that stand in it.

What is said to be a model file may be a folder, a pipe, a pointer that Git LFS left in the place of the file,
or a link to a cache entry that is gone.  Each is refused here by its name, once for all formats, and so is
every read that the file's size does not cover: before memory is taken for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import SourceFile

__all__ = ["LFS_POINTER", "InputFile", "open_input", "open_readable"]

LFS_POINTER = b"version https://git-lfs"


def open_readable(path: Path) -> int:
    """A descriptor of `path`, symbolic links followed.  VaultError names what is in the way."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the name
        raise VaultError(f"{str(path)!r}: not a file name: {error}") from error
    except FileNotFoundError as error:
        if path.is_symlink():
            target = os.readlink(path)
            raise VaultError(f"{path}: a symbolic link to {target}, where there is no file") from error
        raise VaultError(f"{path}: open: no such file") from error
    except PermissionError as error:
        raise VaultError(
            f"{path}: open: permission denied for uid {os.geteuid()}; it must be readable by the user who"
            " starts the system"
        ) from error
    except OSError as error:
        raise VaultError(f"{path}: open: {error.strerror} (errno {error.errno})") from error


class InputFile:
    """A file that is open for the time of its checks: `size` in bytes, as it was when it was opened."""

    def __init__(self, path: Path, fd: int, kind: str) -> None:
        self.path = path
        self._fd = fd
        self._kind = kind
        self._status = os.fstat(fd)
        self.size = self._status.st_size
        self._check()

    def refuse(self, what: str) -> VaultError:
        """The error that says `what` of this file."""
        return VaultError(f"{self.path}: {what}")

    def _check(self) -> None:
        mode = self._status.st_mode
        if stat.S_ISDIR(mode):
            raise self.refuse(f"a folder, not {self._kind}")
        if not stat.S_ISREG(mode):
            raise self.refuse("not a regular file (a device, a pipe or a socket)")
        if self.size == 0:
            raise self.refuse("the file is empty (0 bytes)")
        if self.read(0, min(self.size, 64), "the first bytes").startswith(LFS_POINTER):
            raise self.refuse(
                f"a Git LFS pointer of {self.size} bytes, not the file itself; fetch it with `git lfs pull`"
            )

    def read(self, offset: int, length: int, what: str) -> bytearray:
        """`length` bytes at `offset`; VaultError where the file does not have them all."""
        if offset > self.size or length > self.size - offset:
            missing = offset + length - self.size
            raise self.refuse(
                f"{what}: {length} bytes at {offset}, but the file has {self.size}: {missing} bytes are"
                " missing"
            )
        out = bytearray(length)
        view = memoryview(out)
        done = 0
        while done < length:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise self.refuse(
                    f"{what}: read of {length - done} bytes at {offset + done}: {error.strerror} (errno"
                    f" {error.errno})"
                ) from error
            if got == 0:
                raise self.refuse(f"{what}: {length} bytes at {offset}, but the file ended after {done}")
            done += got
        return out

    def identity(self, digest: bytes) -> SourceFile:
        """What the file is known by from here on.  VaultError if it changed since it was opened."""
        before, after = self._status, os.fstat(self._fd)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise self.refuse("the file was changed while it was being opened")
        return SourceFile(
            path=self.path.absolute(),
            dev=before.st_dev,
            ino=before.st_ino,
            size=before.st_size,
            mtime_ns=before.st_mtime_ns,
            digest=digest,
        )


@contextmanager
def open_input(path: Path, kind: str) -> Iterator[InputFile]:
    """`path` open for checking.  `kind` completes "a folder, not ..." for people ("a GGUF file")."""
    fd = open_readable(path)
    try:
        yield InputFile(path, fd, kind)
    finally:
        os.close(fd)
