"""bench transformers: answers by transformers with streamed experts, against what people have without it.

    side                     model's files           its experts
    transformers, resident   one tensor an expert    copied into memory by the load, as the published layout
                             and projection          has to be
    transformers, mapped     a stack of experts a    mapped from the file: the kernel reads what is touched
                             tensor
    llama.cpp, mapped        GGUF                    the same
    smoe-mp, ring N%         as the first            a ring for so many of them

Each side is a process of its own (side.py) in a memory cgroup of its own, one smaller than the model and one
larger; smoe-mp's system is in it too.  It loads the model and gives two answers, greedily, with a pause
between them in which prewarming may go on.  Page caches are dropped before.  Sides in turn, the one that
begins changing from round to round.  The model is random (randommoe.py), and the same for all sides; all
that transformers runs must say the same tokens, or there is no report.

A side that its cgroup has no room for is killed by the kernel: that is a result, and reported as one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from smoe_mp import segments, tables
from smoe_mp.bench import Figure, Progress, Report, Share, machine
from smoe_mp.bench import side as side_program
from smoe_mp.bench.cgroup import MemoryGroup, memory_group
from smoe_mp.bench.io import SPARE_BYTES, Device, notes_on, scratch_folder
from smoe_mp.bench.randommoe import SEEN_TOKENS, Shape
from smoe_mp.errors import ConfigError, SegmentError, SmoeError
from smoe_mp.launch import clear
from smoe_mp.platform import system
from smoe_mp.run import check_extra
from smoe_mp.runtime import human_bytes
from smoe_mp.sizing import dense_bytes
from smoe_mp.sources import open_source

QUICK_SHAPE = Shape(layers=4, experts=32)
ROUNDS, QUICK_ROUNDS = 3, 1
LIMITS = (0.45, 1.5)  # of the model's bytes
QUICK_LIMITS = (1.5, 4.0)  # so small a model is less than an interpreter with torch
RINGS = (0.5, 1.0)  # of the experts
#: What a process with torch and a system need beside the dense weights and the ring.
PROCESS_BYTES = 448 << 20
SIDE_S = 900.0  # for all that one process does
END_S = 60.0  # for a system to end after its client
SAMPLE_S = 0.05
MIB = 1 << 20

#: The marks that a side gives, and what it does before each.
PHASES = ("imported", "loaded", "prefill", "decode", "rested", "prefill", "decode")
DOING = ("starting", "loading", "at the 1st prompt", "at the 1st answer", "resting", "at the 2nd prompt",
         "at the 2nd answer", "ending")  # fmt: skip
LOADED, PREFILL, DECODES = 1, 2, (3, 6)
ANSWERS = ("1st answer", "2nd answer")

RESIDENT, MAPPED, LLAMA = "transformers, resident", "transformers, mapped", "llama.cpp, mapped"
WHAT = (
    "load, prefill and greedy decode of a random Mixture-of-Experts model in bfloat16, each side in a memory"
    " cgroup of its own: one smaller and one larger than the model."
)

_numbers = itertools.count()


@dataclass(frozen=True)
class Settings:
    """How it is run.  `limits`: of the cgroups, as shares of the model's bytes; `rings`: of smoe-mp's, as
    shares of the experts; `prompt` and `tokens`: of each answer; `threads`: of each side's arithmetic;
    `answer_s`: an answer that takes longer ends early; `llama`: the interpreter with llama_cpp ("": this)."""

    shape: Shape = field(default_factory=Shape)
    rounds: int = ROUNDS
    limits: Sequence[float] = LIMITS
    rings: Sequence[float] = RINGS
    prompt: int = 128
    tokens: int = 64
    threads: int = field(default_factory=lambda: int(machine()["cores"]))
    answer_s: float = 120.0
    pause_s: float = 5.0
    llama: str = ""


@dataclass(frozen=True)
class _Side:
    """One side under one limit (None: none).  `slots`: of smoe-mp's ring, 0 for the others."""

    where: str
    limit: int | None
    name: str
    path: Path
    slots: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.name}"

    @property
    def is_llama(self) -> bool:
        return self.path.suffix == ".gguf"


