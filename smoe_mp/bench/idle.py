"""bench idle: what a system costs that nobody asks anything of.

A real `smoe-mp up` with 16 workers, or as many as are asked for; the CPU time of the supervisor and of all
workers, every thread, by the scheduler's count in nanoseconds, over windows of some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from smoe_mp.bench import Figure, Progress, Report
from smoe_mp.bench.rings import cpu_ns
from smoe_mp.bench.stats import Goal
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Status
from smoe_mp.demo import System
from smoe_mp.vault_writer import VaultWriter

AT_MOST_PERCENT = 0.5
WORKERS, WORKERS_FULL = (16,), (1, 4, 16, 32)
SETTLE_S = 1.0

WHAT = "CPU time of an idle system, supervisor and workers, in percent of one core."


def run(progress: Progress, *, quick: bool = False, workers: Sequence[int] = WORKERS) -> Report:
    """Measure systems with so many workers each, one after the other."""
    windows, window_s = (3, 1.0) if quick else (6, 5.0)
    counts = sorted(set(workers))
    report = Report("idle", WHAT, {"workers": counts, "windows": windows, "window_s": window_s})
    goal = Goal("at most", AT_MOST_PERCENT)
    for at, n in enumerate(counts):
        with _system(n) as (supervisor, pids):
            time.sleep(SETTLE_S)
            shares = _windows(supervisor, pids, windows, window_s, _scaled(progress, at, len(counts)))
        report.figures += [
            Figure(f"supervisor of {n} workers", "% of a core", [a for a, _ in shares]),
            Figure(f"{n} workers together", "% of a core", [b for _, b in shares]),
            Figure(f"all, {n} workers", "% of a core", [a + b for a, b in shares], goal),
        ]
    return report


def _scaled(progress: Progress, at: int, systems: int) -> Progress:
    """Progress with one system as progress with all."""
    return lambda what, done, total: progress(what, at * total + done, systems * total)


def _windows(
    supervisor: int, workers: list[int], windows: int, window_s: float, progress: Progress
) -> list[tuple[float, float]]:
    """Percent of a core that the supervisor and the workers took, window by window."""
    found = []
    for at in range(windows):
        progress("windows", at, windows)
        began, before = time.monotonic_ns(), (cpu_ns(supervisor), sum(map(cpu_ns, workers)))
        time.sleep(window_s)
        after, ns = (cpu_ns(supervisor), sum(map(cpu_ns, workers))), time.monotonic_ns() - began
        found.append(((after[0] - before[0]) / ns * 100, (after[1] - before[1]) / ns * 100))
    progress("windows", windows, windows)
    return found


@contextlib.contextmanager
def _system(workers: int) -> Iterator[tuple[int, list[int]]]:
    """A running system on a small vault: pids of the supervisor and of the workers."""
    with small_system(workers) as name:
        with ControlClient(name) as control:
            status = control.call(Status())
        yield status.pid, [worker.pid for worker in status.workers]


@contextlib.contextmanager
def small_system(workers: int) -> Iterator[str]:
    """The name of a running system with a ring of 16 slots on a vault of 32 small experts in layer 0."""
    name = f"bench-{os.getpid()}-i"
    with tempfile.TemporaryDirectory(prefix="smoe-bench-") as folder:
        vault, config = Path(folder, "idle.smoe"), Path(folder, "idle.toml")
        _write_vault(vault)
        config.write_text(
            f"name = {json.dumps(name)}\nvault.path = {json.dumps(str(vault))}\n"
            f"ring.slots = 16\nworkers.count = {workers}\n"
        )
        with System([sys.executable, "-m", "smoe_mp", "up", str(config)], Console(quiet=True)):
            yield name


def _write_vault(path: Path) -> None:
    experts = [(0, i) for i in range(32)]
    shapes = {"gate": (64, 64), "up": (64, 64), "down": (64, 64)}
    zeros = np.zeros((64, 64), np.float32)
    with VaultWriter(path, experts, bits=4, shapes=shapes, d_model=64, vocab_size=64, ffn_dim=64) as writer:
        for layer, expert in experts:
            writer.add(layer, expert, zeros, zeros, zeros)
