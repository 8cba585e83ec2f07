"""The supervisor's side of shared memory: making the two segments, watching over them, removing them.

posix_ipc creates, sizes and unlinks; C lays out.  A ring is made in this order, so that a creator killed
anywhere leaves something that the next one recognises and removes:

    1. the control segment, empty and exclusively: the name is taken or ours
    2. the supervisor's lock on it: whoever holds that is in charge of the name
    3. what a dead ring left of it is gone by now, so only now the memory that is there is looked at
    4. its size and the data segment's, after the free space has been looked at
    5. smoe_create: all pages, the layout, LIVE last of all

Who finds the name taken asks the lock, not a pid: held means a living supervisor, and the start is
refused.  Free means that its supervisor died.  A ring that is LIVE and is what is wanted (geometry, read
plans, the identity of every file) is adopted with its contents; any other is removed, GONE first, so that
its clients hear of it, and made anew.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

from smoe_mp import _smoe, stats, tables
from smoe_mp._native import check, check_plain, ffi, lib, new_error, reason, text
from smoe_mp.errors import (
    ConfigError,
    NoSuchRing,
    RingExists,
    RingReplaced,
    SegmentError,
    SegmentSpaceError,
    VaultError,
)
from smoe_mp.platform import system
from smoe_mp.sources.base import ExpertTable, PlainSource, Source, SourceFile

#: With "/smoe." before and ".d" behind it a name fills the 30 characters that macOS allows.
NAME_MAX = 22

MODES = ("unknown", "direct", "buffered", "bounce", "memory")
STATES = ("creating", "live", "stopping", "gone", "stale")
ROLES = ("client", "worker", "supervisor", "prewarm", "observer", "trace")
CENSUS = ("empty", "queued", "reading", "ready", "consumed", "failed", "held", "guesses", "reserved")
PREWARM_WORDS = {
    "pause": lib.SMOE_PREWARM_PAUSE,
    "trickle_us": lib.SMOE_PREWARM_TRICKLE_US,
    "run": lib.SMOE_PREWARM_RUN,
    "state": lib.SMOE_PREWARM_STATE,
    "done": lib.SMOE_PREWARM_DONE,
    "goal": lib.SMOE_PREWARM_GOAL,
}
PREWARM_STATES = ("not running", "idle", "running", "resting: a client is busy", "paused", "ring too small")
HUGE_PAGES = "2 MiB huge pages"
SMALL_PAGES_BYTES = 1 << 30  # of a ring, from which on its small pages are worth a word

#: How long a name may stay half-made before it is taken for abandoned.
_SETTLE_S = 2.0
_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module yet


def check_name(name: str) -> str:
    """The name, or ConfigError: letters, digits, ".", "_" and "-", at most 22 characters."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigError(f"name {name!r}: only letters, digits, '.', '_' and '-' may be in a ring's name")
    if name.endswith(".d"):
        raise ConfigError(f"name {name!r}: may not end in '.d', which marks the data segment of another ring")
    if len(name) > NAME_MAX:
        raise ConfigError(
            f"name {name!r}: {len(name)} characters, but a ring's name has at most {NAME_MAX} "
            f"(shared-memory names are limited to 30 on macOS, and so everywhere): choose a shorter one"
        )
    return name


def segment_names(name: str) -> tuple[str, str]:
    """Names of the control and the data segment."""
    return f"/smoe.{name}", f"/smoe.{name}.d"


def installed(name: str) -> Path:
    """A file that is installed beside the C module (in an editable install that is not this folder)."""
    path = Path(_smoe.__file__).parent / name
    if not path.exists():
        raise SegmentError(f"{path}: missing: install smoe-mp anew")
    return path


def worker_program() -> Path:
    """The native worker."""
    return installed("smoe-worker")


@dataclass(frozen=True)
class Probe:
    """What one real direct read of a file showed: `mode` "direct", "buffered" (refused: `call` and
    `os_error`), "bounce" (not a local block file system) or "memory"; alignments in bytes."""

    path: Path
    mode: str
    fs: str
    os_error: int
    call: str
    offset_align: int

    @property
    def reason(self) -> str:
        """Why reads are not direct, "" where they are."""
        if self.mode == "buffered":
            if not self.os_error:
                return f"{self.fs} accepts direct reads and caches what they read all the same"
            return f"{self.call} on {self.fs}: {reason(self.os_error)}"
        if self.mode == "bounce":
            return f"{self.fs} is no local block file system; a model on a local disk is read faster"
        return f"{self.fs} is memory already" if self.mode == "memory" else ""


