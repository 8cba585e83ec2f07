"""The run-time folder: where control sockets lie, and who may reach them.

The folder is the lock on the door: 0700 and ours, or it is refused.  It is the first of
    $SMOE_RUNTIME_DIR,  $XDG_RUNTIME_DIR/smoe-mp,  /tmp/smoe-mp-UID
so that a client finds the socket with no more than the ring's name.  A socket's file name is a short hash
of the ring's name, since a socket's path may have at most 107 bytes (103 on macOS).

Beside it, two trifles that the supervisor and the command line share: the version, and sizes for people.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

from smoe_mp.errors import ConfigError

SOCKET_PATH_MAX = 103 if sys.platform == "darwin" else 107  # bytes in sockaddr_un.sun_path, less the NUL


@functools.cache
def version() -> str:
    """The version of the installed package, "unknown" where it is not installed."""
    metadata: Any = importlib.import_module("importlib.metadata")  # which takes long, and few ask
    try:
        return str(metadata.version("smoe-mp"))
    except metadata.PackageNotFoundError:
        return "unknown"


def runtime_folder() -> Path:
    """The path of the run-time folder; it need not exist."""
    own = os.environ.get("SMOE_RUNTIME_DIR")
    if own:
        return Path(own).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session, "smoe-mp") if session else Path(f"/tmp/smoe-mp-{os.getuid()}")


def make_runtime_folder() -> Path:
    """Create the run-time folder if it is not there, and check it.

    Raises ConfigError if it cannot be made, is not ours, or is open to others.
    """
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run-time folder {folder}: {error.strerror};"
            " set SMOE_RUNTIME_DIR to a folder of yours"
        ) from error
    check_runtime_folder(folder)
    return folder


def check_runtime_folder(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a folder, not a link, is ours, and is closed to others."""
    try:
        found = folder.lstat()  # a link in /tmp could be anybody's
    except OSError as error:
        raise ConfigError(f"run-time folder {folder}: lstat: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"run-time folder {folder} is no folder; set SMOE_RUNTIME_DIR to a folder of yours")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"run-time folder {folder} belongs to uid {found.st_uid}, not to uid {os.geteuid()};"
            " set SMOE_RUNTIME_DIR to a folder of yours"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(f"run-time folder {folder} has mode {mode:04o}, open to others; chmod 0700 it")


def socket_path(name: str) -> Path:
    """The control socket of the ring `name`.

    Raises ConfigError if the folder is so deep that the path does not fit a socket address.
    """
    path = runtime_folder() / (hashlib.blake2b(name.encode(), digest_size=8).hexdigest() + ".ctl")
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_MAX:
        raise ConfigError(
            f"control socket {path}: {size} bytes, a socket's path may have {SOCKET_PATH_MAX};"
            " set SMOE_RUNTIME_DIR to a shorter folder"
        )
    return path


def is_served(path: Path) -> bool:
    """Whether some process listens on the socket at `path`; a socket file alone proves nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # a full backlog: it listens
            return True
        except OSError:
            return False
    return True


def human_bytes(count: float) -> str:
    """`count` bytes for people, in binary units: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
