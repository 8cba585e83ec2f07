"""The metrics process: what status has, for Prometheus.

    python -m smoe_mp.metrics --name NAME --creation HEX --listen-fd N

Started and kept alive by the supervisor, whose listening socket it inherits.  It attaches the ring as an
observer and reads shared memory by itself at each scrape.  What the supervisor alone knows it asks of it, at
most every `ASK_S` seconds and without waiting long; where that does not answer, `smoe_mp_supervisor_up` is 0
and the rest is there all the same.

Counters are those of client ids, not of clients: they never fall, whoever comes and goes under an id, so sums
and rates are right.  `smoe_mp_client_info` says who has an id now.

A scraper may be slow, or stuck, or one of many: each has a thread of its own, which is cut off after
`CONNECTION_S`, and the longest there makes room where there are too many.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from smoe_mp import child, segments, stats
from smoe_mp._native import ffi, lib, text
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import Status, StatusResult
from smoe_mp.errors import SmoeError
from smoe_mp.runtime import version

ASK_S = 10.0  # what the supervisor said is that old at most
ASK_TIMEOUT_MS = 500
RESIDENT_S = 30.0  # between two looks at how much of the ring is in memory
CONNECTION_S = 10.0  # for a request to come and its answer to go
CONNECTIONS_MAX = 32
LOOK_S = 2.0  # between two looks for those that have been there too long


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its `kind` (counter, gauge, histogram), its labels beside `ring`, and what it says."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def shown(self) -> str:
        """As Prometheus has it."""
        return self.name + ("_total" if self.kind == "counter" else "")

    def empty(self) -> Any:
        made = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }[self.kind]
        return made(self.name, self.help, labels=("ring", *self.labels))


def _family(kind: str, name: str, meaning: str, *labels: str) -> Family:
    return Family(f"smoe_mp_{name}", kind, labels, meaning)


#: Counters of a client's id, by the names of `stats`; prewarm has some of them, as client "prewarm".
_OF_CLIENTS = {
    "claims": ("claims", "claim_specific that found its expert"),
    "releases": ("releases", "holds given up, those of views included"),
    "guesses": ("guesses", "guesses issued"),
    "guess_used_bytes": ("guesses_used_bytes", "bytes of guessed experts that a demand made use of"),
    "guess_wasted": ("guesses_wasted", "guesses evicted unread, by whom"),
    "guess_wasted_bytes": ("guesses_wasted_bytes", "bytes of guesses evicted unread, by whom"),
    "guess_drops": ("guesses_dropped", "guesses given up: no idle slot, limit reached, queue full"),
    "guess_displaced": ("guesses_displaced", "queued guesses whose slot a demand took, by whom"),
    "evictions": ("evictions", "slots taken from another expert"),
    "busy_waits": ("busy_waits", "demands that had to wait for a reservation"),
    "read_errors": ("read_errors", "errors of reads that a waiter was told"),
    "timeouts": ("timeouts", "waits that ended without the bytes"),
}
#: Counters of all together.
_OF_ALL = {
    "wanted_bytes": ("read_wanted_bytes", "bytes of experts that were read"),
    "device_bytes": ("read_device_bytes", "bytes asked of the model's files for them"),
    "failed_reads": ("failed_reads", "reads that failed"),
    "short_reads": ("short_reads", "reads continued after fewer bytes than asked"),
    "fallbacks": ("direct_fallbacks", "files switched to buffered reads while running"),
    "checked_reads": ("checked_reads", "reads held against a checksum"),
    "checksum_errors": ("checksum_errors", "of them: did not match"),
    "requeued": ("requeued_reads", "reads taken up again after their worker's death"),
    "skips": ("stale_entries", "queue entries that were there no longer when popped"),
}
_KINDS = dict(zip(stats.KINDS, ("resident", "joined", "promoted", "missed"), strict=True))

FAMILIES = (
    _family(
        "counter",
        "demands",
        "experts demanded, by how they were found: resident, joined (loading for a demand), promoted (a guess"
        " that was not there yet), missed",
        "client",
        "phase",
        "kind",
    ),
    _family("histogram", "wait_seconds", "waits for demanded experts that were not there", "client", "phase"),
    _family("counter", "guesses_used", "guesses that a demand made use of, by whom", "client"),
    *(_family("counter", name, meaning, "client") for name, meaning in _OF_CLIENTS.values()),
    _family("histogram", "read_seconds", "reads of experts, failed ones included"),
    *(_family("counter", name, meaning) for name, meaning in _OF_ALL.values()),
    _family("counter", "queue_pops", "entries that workers took from a queue", "queue"),
    _family("gauge", "queue_length", "entries in a queue", "queue"),
    _family("gauge", "ring_state", "1 for the ring's state", "state"),
    _family("gauge", "slots", "slots by state", "state"),
    _family("gauge", "slots_held", "slots that a client holds"),
    _family("gauge", "slots_reserved", "slots that a client has reserved", "client"),
    _family("gauge", "slot_bytes", "size of a slot"),
    _family("gauge", "ring_bytes", "size of all slots"),
    _family(
        "gauge", "ring_resident_bytes", "how much of them is in memory, looked at twice a minute at most"
    ),
    _family("gauge", "guesses_loading", "guesses queued or being read"),
    _family("gauge", "client_info", "1 for each client: who has the id now", "client", "label", "pid"),
    _family("gauge", "clients_busy", "clients that serve a request"),
    _family("gauge", "workers", "workers that live"),
    _family("gauge", "worker_reading_seconds", "how long a worker's read is under way", "worker"),
    _family("gauge", "prewarm_state", "1 for what the prewarm process does", "state"),
    _family("gauge", "prewarm_done", "experts of the prewarm pass that were looked at"),
    _family("gauge", "prewarm_goal", "experts of the prewarm pass"),
    _family("gauge", "prewarm_trickle_seconds", "pause between two of its reads"),
    _family("gauge", "file_info", "1 for each file: how it is read", "path", "mode"),
    _family("gauge", "build_info", "1: the version of the metrics process", "version"),
    _family("gauge", "supervisor_up", "1 where the supervisor answers; what follows is there only then"),
    _family("gauge", "healthy", "1 where status says ok"),
    _family("gauge", "uptime_seconds", "how long the supervisor runs"),
    _family("gauge", "vault_info", "1: the model that is served", "path", "format"),
    _family("gauge", "vault_bytes", "size of its files"),
    _family("gauge", "vault_experts", "its experts"),
    _family("gauge", "vault_checksums", "of them: have a checksum"),
    _family("gauge", "ring_locked_bytes", "how much of the slots is locked in memory"),
    _family("gauge", "ring_wasted_bytes", "what stays empty of them, as experts differ in size"),
    _family("gauge", "warnings", "warnings that status shows"),
    _family("counter", "control_requests", "requests to the control plane, by what became of them", "result"),
)
_BY_NAME = {family.name.removeprefix("smoe_mp_"): family for family in FAMILIES}


def table() -> str:
    """The metrics as the table of docs/metrics.md."""
    rows = [
        f"| `{f.shown}` | {f.kind} | {', '.join(f.labels)} | {f.help} |".replace("|  |", "| |")
        for f in FAMILIES
    ]
    return "\n".join(["| metric | type | labels | what |", "|---|---|---|---|", *rows])


class RingCollector(Collector):
    """Reads one ring.  `ask` says what the supervisor knows, None where it does not answer."""

    def __init__(self, name: str, ring: Any, info: Any, ask: Callable[[], StatusResult | None]) -> None:
        self._name, self._ring, self._info, self._ask = name, ring, info, ask
        self._made: dict[str, Any] = {}
        self._lock = threading.Lock()  # one look at a time, however many ask
        self._resident_bytes: int | None = None

    def look_at_memory(self) -> float:
        """Ask the kernel how much of the ring is in memory, which takes long for a large one.  Returns how
        many seconds later it may be asked again, so that it takes a hundredth of the time."""
        began = time.monotonic()
        self._resident_bytes = int(lib.smoe_resident_bytes(self._ring))
        return max(RESIDENT_S, 100 * (time.monotonic() - began))

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._made = {name: family.empty() for name, family in _BY_NAME.items()}
            self._clients()
            self._reads()
            self._slots()
            self._participants()
            self._prewarm()
            self._files()
            self._supervisor(self._ask())
            made = list(self._made.values())
        yield from (metric for metric in made if metric.samples)

    def _add(self, name: str, value: float, *labels: object) -> None:
        self._made[name].add_metric((self._name, *map(str, labels)), value)

    def _histogram(self, name: str, buckets: Sequence[int], sum_ns: int, *labels: str) -> None:
        bounds = [*map(floatToGoString, stats.BOUNDS_S), "+Inf"]
        rows = list(zip(bounds, map(float, itertools.accumulate(buckets)), strict=True))
        self._made[name].add_metric((self._name, *labels), rows, sum_ns / 1e9)

    def _tally(self, participant: int) -> stats.Tally:
        found = stats.tally(self._ring, participant)
        assert found is not None  # as it may only be of one owner's
        return found

    def _clients(self) -> None:
        for who in (*stats.CLIENT_IDS, stats.PREWARM_ID):
            did = self._tally(who)
            if not any(did.counters.values()):
                continue
            client = "prewarm" if who == stats.PREWARM_ID else str(who)
            for counter, (name, _) in _OF_CLIENTS.items():
                self._add(name, did.counters[counter], client)
            used = did.counters["guess_hits"] + did.counters["promoted"]
            self._add("guesses_used", used, client)
            for phase, counts in did.phases.items():
                if any(counts.values()):
                    for kind, label in _KINDS.items():
                        self._add("demands", counts[kind], client, phase, label)
                    self._histogram("wait_seconds", did.waits[phase], counts["wait_ns"], client, phase)

    def _reads(self) -> None:
        everybody = self._tally(-1)
        for counter, (name, _) in _OF_ALL.items():
            self._add(name, everybody.counters[counter])
        self._histogram("read_seconds", everybody.reads, everybody.counters["read_ns"])
        for number, queue in enumerate(("demand", "speculative")):
            self._add("queue_pops", everybody.counters[f"pops_{queue}"], queue)
            self._add("queue_length", lib.smoe_queue_length(self._ring, number), queue)

    def _slots(self) -> None:
        out = ffi.new("uint32_t[9]")
        lib.smoe_census(self._ring, out)
        census = dict(zip(segments.CENSUS, list(out), strict=True))
        for state in segments.CENSUS[:6]:
            self._add("slots", census[state], state)
        self._add("slots_held", census["held"])
        self._add("guesses_loading", census["guesses"])
        self._add("slot_bytes", self._info.slot_bytes)
        self._add("ring_bytes", self._info.data_bytes)
        if self._resident_bytes is not None:
            self._add("ring_resident_bytes", self._resident_bytes)
        now = lib.smoe_ring_state(self._ring)
        for number, state in enumerate(segments.STATES):
            self._add("ring_state", number == now, state)

    def _participants(self) -> None:
        living = [p for p in segments.participants(self._ring) if p["alive"]]
        for p in living:
            if p["role"] == "client":
                self._add("client_info", 1, p["id"], p["label"], p["pid"])
                self._add("slots_reserved", p["reserved"], p["id"])
            elif p["role"] == "worker" and p["reading_s"] is not None:
                self._add("worker_reading_seconds", p["reading_s"], p["number"])
        self._add("workers", sum(p["role"] == "worker" for p in living))
        self._add("clients_busy", lib.smoe_busy_clients(self._ring).bit_count())

    def _prewarm(self) -> None:
        words = {
            name: int(lib.smoe_prewarm_get(self._ring, which))
            for name, which in segments.PREWARM_WORDS.items()
        }
        for number, state in enumerate(segments.PREWARM_STATES):
            self._add("prewarm_state", number == words["state"], state)
        self._add("prewarm_done", words["done"])
        self._add("prewarm_goal", words["goal"])
        self._add("prewarm_trickle_seconds", words["trickle_us"] / 1e6)

    def _files(self) -> None:
        for number in range(self._info.n_files):
            path = text(lib.smoe_file_path(self._ring, number))
            self._add("file_info", 1, path, segments.MODES[lib.smoe_file_mode(self._ring, number)])

    def _supervisor(self, status: StatusResult | None) -> None:
        self._add("build_info", 1, version())
        self._add("supervisor_up", status is not None)
        if status is None:
            return
        self._add("healthy", status.health == "ok")
        self._add("uptime_seconds", status.uptime_s)
        self._add("vault_info", 1, status.vault.path, status.vault.format)
        self._add("vault_bytes", status.vault.bytes)
        self._add("vault_experts", status.vault.experts)
        self._add("vault_checksums", status.vault.checksums)
        self._add("ring_locked_bytes", status.ring.locked_bytes)
        self._add("ring_wasted_bytes", status.ring.wasted_bytes)
        self._add("warnings", len(status.warnings))
        for result, n in status.control.items():
            self._add("control_requests", n, result)


class Supervisor:
    """What the supervisor of a ring says of itself, kept for a while."""

    def __init__(self, name: str) -> None:
        self._client = ControlClient(name, timeout_ms=ASK_TIMEOUT_MS)
        self._answer: StatusResult | None = None
        self._asked = -ASK_S

    def ask(self) -> StatusResult | None:
        """For one thread at a time."""
        if time.monotonic() - self._asked >= ASK_S:
            try:
                self._answer = self._client.call(Status(memory=False))
            except SmoeError:
                self._answer = None
            self._asked = time.monotonic()
        return self._answer


# --- serving -----------------------------------------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: ClassVar[CollectorRegistry]
    timeout = CONNECTION_S
    server_version = "smoe-mp"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._answer("404 Not Found", "text/plain; charset=utf-8", b"metrics are at /metrics\n")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer("200 OK", content_type, encode(self.registry))

    def _answer(self, status: str, content_type: str, body: bytes) -> None:
        code, _, words = status.partition(" ")
        self.send_response(int(code), words)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Who asked for what is nobody's business."""


class Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """Serves on a socket that listens already, in threads, each for `CONNECTION_S` at most."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, registry: CollectorRegistry) -> None:
        handler = type("_BoundHandler", (_Handler,), {"registry": registry})
        super().__init__(listening.getsockname(), handler)
        listening.setblocking(False)  # a connection may be gone by the time that it is accepted
        self._listening = listening
        self._open: dict[socket.socket, float] = {}  # since when; oldest first
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._listening.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = self._listening.accept()
        return connection, address or ("", 0)  # a unix socket's has no name

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= CONNECTIONS_MAX:
                self._cut(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """At each look: cut off those that have been there too long."""
        due = time.monotonic() - CONNECTION_S
        with self._lock:
            for connection in [c for c, since in self._open.items() if since < due]:
                self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        """Its thread wakes up with an error, and closes it."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away, or was cut off, is no fault; others are said once."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"warning: a scrape failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = child.parser("smoe_mp.metrics")
    parser.add_argument("--listen-fd", type=int, required=True)
    args = parser.parse_args(argv)
    child.follow_supervisor(args.watch_fd)
    try:
        ring, info = child.attach(args.name, args.creation, lib.SMOE_ROLE_OBSERVER, "metrics")
        supervisor = Supervisor(args.name)
    except SmoeError as e:
        print(e, file=sys.stderr)
        return 1
    registry = CollectorRegistry(auto_describe=False)
    collector = RingCollector(args.name, ring, info, supervisor.ask)
    registry.register(collector)
    server = Server(socket.socket(fileno=args.listen_fd), registry)
    ended = threading.Event()
    child.on_term(ended.set)
    threading.Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True).start()
    child.say_ready(args.ready_fd)
    while not ended.wait(collector.look_at_memory()):
        pass
    os._exit(0)  # threads may be in a scrape still, in the ring's memory


if __name__ == "__main__":
    sys.exit(main())