@dataclass
class _Run:
    """What one process did: its marks, the device's count of bytes at each, and why it went no further."""

    marks: list[dict[str, Any]] = field(default_factory=list)
    device: list[int | None] = field(default_factory=list)
    failed: str = ""
    kills: int = 0  # by the kernel, of any process of the side
    peak_bytes: int | None = None
    held_bytes: int | None = None

    def tokens(self, decode: int) -> list[int]:
        return list(self.marks[decode]["tokens"]) if len(self.marks) > decode else []

    def rate(self, decode: int) -> float:
        """Tokens a second behind the first."""
        return (len(self.tokens(decode)) - 1) / float(self.marks[decode]["s"])

    def device_bytes(self, phase: int) -> int | None:
        now, before = self.device[phase], self.device[phase - 1]
        return None if now is None or before is None else now - before

    def token_bytes(self, decode: int) -> float | None:
        """Bytes that the device read for each token behind the first."""
        read = self.device_bytes(decode)
        return None if read is None else read / (len(self.tokens(decode)) - 1)

    def hit_rate(self, decode: int) -> float | None:
        """In percent; None where nothing was demanded of a ring."""
        now, before = self.marks[decode], self.marks[decode - 1]
        demanded = sum(now.get(key, 0) - before.get(key, 0) for key in side_program.DEMANDS)
        return 100 * (now["hits"] - before["hits"]) / demanded if demanded else None


def run(progress: Progress, scratch: Path, settings: Settings) -> Report:
    """Measure, with models in the folder `scratch` that are made once and kept."""
    check_extra()
    llama, why_not = _llama(settings.llama)
    with scratch_folder(scratch):
        folder = _model(scratch, settings.shape, progress)
    bench = _Bench(folder, settings, llama)
    if why_not:
        bench.notes.append(why_not)
    sides = bench.sides
    whole = settings.rounds * len(sides)
    for turn in range(settings.rounds):
        for at in range(len(sides)):
            side = sides[(at + turn) % len(sides)]
            progress(str(side), turn * len(sides) + at, whole)
            bench.runs[side].append(bench.one(side))
    progress("", whole, whole)
    check_tokens(bench.runs)
    return bench.report()


