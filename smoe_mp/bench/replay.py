"""bench replay: a decode loop on a real ring, driven by a trace, against the faster that it could be.

The trace's tokens are gone through one after the other, of each all layers in turn, as an engine would:
demand the layer's experts, and compute with each as it is there (decoder.py).  The experts are real bytes on
disk, read directly; computing is a matrix-vector product that is bound by memory.  How long it takes is set,
by how many rows it has: 0, 0.5, 1 and 2 times as long as the reads.  A token is then held against

    the bound              the longer of its computing alone and of its reads alone: everything overlaps
    the bound by layers    the same of each layer, added up: a layer's experts are known only when the layer
                           before it is done, so that no more than this can overlap without guessing
    the bound by turns     of each layer, as if its reads landed evenly one after the other: its experts are
                           computed with in their order (by `as_ready`: those that are there first), and
                           nothing is computed while the next one is awaited

Computing alone is the same products on bytes that are in memory.  Reads alone are direct reads of what the
replay missed, by threads that do nothing else, all of one layer at once and one layer after the other, into
the same memory; or the replay without computing, where the ring was faster than they.  Sides in turn, the one
that begins changing from round to round.

Before each replay the ring is filled with small experts that nobody asks for, so each begins alike, with none
of the trace's.  A prompt's rows are one request a layer, of their union; what is said of tokens leaves
prompts out.

Every hit is held against a simulation of exact LRU (lru.py); if one differs there are no figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from smoe_mp import plots, segments
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.curve import usual_top_k
from smoe_mp.bench.decoder import ROW_BYTES, Request, Spec, Step
from smoe_mp.bench.io import MIB, Device, notes_on, scratch_file
from smoe_mp.bench.rings import BenchRing, FlatSource, bench_ring, flat_source
from smoe_mp.bench.stats import Goal, median
from smoe_mp.distances import hit_rates, lru_distances
from smoe_mp.errors import ConfigError, SmoeError, VaultError
from smoe_mp.runtime import human_bytes
from smoe_mp.sources.base import Expert, Extent, Tensor
from smoe_mp.trace import BUSY, CLAIM, DEMAND, IDLE, Trace, read_trace

AT_MOST = 1.10
FILE_BYTES, FILE_BYTES_QUICK = 4 << 30, 64 << 20
FILLER_BYTES = 4096

SHEET = "a token, by how long computing takes, in times of the reads"
WHAT = (
    "ms a token of a decode loop on a ring, driven by a trace, over the longer of its computing alone and its"
    " reads alone."
)


@dataclass(frozen=True)
class Settings:
    """How it is run.  `ring`: slots, as a share of the model's experts; `compute`: how long computing takes,
    in times of the reads; `tokens`: of the trace, 0: all; `any_order`: by `as_ready`, not `in_order`."""

    ring: float = 0.5
    expert_bytes: int = MIB
    compute: Sequence[float] = (0.0, 0.5, 1.0, 2.0)
    workers: int = 8
    clients: int = 1
    tokens: int = 0
    rounds: int = 5
    any_order: bool = False
    file_bytes: int = FILE_BYTES


QUICK: dict[str, Any] = {
    "expert_bytes": 64 << 10,
    "compute": (0.0, 1.0),
    "workers": 2,
    "tokens": 4,
    "rounds": 2,
    "file_bytes": FILE_BYTES_QUICK,
}


# --- the trace -------------------------------------------------------------------------------------------


def steps_of(trace: Trace) -> list[Step]:
    """What the client that demanded most of the trace did, prompt by prompt and token by token.

    Demands of one layer that follow each other are one request, of their union: they are rows of a prompt, or
    waves of one request.  A step is a prompt where a request is more than the top-k.
    """
    demands = (trace.kind == DEMAND) | (trace.kind == CLAIM)
    if not demands.any():
        return []
    client = int(np.bincount(trace.who[demands]).argmax())
    top_k = usual_top_k(trace)
    steps: list[list[tuple[int, set[int]]]] = [[]]
    for i in np.flatnonzero(trace.who == client).tolist():
        if trace.kind[i] in (BUSY, IDLE):
            steps.append([])
        experts = set(trace.entries(i).tolist())
        if not demands[i] or not experts:
            continue
        layer, before = int(trace.layer[i]), steps[-1][-1][0] if steps[-1] else -1
        if layer == before and trace.layers > 1:
            steps[-1][-1][1].update(experts)
            continue
        if layer <= before:
            steps.append([])
        steps[-1].append((layer, experts))
    return [
        Step(any(len(e) > top_k for _, e in step), [Request(layer, sorted(e)) for layer, e in step])
        for step in steps
        if step
    ]


def first_tokens(steps: Sequence[Step], tokens: int) -> list[Step]:
    """The steps up to so many tokens; 0: all."""
    counts = itertools.accumulate(not step.prompt for step in steps)
    return [
        step for step, n in zip(steps, counts, strict=True) if not tokens or n - (not step.prompt) < tokens
    ]


def turned(steps: Sequence[Step], by: float) -> list[Step]:
    """The same, begun with another step: so that clients do not go in step with each other."""
    at = int(len(steps) * by)
    return [*steps[at:], *steps[:at]]


def in_turns(compute: float, reads: float, missed: Sequence[bool]) -> float:
    """How long a request takes if its reads, `reads` long, land evenly one after the other, and computing,
    `compute` long, goes through its experts in turn, of which some are `missed`."""
    done, landed, misses = 0.0, 0, sum(missed)
    for miss in missed:
        landed += miss
        done = max(done, reads * landed / misses if miss else 0.0) + compute / len(missed)
    return done


def lru_rate(steps: Sequence[Step], experts: int, slots: int) -> float:
    """Hit rate (0 to 1) by plain LRU of all that the steps demand, in that order, with nothing cold."""
    keys = [r.layer * experts + e for step in steps for r in step.requests for e in r.experts]
    return hit_rates(lru_distances(keys), [slots])[0]


# --- the vault -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vault:
    """Where the experts lie: `layers` x `experts` of them and `fillers` of each layer, at `places` places."""

    source: FlatSource
    layers: int
    experts: int
    fillers: int
    places: int


def _vault(path: Path, trace: Trace, slots: int, settings: Settings) -> _Vault:
    """Experts on the bytes of `path`; more than it has places for begin again at its first."""
    size, fillers = settings.expert_bytes, -(-slots // trace.layers)
    places = min(trace.layers * trace.experts, settings.file_bytes // size)
    flat = flat_source(path, size, 1)
    filler = Tensor("bytes", "U8", (FILLER_BYTES,), 0, 0, FILLER_BYTES)
    experts = [
        Expert(layer, e, (Extent(0, (layer * trace.experts + e) % places * size, size),), 0)
        if e < trace.experts
        else Expert(layer, e, (Extent(0, (layer * fillers + e) % places * size, FILLER_BYTES),), 1)
        for layer in range(trace.layers)
        for e in range(trace.experts + fillers)
    ]
    source = FlatSource(path, flat.files, experts, [*flat.layouts, (filler,)])
    return _Vault(source, trace.layers, trace.experts, fillers, places)


# --- clients ---------------------------------------------------------------------------------------------


class _Client:
    """A decoder.py."""

    def __init__(self, child: subprocess.Popen[bytes], said: IO[bytes], spec: Spec) -> None:
        self._child, self._said = child, said
        self.tell(asdict(spec))
        self.answer()

    def tell(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._child.stdin.write(json.dumps(what).encode() + b"\n")
            self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            status = self._child.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()
            raise SmoeError(f"a client of the benchmark failed: {(said or [f'exit status {status}'])[-1]}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def _client(spec: Spec) -> Iterator[_Client]:
    """A client's process, ended at the end of the block."""
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-m", "smoe_mp.bench.decoder"],
            stdin=pipe, stdout=pipe, stderr=said, env={**os.environ, **one_thread},
        ) as child,
    ):  # fmt: skip
        try:
            yield _Client(child, said, spec)
        except BaseException:
            child.kill()
            raise


