"""How large the ring becomes: what memory there is, the sum, and what is refused.

    /proc/meminfo ──────────────┐
    this cgroup, its ancestors ─┼─► read_memory ─► Memory ─┐
    free space of /dev/shm ─────┘                          ├─► size ─► Sizing: slots, one line, warnings
    slot size, experts, top-k, dense part, slots given ────┘       └─► or an error with the figures

Facts first.  MemAvailable is the host's, also in a container of 64 MB; what such a container may have is
its cgroup's limit less its use, and page cache that nobody has touched lately counts as use although the
kernel gives it back.  A limit may stand on any ancestor.  Whoever fills shared memory past a limit is
killed, with no message; whoever fills a full /dev/shm gets SIGBUS.  So all three are looked at before a
page is touched, and what does not fit is refused in words.

The sum, all in bytes:

    budget = available - dense part - engine (2 GiB) - max(RAM / 8, 4 GiB)
    budget is not below a quarter of free memory, and then not above half of RAM
    slots  = budget / slot size, then clamped to [64, 4096], to the vault's experts, to /dev/shm

`size` is pure: the same figures give the same ring; it is asked once, at start, and its answer is kept (a
budget that follows memory drifts from run to run and oscillates).  It has to be asked when a dead ring of
the same name has been removed, since that ring's pages count as use, and not at all for an adopted one.

Where a figure that may limit us cannot be read or makes no sense, that is noted, `Memory.certain` is
False, and the sum is replaced by its own conservative floor: a quarter of free memory, as far as that is
known, and the least ring where not even that is.  Nothing that stands in a /proc or cgroup tree makes
`read_memory` raise.

A given number of slots is exact: it is taken as it is or refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from smoe_mp import runtime
from smoe_mp.errors import ConfigError, SegmentSpaceError
from smoe_mp.runtime import human_bytes
from smoe_mp.sources.base import SCOUT_SUFFIX, Source

MIB = 1 << 20
GIB = 1 << 30

#: What automatic sizing takes at least and at most.
LEAST_SLOTS, MOST_SLOTS = 64, 4096
#: The most that can be given (ring.slots).
GIVEN_MOST_SLOTS = 65535
#: The slot word has so many holder bits.
MOST_CLIENTS = 32
#: What automatic sizing leaves free in /dev/shm, for others.
SHM_SPARE_BYTES = 64 * MIB
ENGINE_BYTES = 2 * GIB
SYSTEM_LEAST_BYTES = 4 * GIB

# cgroup v1 says "no limit" by the largest multiple of the page below 2^63.
_UNLIMITED = 1 << 62
_READ_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """A control group with a memory limit: this process's, or an ancestor.

    `name` is its path, `file` where the limit stands.  `use_bytes` is None where it cannot be read.
    """

    name: str
    file: str
    limit_bytes: int
    use_bytes: int | None
    inactive_file_bytes: int = 0

    @property
    def headroom_bytes(self) -> int:
        """limit - (use - inactive file pages), not below 0; the limit where the use is unknown."""
        return max(0, self.limit_bytes - max(0, (self.use_bytes or 0) - self.inactive_file_bytes))

    def __str__(self) -> str:
        use = "unknown" if self.use_bytes is None else human_bytes(self.use_bytes)
        return (
            f"cgroup {self.name}: {self.file} {human_bytes(self.limit_bytes)} - use {use}"
            f" + inactive file pages {human_bytes(self.inactive_file_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """What memory there is, in bytes; None where that is unknown (and `certain` then False).

    Unknown figures only loosen: `room_bytes` is the least of those that are known.
    `total_bytes`, `available_bytes` and `free_bytes` are the host's; `available_name` says who says so.
    `shm_free_bytes` None: no limit is known.  `notes` say what could not be read or made no sense.
    """

    total_bytes: int | None
    available_bytes: int | None
    free_bytes: int | None
    groups: tuple[Group, ...] = ()
    shm_free_bytes: int | None = None
    notes: tuple[str, ...] = ()
    certain: bool = True
    available_name: str = "MemAvailable"

    @property
    def ram_bytes(self) -> int | None:
        """The smaller of the host's memory and the limits of the cgroups."""
        return min(
            (n for n in (self.total_bytes, *(g.limit_bytes for g in self.groups)) if n is not None),
            default=None,
        )

    @property
    def room_bytes(self) -> int | None:
        """What can be had: the smaller of MemAvailable and the headroom of every cgroup."""
        return self._room()[0]

    @property
    def room_name(self) -> str:
        """Who sets `room_bytes`, with the figures."""
        return self._room()[1]

    @property
    def free_room_bytes(self) -> int:
        """Free memory as far as it is known, in this cgroup too."""
        return min(self.free_bytes or 0, self.room_bytes or 0)

    def _room(self) -> tuple[int | None, str]:
        rooms = [(g.headroom_bytes, str(g)) for g in self.groups]
        if self.total_bytes is not None:
            rooms.insert(0, (self.total_bytes, "all memory"))
        if self.available_bytes is not None:
            rooms.insert(0, (self.available_bytes, self.available_name))
        return min(rooms, key=lambda room: room[0], default=(None, "unknown"))


