"""`smoe-mp bench NAME`: one command for each benchmark."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from smoe_mp import plots
from smoe_mp.bench import (
    Progress,
    Report,
    control,
    cuda,
    curve,
    dequant,
    formats,
    hit,
    idle,
    io,
    machine,
    miss,
    peers,
    picture,
    replay,
    wake,
)
from smoe_mp.bench import open as opening
from smoe_mp.bench import prewarm as prewarming
from smoe_mp.bench import speculate as speculation
from smoe_mp.bench import transformers as answers
from smoe_mp.bench.randommoe import Shape
from smoe_mp.errors import ConfigError

app = typer.Typer(
    name="bench",
    help="Measure what is claimed: each benchmark says what it measures, against what, and how sure it is.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short form: seconds, and wide intervals.")]
Scratch = Annotated[
    Path, typer.Option("--scratch", metavar="DIR", help="Where the scratch file is made and kept.")
]
TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace; also a routing CSV or JSON lines, gzipped or not.")
]


def _can_draw(path: Path | None) -> Path | None:
    """Said before anything is measured."""
    if path is not None:
        plots.figure(1, 1)
        if not os.path.isdir(path.absolute().parent):
            raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")
    return path


Picture = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png", callback=_can_draw, help="Draw a picture (needs matplotlib)."),
]
Full = Annotated[bool, typer.Option("--full", help="More settings, for which there must be time.")]
Workers = Annotated[str, typer.Option("--workers", metavar="N,N", help="Numbers of workers.")]
Clients = Annotated[str, typer.Option("--clients", metavar="N,N", help="Clients at once.")]
Slots = Annotated[str, typer.Option("--slots", metavar="N,N", help="Ring sizes.")]


CLIENTS_FULL = (1, 2, 4)


@app.command(
    "io", help="Bytes/s through the ring over bare processes.\n\nExample: smoe-mp bench io --sizes 3,9"
)
def bench_io(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    full: Full = False,
    scratch: Scratch = Path(".bench"),
    sizes: Annotated[str, typer.Option("--sizes", metavar="MIB,MIB", help="Sizes of experts.")] = "",
    workers: Workers = "",
    clients: Clients = "",
    batches: Annotated[str, typer.Option("--batches", metavar="N,N", help="Experts a call.")] = "",
    python: Annotated[bool, typer.Option("--python", help="A client in Python as well.")] = False,
) -> None:
    sizes_mib, counts = _numbers("--sizes", sizes, 1, 1024), _numbers("--workers", workers, 1, 127)
    many, calls = _numbers("--clients", clients, 1, 32), _numbers("--batches", batches, 1, 8)
    asking = io.ASKING_FULL if full else io.asked(many or (1,), calls or (io.BATCH,), python=python)
    if full:
        sizes_mib, counts = sizes_mib or io.SIZES_MIB_FULL, counts or io.WORKERS_FULL
    with _bar() as progress:
        report = io.run(progress, scratch, quick=quick, sizes_mib=sizes_mib, workers=counts, asking=asking)
    _show(report, as_json, plot)


@app.command("hit", help="Taking and giving back a resident.\n\nExample: smoe-mp bench hit --slots 64,4096")
def bench_hit(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    full: Full = False,
    slots: Slots = "",
    clients: Clients = "",
) -> None:
    sizes = _numbers("--slots", slots, 8, 65535) or hit.SLOTS
    many = _numbers("--clients", clients, 1, 31) or (CLIENTS_FULL if full else (1,))
    with _bar() as progress:
        report = hit.run(progress, quick=quick, slots=sizes, clients=many)
    _show(report, as_json, plot)


@app.command("miss", help="Issuing a miss.\n\nExample: smoe-mp bench miss --slots 4096 --hits 0,300")
def bench_miss(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    full: Full = False,
    slots: Slots = "",
    hits: Annotated[str, typer.Option("--hits", metavar="N,N", help="Hits between two misses.")] = "",
    clients: Clients = "",
) -> None:
    sizes = _numbers("--slots", slots, 8, 65535) or (miss.SLOTS_FULL if full else miss.SLOTS)
    between = _numbers("--hits", hits, 0, 10**6) or miss.HITS
    many = _numbers("--clients", clients, 1, 31) or (CLIENTS_FULL if full else (1,))
    with _bar() as progress:
        report = miss.run(progress, quick=quick, slots=sizes, hits=between, clients=many)
    _show(report, as_json, plot)


@app.command(
    "wake", help="From demand to bytes, over a bare read.\n\nExample: smoe-mp bench wake --workers 1,16"
)
def bench_wake(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    full: Full = False,
    scratch: Scratch = Path(".bench"),
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or (wake.WORKERS_FULL if full else wake.WORKERS)
    with _bar() as progress:
        report = wake.run(progress, scratch, quick=quick, workers=counts)
    _show(report, as_json, plot)


@app.command(
    "control", help="A command over the socket beside shared memory.\n\nExample: smoe-mp bench control"
)
def bench_control(as_json: AsJson = False, plot: Picture = None, quick: Quick = False) -> None:
    with _bar() as progress:
        report = control.run(progress, quick=quick)
    _show(report, as_json, plot)


@app.command("idle", help="CPU time of a system that does nothing.\n\nExample: smoe-mp bench idle --quick")
def bench_idle(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    full: Full = False,
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or (idle.WORKERS_FULL if full else idle.WORKERS)
    with _bar() as progress:
        report = idle.run(progress, quick=quick, workers=counts)
    _show(report, as_json, plot)


@app.command("open", help="Opening the index of a large model.\n\nExample: smoe-mp bench open --formats smoe")
def bench_open(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    formats: Annotated[
        str, typer.Option("--formats", metavar="NAME,NAME", help=f"Of {', '.join(opening.BUILDERS)}.")
    ] = "",
) -> None:
    names = tuple(filter(None, (name.strip() for name in formats.split(","))))
    with _bar() as progress:
        report = opening.run(progress, quick=quick, formats=names)
    _show(report, as_json, plot)


@app.command(
    "formats",
    help="Streaming from GGUF and safetensors in place, over a vault.\n\nExample: smoe-mp bench formats",
)
def bench_formats(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or ()
    with _bar() as progress:
        report = formats.run(progress, scratch, quick=quick, workers=counts)
    _show(report, as_json, plot)


@app.command(
    "peers",
    help="Random experts under a memory limit: the ring, mmap, pread, safetensors and numpy. Needs root.\n\n"
    "Example: smoe-mp bench peers --rounds 3",
)
def bench_peers(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds; 0: 5.")] = 0,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=127, help="Number of workers.")
    ] = peers.WORKERS,
) -> None:
    with _bar() as progress:
        report = peers.run(progress, scratch, quick=quick, rounds=rounds, workers=workers)
    _show(report, as_json, plot)


@app.command(
    "dequant", help="Weights out of their blocks.\n\nExample: smoe-mp bench dequant --types Q4_K,Q8_0"
)
def bench_dequant(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    types: Annotated[str, typer.Option("--types", metavar="NAME,NAME", help="Block types.")] = "",
) -> None:
    names = tuple(filter(None, (word.strip() for word in types.split(","))))
    with _bar() as progress:
        report = dequant.run(progress, quick=quick, types=names)
    _show(report, as_json, plot)


@app.command(
    "transformers",
    help="Answers by transformers on streamed experts, over stock transformers and llama.cpp.\n\n"
    "Example: smoe-mp bench transformers --rounds 5 --llama-python llama/bin/python",
)
def bench_transformers(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds.")] = 3,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers; 12: 2.6 GB.")] = 12,
    skew: Annotated[float, typer.Option("--skew", min=0, help="Of the experts' popularity.")] = 0.9,
    limits: Annotated[
        str, typer.Option("--limits", metavar="N,N", help="Of the cgroups, in percent of the model.")
    ] = "",
    rings: Annotated[
        str, typer.Option("--rings", metavar="N,N", help="smoe-mp's, in percent of the experts.")
    ] = "50,100",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of an answer.")] = 64,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Of each side; 0: all cores.")] = 0,
    llama: Annotated[
        str, typer.Option("--llama-python", metavar="PATH", help="An interpreter with llama-cpp-python.")
    ] = "",
) -> None:
    settings = answers.Settings(
        shape=Shape(skew=skew, **({"layers": 4, "experts": 32} if quick else {"layers": layers})),
        rounds=1 if quick else rounds,
        limits=_shares("--limits", limits) or (answers.QUICK_LIMITS if quick else answers.LIMITS),
        rings=_shares("--rings", rings) or answers.RINGS,
        tokens=tokens,
        threads=threads or int(machine()["cores"]),
        llama=llama,
    )
    with _bar() as progress:
        report = answers.run(progress, scratch, settings)
    _show(report, as_json, plot)


@app.command(
    "cuda",
    help="Experts through the ring to a GPU, and tokens/s of a model with them there.\n\n"
    "Example: smoe-mp bench cuda --scratch /mnt/fast",
)
def bench_cuda(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds; 0: 3, with --quick 2.")] = 0,
) -> None:
    with _bar() as progress:
        report = cuda.run(progress, scratch, quick=quick, rounds=rounds)
    _show(report, as_json, plot)


@app.command(
    "curve",
    help="Hit rates by ring size that a trace would have: exact LRU and Belady's OPT.\n\n"
    "Example: smoe-mp bench curve evening.trace --plot evening.png",
)
def bench_curve(
    file: TraceFile,
    as_json: AsJson = False,
    slots: Slots = "",
    plot: Picture = None,
) -> None:
    with _bar() as progress:
        found = curve.run(progress, file, slots=_numbers("--slots", slots, 1, 2**21) or ())
    if plot is not None:
        found.plot(plot)
    found.show(as_json=as_json)


@app.command(
    "replay",
    help="A decode loop on a ring, driven by a trace, over the faster that it could be.\n\n"
    "Example: smoe-mp bench replay evening.trace --ring 50 --tokens 32",
)
def bench_replay(
    *,
    file: TraceFile,
    as_json: AsJson = False,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    ring: Annotated[
        int, typer.Option("--ring", metavar="N", min=1, max=100, help="Slots, in percent of the experts.")
    ] = 50,
    size: Annotated[
        int, typer.Option("--expert-kib", metavar="KIB", min=0, help="Size of an expert; 0: 1024.")
    ] = 0,
    compute: Annotated[
        str, typer.Option("--compute", metavar="N,N", help="Time of computing, in percent of the reads'.")
    ] = "",
    workers: Annotated[int, typer.Option("--workers", min=0, max=127, help="Workers; 0: 8.")] = 0,
    clients: Annotated[int, typer.Option("--clients", min=1, max=32, help="Clients at once.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Of the trace; 0: all.")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds; 0: 5.")] = 0,
    any_order: Annotated[bool, typer.Option("--any-order", help="By as_ready, not in_order.")] = False,
    plot: Picture = None,
) -> None:
    if size % 4:
        raise ConfigError(f"--expert-kib {size}: a multiple of 4 is wanted")
    given: dict[str, Any] = {
        "expert_bytes": size << 10,
        "compute": tuple(n / 100 for n in _numbers("--compute", compute, 0, 10_000) or ()),
        "workers": workers,
        "tokens": tokens,
        "rounds": rounds,
    }
    base = replay.QUICK if quick else {}
    settings = replay.Settings(
        ring=ring / 100, clients=clients, any_order=any_order, **base | {k: v for k, v in given.items() if v}
    )
    with _bar() as progress:
        report = replay.run(progress, scratch, file, settings)
    if plot is not None:
        replay.plot(report, plot)
    _show(report, as_json)


@app.command(
    "speculate",
    help="What guesses name, spare and cost, on a trace that records further ranks; without one, on the small"
    " model, whose next layer's router is asked too.\n\n"
    "Example: smoe-mp bench speculate evening.trace --guesses 4,8",
)
def bench_speculate(
    *,
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="Of `smoe-mp trace record`.")
    ] = None,
    as_json: AsJson = False,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    guesses: Annotated[str, typer.Option("--guesses", metavar="N,N", help="Ranks behind the top-k.")] = "4,8",
    ahead: Annotated[
        str, typer.Option("--ahead", metavar="N,N", help="Named of the next layer, without a TRACE.")
    ] = "4,6,8",
    told: Annotated[
        str, typer.Option("--told", metavar="WORD,WORD", help="At a layer's first or last expert.")
    ] = "first",
    bits: Annotated[str, typer.Option("--bits", metavar="N,N", help="Of the experts' weights: 4, 2.")] = "",
    ring: Annotated[
        int, typer.Option("--ring", metavar="N", min=1, max=100, help="Slots, in percent of the experts.")
    ] = speculation.RING_PERCENT,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=127, help="Number of workers.")
    ] = speculation.WORKERS,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Counted in each round.")] = 12,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds.")] = 12,
    plot: Picture = None,
) -> None:
    settings = speculation.Settings(
        guesses=_numbers("--guesses", guesses, 0, 64),
        ahead=_numbers("--ahead", ahead, 1, 64),
        told=tuple(filter(None, (word.strip() for word in told.split(",")))),
        bits=_numbers("--bits", bits, 2, 4) or speculation.BITS,
        ring=ring,
        workers=workers,
        **(
            {"tokens": 6, "rounds": 2, "shape": (64, 256), "dense_bytes": 1 << 20}
            if quick
            else {"tokens": tokens, "rounds": rounds}
        ),
    )
    with _bar() as progress:
        report = speculation.run(progress, scratch, trace, settings)
    if plot is not None:
        speculation.plot(report, plot)
    _show(report, as_json)


@app.command(
    "prewarm",
    help="The first turn after a start, with and without prewarming.\n\n"
    "Example: smoe-mp bench prewarm --prompts 8,128",
)
def bench_prewarm(
    *,
    as_json: AsJson = False,
    plot: Picture = None,
    quick: Quick = False,
    prompts: Annotated[str, typer.Option("--prompts", metavar="N,N", help="Their lengths in bytes.")] = "",
    slots: Annotated[
        int, typer.Option("--slots", metavar="N", min=129, max=512, help="Of the ring.")
    ] = prewarming.SLOTS,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds; 0: as many as usual.")] = 0,
) -> None:
    lengths = _numbers("--prompts", prompts, 1, 2000)
    with _bar() as progress:
        report = prewarming.run(progress, quick=quick, prompts=lengths, slots=slots, rounds=rounds)
    _show(report, as_json, plot)


def _shares(flag: str, text: str) -> tuple[float, ...]:
    """Percentages as shares of 1."""
    return tuple(number / 100 for number in _numbers(flag, text, 1, 10_000))


def _numbers(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """The whole numbers of "1,3,9"; ConfigError names what is none."""
    found = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        if not word.isascii() or not word.isdigit() or not least <= int(word) <= most:
            raise ConfigError(f"{flag} {text}: {word!r} is no whole number from {least} to {most}")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr, as a function."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _show(report: Report, as_json: bool, path: Path | None = None) -> None:
    if as_json:
        print(json.dumps(report.plain(), indent=2))
    else:
        report.draw(Console())
    if path is not None:
        picture.draw(report, path)