def _all(clients: Sequence[_Client], do: str, **how: Any) -> list[dict[str, Any]]:
    """Have all do something at once."""
    for client in clients:
        client.tell({"do": do, **how})
    return [client.answer() for client in clients]


# --- measuring -------------------------------------------------------------------------------------------


def run(progress: Progress, scratch: Path, file: Path, settings: Settings) -> Report:
    """Measure, with a file in the folder `scratch` that is made once and kept."""
    trace = read_trace(file)
    steps = first_tokens(steps_of(trace), settings.tokens)
    tokens = sum(not step.prompt for step in steps)
    if not tokens:
        raise VaultError(f"{file}: the trace has no tokens to replay, only {len(steps)} prompts")
    top_k, experts = usual_top_k(trace), trace.layers * trace.experts
    slots = max(2 * top_k, round(settings.ring * experts))
    size = settings.expert_bytes
    path = scratch_file(scratch, max(size, min(experts * size, settings.file_bytes)), progress, floats=True)
    probe = segments.probe(path)
    if probe.mode != "direct":
        raise ConfigError(
            f"{path}: direct reads are refused here ({probe.reason}), so this would measure the page cache:"
            " give --scratch a folder on a local disk"
        )
    vault = _vault(path, trace, slots, settings)
    align = max(4096, probe.offset_align)
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(
            bench_ring(vault.source, slots=slots, workers=settings.workers, read_align=align, top_k=top_k)
        )
        ring.settle()
        spec = Spec(
            ring=ring.name,
            path=str(path),
            size=size,
            places=vault.places,
            experts=vault.experts,
            fillers=vault.fillers,
            readers=settings.workers,
            any_order=settings.any_order,
            steps=[],
        )
        clients = [
            stack.enter_context(_client(replace(spec, steps=turned(steps, i / settings.clients))))
            for i in range(settings.clients)
        ]
        bench = _Bench(ring, clients, settings, Device(path), tokens)
        bench.run(progress)
        mode = ring.segments.files()[0]["mode"]
    if mode != "direct":
        raise SmoeError(f"{path}: the workers read it in mode {mode}, not direct: no figures")
    report = bench.report(
        {
            "trace": str(file),
            "layers": trace.layers,
            "experts": trace.experts,
            "top_k": top_k,
            "slots": slots,
            "replayed_tokens": tokens,
            "prompts": len(steps) - tokens,
            **asdict(settings),
            "file": str(path),
            "device": bench.device.name,
        }
    )
    report.notes[:0] = _facts(vault, steps, slots, settings)
    report.notes += notes_on(bench.device)
    return report


