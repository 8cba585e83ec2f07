"""Where metrics are served: a listening socket that only this machine reaches.

The supervisor opens it before anything else, and its child inherits it.  So an address that cannot be had is
an error of the start, and while a child that died is started again, who asks waits and is not refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from smoe_mp.errors import ConfigError
from smoe_mp.platform import system
from smoe_mp.runtime import is_served

#: What `metrics.listen` may be; there is no address that other machines reach.
PATTERN = r"^((127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\]|localhost):\d{1,5}|unix:/.+)?$"

RETRY_S = 3.0  # in which the child of a supervisor that died ends, and lets go of the address
BACKLOG = 64


class Listener:
    """A socket that listens at `address` (as `PATTERN` has it, not empty).  ConfigError where it cannot."""

    def __init__(self, address: str) -> None:
        self._address, self._inode = address, 0
        self._path: Path | None = None
        if address.startswith("unix:"):
            self._path = Path(address.removeprefix("unix:"))
            self._socket = self._retried(self._open_unix)
            self._inode = self._path.lstat().st_ino
            self.url = address
        else:
            self._socket = self._retried(self._open_tcp)
            host, port = self._socket.getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more; the path goes, if it is this socket's still."""
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()

    def _retried(self, attempt: Callable[[], socket.socket]) -> socket.socket:
        deadline = time.monotonic() + RETRY_S
        while True:
            try:
                return attempt()
            except (OSError, OverflowError) as error:
                taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                if not taken or time.monotonic() >= deadline:
                    raise ConfigError(f"{self._what}: {_reason(error)}") from error
            time.sleep(0.05)

    @property
    def _what(self) -> str:
        return f'metrics.listen = "{self._address}"'

    def _open_tcp(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=BACKLOG)

    def _open_unix(self) -> socket.socket:
        assert self._path is not None
        if (size := len(os.fsencode(self._path))) > system.SOCKET_PATH_MAX:
            raise ConfigError(
                f"{self._what}: {size} bytes, and a socket's path may have {system.SOCKET_PATH_MAX}"
            )
        self._remove_stale(self._path)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(str(self._path))
            self._path.chmod(0o600)  # before it listens, so that nobody else is ever let in
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        return made

    def _remove_stale(self, path: Path) -> None:
        """What a supervisor that was killed left; nothing else."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"{self._what}: there is something at that path, and it is no socket")
            if is_served(path):
                raise OSError(errno.EADDRINUSE, "another process listens there")
            path.unlink()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "another process listens there: choose another address, or stop that one"
    if isinstance(error, OverflowError):
        return "a port is at most 65535"
    return f"cannot listen there: {error.strerror if isinstance(error, OSError) else error}"
