"""What a service manager is told: ready, stopping, a line of status, and that the loop still turns.

The protocol is systemd's (sd_notify): a datagram of KEY=VALUE lines to the socket that NOTIFY_SOCKET names,
by its path or, with "@" before it, by an abstract address.  Where the variable is missing nothing is sent.
The variables are taken out of the environment: a child of this process is not the service.

A manager that does not listen, or whose buffer is full, must not hold the system up: a message that is not
taken within a second is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from smoe_mp.runtime import printable

SEND_S = 1.0


class Notify:
    """`address` of the manager's socket, "" for none; `watchdog_s`: it wants to hear of us that often, in
    seconds, 0: not.  `clock` returns seconds."""

    def __init__(
        self, address: str = "", watchdog_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = watchdog_s / 2  # as sd_watchdog_enabled(3) asks for
        self._clock, self._due = clock, 0.0

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Notify:
        """By NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, which are removed."""
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = usec.isascii() and usec.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if watched else 0.0)

    def ready(self, status: str) -> None:
        """The start is over."""
        self._send("READY=1", f"STATUS={printable(status)}")

    def status(self, text: str) -> None:
        """A line for people."""
        self._send(f"STATUS={printable(text)}")

    def stopping(self, why: str) -> None:
        """The stop begins; the watchdog rests from now on."""
        self._send("STOPPING=1", f"STATUS=stopping: {printable(why)}")

    def ping(self) -> float:
        """Tell the watchdog that all is well, when it is time to; seconds until it will be."""
        if not (self._address and self._every_s):
            return float("inf")
        now = self._clock()
        if now >= self._due:
            self._due = now + self._every_s
            self._send("WATCHDOG=1")
        return self._due - now

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.settimeout(SEND_S)
            out.sendto("\n".join(lines).encode(), self._address)