def _facts(vault: _Vault, steps: Sequence[Step], slots: int, settings: Settings) -> list[str]:
    """What one must know to read the figures."""
    n = vault.layers * vault.experts
    where = f"{n} experts of {human_bytes(settings.expert_bytes)}, a ring of {slots} slots ({slots / n:.0%})."
    if vault.places < n:
        where += f" The file has places for {vault.places}: the others are folded onto the same bytes."
    rate = lru_rate(steps, vault.experts, slots)
    return [
        where,
        f"By stack distances, plain LRU has {rate:.1%} of all demands, prompts included, in this order.",
        "by layers: the longer of both of each layer, added up: a layer's experts are known when the one"
        " before it is done. by turns: of each layer, as if its reads landed evenly one after the other, and"
        " its experts were computed with in their order, as far as they are there.",
    ]


def _total(requests: Sequence[Sequence[float]]) -> float:
    """Of all requests of all clients."""
    return sum(map(sum, requests))


class _Bench:
    """The measurement: each side's ms a token, round by round."""

    def __init__(
        self,
        ring: BenchRing,
        clients: Sequence[_Client],
        settings: Settings,
        device: Device,
        tokens: int,
    ) -> None:
        self.ring, self.clients, self.settings, self.device = ring, clients, settings, device
        self.tokens = tokens * settings.clients  # of a pass, of all clients
        self.rows: dict[float, int] = {0.0: 0}
        self.reads_ms: list[float] = []
        self.compute_ms: dict[float, list[float]] = defaultdict(list)
        self.layers_ms: dict[float, list[float]] = defaultdict(list)
        self.turns_ms: dict[float, list[float]] = defaultdict(list)
        self.turns: list[list[list[bool]]] = []  # of the latest reads alone, by client
        self.found: dict[float, list[dict[str, float]]] = defaultdict(list)
        self.bytes: dict[float, list[int]] = defaultdict(lambda: [0, 0])  # wanted, device
        self.by_ring: list[list[int]] = []  # of the latest replay without computing, ns of requests by client
        self.checked = self.bulk = self.passes = self.ring_faster = 0

    def run(self, progress: Progress) -> None:
        whole = self.settings.rounds * (2 * len(self.settings.compute) + 1) + 1
        progress("a first pass", 0, whole)
        self._calibrate()
        done = 1
        for turn in range(self.settings.rounds):
            alone: dict[float, list[list[int]]] = {}  # by compute, -1: the reads; ns of requests, by client
            sides = [("read", -1.0), *(("compute", c) for c in self.settings.compute if c)]
            sides += [("replay", c) for c in self.settings.compute]
            for at in range(len(sides)):
                side, compute = sides[(at + turn) % len(sides)]
                progress(f"{side} {compute:g}" if compute > 0 else side, done, whole)
                done += 1
                if side == "replay":
                    self.found[compute].append(self._replay(compute))
                else:
                    alone[compute] = self._alone(side, compute)
            self._add(alone)
        progress("", whole, whole)

    def _calibrate(self) -> None:
        """How many rows make computing as long as is wanted."""
        self._replay(0.0)
        self.bytes.clear()
        reads = _total(self._reads(self._alone("read", -1.0)))
        for compute in filter(None, self.settings.compute):
            rows = self.rows.get(compute, self.settings.expert_bytes // ROW_BYTES)
            for _ in range(2):
                self.rows[compute] = rows
                took = _total(self._alone("compute", compute))
                rows = max(1, round(rows * compute * reads / took))
            self.rows[compute] = rows
        if 0.0 not in self.settings.compute:
            self.by_ring = []  # it will not be measured again

    def _alone(self, side: str, compute: float) -> list[list[int]]:
        how = {"rows": self.rows[compute]} if side == "compute" else {}
        answers = _all(self.clients, side, **how)
        if side == "read":
            self.turns = [answer["turns"] for answer in answers]
        return [answer["request_ns"] for answer in answers]

    def _reads(self, bare: list[list[int]]) -> list[list[int]]:
        """The reads alone: by threads, or by the ring where it is faster."""
        return min(bare, self.by_ring or bare, key=_total)

    def _replay(self, compute: float) -> dict[str, float]:
        """One pass; figures of a token, the mean of the clients."""
        _all(self.clients[:1], "empty")
        self.ring.settle()
        wanted, device = self.ring.segments.counters()["wanted_bytes"], self.device.bytes_read()
        answers = _all(self.clients, "replay", rows=self.rows[compute])
        self.ring.check()
        after = self.device.bytes_read()
        wanted = self.ring.segments.counters()["wanted_bytes"] - wanted
        read = 0 if after is None or device is None else after - device
        self.bytes[compute][0] += wanted
        self.bytes[compute][1] += read
        for answer in answers:
            self._judge(answer)
        self.passes += 1
        if not compute:
            self.by_ring = [answer["request_ns"] for answer in answers]
        counted = {key: sum(a["tokens"][key] for a in answers) for key in answers[0]["tokens"]}
        demanded = counted["hits"] + counted["joins"] + counted["misses"]
        found = {
            "token": sum(sum(a["token_ns"]) for a in answers) / self.tokens / 1e6,
            "waits": counted["waits"] / self.tokens,
            "waiting": counted["wait_ns"] / self.tokens / 1e6,
            "hits": 100 * counted["hits"] / demanded,
        }
        if prompts := sum(len(a["prompt_ns"]) for a in answers):
            found["prompt"] = sum(sum(a["prompt_ns"]) for a in answers) / prompts / 1e6
        return found

    def _judge(self, answer: dict[str, Any]) -> None:
        """SmoeError where a hit is not one by exact LRU."""
        self.bulk = answer["bulk"]
        if not self._exact:
            return
        if answer["fault"]:
            raise SmoeError(f"ring {self.ring.name}: {answer['fault']}: no figures")
        self.checked = answer["checked"]

    @property
    def _exact(self) -> bool:
        """Whether it is known what exact LRU has: not what several clients interleave to, nor what a request
        of more than the ring keeps does in whatever order it comes."""
        return self.settings.clients == 1 and not (self.settings.any_order and self.bulk)

    def _add(self, alone: dict[float, list[list[int]]]) -> None:
        """A round's sides alone, as ms a token."""

        def per_token(requests: Sequence[Sequence[float]]) -> float:
            return _total(requests) / self.tokens / 1e6

        reads = self._reads(alone[-1.0])
        self.ring_faster += reads is self.by_ring
        self.reads_ms.append(per_token(reads))
        for compute in self.settings.compute:
            computing = alone.get(compute) or [[0] * len(one) for one in reads]
            both = list(zip(computing, reads, self.turns, strict=True))
            self.compute_ms[compute].append(per_token(computing))
            self.layers_ms[compute].append(per_token([[*map(max, c, r)] for c, r, _ in both]))
            self.turns_ms[compute].append(per_token([[*map(in_turns, c, r, t)] for c, r, t in both]))

    # --- what was found ---

    def report(self, settings: dict[str, Any]) -> Report:
        report = Report("replay", WHAT, settings)
        sheet = report.sheets.setdefault(SHEET, {})
        for compute in self.settings.compute:
            side = f"{compute:g} x"
            row = {c: Figure(f"{side}: {c}", unit, values) for c, unit, values in self._columns(compute)}
            sheet[side] = row
            report.figures += row.values()
        for compute in self.settings.compute:
            token = [one["token"] for one in self.found[compute]]
            bound = [max(pair) for pair in zip(self.compute_ms[compute], self.reads_ms, strict=True)]
            goal = Goal("at most", AT_MOST)
            for name, values in (
                ("bound", bound),
                ("bound by layers", self.layers_ms[compute]),
                ("bound by turns", self.turns_ms[compute]),
            ):
                report.shares.append(Share(f"{compute:g} x: token / {name}", token, values, goal))
        report.notes.append(
            f"Reads alone are the ring's, with no computing, in {self.ring_faster} of {self.settings.rounds}"
            " rounds, where it was faster than bare threads."
        )
        for compute, (wanted, device) in self.bytes.items():
            read = f"{device / wanted:.3f} times that" if wanted and device else "unknown"
            report.notes.append(
                f"{compute:g} x: wanted {human_bytes(wanted)}, prompts included; the device read {read}."
            )
            report.extra.setdefault("bytes", []).append(
                {"compute": compute, "wanted": wanted, "device": device or None}
            )
        report.notes.append(
            f"All {self.checked} demands of {self.passes} passes, and of what empties the ring, were hits or"
            " misses as by exact LRU in the order of their stamps"
            + (f", {self.bulk} requests a pass cold, being more than the ring keeps." if self.bulk else ".")
            if self._exact
            else "Hits were not held against exact LRU: several clients, or cold requests in any order."
        )
        report.extra["rows"] = {f"{compute:g}": rows for compute, rows in self.rows.items()}
        return report

    def _columns(self, compute: float) -> Iterator[tuple[str, str, list[float]]]:
        """Name, unit and each round's value."""
        found = self.found[compute]
        yield "token", "ms", [one["token"] for one in found]
        yield "computing", "ms", self.compute_ms[compute]
        yield "reads", "ms", self.reads_ms
        yield "by layers", "ms", self.layers_ms[compute]
        yield "by turns", "ms", self.turns_ms[compute]
        yield "waiting", "ms", [one["waiting"] for one in found]
        yield "waits", "", [one["waits"] for one in found]
        yield "hits", "%", [one["hits"] for one in found]
        if "prompt" in found[0]:
            yield "prompt", "ms", [one["prompt"] for one in found]


def plot(report: Report, path: Path) -> None:
    """Draw a token's time and its bounds over that of computing.  SmoeError where matplotlib is not here."""
    picture = plots.figure(7, 5)
    axes = picture.add_subplot(
        xlabel="computing alone, ms a token", ylabel="ms a token", title=Path(report.settings["trace"]).name
    )
    rows = list(report.sheets[SHEET].values())
    x = [median(row["computing"].values) for row in rows]
    for column, style, label in (
        ("token", "o-", "a token"),
        ("computing", ":", "computing alone"),
        ("reads", ":", "reads alone"),
        ("by layers", "--", "bound by layers"),
        ("by turns", "--", "bound by turns"),
    ):
        axes.plot(x, [median(row[column].values) for row in rows], style, label=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    plots.save(picture, path)
