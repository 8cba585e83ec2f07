"""What the Python programs have in common that the supervisor keeps alive: prewarm and metrics.

    python -m smoe_mp.PROGRAM --name NAME --creation HEX [its own] [--watch-fd N] [--ready-fd N]

They end with their supervisor: its end of the pipe `--watch-fd` closes when it dies, however it dies.  Ctrl-C
is for the supervisor alone, which ends them in order, by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from smoe_mp._native import check, ffi, lib, new_error
from smoe_mp.errors import SmoeError


def parser(program: str) -> argparse.ArgumentParser:
    """The arguments that all have."""
    made = argparse.ArgumentParser(prog=program)
    made.add_argument("--name", required=True)
    made.add_argument("--creation", default="")
    made.add_argument("--watch-fd", type=int, default=-1)
    made.add_argument("--ready-fd", type=int, default=-1)
    return made


def follow_supervisor(watch_fd: int) -> None:
    """End with the supervisor, and not by what a terminal sends to all."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if watch_fd >= 0:
        threading.Thread(target=_watch, args=(watch_fd,), daemon=True).start()


def _watch(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(fd, 1)
    os._exit(3)


def attach(name: str, creation: str, role: int, label: str) -> tuple[Any, Any]:
    """The ring and its smoe_info.  SmoeError where it is not there, or another than that of `creation`."""
    out, error, info = ffi.new("smoe_ring **"), new_error(), ffi.new("smoe_info *")
    check(lib.smoe_attach(name.encode(), role, 0, label.encode(), out, error), error, name)
    lib.smoe_get_info(out[0], info)
    if creation and creation != f"{info.creation[0]:016x}{info.creation[1]:016x}":
        raise SmoeError(f"ring {name}: was replaced")
    return out[0], info


def on_term(stop: Callable[[], None]) -> None:
    """Have `stop` called at SIGTERM."""

    def handler(number: int, frame: Any) -> None:
        stop()

    signal.signal(signal.SIGTERM, handler)


def say_ready(ready_fd: int) -> None:
    if ready_fd >= 0:
        os.write(ready_fd, b"r")
        os.close(ready_fd)
