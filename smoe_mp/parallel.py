"""One piece of work many times, on all cores, and one place to see how far it is.

Threads, not processes: what takes the time (reads, writes, checksums, quantisation) lets go of the
interpreter's lock, and a thread needs no copy of anything and dies with its process.  Items are handed out
one at a time and in order, so no more are in memory than there are threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from smoe_mp.platform import system

T = TypeVar("T")

__all__ = ["byte_bar", "cores", "run_all"]

cores = system.cores


def run_all(count: int, work: Callable[[int], T], done: Callable[[T], object], threads: int) -> None:
    """Call `work(i)` for i = 0 .. count - 1 in `threads` threads, and `done` with each result, in this one.

    The first error, of either or from outside as Ctrl-C is, lets what is under way end, starts nothing more
    and is raised.
    """
    indices = iter(range(count))
    lock, stop = threading.Lock(), threading.Event()
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def serve() -> None:
        while not stop.is_set():
            with lock:
                index = next(indices, None)
            if index is None:
                return
            try:
                results.put((work(index), None))
            except BaseException as error:
                results.put((None, error))
                return

    pool = [threading.Thread(target=serve, daemon=True) for _ in range(max(1, min(threads, count)))]
    try:
        for thread in pool:
            thread.start()
        for _ in range(count):
            result, error = results.get()
            if error is not None:
                raise error
            done(result)  # type: ignore[arg-type]  # T may be None itself
    finally:
        stop.set()
        for thread in pool:
            if thread.ident is not None:
                thread.join()


@contextmanager
def byte_bar(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal, with bytes, rate and time left; yields what moves it on."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as p:
        task = p.add_task(what, total=total)
        yield lambda n: p.advance(task, n)
