"""Whether the source's files are still those that the ring was made for.

Facts first.  A worker holds each file open and compares what it holds (device, inode, size, mtime) before
every publication, so bytes of a file that was written into or cut are never served.  It cannot see that the
name leads to another file by now: `mv` and a re-download leave the old one intact under its descriptor, and a
worker that starts later gets the new one.  And where all is resident nothing is read, so nobody looks.  Hence
a slow timer: each file is looked up by its path anew, links followed, every `vault.check_s` seconds, and at
once when a read has failed.  The first look also opens the source as at the start and compares the digests of
the headers, for a change that leaves size and times as they were.

    the file differs in any of device, inode, size, mtime, header   changed: the ring serves nothing any more
    it cannot be looked up: deleted, its link dangles, its mount is away, a look hangs
                                                                     away: said once; going on

Away is no change: workers have the file open, and what is resident is right.  Changed is for good: of a file
that is back as it was nobody knows what it was meanwhile, so it takes a new start to serve it again.

A look may hang with its file system, and the supervisor may not: it is done in a thread, one at a time.
Where no thread is to be had for the moment, the next look is the next one that is due.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from smoe_mp.errors import VaultError
from smoe_mp.sources import Source, open_source
from smoe_mp.sources.base import SourceFile

HANG_S = 10.0  # a look that takes longer is said to hang


@dataclass(frozen=True, slots=True)
class Change:
    """File number `file` of the source is another: `what` of "inode", "size", "mtime", "header"; `text` for
    people."""

    file: int
    what: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a look found: changes, and by file number why a file could not be looked up."""

    changes: list[Change] = field(default_factory=list)
    away: dict[int, str] = field(default_factory=dict)


def look(source: Source, headers: bool) -> Report:
    """Compare every file with what `source` says of it; `headers`: the digests as well."""
    report = Report()
    for number, file in enumerate(source.files):
        try:
            change = _compare(number, file, os.stat(file.path))
        except OSError as error:
            report.away[number] = f"{file.path}: stat: {error.strerror}"
            continue
        if change is not None:
            report.changes.append(change)
    if headers and not report.changes and not report.away:
        report.changes.extend(_compare_headers(source))
    return report


def _compare(number: int, file: SourceFile, now: os.stat_result) -> Change | None:
    pairs: dict[str, tuple[int | tuple[int, int], int | tuple[int, int]]] = {
        "inode": ((file.dev, file.ino), (now.st_dev, now.st_ino)),
        "size": (file.size, now.st_size),
        "mtime": (file.mtime_ns, now.st_mtime_ns),
    }
    differ = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
    if not differ:
        return None
    figures = ", ".join(f"{what} {_figure(then)}, now {_figure(is_)}" for what, (then, is_) in differ.items())
    how = "replaced by another file" if "inode" in differ else "overwritten or changed in place"
    return Change(number, tuple(differ), f"{file.path} was {how} while it was served: {figures}")


def _figure(value: int | tuple[int, int]) -> str:
    return "{}:{}".format(*value) if isinstance(value, tuple) else str(value)


def _compare_headers(source: Source) -> list[Change]:
    """Open the source as at the start."""
    try:
        again = open_source(source.path)
    except VaultError as error:
        if isinstance(error.__cause__, OSError):
            return []  # away for the moment; the next look says so
        return [Change(0, ("header",), f"{error}: it was changed in place while it was served")]
    then, now = list(source.files), list(again.files)
    if [file.path for file in then] != [file.path for file in now]:
        return [Change(0, ("header",), f"{source.path} is of other files now: {len(now)}, then {len(then)}")]
    return [
        Change(
            number,
            ("header",),
            f"{a.path} was changed in place while it was served: header {a.digest.hex()}, now"
            f" {b.digest.hex()}",
        )
        for number, (a, b) in enumerate(zip(then, now, strict=True))
        if a.digest != b.digest
    ]


class Watch:
    """Looks at a source's files every `every_s` seconds.  `poll` never waits."""

    def __init__(self, source: Source, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._every_s, self._clock = source, every_s, clock
        self._due = clock() + every_s
        self._headers_seen = False
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._report: Report | None = None

    @property
    def hangs(self) -> bool:
        """Whether a look under way takes too long."""
        return self._thread is not None and self._clock() - self._began > HANG_S

    def poll(self, hurry: bool = False) -> Report | None:
        """What the last look found, once it has ended; begins the next one when it is due, or at once where
        there is reason to `hurry`."""
        if hurry:
            self._due = min(self._due, self._clock())
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread = None
            report, self._report = self._report, None
            return report
        if self._clock() >= self._due:
            self._began = self._clock()
            self._due = self._began + self._every_s
            thread = threading.Thread(target=self._look, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had
                thread.start()
                self._thread = thread
        return None

    def _look(self) -> None:
        headers = not self._headers_seen
        report = look(self._source, headers)
        self._headers_seen = self._headers_seen or not report.away
        self._report = report
