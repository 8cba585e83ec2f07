"""The side of platform.py for macOS 14.4 and later.

Facts about the world that the choices here rest on:
 - kqueue tells of the end of any process that one may signal (EVFILT_PROC, NOTE_EXIT).  A process that has
   ended, reaped or not, cannot be registered: ESRCH.  A queue's descriptor can be polled like others.
 - getsockopt(SOL_LOCAL, LOCAL_PEERPID) says who is at the other end of a Unix socket.
 - POSIX shared memory is in no file system: fchmod, fchown and fstatvfs refuse its descriptors (EINVAL), and
   its mode is that of shm_open, less the umask, for ever.  Names have at most 31 bytes, the slash included.
 - There is neither O_DIRECT nor posix_fadvise; F_NOCACHE on a descriptor asks for uncached reads.
 - There are no pid namespaces, so nobody here is pid 1 and inherits orphans.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
from pathlib import Path
from typing import Any

SOCKET_PATH_MAX = 103  # bytes in sockaddr_un.sun_path, less the NUL
MAXRSS_UNIT = 1  # bytes, of getrusage's ru_maxrss
SEGMENTS_HAVE_GROUPS = False
O_DIRECT = 0

# What only a Mac has of them is not known to a type checker elsewhere.
_select: Any = select
_fcntl: Any = fcntl

_SOL_LOCAL = 0  # <sys/un.h>
_LOCAL_PEERPID = 2


class ExitWatch:
    """As on Linux."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._queue = _select.kqueue()
        event = _select.kevent(pid, _select.KQ_FILTER_PROC, _select.KQ_EV_ADD, _select.KQ_NOTE_EXIT)
        try:
            self._queue.control([event], 0)
        except BaseException:
            self._queue.close()
            raise
        self.fd = self._queue.fileno()

    def wait(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        self._queue.close()


def ended_child() -> int:
    return 0


def peer_pid(connected: socket.socket) -> int:
    return connected.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)


def cores() -> int:
    return os.cpu_count() or 1


def open_to_read(path: Path, *, direct: bool) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if direct:
        try:
            _fcntl.fcntl(fd, _fcntl.F_NOCACHE, 1)
        except BaseException:
            os.close(fd)
            raise
    return fd


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    pass


def segment_space(fd: int) -> int | None:
    return None


def set_segment_access(fd: int, gid: int | None, mode: int) -> None:
    pass