def probe(path: str | Path) -> Probe:
    """Try one aligned direct read.  Raises VaultError where the file cannot be read at all."""
    result, error = ffi.new("smoe_probe_result *"), new_error()
    code = lib.smoe_probe(os.fsencode(path), result, error)
    if code < 0:
        raise VaultError(f"{path}: {text(error.call)}: {reason(-code)}")
    return Probe(
        Path(path),
        MODES[result.mode],
        text(result.fs),
        result.os_error,
        text(result.call),
        max(result.offset_align, result.mem_align),
    )


def read_align(probes: Iterable[Probe]) -> int:
    """The alignment of read plans: the largest that a file asks for, and no less than 4096 bytes."""
    return max([4096, *(found.offset_align for found in probes)])


def _unlink(name: str) -> None:
    for segment in segment_names(name):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(segment)


def _check_ours(name: str) -> None:
    """SegmentError where a segment of the ring belongs to another user, whose it stays: a group that may
    write a ring may not take it over or remove it.  Root may, and where there is no /dev/shm the kernel
    says it."""
    for segment in segment_names(name):
        with contextlib.suppress(FileNotFoundError):
            uid = os.stat(f"/dev/shm{segment}").st_uid
            if os.geteuid() not in (0, uid):
                raise SegmentError(
                    f"ring {name} (shared memory {segment}): nobody serves it, and it belongs to uid {uid},"
                    f" not to uid {os.geteuid()}: that user or root may adopt or remove it; or choose another"
                    " name"
                )


def _settled_state(name: str) -> int | None:
    """State of the ring of that name, None: there is none.  RingExists where a supervisor lives, or where
    it is not ours.  A half-made one gets a moment: its creator may be about to take the lock."""
    control, _ = segment_names(name)
    until = time.monotonic() + _SETTLE_S
    while True:
        alive, error = ffi.new("int *"), new_error()
        state: int = lib.smoe_peek(name.encode(), alive, error)
        if state == -errno.ENOENT:
            return None
        if alive[0]:
            raise RingExists(
                f"ring {name} (shared memory {control}): a living supervisor serves it; "
                f"`smoe-mp status {name}` shows it, `smoe-mp down {name}` ends it"
            )
        if state == lib.SMOE_EABI and text(error.call) == "magic":
            raise RingExists(
                f"shared memory {control} exists and is not a ring of smoe-mp: choose another name, "
                f"or remove it"
            )
        if state != 0 or time.monotonic() > until:
            return state
        time.sleep(0.05)


def prewarm_words(state: int) -> str:
    """What the prewarm process says of itself, in words."""
    return PREWARM_STATES[state] if state < len(PREWARM_STATES) else f"{state}, which is none"


def say_crash(name: str) -> None:
    """Have this process say on stderr, before SIGBUS or SIGSEGV ends it, that it was over the ring `name`."""
    check_plain(lib.smoe_say_crash(name.encode()), name)


def _state_words(state: int) -> str:
    """A state, or the error that stands for it, in words."""
    if state < 0:
        return text(lib.smoe_strerror(state))
    return STATES[state] if state < len(STATES) else f"{state}, which is none"


def remove_orphan(name: str) -> None:
    """Remove a ring that no supervisor serves, or a data segment whose ring is gone.  RingExists where a
    supervisor serves it after all, SegmentError where it is another user's."""
    _check_ours(name)
    error = new_error()
    with contextlib.suppress(posix_ipc.ExistentialError):
        os.close(_claim(name))  # only a data segment is left: the name has to be ours to remove it
    lock = check(lib.smoe_supervisor_lock(name.encode(), error), error, name)
    try:
        lib.smoe_bury(name.encode())
        _unlink(name)
    finally:
        lib.smoe_supervisor_unlock(lock)


def _check_space(fd: int, wanted: int, name: str) -> None:
    free = system.segment_space(fd)
    if free is not None and free < wanted:
        raise SegmentSpaceError(
            f"ring {name}: needs {wanted} bytes of shared memory, and its file system (/dev/shm) has {free} "
            f"free: give fewer slots, or more room (`mount -o remount,size=...`; in a container "
            f"`--shm-size` or `shm_size:`)"
        )


def _make_segment(name: str, ring: str) -> int:
    """Create it, empty, open to the owner alone whatever the umask, and return the descriptor.
    posix_ipc.ExistentialError where the name is taken."""
    try:
        segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.PermissionsError as e:
        raise SegmentError(f"ring {ring}: shared memory {name} cannot be made: {e}") from e
    try:
        system.set_segment_access(segment.fd, None, 0o600)
    except BaseException:
        os.close(segment.fd)
        posix_ipc.unlink_shared_memory(name)
        raise
    return int(segment.fd)


