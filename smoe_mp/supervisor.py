"""The supervisor: makes the ring, starts the workers, watches them, and ends everything in order.

    vault ─► probe ─► adopt, or size and create ─► workers, prewarm ─► control ─► ready ─► serve ─► stop
      │        │                 │                        │               │                    ▲
      └────────┴─────────────────┴────────────────────────┴───────────────┴───── any error ────┘

Each step leaves its undoing on a stack before the next begins, so a failed start, a signal and `stop` all end
in the same way, in this order: no new demand (STOPPING), workers finish their reads, prewarm is joined, the
histogram is saved, the ring is removed and its waiters woken (or left to the next supervisor), the control
socket goes last.  Every wait in it is bounded.

A file of the source that changes while it is served ends the serving but not the system (`identity`): the
ring is STALE from then on, which every client is told, and stays so until it is stopped.

A ring that is drained is one that stops, as its workers and clients see it, but for its supervisor, which may
have it live again.

A death while serving ends nothing.  Whoever died, the sweep of csrc/recover.c clears what it left; children
are started again by their `Pool`.  Once a second all locks are looked at, not only the children's: clients
die too, and so do workers that an earlier supervisor left.

The control plane is none of the supervisor's business: whoever runs it hands in a function that opens one
on this `Supervisor`, and the loop calls it when something is there to read, and at its turns.  The methods
under "what the control plane asks" answer it with plain data; `events` tells it what happens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

from smoe_mp import histogram, segments
from smoe_mp._native import CHANGES
from smoe_mp.checking import Checking
from smoe_mp.config import LoadedConfig
from smoe_mp.errors import ConfigError, IdError, SmoeError
from smoe_mp.fit import fit
from smoe_mp.identity import Change, Watch
from smoe_mp.listener import Listener
from smoe_mp.notify import Notify
from smoe_mp.pool import RETRY_S, Pool
from smoe_mp.process import (
    STOP_SIGNALS,
    Child,
    ExitWatch,
    Loop,
    SignalInbox,
    WatchPipe,
    end_all,
    reap_orphans,
)
from smoe_mp.remote import Demand, Remote
from smoe_mp.runtime import group_id, human_bytes, version
from smoe_mp.sources import Source, open_source
from smoe_mp.stats import KINDS

READY_S = 60.0  # for all workers to register and open the files
GRACE_S = 10.0  # for reads to finish when the ring stops
TERM_S = 5.0  # after SIGTERM: for the one read under way
KILL_S = 5.0  # after SIGKILL
SAVE_S = 10.0  # for the popularity's file
SWEEP_S = 1.0  # between looks for clients that died with holds
WARNINGS_MAX = 100  # kept for status

log = logging.getLogger(__name__)


class Events(Protocol):
    """Where events go, as the supervisor sees it."""

    @property
    def pollable(self) -> zmq.Socket[bytes]: ...
    def handle(self) -> None: ...
    def wanted(self, event: str) -> bool: ...
    def publish(self, event: str, data: Mapping[str, Any]) -> None: ...


class Control(Protocol):
    """A control plane, as the loop sees it; `tick` returns after how many seconds to call it again."""

    @property
    def events(self) -> Events | None: ...
    @property
    def pollable(self) -> zmq.Socket[bytes]: ...
    def handle(self) -> None: ...
    def tick(self) -> float: ...
    def close(self) -> None: ...


def _watch_parent(pid: int) -> ExitWatch:
    """A watch on the parent; SmoeError where `pid` is not it, as where it died and somebody has its pid."""
    if os.getppid() == pid:
        with contextlib.suppress(ProcessLookupError):
            watch = ExitWatch(pid)
            if os.getppid() == pid:
                return watch
            watch.close()
    raise SmoeError(f"--parent {pid}: no such process started this one, or it has ended")


class Supervisor:
    """One system's life: `run` starts it, serves and returns when it has been stopped.

    What it does is said to the log, a line a step.  `parent`: the pid of the process that started this one,
    whose end, in whatever way, is this system's; 0: there is none to follow.
    """

    def __init__(self, loaded: LoadedConfig, parent: int = 0) -> None:
        self._loaded, self._config = loaded, loaded.config
        self._parent, self._parent_watch = parent, None if parent == 0 else _watch_parent(parent)
        notify = Notify.from_environment(os.environ)
        self._notify = Notify() if parent else notify  # a private system is not its parent's service
        self._said_health = "ok"
        self._loop = Loop()
        self._workers = Pool(
            range(127), start=self._start_worker, usable=self._worker_usable, on_death=self._worker_died
        )
        self._prewarm = Pool(
            (0,), start=self._start_prewarm, usable=self._prewarm_usable, on_death=self._prewarm_died
        )
        self._metrics = Pool((0,), start=self._start_metrics, usable=lambda _: True, on_death=self._warn)
        self._listener: Listener | None = None
        self._watch: WatchPipe
        self._histogram: Path | None = None
        self._keep_ring = self._was_live = False
        self._warnings: list[str] = []
        self._probes: list[segments.Probe] = []
        self._nameless = False
        self._checksums = 0  # experts that have one
        self._fingerprint = b""
        self._modes: list[str] = []
        self._files: Watch
        self._drained_workers = 0
        self._failed_reads = 0
        self._look_soon = False
        self._away: dict[int, str] = {}  # files that cannot be looked up, by number
        self._stale = ""  # which file changed, and how
        self._hang_said = self._failing_said = False
        self._damage = ""  # what somebody wrote over of the shared memory
        self._started = time.monotonic()
        self._stop_reason = ""
        self._state = "starting"
        self._inbox: SignalInbox
        self._source: Source
        self._segments: segments.Segments
        self._control: Control | None = None
        self._remote = Remote(self._config.name)
        self._checking: Checking
        self._told: dict[str, object] = {}  # by event: what was told last

    def run(
        self, open_control: Callable[[Supervisor], Control], on_ready: Callable[[], None] | None = None
    ) -> None:
        """Start, serve until a stop signal or `request_stop`, and stop.  Main thread only.  `on_ready` is
        called once it serves.

        Nothing is left behind, whatever happens, save by SIGKILL.  Raises SmoeError when a step of the start
        fails or a worker dies in it; later deaths are made good.
        """
        segments.check_name(self._config.name)
        segments.say_crash(self._config.name)
        with ExitStack() as undo:
            self._inbox = SignalInbox()
            undo.callback(self._inbox.close)
            self._loop.add(self._inbox.fd, self._on_signals)
            if self._parent_watch is not None:
                undo.callback(self._parent_watch.close)
                self._loop.add(self._parent_watch.fd, self._on_parent_end)
            undo.callback(self._close_control)
            self._open_vault()
            self._probe_files()
            self._create_ring(undo)
            self._listen(undo)
            self._start_children(undo)
            self._control = open_control(self)
            undo.callback(self._remote.close)
            self._loop.add(self._control.pollable, self._control.handle)
            if self._control.events is not None:
                self._loop.add(self._control.events.pollable, self._control.events.handle)
            self._check_interrupted()
            self._state, self._was_live = "live", True
            self._say(f'ready: attach with smoe_mp.attach("{self._config.name}")')
            if on_ready is not None:
                on_ready()
            self._notify.ready(self._summary())
            self._serve()
        left = "left to the next `smoe-mp up`" if self._keep_ring else "removed"
        self._say(f"stopped: ring {self._config.name} {left}")

    # --- what the control plane asks ---------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """name, pid, version, state."""
        return {"name": self._config.name, "pid": os.getpid(), "version": version(), "state": self._state}

    def request_stop(self, keep_ring: bool = False) -> dict[str, Any]:
        """Have the loop stop at its next turn; returns what was done up to now.  `keep_ring`: leave the ring
        with its contents to the next supervisor."""
        self._keep_ring = keep_ring and not self._stale
        self._stop_reason = self._stop_reason or "asked to by the control plane"
        return {"name": self._config.name, "pid": os.getpid(), **self._figures()}

    def status(self, memory: bool = True) -> dict[str, Any]:
        """All there is to know, as plain data; without `memory` what is known at once."""
        ring, source = self._segments, self._source
        return {
            **self.identity(),
            **self._figures(),
            **ring.figures(),
            "vault": {
                "path": str(source.path),
                "format": source.format,
                "experts": len(source.experts),
                "bytes": sum(file.size for file in source.files),
                "checksums": self._checksums,
                "verify": self._config.vault.verify,
            },
            "files": ring.files(),
            "ring": {
                "slots": ring.n_slots,
                "slot_bytes": ring.slot_bytes,
                "data_bytes": ring.data_bytes,
                "pages": ring.pages,
                "locked_bytes": ring.locked_bytes,
                "resident_bytes": ring.resident_bytes() if memory else None,
                "wasted_bytes": ring.wasted_bytes,
                "census": ring.census(),
            },
            "health": self._health(),
            "workers": self._worker_rows(ring.participants()),
            "prewarm": self._prewarm_status(),
            "metrics": self._listener and {"url": self._listener.url, "state": self._metrics.state},
            "clients": ring.clients(),
            "config": self._loaded.effective(),
            "warnings": self._warnings,
            "verify": self._checking.status(),
        }

    def _worker_rows(self, participants: list[dict[str, Any]]) -> list[dict[str, Any]]:
        registered = {p["number"]: p for p in participants if p["role"] == "worker"}
        limit_s = self._config.ring.read_deadline_ms / 1000
        rows = []
        for id_, child in sorted(self._workers.children.items()):
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

    def set_workers(self, count: int) -> dict[str, Any]:
        """Have `count` workers from now on."""
        self._check_not_stopping()
        if self._state == "drained":
            raise ConfigError(f"ring {self._config.name} is drained and has no workers: resume it first")
        if self._stale:
            raise SmoeError(f"ring {self._config.name}: {self._health()}")
        before = self._workers.target
        self._workers.set_target(count)
        self._workers.tick()
        self._say(f"workers: {before} to {count}")
        return {"before": before, "count": count}

    def prewarm(self, action: str, trickle_ms: int | None = None) -> dict[str, Any]:
        """ "run" begins a pass anew, "pause" and "resume" do that, "trickle" sets the pause between reads."""
        self._check_not_stopping()
        if action in ("pause", "resume"):
            self._segments.prewarm_set("pause", int(action == "pause"))
        elif action == "run":
            self._segments.prewarm_set("run")
        elif trickle_ms is not None:
            self._segments.prewarm_set("trickle_us", trickle_ms * 1000)
        return self._prewarm_status()

    def demand(self, pairs: list[tuple[int, int]]) -> Demand:
        """Have experts read; asked by turns."""
        self._check_not_stopping()
        return self._remote.demand(pairs)

    def speculate(self, pairs: list[tuple[int, int]]) -> dict[str, Any]:
        """Guess experts."""
        self._check_not_stopping()
        return {"queued": self._remote.speculate(pairs)}

    def busy(self, lease_ms: int) -> dict[str, Any]:
        """Raise the control plane's busy flag for a time, or (0) lower it."""
        self._check_not_stopping()
        self._remote.busy(lease_ms)
        return {"busy_clients": self._segments.busy_clients(), "lease_ms": self._remote.lease_ms()}

    def histogram(
        self, action: str, given: Sequence[tuple[int, int, int]], first: int, most: int
    ) -> dict[str, Any]:
        """The popularity; "save", "set" and "reset" do that before.  Raises HistogramError where the file
        cannot be written, IdError for an expert that there is not."""
        ring, file = self._segments, self._histogram
        if action != "get":
            self._check_not_stopping()
        if action == "reset":
            ring.set_counts(dict.fromkeys(range(len(ring.pairs)), 0))
        elif action == "set":
            at = {pair: index for index, pair in enumerate(ring.pairs)}
            for layer, expert, _ in given:
                if (layer, expert) not in at:
                    raise IdError(f"ring {ring.name}: there is no expert {expert} in layer {layer}")
            ring.set_counts({at[layer, expert]: count for layer, expert, count in given})
        counts = ring.histogram()
        if action == "save" and file is not None:
            histogram.save(file, self._fingerprint, ring.pairs, counts)
        order = histogram.Histogram(counts).order()[first : first + most]
        return {
            "experts": len(counts),
            "counted": int(np.count_nonzero(counts)),
            "total": int(counts.sum(dtype=np.uint64)),
            "path": str(file or ""),
            "fingerprint": self._fingerprint.hex(),
            "most_popular": [(*ring.pairs[i], int(counts[i])) for i in order],
        }

    def verify(self, action: str) -> dict[str, Any]:
        """Start or stop a check of the files; how far it is."""
        if action == "start":
            self._check_not_stopping()
            self._checking.start()
        elif action == "stop":
            self._checking.stop()
        return self._checking.status()

    def drain(self, resume: bool) -> _Drain:
        """Serve no more demand, or again."""
        self._check_not_stopping()
        if self._stale:
            raise SmoeError(f"ring {self._config.name}: {self._health()}")
        if resume and self._state == "drained":
            self._segments.set_state("live")
            self._state = "live"
            self._workers.set_target(self._drained_workers)
            self._workers.tick()
            if self._config.prewarm.enabled:
                self._prewarm.set_target(1)
                self._prewarm.tick()
            self._say(f"resumed: {self._workers.target} workers")
        elif not resume and self._state != "drained":
            self._drained_workers = self._workers.target
            self._segments.set_state("stopping")
            self._state = "drained"
            self._workers.let_end()
            self._prewarm.set_target(0)
            self._checking.stop()
            self._say("drained: no new demand; reads that are under way finish")
        self._tell_state()
        return _Drain(self, self._segments)

    def _check_not_stopping(self) -> None:
        """For all that changes something: the stop turns the loop too, and has begun to take things away."""
        if self._stop_reason or self._state == "stopping":
            reason = self._stop_reason or "it failed"
            raise SmoeError(f"ring {self._config.name} is stopping: {reason}")

    @property
    def under_way(self) -> bool:
        """Whether reads of a drained ring have not finished yet."""
        return self._state == "drained" and self._workers.alive > 0

    def _summary(self) -> str:
        """A line for a service manager."""
        ring, health = self._segments, self._said_health
        return f"ring {ring.name}: {ring.n_slots} slots, {self._workers.target} workers, {health}"

    def _health(self) -> str:
        """ "ok", or what is wrong, for people."""
        if self._stale:
            return f"stale: {self._stale}; nothing is served until the system is stopped and started anew"
        if self._damage:
            return f"damaged: somebody wrote over the shared memory: {self._damage}; start the system anew"
        if self._state == "drained":
            return "drained: demand is refused until it is resumed"
        if self._workers.failing:
            alive = self._workers.alive
            return f"failing: workers keep dying, {alive} live; the next try is at most {RETRY_S:.0f} s away"
        if not self._segments.named():
            return "nameless: the shared-memory name was deleted, new clients cannot attach"
        if self._away:
            return f"files away: {next(iter(self._away.values()))}; what is resident or open is served"
        return "ok" if self._workers.state == "ok" else "restarting workers"

    def _prewarm_status(self) -> dict[str, Any]:
        get = self._segments.prewarm_get
        state = segments.prewarm_words(get("state")) if self._prewarm.alive else "not running"
        if self._prewarm.failing:
            state = f"failing: it keeps dying; {state}"
        return {
            "state": state,
            "done": get("done"),
            "goal": get("goal"),
            "trickle_ms": get("trickle_us") / 1000,
            "histogram": str(self._histogram or ""),
            "busy_clients": self._segments.busy_clients(),
        }

    def _figures(self) -> dict[str, Any]:
        counters = self._segments.counters()
        asked = sum(counters[name] for name in KINDS)
        return {
            "uptime_s": round(time.monotonic() - self._started, 3),
            "counters": counters,
            "hit_rate": counters["hits"] / asked if asked else None,
        }

    # --- the steps of a start ----------------------------------------------------------------------------

    def _listen(self, undo: ExitStack) -> None:
        if address := self._config.metrics.listen:
            self._listener = Listener(address)
            undo.callback(self._listener.close)
            self._say(f"metrics: {self._listener.url}")

    def _open_vault(self) -> None:
        self._source = source = open_source(self._loaded.vault_path)
        total = sum(file.size for file in source.files)
        layers = len({expert.layer for expert in source.experts})
        self._say(
            f"vault: {source.path}: {source.format}, {len(source.experts)} experts in {layers} layers,"
            f" {human_bytes(total)}"
        )
        self._checksums = sum(expert.crc32c != 0 for expert in source.experts)
        if self._config.vault.verify and self._checksums < len(source.experts):
            self._warn(
                f"{source.path}: vault.verify = true, but {len(source.experts) - self._checksums} of"
                f" {len(source.experts)} experts have no checksum and are not checked: `smoe-mp pack` writes"
                " vaults that have them (--checksums, or --raw)"
            )

    def _size(self) -> int:
        """How many slots: as given, or as memory allows; refused where they do not fit."""
        sizing = fit(self._loaded, self._source, segments.read_align(self._probes))
        self._say(f"size: {sizing.line}")
        for note in sizing.notes:
            self._say(f"note: {note}")
        for warning in sizing.warnings:
            self._warn(warning)
        return sizing.slots

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
            size=self._size,
            slot_bytes=self._loaded.slot_bytes,
            read_deadline_ms=config.ring.read_deadline_ms,
            direct=config.vault.direct,
            top_k=self._source.model.top_k,
            speculation_ranks=config.speculation.ranks,
            verify=config.vault.verify,
            read_align=segments.read_align(self._probes),
            gid=group_id(config.access.group),
        )
        undo.callback(self._end_ring)
        for number, probe in enumerate(self._probes):
            made.set_mode(number, probe)
        self._modes = [file["mode"] for file in made.files()]
        if made.replaced:
            self._warn(f"the ring that was there could not be adopted: {made.replaced}; made anew")
        how = "adopted with its contents: " if made.adopted else ""
        self._say(
            f"ring: {how}{made.n_slots} slots x {human_bytes(made.slot_bytes)} ="
            f" {human_bytes(made.data_bytes)}, {made.pages}"
        )
        if note := segments.small_pages_note(made.pages, made.data_bytes):
            self._say(f"note: {note}")
        if self._config.ring.lock and (refused := made.lock_pages()):
            self._warn(f"the ring is not locked in memory: {refused}; going on without")

    @property
    def _ring_stays(self) -> bool:
        """Whether the ring outlives this supervisor: as asked, or because a start that failed had only
        adopted it.  Its clients then go on with the next one."""
        return self._keep_ring or (self._segments.adopted and not self._was_live and not self._stop_reason)

    def _end_demand(self) -> None:
        """No new demand; and the workers end, by the ring's state or, where that is to stay, as told."""
        if self._ring_stays and not self._was_live:
            for child in self._workers.all:
                child.send(signal.SIGTERM)
        else:
            self._segments.set_state("stopping")

    def _end_ring(self) -> None:
        if self._ring_stays and self._segments.named():
            self._segments.let_go()
        else:
            self._segments.remove()

    def _load_histogram(self) -> None:
        """Popularity of earlier runs into the ring's counts; an adopted ring has them."""
        source = self._source
        self._fingerprint = histogram.fingerprint(source)
        where = histogram.places(source.path, self._fingerprint, self._loaded.histogram_path)
        self._histogram = where.path
        if self._segments.adopted:
            return
        loaded = histogram.recall(where, self._fingerprint, self._segments.pairs)
        for note in loaded.notes:
            self._warn(note)
        if loaded.histogram is not None:
            self._segments.add_counts(loaded.histogram.counts)
            self._say(f"popularity: {loaded.path}")

    def _save_histogram(self) -> None:
        """Save the popularity; in a thread, since the vault's file system may hang and the stop may not."""
        if self._histogram is None:
            return
        path, counts = self._histogram, self._segments.histogram()
        failed: list[SmoeError] = []

        def save() -> None:
            try:
                histogram.save(path, self._fingerprint, self._segments.pairs, counts)
            except SmoeError as error:
                failed.append(error)

        saving = threading.Thread(target=save, daemon=True)
        try:
            saving.start()
        except RuntimeError as refused:
            self._warn(f"histogram {path}: not saved: {refused}")
            return
        saving.join(SAVE_S)
        if saving.is_alive():
            self._warn(
                f"histogram {path}: not saved in {SAVE_S:g} s: its file system hangs; going on without"
            )
        for error in failed:
            self._warn(str(error))

    def _start_children(self, undo: ExitStack) -> None:
        self._load_histogram()
        undo.callback(self._save_histogram)
        self._segments.prewarm_set("trickle_us", self._config.prewarm.trickle_ms * 1000)
        for word in ("pause", "state", "done", "goal"):  # of an adopted ring: the last supervisor's
            self._segments.prewarm_set(word, 0)
        self._watch = WatchPipe()
        undo.callback(self._watch.close)
        args = ["--source", str(self._source.path), "--fingerprint", self._fingerprint.hex()]
        self._checking = Checking([*self._ring_args(), *args], self._watch, self._loop, self._warn)
        undo.callback(self._end_children)
        undo.callback(self._end_demand)
        self._await_workers()
        self._say(f"workers: {self._workers.target} ready")
        if self._config.prewarm.enabled:
            self._prewarm.set_target(1)
            self._prewarm.tick()
        if self._listener is not None:
            self._metrics.set_target(1)
            self._metrics.tick()

    def _await_workers(self) -> None:
        """Start all workers.  One that dies now would die again: the start has failed."""
        self._workers.set_target(self._config.workers.count)
        children, deadline = self._workers.children, time.monotonic() + READY_S
        while True:
            due_s = self._workers.tick()  # some ids may be held by workers that have not ended yet
            self._check_interrupted()
            late = [child for child in children.values() if not child.ready]
            if not late and len(children) == self._workers.target:
                return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = ", ".join(f"{child.label} (pid {child.pid})" for child in late)
                raise SmoeError(f"not ready within {READY_S:.0f} s: {names or 'ids are still taken'}")
            self._loop.turn(min(due_s, left_s))

    def _worker_usable(self, number: int) -> bool:
        return self._segments.worker_usable(number)

    def _prewarm_usable(self, number: int) -> bool:
        return self._segments.prewarm_usable()

    def _start_worker(self, number: int) -> Child:
        argv = [str(segments.worker_program()), *self._ring_args(), "--id", str(number)]
        argv += ["--files", self._segments.files_sum_hex]
        return Child(f"worker {number}", argv, self._watch, self._loop, self._child_said(f"worker {number}"))

    def _start_prewarm(self, number: int) -> Child:
        argv = [sys.executable, "-m", "smoe_mp.prewarm", *self._ring_args()]
        argv += ["--histogram", str(self._histogram), "--fingerprint", self._fingerprint.hex()]
        return Child("prewarm", argv, self._watch, self._loop, self._child_said("prewarm"))

    def _start_metrics(self, number: int) -> Child:
        assert self._listener is not None
        argv = [sys.executable, "-m", "smoe_mp.metrics", *self._ring_args()]
        argv += ["--listen-fd", str(self._listener.fd)]
        fds, said = [self._listener.fd], self._child_said("metrics")
        return Child("metrics", argv, self._watch, self._loop, said, fds=fds)

    def _ring_args(self) -> list[str]:
        return ["--name", self._segments.name, "--creation", self._segments.creation_hex]

    def _child_said(self, who: str) -> Callable[[str], None]:
        def said(line: str) -> None:
            if line.startswith("warning: "):
                self._warn(f"{who}: {line.removeprefix('warning: ')}", child=who)
            else:
                self._say(f"{who}: {line.removeprefix('smoe-worker: ')}", child=who)

        return said

    # --- serving and stopping ----------------------------------------------------------------------------

    def _serve(self) -> None:
        swept = time.monotonic()
        self._files = Watch(self._source, self._config.vault.check_s)
        while not self._stop_reason:
            due_s = min(
                self._workers.tick(), self._prewarm.tick(), self._metrics.tick(), self._notify.ping(), SWEEP_S
            )
            self._checking.tick()
            self._remote.tick()
            if self._control is not None:
                due_s = min(due_s, self._control.tick())
            self._loop.turn(due_s)
            if time.monotonic() - swept >= SWEEP_S:
                swept = time.monotonic()
                self._sweep()
        self._say(f"stopping: {self._stop_reason}")
        self._notify.stopping(self._stop_reason)

    def _worker_died(self, epitaph: str) -> None:
        if self._state == "starting":
            raise SmoeError(epitaph)
        self._warn(epitaph)
        self._emit("worker", {"text": epitaph, "alive": self._workers.alive})
        self._look_soon = True  # it may have found another file where its own was
        self._recover()
        if self._stale:
            self._workers.set_target(len(self._workers.children))  # another could not open the file either
        if self._workers.failing:
            if not self._failing_said:
                self._say(f"workers keep dying: {self._health()}", logging.ERROR)
            self._give_up_unserved()
        self._failing_said = self._workers.failing

    def _prewarm_died(self, epitaph: str) -> None:
        self._segments.prewarm_set("state", 0)
        self._warn(epitaph)
        self._recover()

    def _give_up_unserved(self) -> None:
        """With no worker left nobody would read what is queued; its waiters are told."""
        if (self._workers.failing or self._state == "drained") and not self._workers.alive:
            self._segments.give_up_queued()

    def _recover(self) -> None:
        done = self._segments.recover()
        if done["clients"] or done["requeued"]:
            self._say(
                f"recovered: {done['clients']} dead clients' holds given back, {done['requeued']} reads taken"
                " up again"
            )

    def _sweep(self) -> None:
        self._recover()
        self._give_up_unserved()
        self._check_files()
        self._check_memory()
        self._tell()
        for number, file in enumerate(self._segments.files()):
            if file["mode"] != self._modes[number]:
                self._modes[number] = file["mode"]
                self._warn(
                    f"{file['path']} ({self._probes[number].fs}): direct reads were refused while running:"
                    f" {file['refusal']}; read through the page cache from now on"
                )
        if not self._segments.named() and not self._nameless:
            self._nameless = True
            self._warn(
                f"the shared-memory name {segments.segment_names(self._config.name)[0]} was deleted: attached"
                " clients go on, new ones cannot attach; stop and start the system when they are done"
                " (RemoveIPC of systemd-logind does this when a user without linger logs out)"
            )

        if os.getpid() == 1:
            reap_orphans([child.pid for child in (*self._workers.all, *self._helpers)])
        if (health := self._health()) != self._said_health:
            self._said_health = health
            self._notify.status(self._summary())

    def _check_memory(self) -> None:
        """Whoever writes over the ring may ruin it, but not unsaid; and it stays said."""
        as_set = {"drained": "stopping"}.get(self._state, self._state)
        if not self._damage and (found := self._segments.damage(as_set)):
            self._damage = found
            segment = segments.segment_names(self._config.name)[0]
            self._warn(
                f"somebody wrote over the shared memory {segment}: {found}; what is asked of it may fail:"
                " stop the system and start it anew"
            )

    def _check_files(self) -> None:
        """Look at the source's files when it is time to, or when reads have failed."""
        if self._stale:
            return
        failed = self._segments.counters()["failed_reads"]
        report = self._files.poll(hurry=self._look_soon or failed > self._failed_reads)
        self._failed_reads, self._look_soon = failed, False
        if self._files.hangs and not self._hang_said:
            self._warn("a look at the model's files hangs with their file system; what is resident is served")
        self._hang_said = self._files.hangs
        if report is None:
            return
        for number, why in report.away.items():
            if number not in self._away:
                self._warn(f"{why}: it cannot be looked up; what is resident or open is served on")
        back = self._away.keys() - report.away.keys()
        for number in back:
            self._say(f"{self._source.files[number].path}: is back")
        if back and not report.away:
            self._workers.retry()  # those that died meanwhile could not open it
        self._away = report.away
        if report.changes:
            self._end_serving(report.changes[0])

    def _end_serving(self, change: Change) -> None:
        """A file is not what the ring was made for: tell every client, for good."""
        self._stale, self._state = change.text, "stale"
        self._prewarm.set_target(0)
        self._workers.set_target(len(self._workers.children))
        self._segments.set_changed(change.file, sum(CHANGES[what] for what in change.what))
        text = f"{change.text}; nothing is served any more: stop this system and start it anew"
        self._warnings = [*self._warnings[-(WARNINGS_MAX - 1) :], text]
        self._say(text, logging.ERROR)
        self._emit("error", {"text": text})

    def _on_parent_end(self) -> None:
        if self._parent_watch is not None:
            self._loop.remove(self._parent_watch.fd)  # it can be read from now on
        self._stop_reason = self._stop_reason or f"the process that started it (pid {self._parent}) ended"

    def _check_interrupted(self) -> None:
        self._on_signals()
        if self._parent_watch is not None and self._parent_watch.wait(0):
            self._on_parent_end()
        if self._stop_reason:
            raise SmoeError(f"stopped before it was ready: {self._stop_reason}")

    def _on_signals(self) -> None:
        for number in self._inbox.drain():
            if number in STOP_SIGNALS:
                self._stop_reason = self._stop_reason or signal.Signals(number).name

    @property
    def _helpers(self) -> list[Child]:
        """Children that are no workers."""
        return [*self._prewarm.all, *self._metrics.all, *self._checking.children]

    def _end_children(self) -> None:
        self._state = "stopping"
        self._tell_state()
        for child in self._helpers:
            child.send(signal.SIGTERM)
        children = [*self._workers.all, *self._helpers]
        for child in end_all(children, self._loop, GRACE_S, TERM_S, KILL_S):
            self._say(f"{child.label} (pid {child.pid}) cannot be ended: its read hangs", logging.WARNING)
        for child in children:
            child.close()

    def _close_control(self) -> None:
        if self._control is not None:
            self._loop.remove(self._control.pollable)
            if self._control.events is not None:
                self._loop.remove(self._control.events.pollable)
            self._control.close()

    # --- events --------------------------------------------------------------------------------------------

    def _emit(self, event: str, data: Mapping[str, Any]) -> None:
        if self._control is not None and self._control.events is not None:
            self._control.events.publish(event, data)

    def _emit_changed(self, event: str, data: Mapping[str, Any]) -> None:
        """Emit it, if it is not what was told last."""
        if self._told.get(event) != data:
            self._told[event] = data
            self._emit(event, data)

    def _tell_state(self) -> None:
        self._emit_changed("state", {"state": self._state, "health": self._health()})

    def _tell(self) -> None:
        """Once a second: what has changed, and the figures if somebody wants them."""
        events = self._control.events if self._control is not None else None
        if events is None:
            return
        self._tell_state()
        if events.wanted("prewarm"):
            status = self._prewarm_status()
            self._emit_changed("prewarm", {key: status[key] for key in ("state", "done", "goal")})
        if events.wanted("verify"):
            found = self._checking.status()
            self._emit_changed("verify", {**found, "bad": len(found["bad"])})
        if events.wanted("stats"):
            queues, census = self._segments.queues(), self._segments.census()
            self._emit("stats", {**self._figures(), "queues": queues, "census": census})

    def _say(self, text: str, level: int = logging.INFO, **fields: object) -> None:
        """A line of the log; `fields` are its own in JSON."""
        log.log(level, "%s", text, extra={"fields": fields})
        if self._state == "starting":
            self._notify.status(text)

    def _warn(self, text: str, **fields: object) -> None:
        self._warnings = [*self._warnings[-(WARNINGS_MAX - 1) :], text]  # for months, not for ever
        self._say(text, logging.WARNING, **fields)
        self._emit("warning", {"text": text})


class _Drain:
    """A drain under way: done when the last worker has finished its reads."""

    def __init__(self, supervisor: Supervisor, ring: segments.Segments) -> None:
        self._supervisor, self._ring = supervisor, ring
        self._before = ring.counters()["reads"]

    def poll(self) -> dict[str, Any] | None:
        """The fields of `DrainResult`, when it is done."""
        if self._supervisor.under_way:
            return None
        state = self._supervisor.identity()["state"]
        return {"state": state, "reads": self._ring.counters()["reads"] - self._before}

    def cancel(self) -> None:
        """It goes on, nobody waits for it."""
