"""`smoe-mp bench io|hit|miss|wake|idle|control|open|formats|peers|dequant|transformers`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from smoe_mp.bench import (
    Progress,
    Report,
    control,
    dequant,
    formats,
    hit,
    idle,
    io,
    machine,
    miss,
    peers,
    wake,
)
from smoe_mp.bench import open as opening
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
    _show(report, as_json)


@app.command("hit", help="Taking and giving back a resident.\n\nExample: smoe-mp bench hit --slots 64,4096")
def bench_hit(
    as_json: AsJson = False,
    quick: Quick = False,
    full: Full = False,
    slots: Slots = "",
    clients: Clients = "",
) -> None:
    sizes = _numbers("--slots", slots, 8, 65535) or hit.SLOTS
    many = _numbers("--clients", clients, 1, 31) or (CLIENTS_FULL if full else (1,))
    with _bar() as progress:
        report = hit.run(progress, quick=quick, slots=sizes, clients=many)
    _show(report, as_json)


@app.command("miss", help="Issuing a miss.\n\nExample: smoe-mp bench miss --slots 4096 --hits 0,300")
def bench_miss(
    *,
    as_json: AsJson = False,
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
    _show(report, as_json)


@app.command(
    "wake", help="From demand to bytes, over a bare read.\n\nExample: smoe-mp bench wake --workers 1,16"
)
def bench_wake(
    as_json: AsJson = False,
    quick: Quick = False,
    full: Full = False,
    scratch: Scratch = Path(".bench"),
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or (wake.WORKERS_FULL if full else wake.WORKERS)
    with _bar() as progress:
        report = wake.run(progress, scratch, quick=quick, workers=counts)
    _show(report, as_json)


@app.command(
    "control", help="A command over the socket beside shared memory.\n\nExample: smoe-mp bench control"
)
def bench_control(as_json: AsJson = False, quick: Quick = False) -> None:
    with _bar() as progress:
        report = control.run(progress, quick=quick)
    _show(report, as_json)


@app.command("idle", help="CPU time of a system that does nothing.\n\nExample: smoe-mp bench idle --quick")
def bench_idle(
    as_json: AsJson = False,
    quick: Quick = False,
    full: Full = False,
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or (idle.WORKERS_FULL if full else idle.WORKERS)
    with _bar() as progress:
        report = idle.run(progress, quick=quick, workers=counts)
    _show(report, as_json)


@app.command("open", help="Opening the index of a large model.\n\nExample: smoe-mp bench open --formats smoe")
def bench_open(
    as_json: AsJson = False,
    quick: Quick = False,
    formats: Annotated[
        str, typer.Option("--formats", metavar="NAME,NAME", help=f"Of {', '.join(opening.BUILDERS)}.")
    ] = "",
) -> None:
    names = tuple(filter(None, (name.strip() for name in formats.split(","))))
    with _bar() as progress:
        report = opening.run(progress, quick=quick, formats=names)
    _show(report, as_json)


@app.command(
    "formats",
    help="Streaming from GGUF and safetensors in place, over a vault.\n\nExample: smoe-mp bench formats",
)
def bench_formats(
    as_json: AsJson = False,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    workers: Workers = "",
) -> None:
    counts = _numbers("--workers", workers, 1, 127) or ()
    with _bar() as progress:
        report = formats.run(progress, scratch, quick=quick, workers=counts)
    _show(report, as_json)


@app.command(
    "peers",
    help="Random experts under a memory limit: the ring, mmap, pread, safetensors and numpy. Needs root.\n\n"
    "Example: smoe-mp bench peers --rounds 3",
)
def bench_peers(
    as_json: AsJson = False,
    quick: Quick = False,
    scratch: Scratch = Path(".bench"),
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Rounds; 0: 5.")] = 0,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, max=127, help="Number of workers.")
    ] = peers.WORKERS,
) -> None:
    with _bar() as progress:
        report = peers.run(progress, scratch, quick=quick, rounds=rounds, workers=workers)
    _show(report, as_json)


@app.command(
    "dequant", help="Weights out of their blocks.\n\nExample: smoe-mp bench dequant --types Q4_K,Q8_0"
)
def bench_dequant(
    as_json: AsJson = False,
    quick: Quick = False,
    types: Annotated[str, typer.Option("--types", metavar="NAME,NAME", help="Block types.")] = "",
) -> None:
    names = tuple(filter(None, (word.strip() for word in types.split(","))))
    with _bar() as progress:
        report = dequant.run(progress, quick=quick, types=names)
    _show(report, as_json)


@app.command(
    "transformers",
    help="Answers by transformers on streamed experts, over stock transformers and llama.cpp.\n\n"
    "Example: smoe-mp bench transformers --rounds 5 --llama-python llama/bin/python",
)
def bench_transformers(
    *,
    as_json: AsJson = False,
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
    _show(report, as_json)


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


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.plain(), indent=2))
    else:
        report.draw(Console())
