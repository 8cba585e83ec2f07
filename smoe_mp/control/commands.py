"""The commands: one class each, with its message, its CLI form, its documentation and its execution.

The fields of a class are the fields of its message, its docstring is its documentation, `cli` and `example`
its form on the command line, `result` the struct it answers with, and `run` does it.  A new command is a
new class in `COMMANDS`, and nothing else.

`run` works on a `System`: what the supervisor says of itself, as plain data, which becomes a typed result
here.  So the supervisor knows nothing of the control plane, and a test can do without a supervisor.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from smoe_mp.control.protocol import DEADLINE_MS_MAX
from smoe_mp.errors import ConfigError

R = TypeVar("R", bound=Struct)


class System(Protocol):
    """What commands work on.  Each method answers at once."""

    def identity(self) -> dict[str, Any]:
        """name, pid, version, state."""

    def status(self) -> dict[str, Any]:
        """The fields of `StatusResult`, less `control`."""

    def request_stop(self, keep_ring: bool = False) -> dict[str, Any]:
        """Have the system stop as soon as the reply is on its way; the fields of `StopResult`."""

    def set_workers(self, count: int) -> dict[str, Any]:
        """Change the number of workers; the fields of `WorkersResult`."""

    def prewarm(self, action: str, trickle_ms: int | None = None) -> dict[str, Any]:
        """Steer the prewarm process; the fields of `PrewarmStatus`."""


# --- results -------------------------------------------------------------------------------------------


class PingResult(Struct, frozen=True):
    name: str
    pid: int
    version: str
    state: str


class VaultStatus(Struct, frozen=True):
    """The model; `checksums`: experts that have one; `verify`: reads are held against them."""

    path: str
    format: str
    experts: int
    bytes: int
    checksums: int = 0
    verify: bool = False


class FileStatus(Struct, frozen=True):
    """A source file and how it is read: the mode that was achieved, not the one that was asked for, and
    the `refusal` of direct reads where there was one."""

    path: str
    mode: str
    size: int
    refusal: str = ""


class RingStatus(Struct, frozen=True):
    """The ring's size in slots and bytes, the pages that it got, how much of it is locked and how much is
    in memory now, and its slots by state.  `wasted_bytes`: what stays empty of the slots because experts
    differ in size, with the mean expert in each."""

    slots: int
    slot_bytes: int
    data_bytes: int
    pages: str
    census: dict[str, int]
    locked_bytes: int = 0
    resident_bytes: int = 0
    wasted_bytes: int = 0


class WorkerStatus(Struct, frozen=True):
    """A worker; `slot` is the one that it reads into, for `reading_s` seconds, None while it is idle.
    `stuck`: for longer than ring.read_deadline_ms."""

    id: int
    pid: int
    alive: bool
    slot: int | None
    reading_s: float | None = None
    stuck: bool = False


class ClientStatus(Struct, frozen=True):
    id: int
    pid: int
    alive: bool
    label: str
    reserved: int


class PrewarmStatus(Struct, frozen=True):
    """What the prewarm process does: `done` of the `goal` experts of its pass, the pause between two reads,
    the file of the popularity, and the clients whose requests it rests for."""

    state: str
    done: int
    goal: int
    trickle_ms: float
    histogram: str
    busy_clients: list[int]


class WorkersResult(Struct, frozen=True):
    """How many workers there were to be before, and from now on."""

    before: int
    count: int


class ConfigValue(Struct, frozen=True):
    """An effective value and where it came from: "default", "file" or a flag."""

    key: str
    value: bool | int | str
    origin: str


class StatusResult(Struct, frozen=True, kw_only=True):
    """Everything there is to know; `hit_rate` is None before the first demand."""

    name: str
    pid: int
    version: str
    state: str
    uptime_s: float
    vault: VaultStatus
    files: list[FileStatus]
    ring: RingStatus
    health: str
    workers: list[WorkerStatus]
    prewarm: PrewarmStatus
    clients: list[ClientStatus]
    counters: dict[str, int]
    hit_rate: float | None
    config: list[ConfigValue]
    warnings: list[str]
    control: dict[str, int] = {}


class StopResult(Struct, frozen=True):
    """What the system had done when it was told to stop."""

    name: str
    pid: int
    uptime_s: float
    counters: dict[str, int]
    hit_rate: float | None


# --- commands ------------------------------------------------------------------------------------------


class Command(Struct, Generic[R], tag_field="command", forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of all commands: what every request has."""

    v: Literal[1] = 1
    id: str | int | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)] = 5000

    result: ClassVar[type[Struct]]
    cli: ClassVar[str] = ""  # "": no form on the command line
    example: ClassVar[str] = ""

    def run(self, system: System, control: dict[str, int]) -> R:
        """Do it; `control` are the control plane's own counters.  Raises SmoeError."""
        raise NotImplementedError