@dataclass(frozen=True, slots=True)
class Reserve:
    """What is not the ring's, in bytes: `scout_bytes` the dense part (`reserve.scout_mb`, by default
    what `dense_bytes` says), `engine_bytes` the engine's overhead."""

    scout_bytes: int = 0
    engine_bytes: int = ENGINE_BYTES


@dataclass(frozen=True, slots=True)
class Sizing:
    """A ring that fits.

    `line` shows the sum; `warnings` and `notes` are one line each.  `budget_bytes` is the sum's, None where
    the slots were given; `allowed_slots` is what memory would allow as `ring.slots`.  `clients`: how many
    can each hold one layer at once; None where the top-k is unknown.  `wasted_bytes`: what stays empty of the
    slots because experts differ in size (`segments.wasted_bytes`).
    """

    slots: int
    slot_bytes: int
    control_bytes: int
    given: bool
    budget_bytes: int | None
    allowed_slots: int
    clients: int | None
    line: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wasted_bytes: int = 0

    @property
    def data_bytes(self) -> int:
        return self.slots * self.slot_bytes


# --- the sum ---------------------------------------------------------------------------------------------


def size(
    memory: Memory,
    reserve: Reserve,
    *,
    slot_bytes: int,
    n_experts: int,
    layers: int,
    top_k: int,
    slots_given: int = 0,
    control_bytes: int = 0,
) -> Sizing:
    """The ring for a vault of `n_experts` experts in `layers` MoE layers; `top_k` 0: unknown.

    `slots_given` 0: automatic.  `control_bytes` is the control segment's size, for the slots given or else
    for MOST_SLOTS or all experts, whichever is less.  Raises ConfigError where one layer of one client
    needs more slots than were given, and SegmentSpaceError where the ring does not fit in memory, a cgroup
    or /dev/shm.
    """
    ask = _Ask(
        slot_bytes=slot_bytes,
        n_experts=n_experts,
        layers=layers,
        top_k=top_k,
        memory=memory,
        reserve=reserve,
        control_bytes=control_bytes,
    )
    return ask.given(slots_given) if slots_given else ask.automatic()


