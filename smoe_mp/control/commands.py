"""The commands: one class each, with its message, its CLI form, its documentation and its execution.

The fields of a class are the fields of its message, its docstring is its documentation, `cli` and `example`
its form on the command line, `result` the struct it answers with, and `run` does it.  A new command is a
new class in `COMMANDS`, and nothing else.

`run` works on a `System`: what the supervisor says of itself, as plain data, which becomes a typed result
here.  So the supervisor knows nothing of the control plane, and a test can do without a supervisor.

Nothing in the supervisor waits.  What takes time (a demand, a drain) answers with a `Later`, which the server
asks again at its turns until it has a result or the asker's deadline has passed.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from smoe_mp.control.protocol import DEADLINE_MS_MAX
from smoe_mp.errors import ConfigError

R = TypeVar("R", bound=Struct)


#: Layer and expert, as the model numbers them.
Pair = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], Annotated[int, Meta(ge=0, lt=1 << 31)]]
Pairs = Annotated[list[Pair], Meta(min_length=1, max_length=65_535)]


class Later(Protocol):
    """A command under way."""

    def poll(self) -> dict[str, Any] | None:
        """The result's fields, or None: not yet.  Raises SmoeError when it has failed."""

    def cancel(self) -> None:
        """Nobody waits any more: give up what is held for it."""


class System(Protocol):
    """What commands work on.  Each method answers at once."""

    def identity(self) -> dict[str, Any]:
        """name, pid, version, state."""

    def status(self, memory: bool = True) -> dict[str, Any]:
        """The fields of `StatusResult`, less `control`; `memory`: also how much of the ring is in memory."""

    def request_stop(self, keep_ring: bool = False) -> dict[str, Any]:
        """Have the system stop as soon as the reply is on its way; the fields of `StopResult`."""

    def set_workers(self, count: int) -> dict[str, Any]:
        """Change the number of workers; the fields of `WorkersResult`."""

    def prewarm(self, action: str, trickle_ms: int | None = None) -> dict[str, Any]:
        """Steer the prewarm process; the fields of `PrewarmStatus`."""

    def demand(self, pairs: list[Pair]) -> Later:
        """Have experts read; the fields of `DemandResult`."""

    def speculate(self, pairs: list[Pair]) -> dict[str, Any]:
        """Guess experts; the fields of `SpeculateResult`."""

    def busy(self, lease_ms: int) -> dict[str, Any]:
        """A request begins, or (0) ends; the fields of `BusyResult`."""

    def histogram(
        self, action: str, counts: list[tuple[int, int, int]], first: int, most: int
    ) -> dict[str, Any]:
        """Look at the popularity or change it; the fields of `HistogramResult`."""

    def verify(self, action: str) -> dict[str, Any]:
        """Check the model's files in the background; the fields of `VerifyStatus`."""

    def drain(self, resume: bool) -> Later:
        """Serve no more demand, or again; the fields of `DrainResult`."""


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
    in memory now (None: not looked at), and its slots by state.  `wasted_bytes`: what stays empty of the
    slots because experts differ in size, with the mean expert in each."""

    slots: int
    slot_bytes: int
    data_bytes: int
    pages: str
    census: dict[str, int]
    locked_bytes: int = 0
    resident_bytes: int | None = None
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


class LatencyStatus(Struct, frozen=True):
    """A histogram of lengths in seconds: quantiles, which are as exact as the buckets are narrow (None: there
    are none), and `buckets`: how many took at most 1 µs, 2 µs, 4 µs, ..., 2^26 µs (67 s), and longer."""

    count: int = 0
    sum_s: float = 0.0
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    buckets: list[int] = []


class DemandStatus(Struct, frozen=True):
    """Experts that were demanded, by how they were found: resident (`hits`), loading for a demand (`joins`),
    loading or queued as a guess (`promoted`), not there (`misses`).  `coverage`: the share that was resident;
    `wait`: the waits for those that were not."""

    demanded: int = 0
    hits: int = 0
    joins: int = 0
    promoted: int = 0
    misses: int = 0
    coverage: float | None = None
    wait: LatencyStatus = LatencyStatus()


class Figures(Struct, frozen=True, kw_only=True):
    """What was counted; `phases`: the demand as the clients told it apart, "prefill", "decode", "unsaid"."""

    counters: dict[str, int] = {}
    demand: DemandStatus = DemandStatus()
    phases: dict[str, DemandStatus] = {}


class ClientStatus(Figures, frozen=True):
    """A client, and what it has done since it attached."""

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


class MetricsStatus(Struct, frozen=True):
    """Where metrics can be fetched, and whether the process that serves them is "ok", "restarting" or
    "failing"."""

    url: str
    state: str


class WorkersResult(Struct, frozen=True):
    """How many workers there were to be before, and from now on."""

    before: int
    count: int


class DemandFailure(Struct, frozen=True):
    """An expert that could not be read, and why."""

    layer: int
    expert: int
    error: str
    message: str


class DemandResult(Struct, frozen=True):
    """`resident`: experts that are in the ring now, `hits` of them were before; `took_ms`: from the request's
    arrival to its answer."""

    resident: int
    hits: int
    failed: list[DemandFailure]
    took_ms: float


class SpeculateResult(Struct, frozen=True):
    """How many guesses were queued; others are in the ring already, or found no idle slot."""

    queued: int


class BusyResult(Struct, frozen=True):
    """Clients that are busy now, and how long the control plane's own flag stays up, milliseconds."""

    busy_clients: list[int]
    lease_ms: int


