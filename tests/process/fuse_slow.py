"""A FUSE file system of one file, in plain Python: `fuse_slow.py FD BEHIND`.

FD is an open /dev/fuse that is mounted already; the file `file` in it shows the bytes of BEHIND.  It does
the least that a reader needs (kernel protocol 7.x: lookup, getattr, open, read); attributes are valid for
an hour, so only reads of data that is not cached ask this process.  Stop it, and they hang.  Like most such
servers it has no FLUSH: one that had would, stopped, also hold up the end of a process that closes the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS = 1, 2, 3, 14, 15, 17
RELEASE, INIT, OPENDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 18, 26, 27, 29, 36, 42
ROOT, FILE = 1, 2
VALID_S = 3600
MAX_WRITE = 1 << 17
KEEP_CACHE = 2


def attributes(node: int, behind: os.stat_result) -> bytes:
    """struct fuse_attr: ino, size, blocks, three times, their nanoseconds, mode, nlink, uid, gid, ..."""
    size = behind.st_size if node == FILE else 0
    mode = stat.S_IFREG | 0o444 if node == FILE else stat.S_IFDIR | 0o755
    s, ns = divmod(behind.st_mtime_ns, 10**9)
    head = struct.pack("<QQQQQQIII", node, size, -(-size // 512), s, s, s, ns, ns, ns)
    return head + struct.pack("<IIIIIII", mode, 1, 0, 0, 0, 4096, 0)


def answer(op: int, node: int, body: bytes, fd: int) -> bytes | int | None:
    """The answer's body, an errno, or None: no answer is wanted."""
    behind = os.fstat(fd)
    match op:
        case _ if op == INIT:
            major, minor, readahead = struct.unpack_from("<III", body)
            out = struct.pack("<IIIIHHIIHH", 7, min(minor, 31), readahead, 0, 12, 10, MAX_WRITE, 1, 32, 0)
            return out.ljust(64, b"\0") if major == 7 else errno.EPROTO
        case _ if op == LOOKUP:
            if node != ROOT or body.rstrip(b"\0") != b"file":
                return errno.ENOENT
            return struct.pack("<QQQQII", FILE, 0, VALID_S, VALID_S, 0, 0) + attributes(FILE, behind)
        case _ if op == GETATTR:
            return struct.pack("<QII", VALID_S, 0, 0) + attributes(node, behind)
        case _ if op in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, KEEP_CACHE, 0)
        case _ if op == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(fd, size, offset)
        case _ if op == STATFS:
            return struct.pack("<QQQQQIIII", 0, 0, 0, 0, 0, 4096, 255, 4096, 0).ljust(80, b"\0")
        case _ if op in (RELEASE, RELEASEDIR):
            return b""
        case _ if op in (FORGET, BATCH_FORGET, INTERRUPT):
            return None
    return errno.ENOSYS


def serve(device: int, fd: int) -> None:
    while True:
        try:
            request = os.read(device, MAX_WRITE + 8192)
        except OSError as e:
            if e.errno in (errno.EINTR, errno.ENOENT):
                continue
            return  # ENODEV: unmounted
        length, op, unique, node = struct.unpack_from("<IIQQ", request)
        said = answer(op, node, request[40:length], fd)
        if said is None:
            continue
        body, error = (b"", -said) if isinstance(said, int) else (said, 0)
        with contextlib.suppress(OSError):  # ENOENT: whoever asked is gone
            os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    serve(int(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY))