@dataclass(frozen=True, slots=True)
class _Ask:
    slot_bytes: int
    n_experts: int
    layers: int
    top_k: int
    memory: Memory
    reserve: Reserve
    control_bytes: int

    @property
    def least(self) -> int:
        """What one layer of one client needs: top-k + 1, and never more than all experts."""
        return min(self.top_k + 1, self.n_experts)

    def clients(self, slots: int) -> int | None:
        if slots >= self.n_experts:
            return MOST_CLIENTS
        return min(MOST_CLIENTS, slots // self.least) if self.top_k else None

    def need(self, slots: int) -> int:
        return slots * self.slot_bytes + self.control_bytes

    def fitting(self, room: int) -> int:
        """Slots that fit in `room` bytes beside the control segment."""
        return max(0, room - self.control_bytes) // self.slot_bytes

    # --- given ---

    def given(self, slots: int) -> Sizing:
        if slots < self.least:
            raise ConfigError(
                f"ring.slots = {slots}: one layer of one client needs {self._least_text()}: no client fits;"
                f" give at least slots = {self.least}, which take {human_bytes(self.need(self.least))}"
            )
        self._check_fits(slots, "as given")
        budget, _ = _budget(self)
        warnings = self._warnings(slots)
        if self.memory.room_bytes is not None and slots > max(LEAST_SLOTS, budget // self.slot_bytes):
            warnings.append(
                f"{slots} slots were given, {_human(slots * self.slot_bytes)}; the sum would allow"
                f" {_human(budget)}: what is left for the engine and the system may be swapped or killed"
            )
        notes = list(self.memory.notes)
        if slots > self.n_experts:
            notes.append(f"{slots} slots for {self.n_experts} experts: {slots - self.n_experts} stay empty")
        room = self.memory.room_bytes
        had = "unknown" if room is None else human_bytes(room)
        line = (
            f"{self._ring_text(slots)}, as given; {had} available ({self.memory.room_name})"
            f"{self._shm_text()}{self._clients_text(slots)}"
        )
        return self._sizing(
            slots,
            given=True,
            budget_bytes=None,
            allowed_slots=max(slots, self._allowed(budget)),
            line=line,
            warnings=tuple(warnings),
            notes=tuple(notes),
        )

    # --- automatic ---

    def automatic(self) -> Sizing:
        budget, text = _budget(self)
        by_memory = budget // self.slot_bytes
        low = max(LEAST_SLOTS, self.least)
        slots = min(max(by_memory, low), MOST_SLOTS)
        bound = "" if by_memory >= low else f"; raised to {slots}, the least"
        allowed = max(self._allowed(budget), min(slots, self.n_experts))
        if min(by_memory, self.n_experts) > MOST_SLOTS:
            bound = (
                f"; cut to {MOST_SLOTS}, the most without being told: memory would allow slots = {allowed}"
            )
        if slots > self.n_experts:
            slots = self.n_experts
            bound = f"; no more than the vault's {slots} experts"
        slots, bound = self._within_shm(slots, bound, allowed)
        if slots < self.least:
            raise self._too_little_shm(self.least, "what one layer of one client needs", SHM_SPARE_BYTES)
        self._check_fits(slots, "the least that is taken" if slots > by_memory else "by the sum")
        line = f"{self._ring_text(slots)}: {text}{bound}{self._clients_text(slots)}"
        return self._sizing(
            slots,
            given=False,
            budget_bytes=budget,
            allowed_slots=allowed,
            line=line,
            warnings=tuple(self._warnings(slots)),
            notes=self.memory.notes,
        )

    def _allowed(self, budget: int) -> int:
        return min(budget // self.slot_bytes, self.n_experts, GIVEN_MOST_SLOTS)

    def _within_shm(self, slots: int, bound: str, allowed: int) -> tuple[int, str]:
        free = self.memory.shm_free_bytes
        if free is None:
            return slots, bound
        by_shm = self.fitting(free - SHM_SPARE_BYTES)
        if by_shm >= slots:
            return slots, bound
        return by_shm, (
            f"; cut to {by_shm} by /dev/shm ({human_bytes(free)} free - {human_bytes(self.control_bytes)}"
            f" control - {human_bytes(SHM_SPARE_BYTES)}): memory would allow slots = {allowed};"
            f" {_SHM_REMEDY}"
        )

    # --- refusals and texts ---

    def _check_fits(self, slots: int, why: str) -> None:
        room, shm = self.memory.room_bytes, self.memory.shm_free_bytes
        if room is not None and self.need(slots) > room:
            raise SegmentSpaceError(
                f"{self._need_text(slots, why)}, but {human_bytes(room)} can be had"
                f" ({self.memory.room_name}): {self._what_fits()}, or more memory (end other programs;"
                " in a container raise its limit, `--memory` or `mem_limit:`)"
            )
        if shm is not None and self.need(slots) > shm:
            raise self._too_little_shm(slots, why)

    def _too_little_shm(self, slots: int, why: str, spare: int = 0) -> SegmentSpaceError:
        free = self.memory.shm_free_bytes or 0
        spared = f", and automatic sizing leaves {human_bytes(spare)} of it to others" if spare else ""
        return SegmentSpaceError(
            f"{self._need_text(slots, why)}, but the shared-memory file system (/dev/shm) has"
            f" {human_bytes(free)} free{spared}: {self._what_fits()}, or more room ({_SHM_REMEDY})"
        )

    def _what_fits(self) -> str:
        """A remedy: the most slots that would be taken if they were given."""
        rooms = (self.memory.room_bytes, self.memory.shm_free_bytes)
        fitting = min([GIVEN_MOST_SLOTS, *(self.fitting(room) for room in rooms if room is not None)])
        if fitting < self.least:
            return (
                f"not even {self._least_text()}, {human_bytes(self.need(self.least))}, fit, nor does any"
                " client: take a vault with smaller experts"
            )
        clients = self.clients(fitting)
        told = "" if clients is None else f" ({_clients(clients)})"
        return f"give at most slots = {fitting}{told}"

    def _least_text(self) -> str:
        unit = "slot" if self.least == 1 else "slots"
        of = f"top-k {self.top_k} + 1" if self.least > self.top_k else "all experts"
        return f"{self.least} {unit} ({of})"

    def _need_text(self, slots: int, why: str) -> str:
        return (
            f"ring of {slots} slots ({why}): {slots} x {human_bytes(self.slot_bytes)} +"
            f" {human_bytes(self.control_bytes)} control = {human_bytes(self.need(slots))}"
        )

    def _ring_text(self, slots: int) -> str:
        return f"{slots} slots x {human_bytes(self.slot_bytes)} = {human_bytes(slots * self.slot_bytes)}"

    def _shm_text(self) -> str:
        free = self.memory.shm_free_bytes
        return "" if free is None else f", /dev/shm {human_bytes(free)} free"

    def _clients_text(self, slots: int) -> str:
        clients = self.clients(slots)
        return "" if clients is None else f"; {_clients(clients)}"

    def _warnings(self, slots: int) -> list[str]:
        cycle = self.layers * self.top_k
        if slots >= min(cycle, self.n_experts):
            return []
        return [
            f"{slots} slots are less than one token's cycle of {self.layers} MoE layers x top-k {self.top_k}"
            f" = {cycle}: nothing survives from token to token; {cycle} slots would take"
            f" {human_bytes(self.need(cycle))}"
        ]

    def _sizing(self, slots: int, **rest: Any) -> Sizing:
        return Sizing(
            slots=slots,
            slot_bytes=self.slot_bytes,
            control_bytes=self.control_bytes,
            clients=self.clients(slots),
            **rest,
        )


_SHM_REMEDY = "`mount -o remount,size=... /dev/shm`; in a container `--shm-size` or `shm_size:`"


def _budget(ask: _Ask) -> tuple[int, str]:
    """The bytes for slots, and the sum in words."""
    memory, reserve = ask.memory, ask.reserve
    room, ram, quarter = memory.room_bytes, memory.ram_bytes, memory.free_room_bytes // 4
    if room is None:
        return 0, "how much memory there is is unknown"
    if memory.certain and ram is not None:
        system = max(ram // 8, SYSTEM_LEAST_BYTES)
        budget = room - reserve.scout_bytes - reserve.engine_bytes - system
        text = (
            f"{human_bytes(room)} available ({memory.room_name}) - {human_bytes(reserve.scout_bytes)} dense"
            f" part - {human_bytes(reserve.engine_bytes)} engine - {human_bytes(system)} system"
            f" (RAM {human_bytes(ram)}) = {_human(budget)}"
        )
        if budget < quarter:
            budget, text = quarter, f"{text}, raised to a quarter of free memory, {human_bytes(quarter)}"
    else:
        budget = quarter
        text = f"not every limit could be read, so a quarter of free memory, {human_bytes(quarter)}"
    if ram is not None and budget > ram // 2:
        budget, text = ram // 2, f"{text}, cut to half of RAM, {human_bytes(ram // 2)}"
    fits = max(0, room - ask.control_bytes)
    if budget > fits:
        budget, text = fits, f"{text}, cut to what fits beside the control segment, {human_bytes(fits)}"
    return budget, text


def _human(count: int) -> str:
    return f"-{human_bytes(-count)}" if count < 0 else human_bytes(count)


def _clients(count: int) -> str:
    return f"{count} client{'' if count == 1 else 's'} fit{'s' if count == 1 else ''}"


# --- the dense part --------------------------------------------------------------------------------------


def dense_bytes(source: Source) -> int:
    """Bytes of what the engine keeps of the model beside the ring: everything that is no routed expert.

    That is the files' sizes less the experts' bytes; a `.smoe` vault has its dense part in a file of its
    own, NAME.scout.safetensors beside NAME.smoe or NAME.q4.smoe, which is counted if it is there.
    """
    experts = sum(extent.length for expert in source.experts for extent in expert.extents)
    return max(0, sum(file.size for file in source.files) - experts) + _scout_file_bytes(source.path)


def _scout_file_bytes(vault: Path) -> int:
    if vault.suffix != ".smoe":
        return 0
    for stem in dict.fromkeys((vault.stem, vault.stem.rpartition(".")[0] or vault.stem)):
        try:
            return vault.with_name(stem + SCOUT_SUFFIX).stat().st_size
        except OSError:
            continue
    return 0


# --- reading ---------------------------------------------------------------------------------------------


def shm_free_bytes(folder: Path) -> int | None:
    """Free bytes of the file system at `folder`; None where there is none, or where it has no limit."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # a tmpfs of size=0 has no limit


def read_memory(
    root: Path = Path("/"),
    *,
    level: Callable[[], int] | None = None,
    shm_free: Callable[[Path], int | None] = shm_free_bytes,
) -> Memory:
    """What memory this process may have, by the files beneath `root`.  Never raises for what they say.

    `level`: on macOS, what gives kern.memorystatus_level (percent, negative where it fails); it is used
    instead of /proc.
    """
    if level is not None:
        return _by_level(level())
    reader = _Reader(root)
    total, available, free = reader.meminfo()
    return Memory(
        total_bytes=total,
        available_bytes=available,
        free_bytes=free,
        groups=reader.groups(),
        shm_free_bytes=shm_free(root / "dev/shm"),
        notes=tuple(reader.notes),
        certain=reader.certain,
    )


def _by_level(percent: int) -> Memory:
    name = "kern.memorystatus_level"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not 0 <= percent <= 100:
        return Memory(total, None, None, notes=(f"{name} is {percent}: not a percentage",), certain=False)
    available = total * percent // 100
    return Memory(total, available, available, available_name=f"{name} {percent}%")


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted cgroup hierarchy: `top`, the folder of it that is mounted, at `point`."""

    version: int
    top: str
    point: str
    memory: bool


@dataclass(slots=True)
class _Reader:
    """One look at a tree; what it doubts goes to `notes`."""

    root: Path
    notes: list[str] = field(default_factory=list)
    certain: bool = True

    def doubt(self, path: str, what: str) -> None:
        """Note that a figure which may limit us is unknown."""
        self.certain = False
        self.notes.append(f"{runtime.printable(path)}: {what}; sized with care")

    def text(self, path: str) -> str | None:
        """The file at `path`, None where there is none; unreadable: doubted."""
        try:
            with open(self.root / path.lstrip("/"), "rb") as file:
                return file.read(_READ_MOST).decode("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:  # ValueError: a NUL in a path from a damaged mountinfo
            self.doubt(path, f"cannot be read: {getattr(error, 'strerror', None) or error}")
            return None

    # --- the host ---

    def meminfo(self) -> tuple[int | None, int | None, int | None]:
        """Total, available and free bytes."""
        path = "/proc/meminfo"
        text = self.text(path)
        if text is None:
            self.doubt(path, "not there")
            return None, None, None
        total, free = self._field(text, "MemTotal"), self._field(text, "MemFree")
        if not re.search(r"^MemAvailable:", text, re.MULTILINE) and free is not None:
            self.notes.append(f"{path}: no MemAvailable; MemFree is taken")
            return total, free, free
        return total, self._field(text, "MemAvailable"), free

    def _field(self, text: str, key: str) -> int | None:
        found = re.search(rf"^{key}:[ \t]*([0-9]{{1,15}}) kB$", text, re.MULTILINE)
        if found is None:
            self.doubt("/proc/meminfo", f"no sensible {key}")
            return None
        return int(found[1]) * 1024

    # --- control groups ---

    def groups(self) -> tuple[Group, ...]:
        """This process's cgroup and its ancestors as far as they can be seen, those with a limit."""
        text = self.text("/proc/self/cgroup")
        mounts = list(self._mounts())
        if text is None or not text.strip():
            if any(m.memory for m in mounts):
                self.doubt("/proc/self/cgroup", "empty or not there, but cgroups are mounted")
            return ()
        found = self._own_path(text)
        if found is None:
            return ()
        version, own = found
        located = self._locate(own, [m for m in mounts if m.memory and m.version == version])
        if located is None:
            return ()
        point, inner = located
        limited = self._v1 if version == 1 else self._v2
        folders = [inner, *inner.parents]
        groups = (limited(f"{point}/{f}".removesuffix("/."), f == inner) for f in folders)
        return tuple(g for g in groups if g is not None)

    def _own_path(self, text: str) -> tuple[int, str] | None:
        """Version and path of the cgroup that accounts this process's memory.

        A controller is in one hierarchy only: where a v1 hierarchy has memory, v2 has not.
        """
        unified = None
        for line in text.splitlines():
            number, colon, rest = line.partition(":")
            controllers, colon2, path = rest.partition(":")
            if not (colon and colon2 and path.startswith("/")):
                self.doubt("/proc/self/cgroup", f"makes no sense: {_shown(line)}")
            elif "memory" in controllers.split(","):
                return 1, path
            elif number == "0" and not controllers:
                unified = 2, path
        return unified

    def _mounts(self) -> Iterator[_Mount]:
        for line in (self.text("/proc/self/mountinfo") or "").splitlines():
            left, dash, right = line.partition(" - ")
            place, kind = left.split(" "), right.split(" ")
            if not dash or len(place) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
                continue
            version = 2 if kind[0] == "cgroup2" else 1
            memory = version == 2 or "memory" in kind[2].split(",")
            yield _Mount(version, _unescaped(place[3]), _unescaped(place[4]), memory)

    def _locate(self, own: str, mounts: list[_Mount]) -> tuple[str, PurePosixPath] | None:
        """The mount point that shows the cgroup `own`, and the cgroup's path beneath it.

        Paths in both files are seen from this process's cgroup namespace, so a mount of our own folder has
        that folder, or "/" in a namespace, as its top; a top of ".."s alone lies above the namespace.
        """
        above = None
        for mount in mounts:
            inner = _beneath(own, mount.top)
            if inner is not None and os.path.isdir(
                self.root / mount.point.lstrip("/") / inner
            ):  # False for absurd names too
                return mount.point, inner
            if above is None and (inner is not None or set(mount.top.split("/")) <= {"", ".."}):
                above = mount.point
        self.doubt(f"cgroup {own}", "not visible beneath any mounted cgroup hierarchy with memory")
        return None if above is None else (above, PurePosixPath())

    def _number(self, path: str) -> int | None:
        """A limit or a use; None for "max", v1's unlimited and an absent file."""
        text = self.text(path)
        if text is None or text.strip() == "max":
            return None
        if not re.fullmatch(r"[0-9]{1,20}", text.strip(), re.ASCII):
            self.doubt(path, f"makes no sense: {_shown(text)}")
            return None
        value = int(text)
        return None if value >= _UNLIMITED else value

    def _stat(self, path: str) -> Mapping[str, int]:
        pairs = re.findall(r"^([a-z0-9_]+) ([0-9]{1,20})$", self.text(path) or "", re.MULTILINE | re.ASCII)
        return {key: int(value) for key, value in pairs}

    def _v2(self, folder: str, _own: bool) -> Group | None:
        limits = {name: self._number(f"{folder}/{name}") for name in ("memory.max", "memory.high")}
        return self._group(folder, limits, "memory.current", ("inactive_file",))

    def _v1(self, folder: str, own: bool) -> Group | None:
        if not own and (self.text(f"{folder}/memory.use_hierarchy") or "1").strip() == "0":
            return None  # does not count its children
        limits = {"memory.limit_in_bytes": self._number(f"{folder}/memory.limit_in_bytes")}
        if own:  # ancestors that a container does not see show here
            hierarchical = self._stat(f"{folder}/memory.stat").get("hierarchical_memory_limit", _UNLIMITED)
            limits["hierarchical_memory_limit"] = None if hierarchical >= _UNLIMITED else hierarchical
        return self._group(folder, limits, "memory.usage_in_bytes", ("total_inactive_file", "inactive_file"))

    def _group(
        self, folder: str, limits: Mapping[str, int | None], use_file: str, inactive: tuple[str, ...]
    ) -> Group | None:
        known = {name: limit for name, limit in limits.items() if limit is not None}
        if not known:
            return None
        name = min(known, key=lambda file: known[file])  # the first of equals
        use = self._number(f"{folder}/{use_file}")
        if use is None:
            self.doubt(f"{folder}/{use_file}", "not known how much of the limit is used")
        where, stat = runtime.printable(folder), self._stat(f"{folder}/memory.stat")
        found = [stat[key] for key in inactive if key in stat]
        if not found:
            self.notes.append(f"{where}/memory.stat: no {inactive[-1]}; all page cache counts")
        return Group(where, name, known[name], use, found[0] if found else 0)


def _beneath(path: str, top: str) -> PurePosixPath | None:
    """`path` relative to `top`; None where it is not beneath it, as far as names tell."""
    parts, tops = PurePosixPath(path).parts, PurePosixPath(top).parts
    if parts[: len(tops)] != tops or ".." in parts[len(tops) :]:
        return None
    return PurePosixPath(*parts[len(tops) :])


def _unescaped(name: str) -> str:
    r"""A path of mountinfo, where blanks, line ends and backslashes are written \ooo."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found[1], 8)), name)


def _shown(text: str) -> str:
    return "empty" if not text.strip() else repr(text.strip()[:40])