class Ping(Command[PingResult], tag="ping", frozen=True, kw_only=True):
    """Ask whether the supervisor answers, and who it is."""

    result = PingResult

    def run(self, system: System, control: dict[str, int]) -> PingResult:
        return msgspec.convert(system.identity(), PingResult)


class Status(Command[StatusResult], tag="status", frozen=True, kw_only=True):
    """Show a running system: vault, ring, workers, clients, counters, settings."""

    result = StatusResult
    cli = "status NAME [--json] [--watch [S]]"
    example = "smoe-mp status smoe-demo --json"

    def run(self, system: System, control: dict[str, int]) -> StatusResult:
        return msgspec.convert({**system.status(), "control": control}, StatusResult)


class Stop(Command[StopResult], tag="stop", frozen=True, kw_only=True):
    """Stop a running system in order: no new demand, reads finish, prewarm is joined, the histogram is
    saved, the ring is removed, or with keep_ring left to the next `smoe-mp up`."""

    keep_ring: bool = False

    result = StopResult
    cli = "down NAME [--keep-ring] [--timeout S]"
    example = "smoe-mp down smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> StopResult:
        return msgspec.convert(system.request_stop(self.keep_ring), StopResult)


class Workers(Command[WorkersResult], tag="workers", frozen=True, kw_only=True):
    """Change the number of worker processes of a running system; surplus ones finish their read."""

    count: Annotated[int, Meta(ge=1, le=127)]

    result = WorkersResult
    cli = "workers NAME COUNT"
    example = "smoe-mp workers smoe-demo 4"

    def run(self, system: System, control: dict[str, int]) -> WorkersResult:
        return msgspec.convert(system.set_workers(self.count), WorkersResult)


class Prewarm(Command[PrewarmStatus], tag="prewarm", frozen=True, kw_only=True):
    """Steer the prewarm process: begin a pass anew, pause, resume, or set the pause between two reads."""

    action: Literal["run", "pause", "resume", "trickle"]
    trickle_ms: Annotated[int, Meta(ge=0, le=60_000)] | None = None

    result = PrewarmStatus
    cli = "prewarm NAME run|pause|resume|trickle [--ms N]"
    example = "smoe-mp prewarm smoe-demo pause"

    def run(self, system: System, control: dict[str, int]) -> PrewarmStatus:
        if (self.action == "trickle") != (self.trickle_ms is not None):
            raise ConfigError("prewarm: trickle takes trickle_ms, the other actions do not")
        return msgspec.convert(system.prewarm(self.action, self.trickle_ms), PrewarmStatus)


AnyCommand = Ping | Status | Stop | Workers | Prewarm
COMMANDS: dict[str, type[AnyCommand]] = {
    "ping": Ping,
    "status": Status,
    "stop": Stop,
    "workers": Workers,
    "prewarm": Prewarm,
}


def help_text(command: type[AnyCommand]) -> str:
    """The command's documentation with its example, for the command line."""
    return f"{inspect.getdoc(command)}\n\nExample: {command.example}"