def _open_to_group(ring: str, fds: Iterable[int], gid: int | None) -> None:
    """Have the group `gid` (None: nobody) share the segments with the descriptors `fds`, control first:
    clients write into that one, but only the owner's workers into the data."""
    try:
        for fd, mode in zip(fds, (0o660, 0o640), strict=True):
            system.set_segment_access(fd, gid, 0o600 if gid is None else mode)
    except OSError as error:
        raise SegmentError(f"ring {ring}: cannot set who may open it: {error.strerror}") from error


def _claim(ring: str) -> int:
    """Take the ring's name by its control segment; the descriptor."""
    return _make_segment(segment_names(ring)[0], ring)


def _inode(segment: str) -> int:
    """The segment's inode, 0 where there is none, as on macOS."""
    try:
        return os.stat(f"/dev/shm{segment}").st_ino
    except FileNotFoundError:
        return 0


def _leads_to(segment: str, inode: int) -> bool:
    """Whether the name is still that of the segment with that inode (0: not known)."""
    found = _inode(segment)
    return found == inode if inode else found != 0 or not os.path.isdir("/dev/shm")


class Segments:
    """A living ring, seen by its supervisor."""

    def __init__(
        self,
        name: str,
        ring: Any,
        info: Any,
        pages: str,
        paths: list[tuple[str, int]],
        *,
        wasted_bytes: int = 0,
        adopted: bool = False,
        replaced: str = "",
    ) -> None:
        self.name = name
        self.ring = ring
        self.creation_hex = f"{info.creation[0]:016x}{info.creation[1]:016x}"
        self.files_sum_hex = f"{lib.smoe_files_sum(ring):08x}"
        self.slot_bytes = int(info.slot_bytes)
        self.n_slots = int(info.n_slots)
        self.data_bytes = int(info.data_bytes)
        self.control_bytes = int(info.control_bytes)
        self.pages = pages
        self.adopted = adopted
        self.replaced = replaced  # why the ring that was there could not be adopted
        self._files = paths
        self.wasted_bytes = wasted_bytes  # see the function of this name
        self.locked_bytes = 0
        self._removed = False
        self._inodes = [_inode(segment) for segment in segment_names(name)]
        pair = ffi.new("uint32_t[2]")
        self.pairs: list[tuple[int, int]] = []  # (layer, expert) by expert index
        for index in range(info.n_experts):
            lib.smoe_expert_pair(ring, index, pair, pair + 1)
            self.pairs.append((int(pair[0]), int(pair[1])))

    def set_state(self, state: str) -> None:
        """Store "live", "stopping" or "gone" and wake everyone who waits on the ring."""
        lib.smoe_set_state(self.ring, STATES.index(state))

    def set_changed(self, file: int, what: int) -> None:
        """The source's file number `file` is not what the ring was made for (`what`: SMOE_CHANGED_* of
        smoe.h): nothing is served any more, and whoever waits is told."""
        check_plain(lib.smoe_set_changed(self.ring, file, what), self.name)

    @property
    def state(self) -> str:
        return _state_words(lib.smoe_ring_state(self.ring))

    def damage(self, state: str) -> str:
        """What somebody wrote over of the control segment, "" if nothing shows; it is to be in `state`."""
        error = new_error()
        if lib.smoe_intact(self.ring, STATES.index(state), error) == 0:
            return ""
        return _difference(lib.SMOE_ECORRUPT, error)

    def census(self) -> dict[str, int]:
        """Slots by state, and beside them: held slots, guesses loading, slots reserved."""
        out = ffi.new("uint32_t[9]")
        lib.smoe_census(self.ring, out)
        return dict(zip(CENSUS, list(out), strict=True))

    def counters(self) -> dict[str, int]:
        """Sums over all participants since the ring was made."""
        return stats.counters(self.ring, -1)

    def figures(self) -> dict[str, Any]:
        """Those of all participants since the ring was made, with `read_latency`, and of the clients that are
        gone (`departed`): see `stats`."""
        everybody = stats.tally(self.ring)
        assert everybody is not None
        return {
            **stats.figures(everybody),
            "read_latency": stats.latency(everybody.reads, everybody.counters["read_ns"]),
            "departed": stats.figures(stats.former(self.ring)),
        }

    def clients(self) -> list[dict[str, Any]]:
        """The participants that are clients, with their figures since they attached."""
        rows = [p for p in self.participants() if p["role"] == "client"]
        found = [(p, stats.tally(self.ring, p["id"], lib.SMOE_OF_PRESENT)) for p in rows]
        return [{**p, **stats.figures(own)} for p, own in found if own is not None]

    def participants(self) -> list[dict[str, Any]]:
        """Who is registered: id, role, pid, alive (by the kernel's lock), label, what it reads or holds."""
        return participants(self.ring)

    def queues(self) -> dict[str, int]:
        return {
            "demand": int(lib.smoe_queue_length(self.ring, 0)),
            "speculative": int(lib.smoe_queue_length(self.ring, 1)),
        }

    def files(self) -> list[dict[str, Any]]:
        """The source's files, with the way of reading that was achieved, and why it is not direct where a
        worker found that out."""
        return [
            {
                "path": path,
                "size": size,
                "mode": MODES[lib.smoe_file_mode(self.ring, i)],
                "refusal": reason(code) if (code := lib.smoe_file_refusal(self.ring, i)) else "",
            }
            for i, (path, size) in enumerate(self._files)
        ]

    def set_mode(self, file: int, found: Probe) -> None:
        """Have workers read the source's file number `file` as the probe found."""
        check_plain(
            lib.smoe_set_file_mode(self.ring, file, MODES.index(found.mode), found.os_error), self.name
        )

    def recover(self) -> dict[str, int]:
        """The sweep after a death: clear what dead participants left.  Figures of what was done."""
        out = ffi.new("smoe_recovery *")
        lib.smoe_recover(self.ring, 0, out)
        return {
            "clients": int(out.clients),
            "workers": int(out.workers),
            "requeued": int(out.requeued),
            "pushed": int(out.pushed),
        }

    def lock_pages(self) -> str:
        """Keep the ring from being swapped out; "" or why that is refused (limit and need)."""
        code = lib.smoe_lock_pages(self.ring)
        if code == 0:
            self.locked_bytes = self.data_bytes
            return ""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        have = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return f"mlock: {reason(-code)}: {self.data_bytes} bytes are needed, the limit (ulimit -l) is {have}"

    def resident_bytes(self) -> int:
        """How much of the ring is in memory: less than all means that the system swaps or compresses it.  Of
        more than 64 MiB a sample is looked at."""
        return int(lib.smoe_resident_bytes(self.ring))

    def give_up_queued(self) -> int:
        """No worker is left: fail what is queued, so that its waiters get an error.  How many."""
        return int(lib.smoe_give_up_queued(self.ring))

    def worker_usable(self, number: int) -> bool:
        """Whether a worker may be started under this number (0 to 126)."""
        return bool(lib.smoe_id_free(self.ring, number))

    def prewarm_usable(self) -> bool:
        """Whether a prewarm process may be started: none lives that an earlier supervisor left."""
        return not any(p["role"] == "prewarm" and p["alive"] for p in self.participants())

    def busy_clients(self) -> list[int]:
        """Clients that serve a request now."""
        mask = lib.smoe_busy_clients(self.ring)
        return [c for c in range(32) if mask >> c & 1]

    def prewarm_get(self, which: str) -> int:
        """A word of the prewarm process: see `PREWARM_WORDS`."""
        return int(lib.smoe_prewarm_get(self.ring, PREWARM_WORDS[which]))

    def prewarm_set(self, which: str, value: int = 1) -> None:
        check_plain(lib.smoe_prewarm_set(self.ring, PREWARM_WORDS[which], value), self.name)

    def histogram(self) -> npt.NDArray[np.uint32]:
        """Claims of each expert, by expert index."""
        return read_histogram(self.ring, len(self.pairs))

    def add_counts(self, counts: npt.NDArray[np.uint32]) -> None:
        """Add to each expert's count (by expert index; saturating)."""
        for index in np.flatnonzero(counts):
            lib.smoe_histogram_add(self.ring, int(index), int(counts[index]))

    def set_counts(self, counts: Mapping[int, int]) -> None:
        """Set experts' counts, by expert index."""
        for index, count in counts.items():
            lib.smoe_histogram_set(self.ring, index, count)

    def named(self) -> bool:
        """Whether the ring's name still leads to it: somebody may have deleted the segment."""
        return _leads_to(segment_names(self.name)[0], self._inodes[0])

    def let_go(self) -> None:
        """Leave the ring, LIVE and with its contents, to the next supervisor.  A second call does nothing."""
        if not self._removed:
            self._removed = True
            self.set_state("live")
            lib.smoe_detach(self.ring)

    def remove(self) -> None:
        """GONE, wake everyone, unlink both segments where they are still ours, unmap.  A second call does
        nothing."""
        if self._removed:
            return
        self._removed = True
        self.set_state("gone")
        for segment, inode in zip(segment_names(self.name), self._inodes, strict=True):
            if _leads_to(segment, inode):
                with contextlib.suppress(posix_ipc.ExistentialError):
                    posix_ipc.unlink_shared_memory(segment)
        lib.smoe_detach(self.ring)


