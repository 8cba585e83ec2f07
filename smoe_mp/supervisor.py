"""The supervisor: makes the ring, starts the workers, watches them, and ends everything in order.

    open vault ─► probe files ─► create ring ─► start workers ─► control ─► ready ─► serve ─► stop
         │             │              │               │             │                  ▲
         └─────────────┴──────────────┴───────────────┴─────────────┴──── any error ───┘

Each step leaves its undoing on a stack before the next begins, so a failed start, a dead worker, a signal
and `stop` all end in the same way, in this order: no new demand (STOPPING), workers finish their reads, the
ring is removed and its waiters woken, the control socket goes last.  Every wait in it is bounded.

The control plane is none of the supervisor's business: whoever runs it hands in a function that opens one
on this `Supervisor`, and the loop calls it when something is there to read.  `identity`, `status` and
`request_stop` answer it with plain data.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import zmq

from smoe_mp import segments
from smoe_mp.config import LoadedConfig
from smoe_mp.errors import ConfigError, SmoeError
from smoe_mp.process import STOP_SIGNALS, Child, Loop, SignalInbox, WatchPipe, end_all
from smoe_mp.runtime import human_bytes, version
from smoe_mp.sources import Source, open_source

READY_S = 60.0  # for all workers to register and open the files
GRACE_S = 10.0  # for reads to finish when the ring stops
TERM_S = 5.0  # after SIGTERM: for the one read under way
KILL_S = 5.0  # after SIGKILL
SWEEP_S = 1.0  # between looks for clients that died with holds
TOLD_S = 1.0  # for our own stop signal to follow a worker's orderly end


class Control(Protocol):
    """A control plane, as the loop sees it."""

    @property
    def pollable(self) -> zmq.Socket[bytes]: ...
    def handle(self) -> None: ...
    def close(self) -> None: ...


class Supervisor:
    """One system's life: `run` starts it, serves and returns when it has been stopped.

    `say` receives one line a step.
    """

    def __init__(self, loaded: LoadedConfig, say: Callable[[str], None]) -> None:
        self._loaded, self._config, self._say = loaded, loaded.config, say
        self._loop = Loop()
        self._workers: dict[int, Child] = {}
        self._warnings: list[str] = []
        self._probes: list[segments.Probe] = []
        self._modes: list[str] = []
        self._started = time.monotonic()
        self._stop_reason = ""
        self._state = "starting"
        self._inbox: SignalInbox
        self._source: Source
        self._segments: segments.Segments
        self._control: Control | None = None

    def run(self, open_control: Callable[[Supervisor], Control]) -> None:
        """Start, serve until a stop signal or `request_stop`, and stop.  Main thread only.

        Nothing is left behind, whatever happens, save by SIGKILL.  Raises SmoeError when a step fails or a
        worker dies.
        """
        segments.check_name(self._config.name)
        with ExitStack() as undo:
            self._inbox = SignalInbox()
            undo.callback(self._inbox.close)
            self._loop.add(self._inbox.fd, self._on_signals)
            undo.callback(self._close_control)
            self._open_vault()
            self._probe_files()
            self._create_ring(undo)
            self._start_workers(undo)
            self._control = open_control(self)
            self._loop.add(self._control.pollable, self._control.handle)
            self._check_interrupted()
            self._state = "live"
            self._say(f'ready: attach with smoe_mp.attach("{self._config.name}")')
            self._serve()
        self._say(f"stopped: ring {self._config.name} removed")

    # --- what the control plane asks ---------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """name, pid, version, state."""
        return {"name": self._config.name, "pid": os.getpid(), "version": version(), "state": self._state}

    def request_stop(self) -> dict[str, Any]:
        """Have the loop stop at its next turn; returns what was done up to now."""
        self._stop_reason = self._stop_reason or "asked to by the control plane"
        return {"name": self._config.name, "pid": os.getpid(), **self._figures()}

    def status(self) -> dict[str, Any]:
        """All there is to know, as plain data."""
        ring, source = self._segments, self._source
        participants = ring.participants()
        return {
            **self.identity(),
            **self._figures(),
            "vault": {
                "path": str(source.path),
                "format": source.format,
                "experts": len(source.experts),
                "bytes": sum(file.size for file in source.files),
            },
            "files": ring.files(),
            "ring": {
                "slots": ring.n_slots,
                "slot_bytes": ring.slot_bytes,
                "data_bytes": ring.data_bytes,
                "pages": ring.pages,
                "census": ring.census(),
            },
            "workers": self._worker_rows(participants),
            "clients": [p for p in participants if p["role"] == "client"],
            "config": self._loaded.effective(),
            "warnings": self._warnings,
        }

    def _worker_rows(self, participants: list[dict[str, Any]]) -> list[dict[str, Any]]:
        registered = {p["number"]: p for p in participants if p["role"] == "worker"}
        limit_s = self._config.ring.read_deadline_ms / 1000
        rows = []
        for id_, child in self._workers.items():
            seen = registered.get(id_, {})
            reading_s = seen.get("reading_s")
            rows.append(
                {
                    "id": id_,
                    "pid": child.pid,
                    "alive": not child.exited,
                    "slot": seen.get("current_slot"),
                    "reading_s": reading_s,
                    "stuck": reading_s is not None and reading_s > limit_s,
                }
            )
        return rows

    def _figures(self) -> dict[str, Any]:
        counters = self._segments.counters()
        asked = sum(counters[name] for name in ("hits", "joins", "promoted", "misses"))
        return {
            "uptime_s": round(time.monotonic() - self._started, 3),
            "counters": counters,
            "hit_rate": counters["hits"] / asked if asked else None,
        }

    # --- the steps of a start ----------------------------------------------------------------------------

    def _open_vault(self) -> None:
        self._source = source = open_source(self._loaded.vault_path)
        total = sum(file.size for file in source.files)
        layers = len({expert.layer for expert in source.experts})
        self._say(
            f"vault: {source.path}: {source.format}, {len(source.experts)} experts in {layers} layers,"
            f" {human_bytes(total)}"
        )
        self._check_slots(self._config.ring.slots, source.model.top_k, layers)

    def _check_slots(self, slots: int, top_k: int, layers: int) -> None:
        if slots < top_k + 1:
            raise ConfigError(
                f"ring.slots = {slots}: one layer of one client needs {top_k + 1} slots (top-k {top_k} + 1)"
            )
        if top_k and slots < layers * top_k:
            self._warn(
                f"{slots} slots are less than one token's cycle of {layers} MoE layers x top-k {top_k} ="
                f" {layers * top_k}: nothing survives from token to token"
            )

    def _probe_files(self) -> None:
        """Try a direct read of every file; say once a file system and mode what was found."""
        said: set[tuple[str, str]] = set()
        for file in self._source.files:
            probe = segments.probe(file.path)
            self._probes.append(probe)
            if (probe.fs, probe.mode) in said:
                continue
            said.add((probe.fs, probe.mode))
            if probe.mode == "direct":
                self._say(f"reads: {probe.fs}: direct, past the page cache")
            else:
                self._not_direct(str(file.path), probe)

    def _not_direct(self, path: str, probe: segments.Probe) -> None:
        if self._config.vault.direct == "require":
            raise ConfigError(
                f'{path}: vault.direct = "require", but reads are not direct: {probe.reason};'
                ' move the vault to a local disk, or set direct = "auto"'
            )
        if probe.mode == "memory":
            self._say(f"reads: {probe.fs}: the vault is memory-backed, no disk is read")
        else:
            self._warn(f"{path}: reads are not direct but {probe.mode}: {probe.reason}")

    def _create_ring(self, undo: ExitStack) -> None:
        self._check_interrupted()
        config = self._config
        self._segments = made = segments.create(
            config.name,
            self._source,
            slots=config.ring.slots,
            slot_bytes=self._loaded.slot_bytes,
            read_deadline_ms=config.ring.read_deadline_ms,
            direct=config.vault.direct,
            top_k=self._source.model.top_k,
            speculation_ranks=config.speculation.ranks,
            read_align=max(4096, *(probe.offset_align for probe in self._probes)),
        )
        undo.callback(made.remove)
        for number, probe in enumerate(self._probes):
            made.set_mode(number, probe)
        self._modes = [file["mode"] for file in made.files()]
        self._say(
            f"ring: {made.n_slots} slots x {human_bytes(made.slot_bytes)} = {human_bytes(made.data_bytes)},"
            f" {made.pages}"
        )

    def _start_workers(self, undo: ExitStack) -> None:
        watch = WatchPipe()
        undo.callback(watch.close)
        undo.callback(self._end_workers)
        undo.callback(self._segments.set_state, "stopping")
        program = str(segments.worker_program())
        ring = ["--name", self._segments.name, "--creation", self._segments.creation_hex]
        count = self._config.workers.count
        for id_ in range(count):
            self._check_interrupted()
            argv = [program, *ring, "--id", str(id_)]
            self._workers[id_] = Child(f"worker {id_}", argv, watch, self._loop, self._worker_said(id_))
        children = self._workers.values()

        def settled() -> bool:
            return (
                bool(self._stop_reason)
                or all(child.ready for child in children)
                or any(child.exited for child in children)
            )

        done = self._loop.wait_until(settled, READY_S)
        self._check_interrupted()
        self._check_workers()
        if not done:
            late = ", ".join(f"{child.label} (pid {child.pid})" for child in children if not child.ready)
            raise SmoeError(f"not ready within {READY_S:.0f} s: {late}")
        self._say(f"workers: {count} ready")

    def _worker_said(self, id_: int) -> Callable[[str], None]:
        return lambda line: self._say(f"worker {id_}: {line.removeprefix('smoe-worker: ')}")

    # --- serving and stopping ----------------------------------------------------------------------------

    def _serve(self) -> None:
        swept = time.monotonic()
        while not self._stop_reason:
            self._loop.turn(SWEEP_S)
            if not self._stop_reason:
                self._check_workers()
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                self._sweep()
        self._say(f"stopping: {self._stop_reason}")

    def _sweep(self) -> None:
        cleared = self._segments.recover_clients()
        if cleared:
            self._say(f"recovered: {cleared} dead client{'s' if cleared > 1 else ''}, holds given back")
        for number, file in enumerate(self._segments.files()):
            if file["mode"] != self._modes[number]:
                self._modes[number] = file["mode"]
                self._warn(
                    f"{file['path']} ({self._probes[number].fs}): direct reads were refused while running:"
                    f" {file['refusal']}; read through the page cache from now on"
                )

    def _check_workers(self) -> None:
        for child in self._workers.values():
            if not child.exited:
                continue
            # Told to end by somebody else: a service manager tells all of us at once, in any order.
            if not child.failed and self._loop.wait_until(lambda: bool(self._stop_reason), TOLD_S):
                return
            child.close()
            raise SmoeError(child.epitaph())

    def _check_interrupted(self) -> None:
        self._on_signals()
        if self._stop_reason:
            raise SmoeError(f"stopped before it was ready: {self._stop_reason}")

    def _on_signals(self) -> None:
        for number in self._inbox.drain():
            if number in STOP_SIGNALS:
                self._stop_reason = self._stop_reason or signal.Signals(number).name

    def _end_workers(self) -> None:
        self._state = "stopping"
        for child in end_all(self._workers.values(), self._loop, GRACE_S, TERM_S, KILL_S):
            self._say(f"warning: {child.label} (pid {child.pid}) cannot be ended: its read hangs")
        for child in self._workers.values():
            child.close()

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.remove(self._control.pollable)
            self._control.close()

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._say(f"warning: {text}")