def _llama(python: str) -> tuple[str, str]:
    """The interpreter that has llama_cpp, or "" and why there is none.  ConfigError where the one that was
    given has it not."""
    chosen = python or sys.executable
    try:
        done = subprocess.run([chosen, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    except OSError as error:
        why = str(error.strerror)
    else:
        if done.returncode == 0:
            return chosen, ""
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if python:
        raise ConfigError(f"--llama-python {python}: {why}: give an interpreter that has llama-cpp-python")
    return "", f"No side with llama.cpp ({why}): --llama-python may name an interpreter that has it."


def model_folder(scratch: Path, shape: Shape) -> Path:
    return scratch / f"transformers-{'x'.join(map(str, asdict(shape).values()))}"


def _model(scratch: Path, shape: Shape, progress: Progress) -> Path:
    """The folder with the model's three forms, made where they are not there yet."""
    folder = model_folder(scratch, shape)
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    need = 3 * (shape.experts_bytes + shape.dense_bytes)
    free = shutil.disk_usage(folder).free
    if free < need + SPARE_BYTES:
        raise SegmentError(
            f"{folder}: the model in three forms needs {human_bytes(need)}, and {human_bytes(free)} are free:"
            " give --scratch another folder"
        )
    progress("making the model", 0, 1)
    command = [sys.executable, "-m", "smoe_mp.bench.randommoe", str(folder), json.dumps(asdict(shape))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode:
        raise SmoeError(f"{folder}: the model could not be made: {done.stderr.strip().splitlines()[-1:]}")
    os.sync()
    progress("making the model", 1, 1)
    return folder


def _environment() -> dict[str, str]:
    """Of the children: nothing is to be fetched."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


class _Bench:
    """One benchmark: the model, the sides, their runs."""

    def __init__(self, folder: Path, settings: Settings, llama: str) -> None:
        self.folder, self.settings, self.llama = folder, settings, llama
        self.apart, self.fused, self.gguf = (folder / name for name in ("apart", "fused", "model.gguf"))
        files = sorted(self.apart.glob("*.safetensors"))
        probe = segments.probe(files[0])
        if probe.mode != "direct":
            raise ConfigError(
                f"{files[0]}: direct reads are refused here ({probe.reason}), so this would measure the page"
                " cache: give --scratch a folder on a local disk"
            )
        self.device = Device(files[0])
        self.model_bytes = sum(file.stat().st_size for file in files)
        self.notes: list[str] = []
        self.dropped = ""  # from the page cache before each run
        self.sides = [side for limit in self._limits() for side in self._sides_under(limit)]
        self.runs: dict[_Side, list[_Run]] = {side: [] for side in self.sides}
        numbers, ids = random.Random(2), range(settings.shape.vocabulary)
        self.prompts = [numbers.choices(ids, k=settings.prompt) for _ in ANSWERS]

    # --- what is to be run ---

    def _limits(self) -> list[int | None]:
        """The cgroups' limits in bytes; a single None where no cgroup can be made."""
        try:
            with memory_group(self.model_bytes):
                return [int(share * self.model_bytes) for share in self.settings.limits]
        except SmoeError as error:
            self.notes.append(f"No memory limits, and no figures of memory: {error}.")
            return [None]

    def _sides_under(self, limit: int | None) -> Iterator[_Side]:
        where = "no limit" if limit is None else f"{human_bytes(limit)} ({limit / self.model_bytes:.0%})"
        yield _Side(where, limit, RESIDENT, self.apart)
        yield _Side(where, limit, MAPPED, self.fused)
        if self.llama and self.gguf.exists():
            yield _Side(where, limit, LLAMA, self.gguf)
        experts = self.settings.shape.layers * self.settings.shape.experts
        for slots in self._rings(limit, experts):
            yield _Side(where, limit, f"smoe-mp, ring {slots / experts:.0%}", self.apart, slots)

    def _rings(self, limit: int | None, experts: int) -> list[int]:
        """Slots of smoe-mp's rings: as set, or what the limit leaves, and no fewer than a layer wants."""
        source, room = open_source(self.apart), experts
        if limit is not None:
            slot_bytes = segments.choose_slot_bytes(tables.build(source, 4096), None)
            room = (limit - dense_bytes(source) - PROCESS_BYTES) // slot_bytes
        least = self.settings.shape.top_k + 1
        wanted = (max(least, min(round(share * experts), room)) for share in self.settings.rings)
        return list(dict.fromkeys(wanted))

    # --- one run ---

    def one(self, side: _Side) -> _Run:
        """Load and two answers, in a process that starts with nothing in the page cache."""
        self.dropped = drop_caches(self.folder)
        ring = f"bench-{os.getpid()}-{next(_numbers)}"
        with contextlib.ExitStack() as stack:
            stack.callback(clear, ring)  # what a side that was killed left
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smoe-bench-")))
            group = None if side.limit is None else stack.enter_context(memory_group(side.limit))
            said = stack.enter_context((folder / "stderr").open("w+b"))
            command = [
                self.llama if side.is_llama else sys.executable,
                *("-c", Path(side_program.__file__).read_text(encoding="utf-8")),
                json.dumps(self._spec(side, ring, folder)),
            ]
            child = stack.enter_context(_child(group.inside(command) if group else command, said))
            found = self._follow(child, group)
            if group is not None:
                group.wait_empty(END_S)  # the side's system ends after it
                found.peak_bytes, found.kills = group.peak_bytes(), group.kills()
            said.seek(0)
            found.failed = _why(found, child.returncode, said.read().decode(errors="replace"))
        return found

    def _spec(self, side: _Side, ring: str, folder: Path) -> dict[str, Any]:
        """What side.py is told."""
        chosen = self.settings
        # A file of popularity of its own: nothing is known from the rounds before.
        system = {
            "slots": side.slots,
            "name": ring,
            "settings": {"prewarm.histogram": f"{folder}/popularity"},
        }
        return {
            "engine": "llama" if side.is_llama else "transformers",
            "path": str(side.path.absolute()),
            "system": system if side.slots else None,
            "threads": chosen.threads,
            "prompts": self.prompts,
            "tokens": chosen.tokens,
            "limit_s": chosen.answer_s,
            "pause_s": chosen.pause_s,
        }

    def _follow(self, child: subprocess.Popen[bytes], group: MemoryGroup | None) -> _Run:
        """Take the marks of a side until it ends."""
        assert child.stdin is not None
        assert child.stdout is not None
        found = _Run(held_bytes=0 if group else None)
        deadline = time.monotonic() + SIDE_S
        while time.monotonic() < deadline:
            if group is not None:
                found.held_bytes = max(found.held_bytes or 0, group.held_bytes())
            if not select.select([child.stdout], [], [], SAMPLE_S)[0]:
                continue
            line = child.stdout.readline()
            if not line:
                break
            found.marks.append(json.loads(line))
            found.device.append(self.device.bytes_read())
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(b"\n")
        else:
            child.kill()
        child.wait()
        return found

    # --- what was found ---

    def report(self) -> Report:
        settings = {**asdict(self.settings), "folder": str(self.folder), "device": self.device.name}
        report = Report("transformers", WHAT, {**settings, "model_bytes": self.model_bytes})
        whole = {side: runs for side, runs in self.runs.items() if not any(one.failed for one in runs)}
        for side, runs in self.runs.items():
            if side in whole:
                row = {c: Figure(f"{side}: {c}", unit, values) for c, unit, values in self._columns(runs)}
                report.sheets.setdefault(side.where, {})[side.name] = row
                report.figures += row.values()
            report.notes += [f"{side}: {text}." for text in _failures(runs)]
        for ours, other in itertools.product(whole, whole):
            if ours.slots and not other.slots and ours.limit == other.limit:
                name = f"{ours} / {other.name}"
                for decode, answer in zip(DECODES, ANSWERS, strict=True):
                    above, below = ([one.rate(decode) for one in whole[side]] for side in (ours, other))
                    report.shares.append(Share(f"{name}, {answer}", above, below))
        report.notes += [*self.notes, *self._facts(), *notes_on(self.device)]
        report.extra["runs"] = [
            {"limit": side.limit, "side": side.name, "slots": side.slots, **asdict(one)}
            for side, runs in self.runs.items()
            for one in runs
        ]
        return report

    def _columns(self, runs: list[_Run]) -> Iterator[tuple[str, str, list[float]]]:
        """Name, unit and each round's value; none of what is not known here."""
        prompt = self.settings.prompt
        values: dict[tuple[str, str], list[float | None]] = {
            ("load", "s"): [one.marks[LOADED]["s"] for one in runs],
            ("load, read", "MiB"): [_mib(one.device_bytes(LOADED)) for one in runs],
            ("prefill", "tokens/s"): [prompt / one.marks[PREFILL]["s"] for one in runs],
            ("prefill, read", "MiB"): [_mib(one.device_bytes(PREFILL)) for one in runs],
        }
        for decode, answer in zip(DECODES, ANSWERS, strict=True):
            values[answer, "tokens/s"] = [one.rate(decode) for one in runs]
            values[f"{answer}, read", "MiB/token"] = [_mib(one.token_bytes(decode)) for one in runs]
            values[f"{answer}, hits", "%"] = [one.hit_rate(decode) for one in runs]
        values["memory", "MiB"] = [_mib(one.peak_bytes) for one in runs]
        values["memory, no cache", "MiB"] = [_mib(one.held_bytes) for one in runs]
        for (name, unit), found in values.items():
            known = [value for value in found if value is not None]
            if len(known) == len(runs):
                yield name, unit, known

    def _facts(self) -> list[str]:
        """What one must know to read the figures."""
        shape = self.settings.shape
        seen = json.loads((self.folder / "complete").read_text())
        facts = [
            "read: what the device read meanwhile. memory: the cgroup's peak, page cache included; no cache:"
            f" of anonymous and shared memory, looked at every {SAMPLE_S * 1000:.0f} ms. hits: of the experts"
            " that smoe-mp's client demanded.",
            f"The model: {shape.layers} layers of {shape.experts} experts of"
            f" {human_bytes(shape.expert_bytes)}, top-{shape.top_k}; {human_bytes(self.model_bytes)},"
            f" {shape.experts_bytes / self.model_bytes:.0%} of it experts. A token wants"
            f" {human_bytes(shape.token_bytes)} of them.",
            f"Its weights are random, its routers skewed ({shape.skew:g}): of {SEEN_TOKENS} random tokens'"
            f" demands {seen['quarter']:.0%} are for the most popular quarter of a layer's experts, and a"
            f" token shares {seen['overlap']:.0%} of its experts with the one before.",
            "transformers runs its eager code for experts on all sides, and all said the same tokens.",
            f"Before each run {self.dropped} dropped from the page cache; smoe-mp began with an empty ring"
            f" and no popularity known. Between the answers are {self.settings.pause_s:g} s.",
        ]
        said: dict[bool, list[int]] = {}  # the 1st answer, by whether it is llama.cpp's
        for side, runs in self.runs.items():
            for one in runs:
                if one.tokens(DECODES[0]):
                    said.setdefault(side.is_llama, one.tokens(DECODES[0]))
        if False in said:
            facts.append(
                f"{len(set(said[False]))} of the {len(said[False])} tokens of the 1st answer differ from each"
                " other."
            )
        if False in said and True in said:
            facts.append(
                "llama.cpp has the same weights, in BF16, and its own arithmetic: of the 1st answer the first"
                f" {_agreeing(said[False], said[True])} tokens are the same."
            )
        return facts


def check_tokens(runs: Mapping[_Side, Sequence[_Run]]) -> None:
    """SmoeError where two runs of transformers do not say the same, as far as both came."""
    for decode in DECODES:
        longest: list[int] = []
        for side, ours in runs.items():
            for tokens in (one.tokens(decode) for one in ours if not side.is_llama):
                if _agreeing(tokens, longest) < min(len(tokens), len(longest)):
                    raise SmoeError(
                        f"{side} says other tokens, {tokens}, than the sides before it, {longest}: no figures"
                    )
                longest = max(longest, tokens, key=len)


@contextlib.contextmanager
def _child(command: list[str], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A side's process, killed at the end of the block if it still runs."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=said, bufsize=0, env=_environment()
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def drop_caches(folder: Path) -> str:
    """Drop the files in `folder` from the page cache, as root all of it, libraries too.  Returns which."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for file in (path for path in folder.rglob("*") if path.is_file()):
            with file.open("rb") as opened:
                system.drop_cached(opened.fileno(), 0, 0)
        return "the model's files were"
    return "all files were"


def _why(run: _Run, status: int, said: str) -> str:
    """Why a side came no further; "" where it did all."""
    doing = DOING[len(run.marks)]
    if status and run.kills:
        return f"killed by the kernel while {doing}: its cgroup was full"
    if status == -signal.SIGKILL:
        return f"not done after {SIDE_S:.0f} s: stopped while {doing}"
    if status:
        return f"failed while {doing}: {(said.strip().splitlines() or [f'exit status {status}'])[-1]}"
    if any(len(run.tokens(decode)) < 2 for decode in DECODES):
        return "no second token of an answer in its time"
    return ""


def _failures(runs: list[_Run]) -> list[str]:
    """What went wrong, and in how many of the rounds."""
    texts = [one.failed or ("a process of it was killed by the kernel" if one.kills else "") for one in runs]
    return [f"in {texts.count(text)} of {len(runs)} rounds {text}" for text in dict.fromkeys(texts) if text]


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start of both are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _mib(count: float | None) -> float | None:
    return None if count is None else count / MIB