def read_histogram(ring: Any, n_experts: int) -> npt.NDArray[np.uint32]:
    """Claims of each expert, by expert index, uint32."""
    counts = np.zeros(n_experts, np.uint32)
    lib.smoe_histogram_read(ring, ffi.cast("uint32_t *", ffi.from_buffer(counts)), n_experts)
    return counts


def slot_word(ring: Any, slot: int) -> tuple[int, int]:
    """The state of a slot, by its number in `CENSUS`, and the expert index: whose bytes are or will be there
    (0 in an empty one).  The word's bits: csrc/core.h."""
    word = int(lib.smoe_slot_word(ring, slot))
    return word & 7, word >> 11 & 0x1FFFFF


def participants(ring: Any) -> list[dict[str, Any]]:
    room = 163
    infos = ffi.new("smoe_participant_info[]", room)
    n = lib.smoe_participants(ring, infos, room)
    now = lib.smoe_now_ns()
    return [
        {
            "id": int(p.id),
            "role": ROLES[p.role],
            "number": int(p.id) - 32 if ROLES[p.role] == "worker" else int(p.id),
            "pid": int(p.pid),
            "alive": bool(p.alive),
            "label": text(p.label),
            "reserved": int(p.reserved_slots),
            "current_slot": int(p.current_slot) - 1 if p.current_slot else None,
            "reading_s": (now - p.read_started_ns) / 1e9 if p.read_started_ns else None,
        }
        for p in (infos[i] for i in range(max(n, 0)))
    ]


