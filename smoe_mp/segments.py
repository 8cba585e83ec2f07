"""The supervisor's side of shared memory: making the two segments, watching over them, removing them.

posix_ipc creates, sizes and unlinks; C lays out.  A ring is made in this order, so that a creator killed
anywhere leaves something that the next one recognises and removes:

    1. the control segment, exclusively: the name is taken or ours
    2. the supervisor's lock on it: whoever holds that is in charge of the name
    3. its size and the data segment's, after the free space has been looked at
    4. smoe_create: all pages, the layout, LIVE last of all

Who finds the name taken asks the lock, not a pid: held means a living supervisor, and the start is
refused.  Free means that its supervisor died; the ring is removed, GONE first, so that its clients hear
of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posix_ipc

from smoe_mp import _smoe, tables
from smoe_mp._native import check, check_plain, ffi, lib, new_error, raise_error, reason, text
from smoe_mp.errors import ConfigError, RingExists, SegmentError, SegmentSpaceError, VaultError
from smoe_mp.sources.base import Source

#: With "/smoe." before and ".d" behind it a name fills the 30 characters that macOS allows.
NAME_MAX = 22

MODES = ("unknown", "direct", "buffered", "bounce", "memory")
STATES = ("creating", "live", "stopping", "gone")
ROLES = ("client", "worker", "supervisor", "prewarm")
CENSUS = ("empty", "queued", "reading", "ready", "consumed", "failed", "held", "guesses", "reserved")
#: How long a name may stay half-made before it is taken for abandoned.
_SETTLE_S = 2.0
_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module yet


def check_name(name: str) -> str:
    """The name, or ConfigError: letters, digits, ".", "_" and "-", at most 22 characters."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigError(f"name {name!r}: only letters, digits, '.', '_' and '-' may be in a ring's name")
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


def _unlink(name: str) -> None:
    for segment in segment_names(name):
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(segment)


def _clear_name(name: str) -> None:
    """Remove a ring whose supervisor is dead.  RingExists where one lives, or where it is not ours."""
    control, _ = segment_names(name)
    until = time.monotonic() + _SETTLE_S
    while True:
        alive, error = ffi.new("int *"), new_error()
        state = lib.smoe_peek(name.encode(), alive, error)
        if state == -2:  # ENOENT: gone by itself
            return
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
            break
        time.sleep(0.05)  # half-made: its creator may be about to take the lock
    lock = check(lib.smoe_supervisor_lock(name.encode(), error), error, name)
    try:
        lib.smoe_bury(name.encode())
        _unlink(name)
    finally:
        lib.smoe_supervisor_unlock(lock)


def _check_space(fd: int, wanted: int, name: str) -> None:
    st = os.fstatvfs(fd)
    free = st.f_bavail * st.f_frsize
    if free < wanted:
        raise SegmentSpaceError(
            f"ring {name}: needs {wanted} bytes of shared memory, and its file system (/dev/shm) has {free} "
            f"free: give fewer slots, or more room (`mount -o remount,size=...`; in a container "
            f"`--shm-size` or `shm_size:`)"
        )


def _make_segment(name: str, size: int, ring: str) -> int:
    """Create, open to the owner alone whatever the umask, size once, and return the descriptor."""
    segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    try:
        os.fchmod(segment.fd, 0o600)
        _check_space(segment.fd, size, ring)
        os.ftruncate(segment.fd, size)
    except BaseException:
        os.close(segment.fd)
        raise
    return int(segment.fd)


