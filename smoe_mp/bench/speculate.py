"""bench speculate: what guesses name, what they spare, and what they cost, on routing that was recorded.

A decode loop runs on a real ring: real workers, direct reads of a scratch file with as many experts as the
model has.  Which experts a token wants, and which its router ranks behind them, the trace says.  A layer is

    dense product ─► demand, in order ─► product on each expert, as soon as it and those before it are there

as `smoe_mp.transformers` drives it.  Guesses are told before the product on the first expert, as that does,
or before the one on the last: then all of the layer is there, and no demand shares the device with them.

The products are real and bound by memory: of the layer's dense weights (`DENSE_BYTES`, in a place of their
own) and of every byte of each expert, in its slot.  So reads that take bandwidth from them show.  They are
sums of whole numbers by one thread, whatever a BLAS library would do with its own.

Sides are numbers of guesses, 0 among them, in turn; each replays the same tokens in a round, behind some that
are not counted, which fill the ring for it.  What a side takes longer than the one without guesses is split
as the original system splits it:

    compute      the products take longer: reads take their bandwidth, and the cores
    wait         demands are waited for longer, or less long; it is the sum of
      number     other numbers of demands have to be waited for, each as long as without guesses: fewer, where
                 guesses are right, or more, where they have thrown out what is used
      length     each that is waited for takes longer: workers and device are busy with guesses
    telling      the calls that guess

With `ahead` the guesses are the next layer's, of the small model's own next router (`routing`), beside those
of the ranks behind the top-k.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp import models, plots, quant, segments
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.formats import SHAPE
from smoe_mp.bench.io import Device, notes_on, scratch_file
from smoe_mp.bench.prewarm import texts
from smoe_mp.bench.rings import BenchRing, FlatSource, bench_ring, flat_source
from smoe_mp.bench.routing import Looking, Routing, Told, Way, lookahead, of_trace
from smoe_mp.bench.stats import Ratio, median
from smoe_mp.engine import ResidentExperts
from smoe_mp.errors import ConfigError, SmoeError
from smoe_mp.ring import Ring, attach
from smoe_mp.runtime import human_bytes
from smoe_mp.sources.base import Expert, Extent
from smoe_mp.stats import KINDS
from smoe_mp.tables import SLOT_ALIGN
from smoe_mp.trace import read_trace

WORKERS = 4
RING_PERCENT = 25
GUESSES = (4, 8)
BITS = (4, 2)
#: Of a layer's dense weights; Qwen3-30B-A3B has about as many in 4 bits.
DENSE_BYTES = 12 << 20
TEXT_BYTES, TEXTS = 500, 4  # that the small model is run on for a look ahead
AHEAD = (4, 6, 8)  # the small model's top-k is 4
COLUMNS = SLOT_ALIGN // 8
QUIET_S = 30.0  # for reads under way to end

WHAT = "a decode loop on a real ring, its experts by a trace: what guesses name, what they spare and cost."

#: Before which expert's product guesses are told.
TOLD = ("first", "last")

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Guessing:
    """One side: which way guesses are made, how many at a time (0: none), before which expert's product."""

    way: Told
    n: int
    told: str = TOLD[0]

    def __str__(self) -> str:
        if not self.n:
            return "no guesses"
        how = "of the ranks behind" if self.way == "behind" else "by looking ahead"
        return f"{self.n} {how}" + ("" if self.told == TOLD[0] else f", told at the {self.told}")


@dataclass(frozen=True)
class Settings:
    """How it is run.  `guesses`: numbers of ranks; `ahead`: of experts named by looking ahead, where that is
    known; `bits`: of the experts' weights, 4 and 2; `ring`: slots in percent of the experts;
    `tokens`: counted in each round; `shape`: rows and columns of an expert's three matrices."""

    guesses: Sequence[int] = GUESSES
    ahead: Sequence[int] = AHEAD
    told: Sequence[str] = TOLD[:1]
    bits: Sequence[int] = BITS
    ring: int = RING_PERCENT
    workers: int = WORKERS
    tokens: int = 12
    rounds: int = 12
    shape: tuple[int, int] = SHAPE
    dense_bytes: int = DENSE_BYTES


