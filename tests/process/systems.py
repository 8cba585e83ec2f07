"""Running systems for tests: starting them, asking them, killing them, and looking for what they leave
behind."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import posix_ipc
from support import LIMIT_S, SHARED, stop, until

from smoe_mp import cli, runtime
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Command, Status, StatusResult
from smoe_mp.process import ExitWatch
from smoe_mp.quant import packed_sizes
from smoe_mp.sources import open_source
from smoe_mp.vault_writer import VaultWriter

VAULT = SHARED / "vaults/qwen3-tiny.q4.smoe"


def smoe_mp_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `smoe-mp ARGUMENTS` to its end in a process of its own."""
    command = [sys.executable, "-m", "smoe_mp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def smoe_mp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `smoe-mp ARGUMENTS` to its end: in this process, which is many times faster, unless it takes over
    signals.  Main thread only."""
    words = [str(argument) for argument in arguments]
    if words[0] in ("up", "demo"):
        return smoe_mp_process(*words)
    out, errors, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["smoe-mp", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            cli.main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())


def segments_of(name: str) -> list[str]:
    """The shared-memory segments of the ring `name` that exist."""
    found = []
    for segment in (f"/smoe.{name}", f"/smoe.{name}.d"):
        try:
            posix_ipc.SharedMemory(segment).close_fd()
        except posix_ipc.ExistentialError:
            continue
        found.append(segment)
    return found


def ask(name: str, command: Command[Any]) -> Any:
    """The answer of the system that serves the ring `name`."""
    with ControlClient(name, timeout_ms=LIMIT_S * 1000) as control:
        return control.call(command)


def status_of(name: str) -> StatusResult:
    result: StatusResult = ask(name, Status())
    return result


# --- vaults ------------------------------------------------------------------------------------------------


def make_vault(path: Path, *, layers: int = 1, experts: int = 8, side: int = 64) -> Path:
    """A vault of `layers` x `experts` experts of three `side` x `side` tensors, each stamped."""
    pairs = list(itertools.product(range(layers), range(experts)))
    shapes = dict.fromkeys(("gate", "up", "down"), (side, side))
    codes, scales = packed_sizes(side * side, 4)
    with VaultWriter(path, pairs, bits=4, shapes=shapes, d_model=side, vocab_size=64, ffn_dim=side) as writer:
        for index, (layer, expert) in enumerate(pairs):
            stamp = np.arange(codes, dtype=np.uint32) * 7 + index * 31
            packed = stamp.astype(np.uint8), np.full(scales // 2, index + 1, np.float16)
            writer.add_packed(layer, expert, packed, packed, packed)
    return path


def bytes_of(vault: Path) -> dict[tuple[int, int], bytes]:
    """(layer, expert) to its bytes as they are in the file."""
    source, raw = open_source(vault), vault.read_bytes()
    return {(x.layer, x.expert): b"".join(raw[e.offset : e.offset + e.length] for e in x.extents)
            for x in source.experts}  # fmt: skip


# --- processes ---------------------------------------------------------------------------------------------


def pids_of(name: str) -> list[int]:
    """Workers and prewarm processes of the ring `name` that live."""
    return [int(line.split(":")[0]) for line in processes_of(name)]


def watched(pids: Iterable[int]) -> list[ExitWatch]:
    """Watches on those of the processes that live still."""
    watches = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            watches.append(ExitWatch(pid))
    return watches


def wait_ended(watches: Iterable[ExitWatch]) -> None:
    """Wait for the end of all."""
    for watch in watches:
        assert watch.wait(LIMIT_S), f"pid {watch.pid} never ends"
        watch.close()


def kill_and_wait(*pids: int) -> None:
    """SIGKILL, and wait for the end, also of those that are not ours."""
    watches = watched(pids)
    for watch in watches:
        with contextlib.suppress(ProcessLookupError):
            os.kill(watch.pid, signal.SIGKILL)
    wait_ended(watches)


def processes_of(name: str) -> list[str]:
    """Command lines of workers of the ring `name` that live; of other systems than Linux, none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--name" in words and name.encode() in words:
            found.append(f"{entry.parent.name}: {b' '.join(words).decode()}")
    return found


def assert_nothing_left(name: str) -> None:
    assert segments_of(name) == []
    assert processes_of(name) == []
    assert not runtime.socket_path(name).exists()


@dataclass(frozen=True)
class User:
    """Another user, whom root can be: of a group with the number of the uid, and of one more."""

    uid: int
    team: int

    def prefix(self) -> list[str]:
        """Words before a command that have it run as that user, with the same pid.

        Where this Python lies in a folder that is closed to others, as in root's home, it does so in a mount
        namespace of its own, in which that folder holds nothing but this Python and may be entered.
        """
        words = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={self.team}"]
        python = Path(sys.base_prefix).resolve()
        closed = [p for p in python.parents if not p.stat().st_mode & 0o001]
        if not closed:
            return words
        # An empty folder takes the place of the outermost closed one, with the same path to Python in it.
        mounts = 'mount --bind "$1" /mnt && mount -t tmpfs -o mode=755 tmpfs "$2" &&'
        mounts += ' (umask 022 && mkdir -p "$1") && mount --move /mnt "$1" && shift 2 && exec "$@"'
        return ["unshare", "-m", "sh", "-c", mounts, "sh", str(python), str(closed[-1]), *words]


class System:
    """A running `smoe-mp up`: `lines` are what it printed up to ready.  `before`: words before the command,
    of a program that becomes it (`User.prefix`)."""

    def __init__(
        self, name: str, config: Path, flags: tuple[str, ...], errors: Path, before: Sequence[str] = ()
    ) -> None:
        self.name, self.config, self._errors = name, config, errors
        with errors.open("wb") as sink:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "smoe_mp", "up", str(config), *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        assert self.process.stdout is not None
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search('(^|")ready: ', line):  # as text, or in JSON
                return
        raise AssertionError(f"not ready: {self.lines}: {self.errors()}")

    def errors(self) -> str:
        """What is on its stderr."""
        return self._errors.read_text()

    def status(self) -> dict[str, Any]:
        done = smoe_mp("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def ask(self, command: Command[Any]) -> Any:
        return ask(self.name, command)

    def look(self) -> StatusResult:
        """`status` without a process of its own."""
        return status_of(self.name)

    def kill(self, everything: bool = False) -> None:
        """SIGKILL the supervisor, or all of it at once, and wait until no process of it is left.

        At once: the supervisor is stopped first, so that it starts nobody anew, and killed last: its end may
        orphan a process group, whose stopped members the kernel then lets go on.
        """
        if everything:
            stop(self.process.pid)
        children = watched(pids_of(self.name))
        for child in children if everything else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGKILL)
        self.wait()
        wait_ended(children)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(LIMIT_S)

    def end(self) -> None:
        """Stop it if it has not ended, and let go of it."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            finally:
                self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def wait_prewarmed(system: System) -> StatusResult:
    """Wait until prewarm has made its pass and what it asked for has been read; the status then."""

    def there() -> bool:
        seen = system.look()
        return seen.prewarm.state == "idle" and seen.ring.census["queued"] == seen.ring.census["reading"] == 0

    until(there, "an end of prewarm's pass")
    return system.look()  # the counters of the last look may be older than the state in it


class Up(Protocol):
    """`up(slots=..., workers=..., name=..., flags=(...))` starts a system and returns it, ready.  `vault`:
    another than the fixture's; `more`: further lines of the configuration."""

    def __call__(
        self,
        *,
        slots: int = 16,
        workers: int = 2,
        name: str = "",
        flags: tuple[str, ...] = (),
        vault: Path | None = None,
        more: str = "",
    ) -> System: ...


def write_config(path: Path, name: str, vault: Path, slots: int, workers: int, *, more: str = "") -> Path:
    """A configuration file for a ring on `vault`.  Unless `more` says otherwise a read may take as long as a
    machine may stand."""
    if "read_deadline_ms" not in more:
        more += f"ring.read_deadline_ms = {LIMIT_S * 1000}\n"
    path.write_text(
        f"name = {json.dumps(name)}\nvault.path = {json.dumps(str(vault))}\n"
        f"ring.slots = {slots}\nworkers.count = {workers}\n{more}"
    )
    return path