class Segments:
    """A living ring, seen by its supervisor."""

    def __init__(self, name: str, ring: Any, info: Any, pages: str, paths: list[tuple[str, int]]) -> None:
        self.name = name
        self.ring = ring
        self.creation_hex = f"{info.creation[0]:016x}{info.creation[1]:016x}"
        self.slot_bytes = int(info.slot_bytes)
        self.n_slots = int(info.n_slots)
        self.data_bytes = int(info.data_bytes)
        self.control_bytes = int(info.control_bytes)
        self.pages = pages
        self._files = paths
        self._removed = False

    def set_state(self, state: str) -> None:
        """Store "live", "stopping" or "gone" and wake everyone who waits on the ring."""
        lib.smoe_set_state(self.ring, STATES.index(state))

    @property
    def state(self) -> str:
        return STATES[lib.smoe_ring_state(self.ring)]

    def census(self) -> dict[str, int]:
        """Slots by state, and beside them: held slots, guesses loading, slots reserved."""
        out = ffi.new("uint32_t[9]")
        lib.smoe_census(self.ring, out)
        return dict(zip(CENSUS, list(out), strict=True))

    def counters(self) -> dict[str, int]:
        """Sums over all participants since the ring was made."""
        return counters(self.ring, -1)

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

    def recover_clients(self) -> int:
        """Clear what dead clients left; how many there were."""
        return int(lib.smoe_recover_clients(self.ring))

    def remove(self) -> None:
        """GONE, wake everyone, unlink both segments, unmap.  A second call does nothing."""
        if self._removed:
            return
        self._removed = True
        self.set_state("gone")
        _unlink(self.name)
        lib.smoe_detach(self.ring)


def counters(ring: Any, participant: int) -> dict[str, int]:
    """All counters of one participant, or (-1) the sums."""
    out: dict[str, int] = {}
    while pointer := lib.smoe_counter_name(len(out)):
        out[text(pointer)] = int(lib.smoe_counter_value(ring, len(out), participant))
    return out


def participants(ring: Any) -> list[dict[str, Any]]:
    room = 162
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
    return "2 MiB huge pages" if huge >= total else f"{huge * 100 // total}% 2 MiB huge pages, else {small}"


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


def create(
    name: str,
    source: Source,
    *,
    slots: int,
    slot_bytes: int | None = None,
    read_deadline_ms: int = 30000,
    direct: str = "auto",
    top_k: int = 0,
    speculation_ranks: int = 0,
    read_align: int = 4096,
) -> Segments:
    """Make the ring `name` for `source` and register this process as its supervisor.

    `slots`: 1 to 65535; `slot_bytes`: a multiple of 16384, None for the source's own.  Raises RingExists,
    SegmentSpaceError, ConfigError or SegmentError, and then leaves nothing behind.
    """
    check_name(name)
    t = tables.build(source, read_align)
    geometry = _geometry(
        t,
        slots,
        choose_slot_bytes(t, slot_bytes),
        read_deadline_ms=read_deadline_ms,
        top_k=top_k,
        direct_required=int(direct == "require"),
        speculation_ranks=speculation_ranks,
    )
    sizes, error = ffi.new("uint64_t[2]"), new_error()
    check(lib.smoe_measure(geometry, sizes, sizes + 1, error), error, name)
    control, data = segment_names(name)
    control_fd = _take_name(name, control, int(sizes[0]))
    data_fd, lock = -1, -1
    try:
        lock = check(lib.smoe_supervisor_lock(name.encode(), error), error, name)
        # The control segment's own pages come out of the same space.
        _check_space(control_fd, int(sizes[0] + sizes[1]), name)
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(data)  # an orphan: whoever owns the control segment owns both
        data_fd = _make_segment(data, int(sizes[1]), name)
        native, keep = _native_tables(t)
        code = lib.smoe_create(control_fd, data_fd, geometry, native, error)
        del keep
        if code < 0:
            raise_error(code, error, name)
        ring, held, lock = ffi.new("smoe_ring **"), lock, -1  # the handle's from here on
        check(
            lib.smoe_attach(name.encode(), lib.SMOE_ROLE_SUPERVISOR, held, b"supervisor", ring, error),
            error,
            name,
        )
        pages = _pages_got(data_fd)
    except BaseException:
        lib.smoe_bury(name.encode())
        _unlink(name)
        raise
    finally:
        for fd in (control_fd, data_fd):
            if fd >= 0:
                os.close(fd)
        if lock >= 0:
            lib.smoe_supervisor_unlock(lock)
    info = ffi.new("smoe_info *")
    lib.smoe_get_info(ring[0], info)
    return Segments(name, ring[0], info, pages, [(str(f.path), f.size) for f in source.files])


def _take_name(name: str, control: str, size: int) -> int:
    for _ in range(3):
        try:
            return _make_segment(control, size, name)
        except posix_ipc.ExistentialError:
            _clear_name(name)
        except SegmentSpaceError:
            _unlink(name)
            raise
    raise RingExists(f"ring {name} (shared memory {control}): somebody else is making it")
