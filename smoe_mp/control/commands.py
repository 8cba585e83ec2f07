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

R = TypeVar("R", bound=Struct)


class System(Protocol):
    """What commands work on.  Each method answers at once."""

    def identity(self) -> dict[str, Any]:
        """name, pid, version, state."""

    def status(self) -> dict[str, Any]:
        """The fields of `StatusResult`, less `control`."""

    def request_stop(self) -> dict[str, Any]:
        """Have the system stop as soon as the reply is on its way; the fields of `StopResult`."""


# --- results -------------------------------------------------------------------------------------------


class PingResult(Struct, frozen=True):
    name: str
    pid: int
    version: str
    state: str


class VaultStatus(Struct, frozen=True):
    path: str
    format: str
    experts: int
    bytes: int


class FileStatus(Struct, frozen=True):
    """A source file and how it is read: the mode that was achieved, not the one that was asked for, and
    the `refusal` of direct reads where there was one."""

    path: str
    mode: str
    size: int
    refusal: str = ""


class RingStatus(Struct, frozen=True):
    """The ring's size in slots and bytes, the pages that it got, and its slots by state."""

    slots: int
    slot_bytes: int
    data_bytes: int
    pages: str
    census: dict[str, int]


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


class ConfigValue(Struct, frozen=True):
    """An effective value and where it came from: "default", "file" or a flag."""

    key: str
    value: int | str
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
    workers: list[WorkerStatus]
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
    cli = "status NAME [--json]"
    example = "smoe-mp status smoe-demo --json"

    def run(self, system: System, control: dict[str, int]) -> StatusResult:
        return msgspec.convert({**system.status(), "control": control}, StatusResult)


class Stop(Command[StopResult], tag="stop", frozen=True, kw_only=True):
    """Stop a running system in order: no new demand, reads finish, the ring is removed."""

    result = StopResult
    cli = "down NAME [--timeout S]"
    example = "smoe-mp down smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> StopResult:
        return msgspec.convert(system.request_stop(), StopResult)


AnyCommand = Ping | Status | Stop
COMMANDS: dict[str, type[AnyCommand]] = {"ping": Ping, "status": Status, "stop": Stop}


def help_text(command: type[AnyCommand]) -> str:
    """The command's documentation with its example, for the command line."""
    return f"{inspect.getdoc(command)}\n\nExample: {command.example}"