QUICK: dict[str, Any] = {"tokens": 6, "rounds": 2, "shape": (64, 256), "dense_bytes": 1 << 20}


def run(progress: Progress, scratch: Path, trace: Path | None, settings: Settings) -> Report:
    """Measure on `trace`; None: on the small model, which looks ahead too.

    ConfigError where the trace records no further ranks, is too short, or direct reads are refused.
    """
    if trace is None:
        progress("the small model looks ahead", 0, 1)
        routing = small_model()
    else:
        routing = of_trace(read_trace(trace))
    if strange := [word for word in settings.told if word not in TOLD]:
        raise ConfigError(f"--told {strange[0]}: wanted is {' or '.join(TOLD)}")
    if odd := [bits for bits in settings.bits if bits not in BITS]:
        raise ConfigError(f"--bits {odd[0]}: vaults have weights of {BITS[0]} or {BITS[1]} bits")
    sides = _sides(routing, settings)
    report = Report(
        "speculate",
        WHAT,
        {
            "trace": "the small model" if trace is None else str(trace),
            "layers": routing.layers,
            "experts": routing.experts,
            "top_k": routing.top_k,
            "bits": list(settings.bits),
            "slots": _slots(routing, settings),
            "workers": settings.workers,
            "tokens": settings.tokens,
            "rounds": settings.rounds,
            "dense_bytes_a_layer": settings.dense_bytes,
        },
    )
    _add_names(report, routing, sides, _slots(routing, settings))
    sizes = {bits: expert_bytes(settings.shape, bits) for bits in settings.bits}
    experts = routing.layers * routing.experts
    path = scratch_file(scratch, max(sizes.values()) * experts, progress)
    probe = segments.probe(path)
    if probe.mode != "direct":
        raise ConfigError(
            f"{path}: direct reads are refused here ({probe.reason}), so this would measure the page cache:"
            " give --scratch a folder on a local disk"
        )
    device = Device(path)
    dense = np.ones((routing.layers, settings.dense_bytes // 8), np.int64)
    for at, (bits, size) in enumerate(sizes.items()):
        bench = _Bench(routing, source(path, routing, size), dense, settings, sides)

        def step(what: str, done: float, whole: float, at: int = at, bits: int = bits) -> None:
            progress(f"Q{bits}, {what}", at * whole + done, len(sizes) * whole)

        bench.run(step, device, max(4096, probe.offset_align))
        bench.add_to(report, f"Q{bits}", size)
    report.notes += notes_on(device)
    return report


def small_model() -> Routing:
    """Routing of the small model on text that it never saw, with what it foretells of the next layer."""
    engine = Looking.open(models.TINY, ResidentExperts(models.TINY / "tiny.smoe"))
    return lookahead(engine, [text[:TEXT_BYTES] for text in texts()[:TEXTS]])


def expert_bytes(shape: tuple[int, int], bits: int) -> int:
    """Of an expert of three such matrices in a `.smoe` vault, in whole blocks."""
    each = 3 * sum(quant.packed_sizes(shape[0] * shape[1], bits))
    return -(-each // SLOT_ALIGN) * SLOT_ALIGN


def source(path: Path, routing: Routing, size: int) -> FlatSource:
    """The file as the model's experts, of `size` bytes each."""
    flat = flat_source(path, size, routing.layers * routing.experts)
    experts = [
        Expert(*divmod(at, routing.experts), (Extent(0, at * size, size),), 0)
        for at in range(len(flat.experts))
    ]
    return FlatSource(flat.path, flat.files, experts, flat.layouts)


def _sides(routing: Routing, settings: Settings) -> list[Guessing]:
    """No guesses first, then those of the ranks, then those of a look ahead where there is one."""
    counts = [n for n in settings.guesses if n]
    if counts and max(counts) > routing.behind.shape[-1]:
        raise ConfigError(f"--guesses {max(counts)}: {routing.behind.shape[-1]} ranks are known")
    ahead = settings.ahead if routing.ahead is not None else ()
    if routing.ahead is not None and ahead and max(ahead) > routing.ahead.shape[-1]:
        raise ConfigError(f"--ahead {max(ahead)}: {routing.ahead.shape[-1]} ranks are known")
    named: list[tuple[Told, int]] = [*(("behind", n) for n in counts), *(("ahead", n) for n in ahead)]
    return [Guessing("behind", 0), *(Guessing(way, n, told) for way, n in named for told in settings.told)]


def _slots(routing: Routing, settings: Settings) -> int:
    return max(routing.top_k + 1, round(settings.ring / 100 * routing.layers * routing.experts))


# --- what is named ---------------------------------------------------------------------------------------


def _add_names(report: Report, routing: Routing, sides: Sequence[Guessing], slots: int) -> None:
    """By counting alone: shares of the demands that each way names."""
    lines = report.extra["named"] = []
    k = routing.top_k
    ways: list[tuple[Way, str, Sequence[int]]] = [
        ("last", "the same experts as the last token, and then its next ranks", (k, k + 2, k + 4)),
        ("behind", "the ranks behind the last token's experts", sorted({s.n for s in sides if s.n} | {k})),
    ]
    if "ahead" in routing.ways:
        ways += [
            ("ahead", "the next layer's router, before this layer's experts", (k, k + 2, k + 4)),
            ("late", "the next layer's router, after this layer's experts", (k, k + 2, k + 4)),
        ]
    covered = {
        (way, n): routing.coverage(way, n, slots) for way, n in dict.fromkeys((s.way, s.n) for s in sides)
    }
    report.notes.append(
        f"{len(routing)} tokens; without guesses a ring of {slots} slots has {covered['behind', 0]:.1%} of"
        " their experts."
    )
    report.notes += [
        f"{Guessing(way, n)}, were they all read at once: {share:.1%}."
        for (way, n), share in covered.items()
        if n
    ]
    report.extra["coverage_at_best"] = [
        {"way": way, "n": n, "coverage": share} for (way, n), share in covered.items()
    ]
    for way, words, counts in ways:
        for n in counts:
            if way == "behind" and n > routing.behind.shape[-1]:
                continue
            share, spared = routing.share_named(way, n), routing.spared(way, n, slots)
            lines.append({"way": way, "n": n, "of_demands": share, "of_missing": spared})
            report.notes.append(
                f"{n} of {words}: {share:.1%} of the demands were named, and {spared:.1%} of those that this"
                " ring would not have had."
            )


# --- the decode loop -------------------------------------------------------------------------------------


@dataclass
class _Clock:
    """Nanoseconds of a stretch of tokens."""

    all: int = 0
    compute: int = 0
    wait: int = 0
    telling: int = 0


class Decode:
    """A decode loop.  Experts and dense weights are seen as matrices of int64 with rows of `COLUMNS`."""

    def __init__(self, ring: Ring, routing: Routing, dense: Int64s) -> None:
        self._ring, self._routing = ring, routing
        self._dense = dense
        self._vector = np.ones(COLUMNS, np.int64)

    def run(self, tokens: range, guessing: Guessing) -> _Clock:
        clock, now = _Clock(), time.perf_counter_ns
        began = now()
        for token in tokens:
            for layer in range(self._routing.layers):
                self._layer(token, layer, guessing, clock)
        clock.all = now() - began
        return clock

    def _layer(self, token: int, layer: int, guessing: Guessing, clock: _Clock) -> None:
        now = time.perf_counter_ns
        wanted = self._routing.chosen[token, layer].tolist()
        whom, guesses = layer, list[int]()
        if guessing.n:
            whom, guesses = self._routing.told(guessing.way, guessing.n, token, layer)
        at = now()
        self._product(self._dense[layer])
        clock.compute += (then := now()) - at
        tell = wanted[0 if guessing.told == "first" else -1]
        for expert in self._ring.in_order(layer, wanted):
            clock.wait += (at := now()) - then
            if guesses and expert.expert == tell:
                self._ring.speculate(whom, guesses)
                clock.telling += (then := now()) - at
                at = then
            self._product(expert.raw.view(np.int64))
            clock.compute += (then := now()) - at

    def _product(self, weights: Int64s) -> None:
        """One multiplication for each 8 bytes: less than the bytes take to come from memory."""
        np.dot(weights.reshape(-1, COLUMNS), self._vector)


@dataclass
class _Found:
    """A side, round by round: milliseconds a token, and counts of all rounds."""

    token: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    telling: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)  # percent
    late: list[float] = field(default_factory=list)  # experts a token that were not there when demanded
    busy: list[float] = field(default_factory=list)  # percent of the workers' time that was reading
    issued: int = 0
    used: int = 0
    wasted: list[float] = field(default_factory=list)  # MB a token
    wanted: int = 0
    device: int | None = 0


class _Bench:
    """One size of experts: a ring, and all sides on it."""

    def __init__(
        self,
        routing: Routing,
        source: FlatSource,
        dense: Int64s,
        settings: Settings,
        sides: Sequence[Guessing],
    ) -> None:
        self._routing, self._source, self._dense, self._settings = routing, source, dense, settings
        self._sides = list(sides)
        self._slots = _slots(routing, settings)
        self._found = {side: _Found() for side in sides}
        # Tokens that fill the ring anew, whatever the side before left there.
        self._warm = -(-2 * self._slots // (routing.layers * routing.top_k))
        if len(routing) < self._warm + settings.tokens:
            raise ConfigError(
                f"the trace has {len(routing)} tokens with ranks, and a round needs {settings.tokens} behind"
                f" {self._warm} that fill {self._slots} slots: take a smaller --ring or fewer --tokens"
            )

    def run(self, progress: Progress, device: Device, align: int) -> None:
        settings, self._device = self._settings, device
        spare = len(self._routing) - self._warm - settings.tokens
        with (
            bench_ring(
                self._source,
                slots=self._slots,
                workers=settings.workers,
                read_align=align,
                top_k=self._routing.top_k,
            ) as made,
            attach(made.name, "bench") as ring,
        ):
            made.settle()
            decode = Decode(ring, self._routing, self._dense)
            decode.run(range(self._warm), self._sides[0])
            whole = settings.rounds * len(self._sides)
            for at in range(settings.rounds):
                begin = spare * at // max(1, settings.rounds - 1)
                for turn in range(len(self._sides)):
                    side = self._sides[(at + turn) % len(self._sides)]
                    progress(str(side), at * len(self._sides) + turn, whole)
                    self._one(made, ring, decode, begin, side)
            progress("", whole, whole)
            mode = made.segments.files()[0]["mode"]
        if mode != "direct":
            raise SmoeError(f"{self._source.path}: read in mode {mode}, not direct: no figures")

    def _one(self, made: BenchRing, ring: Ring, decode: Decode, begin: int, side: Guessing) -> None:
        """A side's stretch of tokens, and what it changed by when all its reads have ended."""
        tokens = range(begin + self._warm, begin + self._warm + self._settings.tokens)
        decode.run(range(begin, tokens.start), side)
        _until_quiet(made)
        before, device_before = ring.stats(), self._device.bytes_read()
        clock = decode.run(tokens, side)
        _until_quiet(made)
        after, device_after = ring.stats(), self._device.bytes_read()
        made.check()
        n, found = len(tokens), self._found[side]
        own = {key: after["client"][key] - before["client"][key] for key in (*KINDS, "guess_hits", "guesses")}
        reads = {key: after[key] - before[key] for key in ("wanted_bytes", "read_ns")}
        demanded = sum(own[kind] for kind in KINDS)
        for name in ("compute", "wait", "telling"):
            getattr(found, name).append(getattr(clock, name) / n / 1e6)
        found.token.append(clock.all / n / 1e6)
        found.hits.append(100 * own["hits"] / demanded)
        found.late.append((demanded - own["hits"]) / n)
        found.busy.append(100 * reads["read_ns"] / clock.all / self._settings.workers)
        needed = own["guess_hits"] + own["promoted"] + own["misses"]
        found.issued += own["guesses"]
        found.used += own["guess_hits"] + own["promoted"]
        found.wasted.append((reads["wanted_bytes"] - needed * ring.slot_bytes) / n / 1e6)
        found.wanted += reads["wanted_bytes"]
        known = None not in (found.device, device_before, device_after)
        found.device = found.device + device_after - device_before if known else None  # type: ignore[operator]

    def add_to(self, report: Report, where: str, size: int) -> None:
        columns = {
            "token": ("ms", "token"),
            "compute": ("ms", "compute"),
            "wait": ("ms", "wait"),
            "there": ("%", "hits"),
            "workers read": ("%", "busy"),
            "read in vain": ("MB/token", "wasted"),
        }
        title = f"{where}: experts of {human_bytes(size)}"
        for side, found in self._found.items():
            row = {
                column: Figure(f"{where}, {side}: {column}", unit, getattr(found, attribute))
                for column, (unit, attribute) in columns.items()
            }
            report.sheets.setdefault(title, {})[str(side)] = row
            report.figures += row.values()
            beside = (
                "unknown" if found.device is None else f"{found.device / max(1, found.wanted):.3f} times that"
            )
            report.notes.append(
                f"{where}, {side}: {found.issued} guesses were read or queued, {found.used} were used;"
                f" wanted {human_bytes(found.wanted)}, the device read {beside}."
            )
        base = self._found[self._sides[0]]
        for side in self._sides[1:]:
            found = self._found[side]
            share = Share(f"{where}: token, {side} / {self._sides[0]}", found.token, base.token)
            report.shares.append(share)
            change = split(base, found)
            report.figures += [
                Figure(f"{where}, {side}: more of {name}", "ms/token", values)
                for name, values in change.items()
            ]
            report.notes.append(f"{where}, {side}: {words(share.ratio, base, found, change)}")


def _until_quiet(made: BenchRing) -> None:
    """Until no read is queued or under way."""
    deadline = time.monotonic() + QUIET_S
    while (census := made.segments.census())["queued"] or census["reading"]:
        made.check()
        if time.monotonic() > deadline:
            raise SmoeError(f"ring {made.name}: reads were still under way after {QUIET_S:.0f} s")
        time.sleep(0.0005)


def split(base: _Found, found: _Found) -> dict[str, list[float]]:
    """What a token takes longer with guesses than without, by cause, round by round (ms)."""
    rounds = range(len(base.token))
    each = [base.wait[i] / base.late[i] if base.late[i] else 0.0 for i in rounds]
    number = [(found.late[i] - base.late[i]) * each[i] for i in rounds]
    wait = [found.wait[i] - base.wait[i] for i in rounds]
    return {
        "compute": [found.compute[i] - base.compute[i] for i in rounds],
        "wait": wait,
        "wait, number": number,
        "wait, length": [wait[i] - number[i] for i in rounds],
        "telling": [found.telling[i] - base.telling[i] for i in rounds],
    }


def words(ratio: Ratio, base: _Found, found: _Found, change: Mapping[str, Sequence[float]]) -> str:
    """The verdict on a side in words."""
    more = {name: median(values) for name, values in change.items()}
    if ratio.high < 1:
        verdict = "it pays"
    elif ratio.low > 1:
        verdict = "it does not pay"
    else:
        verdict = "whether it pays cannot be told"
    return (
        f"{median(found.hits):.1f}% of the experts were there, not {median(base.hits):.1f}%; a token takes"
        f" {ratio.ratio:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f}): {verdict}."
        f" Compute {more['compute']:+.2f} ms (memory bandwidth and cores), waits {more['wait']:+.2f} ms (by"
        f" their number {more['wait, number']:+.2f}; by the length of each, workers and device being busy"
        f" with guesses, {more['wait, length']:+.2f}), telling {more['telling']:+.2f} ms;"
        f" {median(found.wasted):.1f} MB a token were read in vain."
    )


def plot(report: Report, path: Path) -> None:
    """Draw what a token's time is made of, side by side.  SmoeError where matplotlib is not here."""
    picture = plots.figure(8, 1 + 0.5 * sum(len(rows) + 1 for rows in report.sheets.values()))
    for at, (title, rows) in enumerate(report.sheets.items(), 1):
        axes = picture.add_subplot(len(report.sheets), 1, at, title=title, xlabel="ms a token")
        left = [0.0] * len(rows)
        for column in ("compute", "wait"):
            width = [median(row[column].values) for row in rows.values()]
            axes.barh(list(rows), width, left=left, label=column)
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.invert_yaxis()
        axes.legend()
    plots.save(picture, path)