def _pages_got(fd: int) -> str:
    """Which pages back the data segment: by a map made for the question, filled and dropped again."""
    small = f"{os.sysconf('SC_PAGE_SIZE') // 1024} KiB pages"
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as probe:
        try:
            probe.madvise(_MADV_POPULATE_READ)
            with open("/proc/self/smaps", encoding="utf-8", errors="replace") as f:
                lines = f.read().splitlines()
        except (OSError, AttributeError):
            return small
    inode, inside, huge, total = str(os.fstat(fd).st_ino), False, 0, 0
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.split()[4] == inode
        elif inside and line.startswith("ShmemPmdMapped:"):
            huge += int(line.split()[1])
        elif inside and line.startswith("Size:"):
            total += int(line.split()[1])
    if not huge:
        return small
    return HUGE_PAGES if huge >= total else f"{huge * 100 // total}% {HUGE_PAGES}, else {small}"


def small_pages_note(pages: str, data_bytes: int, folder: str = "/dev/shm") -> str:
    """What to do where a large ring has small pages, as told by `_pages_got`; "": nothing.

    /dev/shm is a mount of tmpfs and goes by its own option; transparent_hugepage/shmem_enabled is for memory
    that lies in no mount (kernel documentation, admin-guide/mm/transhuge)."""
    if data_bytes < SMALL_PAGES_BYTES or HUGE_PAGES in pages or not os.path.isdir(folder):
        return ""
    return (
        f"the ring has {pages}: with {HUGE_PAGES} reads cost less; `mount -o remount,huge=advise {folder}`"
        " allows them to rings made from then on (docs/operations.md)"
    )


def _geometry(t: tables.Tables, slots: int, slot_bytes: int, **settings: int) -> Any:
    return ffi.new(
        "smoe_geometry *",
        {
            "slot_bytes": slot_bytes,
            "n_slots": slots,
            "n_experts": len(t.experts),
            "n_windows": len(t.windows),
            "n_parts": len(t.parts),
            "n_moves": len(t.moves),
            "n_layouts": len(t.layouts),
            "n_tensors": len(t.tensors),
            "n_files": len(t.files),
            "grid_layers": t.grid_layers,
            "grid_experts": t.grid_experts,
            "strings_bytes": len(t.strings),
            "read_align": t.read_align,
            **settings,
        },
    )


def _native_tables(t: tables.Tables) -> tuple[Any, list[Any]]:
    names = ("experts", "windows", "parts", "moves", "layouts", "tensors", "files")
    buffers = {n: ffi.from_buffer(getattr(t, n)) for n in names if len(getattr(t, n))}
    strings = ffi.from_buffer(t.strings)
    out = ffi.new("smoe_tables *", {**buffers, "strings": ffi.cast("const char *", strings)})
    return out, [*buffers.values(), strings, t]


