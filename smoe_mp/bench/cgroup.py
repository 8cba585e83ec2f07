"""Memory cgroups of one's own, version 1 or 2: a limit that holds for a process and all its children.

    with memory_group(1 << 30) as group:
        subprocess.run(group.inside(command))
        group.peak_bytes(), group.kills()

A process enters before its program starts, so that all it uses is counted, page cache too.  Where a group
may be made depends on the system: the places are tried one after the other, and it needs root.  The limit
is one on memory and swap together, so nothing goes out to a swap device.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smoe_mp.errors import SmoeError

EMPTY_S = 60.0  # for the last of its processes to be reaped
_ENTER = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of one version are called.  `swap`: that of the limit on swap, and what is written there
    (None: the limit on both, which is the same number again)."""

    limit: str
    swap: str
    swap_value: str | None
    peak: str
    events: str
    anonymous: str


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    None,
    "memory.max_usage_in_bytes",
    "memory.oom_control",
    "rss",
)
_V2 = _Files("memory.max", "memory.swap.max", "0", "memory.peak", "memory.events", "anon")


class MemoryGroup:
    """A cgroup with a memory limit, in the folder `path`."""

    def __init__(self, path: Path, files: _Files, limit_bytes: int) -> None:
        self.path, self._files, self.limit_bytes = path, files, limit_bytes

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in this group."""
        return ["sh", "-c", _ENTER, "sh", str(self.path), *command]

    def peak_bytes(self) -> int | None:
        """The most that was used at once, page cache included; None where the kernel does not say."""
        try:
            return int((self.path / self._files.peak).read_text())
        except (OSError, ValueError):
            return None

    def held_bytes(self) -> int:
        """What is used now and cannot be dropped: anonymous and shared memory."""
        text = (self.path / "memory.stat").read_text()
        return sum(_value(text, key) for key in (self._files.anonymous, "shmem"))

    def kills(self) -> int:
        """How many processes the kernel killed because the limit was reached."""
        return _value((self.path / self._files.events).read_text(), "oom_kill")

    def end(self) -> None:
        """Kill what still runs in it, and remove it.  SmoeError where that does not come to an end."""
        deadline = time.monotonic() + EMPTY_S
        while not self._removed():
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SmoeError(f"{self.path}: rmdir: still in use after {EMPTY_S:.0f} s")
            time.sleep(0.01)

    def wait_empty(self, limit_s: float) -> bool:
        """Wait until no process is left in it; False where one still is after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while (self.path / "cgroup.procs").read_text():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _removed(self) -> bool:
        try:
            self.path.rmdir()
        except OSError:  # EBUSY as long as its last process is being reaped
            return False
        return True


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new group with this limit, for the time of the block.  SmoeError, with each place that was tried,
    where none can be made."""
    tried = []
    for home, files in _homes():
        path = home / f"smoe-mp-{os.getpid()}-{next(_numbers)}"
        try:
            path.mkdir()
        except OSError as error:
            tried.append(f"{home}: {error.strerror}")
            continue
        group = MemoryGroup(path, files, limit_bytes)
        try:
            (path / files.limit).write_text(str(limit_bytes))
            if (path / files.swap).exists():
                (path / files.swap).write_text(files.swap_value or str(limit_bytes))
        except OSError as error:
            path.rmdir()
            tried.append(f"{path / files.limit}: {error.strerror}")
            continue
        try:
            yield group
        finally:
            group.end()
        return
    raise SmoeError(
        f"no memory cgroup, version 1 or 2, can be made here: {'; '.join(tried) or 'none is mounted'}"
    )


def _homes() -> Iterator[tuple[Path, _Files]]:
    """Folders where a memory cgroup may be made."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for line in mounts:
        left, _, right = line.partition(" - ")
        point, kind = Path(left.split(" ")[4]), right.split(" ")
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield point / own.get("memory", "/").lstrip("/"), _V1
            yield point, _V1
        elif kind[0] == "cgroup2":
            yield point, _V2  # one with processes in it hands no controller down, save the root


def _value(text: str, key: str) -> int:
    """The number behind `key` at the start of a line; 0 where there is none."""
    found = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