class ExpertCount(Struct, frozen=True, array_like=True):
    """`[layer, expert, count]`."""

    layer: Annotated[int, Meta(ge=0, lt=1 << 31)]
    expert: Annotated[int, Meta(ge=0, lt=1 << 31)]
    count: Annotated[int, Meta(ge=0, lt=1 << 32)]


class HistogramResult(Struct, frozen=True):
    """The popularity: `experts` of the model, `counted` of them demanded at least once, `total` counts in
    all, the file that it is kept in, the `fingerprint` of the model, and the experts asked for, most popular
    first."""

    experts: int
    counted: int
    total: int
    path: str
    fingerprint: str
    most_popular: list[ExpertCount]


class BadExpertStatus(Struct, frozen=True):
    """A fault of an expert: `offset` and `length` in bytes of the file `path`."""

    layer: int
    expert: int
    path: str
    offset: int
    length: int
    fault: str


class VerifyStatus(Struct, frozen=True):
    """What a check of the files does: `state` is never, running, done, stopped or failed (`error` says why);
    `done` of `goal` experts, `checked` of them against a checksum, and the bad ones."""

    state: str = "never"
    done: int = 0
    goal: int = 0
    checked: int = 0
    bad: list[BadExpertStatus] = []
    error: str = ""


class DrainResult(Struct, frozen=True):
    """The system's state from now on, and how many reads were still finished."""

    state: str
    reads: int


class ConfigValue(Struct, frozen=True):
    """An effective value and where it came from: "default", "file" or a flag."""

    key: str
    value: bool | int | str
    origin: str


class StatusResult(Figures, frozen=True, kw_only=True):
    """Everything there is to know.  Figures are those of all, since the ring was made; `departed`: of clients
    that are gone.  `hit_rate` is None before the first demand."""

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
    departed: Figures = Figures()
    read_latency: LatencyStatus = LatencyStatus()
    hit_rate: float | None
    config: list[ConfigValue]
    warnings: list[str]
    control: dict[str, int] = {}
    verify: VerifyStatus = VerifyStatus()
    metrics: MetricsStatus | None = None


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

    def run(self, system: System, control: dict[str, int]) -> R | Later:
        """Do it, or begin to; `control` are the control plane's own counters.  Raises SmoeError."""
        raise NotImplementedError


class Ping(Command[PingResult], tag="ping", frozen=True, kw_only=True):
    """Ask whether the supervisor answers, and who it is."""

    result = PingResult

    def run(self, system: System, control: dict[str, int]) -> PingResult:
        return msgspec.convert(system.identity(), PingResult)


class Status(Command[StatusResult], tag="status", frozen=True, kw_only=True):
    """Show a running system: vault, ring, workers, clients, counters, settings.  With memory false the
    supervisor does not look at how much of the ring is in memory, which takes it 50 ms a GiB."""

    memory: bool = True

    result = StatusResult
    cli = "status NAME [--json] [--watch [S]]"
    example = "smoe-mp status smoe-demo --json"

    def run(self, system: System, control: dict[str, int]) -> StatusResult:
        return msgspec.convert({**system.status(self.memory), "control": control}, StatusResult)


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


