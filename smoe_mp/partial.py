"""A large file that is there whole or not at all.

It is written as `<name>.partial` beside its place, synced, and renamed; whoever fails removes it.  A writer
that is killed leaves its partial file behind, and the next one takes that over and begins anew: what a dead
writer wrote was made of a source that may have changed since, and finding that out costs as much as writing
again.  A lock on the file, which the kernel drops at a death, tells a dead writer's file from a living one's;
a file system without locks cannot, and there two writers at once are the user's to avoid.

Several threads may write at once, each its own bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from smoe_mp.errors import VaultError
from smoe_mp.platform import system

__all__ = ["SPARE_BYTES", "PartialFile", "free_bytes", "lock_file", "partial_of", "sync_folder"]

#: Left free on the file system, besides the file.
SPARE_BYTES = 1 << 20


def free_bytes(folder: Path, going: Iterable[Path] = ()) -> int:
    """What the folder's file system has free for this user, with what the files `going`, which need not be
    there, will give back.  VaultError where it cannot be told."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise VaultError(f"{folder}: statvfs: {error.strerror} (errno {error.errno})") from error
    free = space.f_bavail * space.f_frsize
    for path in going:
        with contextlib.suppress(OSError):  # mostly there is none
            free += os.lstat(path).st_blocks * 512
    return free


def partial_of(path: Path) -> Path:
    """Where the file lies in the making; what a killed writer left there is taken over by the next."""
    return path.with_name(path.name + ".partial")


def lock_file(fd: int) -> bool:
    """Lock the file for as long as it is open; False: another process has it.  On a file system without locks
    it is simply not locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def sync_folder(folder: Path) -> None:
    """Make a rename last; file systems that cannot do that are let be."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder to write in and not to list
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


class PartialFile:
    """The file `path` in the making, of `size` bytes; `what` it is, for messages.

    VaultError, with the figures, where another process is writing it, the space is not there or the file
    system fails.
    """

    def __init__(self, path: Path, size: int, what: str) -> None:
        self.path, self.size, self._what = path, size, what
        self._partial = partial_of(path)
        self._fd = -1
        try:
            self._fd = self._open()
            self._check_space()
        except BaseException:
            self.abort()
            raise

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def write(self, data: memoryview | bytes | bytearray, offset: int) -> None:
        """Write all of `data` at `offset` (bytes)."""
        rest = memoryview(data)
        try:
            while rest:
                done = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[done:], offset + done
        except OSError as error:
            raise VaultError(
                f"{self._partial}: pwrite of {len(rest)} bytes at {offset}: {error.strerror} (errno"
                f" {error.errno})"
            ) from error

    def publish(self, before: Callable[[], None] | None = None) -> None:
        """Sync, drop from the page cache what was written, rename, sync the folder.  `before` is called when
        nothing but the rename is left to do."""
        call = "fsync"
        try:
            os.fsync(self._fd)
            # A vault will be read past the page cache; there it would only push out what others need.
            system.drop_cached(self._fd, 0, 0)
            if before is not None:
                before()
            call = "rename"
            os.rename(self._partial, self.path)
            call = "fsync of the folder"
            sync_folder(self.path.parent)
        except OSError as error:
            raise VaultError(f"{self.path}: {call}: {error.strerror} (errno {error.errno})") from error
        os.close(self._fd)
        self._fd = -1

    def abort(self) -> None:
        """Remove what was written; the file that was in its place stays."""
        if self._fd < 0:
            return
        # The name may be another writer's by now, if it was the last step of publishing that failed.
        if self._partial.exists() and os.path.samestat(os.fstat(self._fd), self._partial.stat()):
            self._partial.unlink()
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        """The partial file, empty and locked by this process."""
        while True:
            fd, call = -1, "open"
            try:
                fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                call = "flock"
                if not lock_file(fd):
                    os.close(fd)
                    raise VaultError(f"{self._partial}: another process is writing this {self._what}")
                # Between the two calls the last writer may have renamed or removed the file that was opened.
                call = "stat"
                if os.path.samestat(os.fstat(fd), os.stat(self._partial)):
                    call = "ftruncate"
                    os.ftruncate(fd, 0)
                    return fd
                os.close(fd)
            except FileNotFoundError as error:
                if fd < 0:
                    raise VaultError(f"{self._partial}: open: the folder does not exist") from error
                os.close(fd)
            except OSError as error:
                if fd >= 0:
                    os.close(fd)
                raise VaultError(
                    f"{self._partial}: {call}: {error.strerror} (errno {error.errno})"
                ) from error

    def _check_space(self) -> None:
        space = os.fstatvfs(self._fd)
        free = space.f_bavail * space.f_frsize
        if free < self.size + SPARE_BYTES:
            raise VaultError(
                f"{self.path}: the {self._what} needs {self.size} bytes, its file system has {free} free:"
                f" {self.size + SPARE_BYTES - free} bytes too few, with {SPARE_BYTES} to spare"
            )
