"""Running systems for tests: starting them, asking them, and looking for what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import posix_ipc

from smoe_mp import runtime

VAULT = Path(__file__).resolve().parents[3] / "shared/vaults/qwen3-tiny.q4.smoe"
LIMIT_S = 60  # a bound for what always happens, so that a fault ends the test


def smoe_mp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `smoe-mp ARGUMENTS` to its end."""
    command = [sys.executable, "-m", "smoe_mp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


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


class System:
    """A running `smoe-mp up`: `lines` are what it printed up to ready."""

    def __init__(self, name: str, config: Path, flags: tuple[str, ...], errors: Path) -> None:
        self.name, self.config, self._errors = name, config, errors
        with errors.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "smoe_mp", "up", str(config), *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        assert self.process.stdout is not None
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("ready: "):
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


class Up(Protocol):
    """`up(slots=..., workers=..., name=..., flags=(...))` starts a system and returns it, ready."""

    def __call__(
        self, *, slots: int = 16, workers: int = 2, name: str = "", flags: tuple[str, ...] = ()
    ) -> System: ...


def write_config(path: Path, name: str, vault: Path, slots: int, workers: int) -> Path:
    """A configuration file for a ring on `vault`."""
    path.write_text(
        f"name = {json.dumps(name)}\nvault.path = {json.dumps(str(vault))}\n"
        f"ring.slots = {slots}\nworkers.count = {workers}\n"
    )
    return path