def choose_slot_bytes(t: tables.Tables, slot_bytes: int | None) -> int:
    """The slot size: the largest plan's, or the configured one if that is no smaller (bytes)."""
    if not slot_bytes:
        return t.slot_bytes
    if slot_bytes % tables.SLOT_ALIGN:
        raise ConfigError(f"slot size {slot_bytes}: not a multiple of {tables.SLOT_ALIGN} bytes")
    if slot_bytes < t.slot_bytes:
        raise ConfigError(
            f"slot size {slot_bytes} bytes: the largest expert's read plan needs {t.slot_bytes}: "
            f"leave slot_mb out, or give at least {-(-t.slot_bytes // 2**20)}"
        )
    return slot_bytes


def wasted_bytes(t: tables.Tables, slots: int, slot_bytes: int) -> int:
    """What experts of different sizes waste of a ring: the bytes of its slots that stay empty with the mean
    expert in each.

    An expert fills what its read plan needs, in whole steps of the slot size; each expert counts once.
    """
    last = t.windows[t.experts["first_window"] + t.experts["n_windows"] - 1]
    filled = last["slot_offset"] + last["length"]
    moved = np.flatnonzero(t.experts["n_moves"])
    if len(moved):
        move = t.moves[t.experts["first_move"][moved] + t.experts["n_moves"][moved] - 1]
        filled[moved] = np.maximum(filled[moved], move["to"] + move["bytes"])
    steps = -(-filled.astype(np.int64) // tables.SLOT_ALIGN)
    return int(slots * (slot_bytes - steps.mean() * tables.SLOT_ALIGN))


def control_bytes(t: tables.Tables, slots: int, slot_bytes: int) -> int:
    """Size of the control segment (bytes) of a ring with that many slots."""
    sizes, error = ffi.new("uint64_t[2]"), new_error()
    check(lib.smoe_measure(_geometry(t, slots, slot_bytes), sizes, sizes + 1, error), error, "?")
    return int(sizes[0])


class _Wanted:
    """The ring that is asked for, as C takes it; the number of slots may come later."""

    def __init__(
        self,
        name: str,
        source: Source,
        t: tables.Tables,
        slot_bytes: int,
        settings: dict[str, int],
        *,
        gid: int | None = None,
    ) -> None:
        self.name, self.source, self.gid = name, source, gid
        self.native, self._keep = _native_tables(t)
        self._tables, self._slot_bytes, self._settings = t, slot_bytes, settings

    def geometry(self, slots: int) -> tuple[Any, int, int]:
        """Of a ring with so many slots; and the bytes of its two segments."""
        geometry = _geometry(self._tables, slots, self._slot_bytes, **self._settings)
        sizes, error = ffi.new("uint64_t[2]"), new_error()
        check(lib.smoe_measure(geometry, sizes, sizes + 1, error), error, self.name)
        return geometry, int(sizes[0]), int(sizes[1])

    def segments(self, ring: Any, data_fd: int, *, adopted: bool, replaced: str) -> Segments:
        info = ffi.new("smoe_info *")
        lib.smoe_get_info(ring, info)
        paths = [(str(f.path), f.size) for f in self.source.files]
        wasted = wasted_bytes(self._tables, int(info.n_slots), int(info.slot_bytes))
        pages = _pages_got(data_fd)
        return Segments(
            self.name, ring, info, pages, paths, wasted_bytes=wasted, adopted=adopted, replaced=replaced
        )


def create(
    name: str,
    source: Source,
    *,
    slots: int,
    size: Callable[[], int] | None = None,
    slot_bytes: int | None = None,
    read_deadline_ms: int = 30000,
    direct: str = "auto",
    top_k: int = 0,
    speculation_ranks: int = 0,
    read_align: int = 4096,
    verify: bool = False,
    gid: int | None = None,
) -> Segments:
    """Make the ring `name` for `source`, or adopt the one that a dead supervisor left, and register this
    process as its supervisor.

    `slots`: 1 to 65535, or 0: as many as `size` says, and a ring that is adopted keeps its own.  `size` is
    called when a ring has to be made, after one that could not be adopted is gone, whose pages would count
    as use; what it raises is passed on.
    `slot_bytes`: a multiple of 16384, None for the source's own.  `gid`: a group whose members may attach,
    None for nobody but this user; of a ring that is adopted too.  Raises RingExists, SegmentSpaceError,
    ConfigError or SegmentError, and then leaves nothing of its own behind.
    """
    check_name(name)
    t = tables.build(source, read_align)
    settings = {
        "read_deadline_ms": read_deadline_ms,
        "top_k": top_k,
        "direct_required": int(direct == "require"),
        "speculation_ranks": speculation_ranks,
        "verify": int(verify),
    }
    wanted = _Wanted(name, source, t, choose_slot_bytes(t, slot_bytes), settings, gid=gid)
    wanted.geometry(slots or 1)  # refuses impossible numbers before anything is touched
    replaced = ""
    for _ in range(3):
        with contextlib.suppress(NoSuchRing):  # somebody else removed it between two looks
            try:
                return _make(wanted, size or (lambda: slots), replaced)
            except posix_ipc.ExistentialError:
                found = _adopt(wanted, slots)
                if isinstance(found, Segments):
                    return found
                replaced = found
    raise RingExists(f"ring {name} (shared memory {segment_names(name)[0]}): somebody else is making it")


def _supervise(name: str, lock: int) -> Any:
    """Attach as the supervisor that holds the lock; the descriptor is the handle's from here on."""
    ring, error = ffi.new("smoe_ring **"), new_error()
    code = lib.smoe_attach(name.encode(), lib.SMOE_ROLE_SUPERVISOR, lock, b"supervisor", ring, error)
    check(code, error, name)
    return ring[0]


def _make(wanted: _Wanted, size: Callable[[], int], replaced: str) -> Segments:
    """Create, lay out, publish.  posix_ipc.ExistentialError where the name is taken."""
    control, data = segment_names(wanted.name)
    error, lock = new_error(), -1
    fds = [_claim(wanted.name)]
    try:
        lock = check(lib.smoe_supervisor_lock(wanted.name.encode(), error), error, wanted.name)
        if not _is_of(control, fds[0]):
            raise RingExists(f"ring {wanted.name} (shared memory {control}): somebody else is making it")
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(data)  # an orphan: whoever owns the control segment owns both
        geometry, control_bytes, data_bytes = wanted.geometry(size())
        # The control segment's own pages come out of the same space.
        _check_space(fds[0], control_bytes + data_bytes, wanted.name)
        data_fd = _make_segment(data, wanted.name)
        fds.append(data_fd)
        os.ftruncate(fds[0], control_bytes)
        os.ftruncate(data_fd, data_bytes)
        _open_to_group(wanted.name, fds, wanted.gid)
        check(lib.smoe_create(fds[0], data_fd, geometry, wanted.native, error), error, wanted.name)
        held, lock = lock, -1
        ring = _supervise(wanted.name, held)
        return wanted.segments(ring, data_fd, adopted=False, replaced=replaced)
    except BaseException:
        if _is_of(control, fds[0]):  # else it was taken for abandoned, and the name is somebody else's
            lib.smoe_bury(wanted.name.encode())
            _unlink(wanted.name)
        raise
    finally:
        for fd in fds:
            os.close(fd)
        if lock >= 0:
            lib.smoe_supervisor_unlock(lock)


def _is_of(segment: str, fd: int) -> bool:
    """Whether the name still leads to the object behind the descriptor (not told on macOS, where shared
    memory has no inode)."""
    try:
        named = posix_ipc.SharedMemory(segment, read_only=True)
    except (posix_ipc.Error, OSError):
        return False
    try:
        return os.fstat(named.fd).st_ino == os.fstat(fd).st_ino
    finally:
        os.close(named.fd)


def _adopt(wanted: _Wanted, slots: int) -> Segments | str:
    """The ring that a dead supervisor left, or, once it is removed, why it could not be adopted.  `slots`
    0: however many it has."""
    state = _settled_state(wanted.name)
    if state is None:
        return ""
    _check_ours(wanted.name)
    why = f"its state is {_state_words(state)}" if state >= 0 else _state_words(state)
    if state == STATES.index("live"):
        error = new_error()
        lock = check(lib.smoe_supervisor_lock(wanted.name.encode(), error), error, wanted.name)
        try:
            ring = _supervise(wanted.name, lock)
        except NoSuchRing:
            why = "its data segment is gone"
        except RingReplaced:
            why = "its data segment is another one"
        except SegmentError as refused:
            why = str(refused)
        else:
            info = ffi.new("smoe_info *")
            lib.smoe_get_info(ring, info)
            geometry, _, _ = wanted.geometry(slots or int(info.n_slots))
            code = lib.smoe_adoptable(ring, geometry, wanted.native, error)
            if code == 0:
                lib.smoe_set_settings(ring, geometry)
                lib.smoe_recover(ring, 1, ffi.NULL)
                fds = [posix_ipc.SharedMemory(s, read_only=True).fd for s in segment_names(wanted.name)]
                try:
                    _open_to_group(wanted.name, fds, wanted.gid)
                    return wanted.segments(ring, fds[1], adopted=True, replaced="")
                finally:
                    for fd in fds:
                        os.close(fd)
            why = _difference(code, error)
            lib.smoe_detach(ring)
    remove_orphan(wanted.name)
    return why


def difference_to(ring: Any, name: str, source: Source) -> str:
    """In what the attached ring is not one of the model `source`; "" if in nothing.

    Held against each other are experts, read plans, tensors with their types, shapes and tags, and every
    file's device, inode, size, time of change and header.  `ring`: a client's handle.
    """
    info = ffi.new("smoe_info *")
    lib.smoe_get_info(ring, info)
    if len(source.files) != info.n_files:
        return f"files differ: {info.n_files}, now {len(source.files)}"
    files = [_named_as(text(lib.smoe_file_path(ring, i)), file) for i, file in enumerate(source.files)]
    experts = ExpertTable.of(source.experts)
    same = PlainSource(source.format, source.path, tuple(files), experts, tuple(source.layouts), source.model)
    t = tables.build(same, int(info.read_align))
    settings = {"read_deadline_ms": 1, "top_k": 0, "direct_required": 0, "speculation_ranks": 0}
    wanted = _Wanted(name, same, t, int(info.slot_bytes), settings)
    error = new_error()
    code = lib.smoe_adoptable(ring, wanted.geometry(int(info.n_slots))[0], wanted.native, error)
    return _difference(code, error) if code == lib.SMOE_EDIFFERS else ""


def _named_as(path: str, file: SourceFile) -> SourceFile:
    """The file under another path, if that leads to it: a ring may know it by one with links in it."""
    try:
        st = os.stat(path)
    except OSError:
        return file
    return replace(file, path=Path(path)) if (st.st_dev, st.st_ino) == (file.dev, file.ino) else file


def _difference(code: int, error: Any) -> str:
    what = text(error.call)
    if code == lib.SMOE_ECORRUPT:
        return f"{what} does not add up ({error.wanted}, {error.got:#x})"
    if what.startswith("a file's"):
        return f"{what} has changed (file {error.wanted} of the source)"
    figures = f": {error.got}, now {error.wanted}" if error.wanted != error.got else ""
    return f"{what} differ{'' if what.endswith('s') else 's'}{figures}"


@dataclass(frozen=True)
class Found:
    """A ring that lies in shared memory: `state` in words, `bytes` of both segments, whether a supervisor
    serves it, and which other participants live."""

    name: str
    state: str
    bytes: int
    served: bool
    living: tuple[str, ...]
    uid: int

    @property
    def orphan(self) -> bool:
        """Nobody living has a part in it."""
        return not self.served and not self.living


def find_rings(folder: Path = Path("/dev/shm")) -> list[Found]:
    """The rings of this machine, by their segments.  Foreign files of like names are left out, and so are
    names that no ring can have."""
    found = []
    for path in sorted(folder.glob("smoe.*")):
        name = path.name.removeprefix("smoe.")
        if name.endswith(".d") and path.with_name(path.name[:-2]).exists():
            continue
        with contextlib.suppress(FileNotFoundError, ConfigError):
            entry = _look_at(check_name(name.removesuffix(".d")), path)
            if entry is not None:
                found.append(entry)
    return found


def _look_at(name: str, path: Path) -> Found | None:
    alive, error = ffi.new("int *"), new_error()
    state = lib.smoe_peek(name.encode(), alive, error)
    if state == lib.SMOE_EABI and text(error.call) == "magic":
        return None
    held = lib.smoe_locks_held(name.encode())
    sizes = [p.stat().st_size for p in (path, path.with_name(path.name + ".d")) if p.exists()]
    words = "data segment without its ring" if state == -errno.ENOENT else _state_words(state)
    ring, living = ffi.new("smoe_ring **"), []
    if lib.smoe_attach(name.encode(), lib.SMOE_ROLE_OBSERVER, 0, b"", ring, error) == 0:
        living = [f"{p['label'] or p['role']} (pid {p['pid']})" for p in participants(ring[0]) if p["alive"]]
        lib.smoe_detach(ring[0])
    elif held > 0:  # of another build, or damaged: its locks speak all the same
        living = [f"{held} processes"]
    elif held not in (0, -errno.ENOENT):
        living = [f"not known who: {_state_words(held)}"]
    return Found(name, words, sum(sizes), bool(alive[0]), tuple(living), path.stat().st_uid)