class Demand(Command[DemandResult], tag="demand", frozen=True, kw_only=True):
    """Have experts read, and answer when each is in the ring or has failed.  No hold is kept: an expert may
    be evicted by what others demand.  A list may be longer than the ring."""

    experts: Pairs

    result = DemandResult
    cli = "demand NAME LAYER:EXPERT[-EXPERT]..."
    example = "smoe-mp demand smoe-demo 0:3 1:0-7"

    def run(self, system: System, control: dict[str, int]) -> Later:
        return system.demand(self.experts)


class Speculate(Command[SpeculateResult], tag="speculate", frozen=True, kw_only=True):
    """Guess experts: they are read when no demand is waiting.  Answers at once."""

    experts: Pairs

    result = SpeculateResult
    cli = "speculate NAME LAYER:EXPERT[-EXPERT]..."
    example = "smoe-mp speculate smoe-demo 2:0-15"

    def run(self, system: System, control: dict[str, int]) -> SpeculateResult:
        return msgspec.convert(system.speculate(self.experts), SpeculateResult)


class Busy(Command[BusyResult], tag="busy", frozen=True, kw_only=True):
    """A request begins: the prewarm process rests until `idle`, or until the lease ends (an asker that dies
    must not stop prewarming for good).  Again: the lease begins anew."""

    lease_ms: Annotated[int, Meta(ge=1, le=DEADLINE_MS_MAX)] = 60_000

    result = BusyResult
    cli = "busy NAME [--lease S]"
    example = "smoe-mp busy smoe-demo --lease 300"

    def run(self, system: System, control: dict[str, int]) -> BusyResult:
        return msgspec.convert(system.busy(self.lease_ms), BusyResult)


class Idle(Command[BusyResult], tag="idle", frozen=True, kw_only=True):
    """The request that `busy` announced is over."""

    result = BusyResult
    cli = "idle NAME"
    example = "smoe-mp idle smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> BusyResult:
        return msgspec.convert(system.busy(0), BusyResult)


class Histogram(Command[HistogramResult], tag="histogram", frozen=True, kw_only=True):
    """Look at the experts' popularity (`get`: `most` experts from place `first` on), `save` it to its file
    now, `set` the `counts` of some experts, or `reset` all to none."""

    action: Literal["get", "save", "set", "reset"] = "get"
    counts: Annotated[list[ExpertCount], Meta(max_length=20_000)] = []
    first: Annotated[int, Meta(ge=0)] = 0
    most: Annotated[int, Meta(ge=0, le=20_000)] = 20

    result = HistogramResult
    cli = "histogram show|export|import|reset|save NAME [FILE]"
    example = "smoe-mp histogram show smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> HistogramResult:
        if (self.action == "set") != bool(self.counts):
            raise ConfigError("histogram: set takes counts, the other actions do not")
        counts = [(row.layer, row.expert, row.count) for row in self.counts]
        done = system.histogram(self.action, counts, self.first, self.most)
        return msgspec.convert(done, HistogramResult)


class Verify(Command[VerifyStatus], tag="verify", frozen=True, kw_only=True):
    """Check every expert of the model's files while the system serves: one read at a time, none while a
    client is busy or a demand waits.  `start` begins anew, `stop` ends it, `status` says how far it is."""

    action: Literal["start", "stop", "status"] = "status"

    result = VerifyStatus
    cli = "verify --ring NAME"
    example = "smoe-mp verify --ring smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> VerifyStatus:
        return msgspec.convert(system.verify(self.action), VerifyStatus)


class Drain(Command[DrainResult], tag="drain", frozen=True, kw_only=True):
    """Refuse new demand, finish the reads that are under way, and keep the ring; answers when that is done.
    `resume`: serve again."""

    resume: bool = False

    result = DrainResult
    cli = "drain NAME [--resume]"
    example = "smoe-mp drain smoe-demo"

    def run(self, system: System, control: dict[str, int]) -> Later:
        return system.drain(self.resume)


AnyCommand = (
    Ping | Status | Stop | Workers | Prewarm | Demand | Speculate | Busy | Idle | Histogram | Verify | Drain
)
COMMANDS: dict[str, type[AnyCommand]] = {
    "ping": Ping,
    "status": Status,
    "demand": Demand,
    "speculate": Speculate,
    "busy": Busy,
    "idle": Idle,
    "prewarm": Prewarm,
    "workers": Workers,
    "histogram": Histogram,
    "verify": Verify,
    "drain": Drain,
    "stop": Stop,
}


def help_text(command: type[AnyCommand]) -> str:
    """The command's documentation with its example, for the command line."""
    return f"{inspect.getdoc(command)}\n\nExample: {command.example}"
