"""Binding a socket in the run-time folder, closed to strangers from its first moment."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from smoe_mp.errors import ControlError


def bind(socket: zmq.Socket[bytes], path: Path, gid: int | None, what: str) -> None:
    """Bind `socket` at `path`, for this user alone or for the group `gid` too.

    Raises ControlError, with `what` the socket is.
    """
    mask = os.umask(0o177)  # nobody gets in between bind and chmod
    try:
        socket.bind(f"ipc://{path}")
        if gid is not None:
            os.chown(path, -1, gid)
        os.chmod(path, 0o600 if gid is None else 0o660)
    except (zmq.ZMQError, OSError) as error:
        raise ControlError(f"{what} {path}: bind: {error.strerror}") from error
    finally:
        os.umask(mask)
