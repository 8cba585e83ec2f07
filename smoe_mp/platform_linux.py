"""Linux's side of platform.py."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
from pathlib import Path

assert sys.platform != "darwin"

SOCKET_PATH_MAX = 107  # bytes in sockaddr_un.sun_path, less the NUL
MAXRSS_UNIT = 1024  # bytes, of getrusage's ru_maxrss
SEGMENTS_HAVE_GROUPS = True
O_DIRECT = os.O_DIRECT


class ExitWatch:
    """Waits for the end of a process that need not be a child; made while it surely lives.

    `fd` can be read from that end on, so a loop may wait for it too.
    """

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if there is no such process (or in another pid namespace)."""
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within `timeout_s` seconds."""
        poller = select.poll()  # unlike select, it takes a descriptor of any number
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        os.close(self.fd)


def ended_child() -> int:
    """The pid of a child that has ended and that nobody has reaped; 0: there is none."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended.si_pid if ended is not None else 0
    return 0


def peer_pid(connected: socket.socket) -> int:
    """The process at the other end of a Unix socket, 0 where it cannot be seen from here.  Raises OSError."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[0])


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def open_to_read(path: Path, *, direct: bool) -> int:
    """A descriptor; direct: whose reads go past the page cache, of whole pages into whole pages.  Raises
    OSError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Forget a file's pages that were read or written through the cache; nbytes 0: to its end."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


# --- shared memory ------------------------------------------------------------------------------------------


def segment_space(fd: int) -> int | None:
    """Free bytes where the segment lies; None: no limit that one could ask for."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # a tmpfs of size=0 has no limit


def set_segment_access(fd: int, gid: int | None, mode: int) -> None:
    """Give the segment to the group `gid` (None: leave its group), and this mode whatever the umask.  Raises
    OSError."""
    if gid is not None:
        os.fchown(fd, -1, gid)
    os.fchmod(fd, mode)
