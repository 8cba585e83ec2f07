"""The commands of the control plane on the command line: arguments in, one message, a line or JSON out."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from smoe_mp import histogram as files
from smoe_mp.completion import Name
from smoe_mp.control.client import ControlClient, check_served
from smoe_mp.control.commands import (
    Busy,
    BusyResult,
    Command,
    Demand,
    Drain,
    ExpertCount,
    Histogram,
    HistogramResult,
    Idle,
    Pair,
    Speculate,
    Verify,
    VerifyStatus,
    help_text,
)
from smoe_mp.control.events import EVENTS, Event, EventStream
from smoe_mp.control.protocol import DEADLINE_MS_MAX
from smoe_mp.errors import ConfigError, Refused
from smoe_mp.finite import finite
from smoe_mp.top import run_top

PAGE = 20_000  # experts that one answer tells of

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Experts = Annotated[
    list[str], typer.Argument(metavar="LAYER:EXPERT[-EXPERT]", help="Experts, as 5:3 or 5:0-7; several.")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="S", min=0.001, max=DEADLINE_MS_MAX / 1000, callback=finite, help="Seconds."
    ),
]


def ask(name: str, command: Command[Any], timeout_s: float = 5.0) -> Any:
    """The answer of the system `name`.  Raises NoSuchRing where there is none."""
    check_served(name)
    with ControlClient(name, timeout_ms=max(1, int(timeout_s * 1000))) as control:
        return control.call(command)


def show_json(result: Struct) -> None:
    """Print it as JSON, indented."""
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


def pairs_of(texts: list[str]) -> list[Pair]:
    """[(layer, expert), ...] of "5:3" and "5:0-7".  Raises ConfigError."""
    pairs: list[Pair] = []
    for text in texts:
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
        if not found:
            raise ConfigError(f"{text}: not LAYER:EXPERT or LAYER:FIRST-LAST, whole numbers")
        layer, first, last = (int(part) if part else None for part in found.groups())
        assert layer is not None
        assert first is not None
        last = first if last is None else last
        if not first <= last < first + 65_536:
            raise ConfigError(f"{text}: from {first} to {last} are no experts, or too many")
        pairs += [(layer, expert) for expert in range(first, last + 1)]
    return pairs


def demand(name: Name, experts: Experts, *, timeout: Timeout = 60.0, as_json: AsJson = False) -> None:
    result = ask(name, Demand(experts=pairs_of(experts)), timeout)
    if as_json:
        show_json(result)
    else:
        for failure in result.failed:
            print(f"FAILED: expert {failure.expert} of layer {failure.layer}: {failure.message}")
        print(f"{name}: {result.resident} resident, {result.hits} of them before; {result.took_ms:g} ms")
    raise typer.Exit(1 if result.failed else 0)


def speculate(name: Name, experts: Experts, *, as_json: AsJson = False) -> None:
    pairs = pairs_of(experts)
    result = ask(name, Speculate(experts=pairs))
    if as_json:
        show_json(result)
    else:
        print(f"{name}: {result.queued} of {len(set(pairs))} guesses queued")


def busy(
    name: Name,
    lease: Annotated[
        float,
        typer.Option(
            "--lease", metavar="S", min=0.001, max=3600, callback=finite, help="For how many seconds at most."
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    _show_busy(name, ask(name, Busy(lease_ms=max(1, int(lease * 1000)))), as_json)


def idle(name: Name, as_json: AsJson = False) -> None:
    _show_busy(name, ask(name, Idle()), as_json)


def _show_busy(name: str, result: BusyResult, as_json: bool) -> None:
    if as_json:
        show_json(result)
        return
    lease = f", the control plane's flag for {result.lease_ms / 1000:g} s more" if result.lease_ms else ""
    print(f"{name}: {len(result.busy_clients)} clients are busy{lease}")


def drain(
    name: Name,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Serve again.")] = False,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    result = ask(name, Drain(resume=resume), timeout)
    if as_json:
        show_json(result)
    elif resume:
        print(f"{name}: {result.state}")
    else:
        print(f"{name}: {result.state}, {result.reads} reads were still finished; the ring is kept")


# --- the histogram ---------------------------------------------------------------------------------------

histogram_app = typer.Typer(help="The experts' popularity: what prewarming goes by.", no_args_is_help=True)


@histogram_app.command(
    help="Show the most popular experts.\n\nExample: smoe-mp histogram show smoe-demo --top 50"
)
def show(
    name: Name,
    *,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=PAGE, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    result: HistogramResult = ask(name, Histogram(most=top))
    if as_json:
        show_json(result)
        return
    print(f"{result.counted} of {result.experts} experts were demanded, {result.total:,} times in all")
    most = max([row.count for row in result.most_popular if row.count], default=1)
    for row in result.most_popular:
        if row.count:
            bar = "#" * max(1, round(40 * row.count / most))
            print(f"layer {row.layer:4d}  expert {row.expert:4d}  {row.count:10,}  {bar}")
    print(f"kept in {result.path}")


@histogram_app.command(
    help="Write the popularity to a new file, in its own format (docs/formats.md)."
    "\n\nExample: smoe-mp histogram export smoe-demo mine.bin"
)
def export(
    name: Name,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    if os.path.exists(out) and not force:
        raise ConfigError(f"{out}: there already; --force replaces it")
    fingerprint, counts = _whole(name)
    files.save(out, fingerprint, list(counts), np.array(list(counts.values()), np.uint32))
    print(f"{out}: the popularity of {len(counts)} experts")


def _whole(name: str) -> tuple[bytes, dict[Pair, int]]:
    """The model's fingerprint and the count of every expert of it."""
    first: HistogramResult = ask(name, Histogram(most=PAGE))
    rows: list[ExpertCount] = list(first.most_popular)
    while len(rows) < first.experts and (
        page := ask(name, Histogram(first=len(rows), most=PAGE)).most_popular
    ):
        rows += page
    # Counts go on meanwhile and may have changed the order between two pages: each expert once.
    counts = {(row.layer, row.expert): row.count for row in rows}
    if len(counts) < first.experts:
        raise ConfigError(f"ring {name}: counts changed while they were read; try again when it is idle")
    return bytes.fromhex(first.fingerprint), counts


@histogram_app.command(
    "import",
    help="Take the popularity from a file of this model, in place of the present one."
    "\n\nExample: smoe-mp histogram import smoe-demo mine.bin",
)
def import_(
    name: Name, path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to read.")]
) -> None:
    fingerprint, counts = _whole(name)
    pairs = list(counts)
    loaded = files.load(path, fingerprint, pairs, set_aside=False)
    if loaded.histogram is None:
        raise ConfigError("; ".join(loaded.notes) or f"histogram {path}: no such file")
    rows = [ExpertCount(*pair, int(n)) for pair, n in zip(pairs, loaded.histogram.counts, strict=True)]
    for start in range(0, len(rows), PAGE):
        result = ask(name, Histogram(action="set", counts=rows[start : start + PAGE], most=0))
    print(f"{name}: popularity of {result.counted} experts from {path}")


@histogram_app.command(help="Forget the popularity.\n\nExample: smoe-mp histogram reset smoe-demo")
def reset(name: Name) -> None:
    ask(name, Histogram(action="reset", most=0))
    print(f"{name}: no expert is popular now")


@histogram_app.command(
    help="Save the popularity to its own file now; this also happens each minute."
    "\n\nExample: smoe-mp histogram save smoe-demo"
)
def save(name: Name) -> None:
    result = ask(name, Histogram(action="save", most=0))
    print(f"{name}: popularity of {result.counted} experts in {result.path}")


# --- verify and events -----------------------------------------------------------------------------------


def verify_live(name: str, as_json: bool) -> int:
    """Check the files of a running system, showing how far it is; the exit status.  Ctrl-C ends the check."""
    check_served(name)
    with ControlClient(name) as control, Progress(console=Console(stderr=True), transient=True) as bar:
        control.call(Verify(action="start"))
        task = bar.add_task("verify", total=None)
        try:
            while (found := control.call(Verify())).state == "running":
                bar.update(task, total=found.goal or None, completed=found.done)
                time.sleep(0.1)
        except BaseException:
            control.call(Verify(action="stop"))
            raise
    if as_json:
        show_json(found)
    else:
        _draw_verify(name, found)
    if found.state == "failed":
        raise Refused(f"ring {name}: {found.error}")
    return 1 if found.bad or found.state != "done" else 0


def _draw_verify(name: str, found: VerifyStatus) -> None:
    for bad in found.bad:
        print(f"BAD: expert {bad.expert} of layer {bad.layer}: {bad.path} at {bad.offset}: {bad.fault}")
    wrong = len({(bad.layer, bad.expert) for bad in found.bad})
    print(
        f"{name}: {found.state}: {found.done} of {found.goal} experts looked at, {found.checked} of them by"
        f" their checksums; {f'{wrong} BAD' if wrong else 'none is bad'}"
    )


EVENTS_HELP = f"""Print what happens in a running system, a line an event, until Ctrl-C.

Events: {", ".join(EVENTS)}.

Example: smoe-mp events smoe-demo --only state --only worker"""


def events(
    name: Name,
    *,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="EVENT", help="Only these; by default all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    unknown = sorted(set(only or ()) - set(EVENTS))
    if unknown:
        raise ConfigError(f"no event {unknown[0]!r}: there are {', '.join(EVENTS)}")
    check_served(name)
    with EventStream(name, tuple(only or ())) as stream:
        for line in _lines(stream, as_json):
            try:
                print(line, flush=True)
            except BrokenPipeError:  # whoever read it has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return


def _lines(stream: EventStream, as_json: bool) -> Iterator[str]:
    lost = 0
    draw: Callable[[Event], str] = _one_line
    if as_json:
        draw = lambda event: msgspec.json.encode(event).decode()  # noqa: E731
    for event in stream:
        if stream.lost > lost and not as_json:
            yield f"({stream.lost - lost} events were lost: read too slowly)"
        lost = stream.lost
        yield draw(event)


def _one_line(event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    data = event.data
    if event.event == "stats":
        rate = data.get("hit_rate")
        c = data.get("counters", {})
        words = f"hits {c.get('hits')}, misses {c.get('misses')}, reads {c.get('reads')}"
        words += "" if rate is None else f", hit rate {rate:.1%}"
    else:
        words = str(data["text"]) if "text" in data else ", ".join(f"{k} {v}" for k, v in data.items())
    return f"{clock}  {event.event:8}  {words}"


TOP_HELP = """Watch a running system: the ring as a map, rates, hits, workers, prewarm, clients.

Keys: p pauses and resumes prewarm, + and - change the number of workers, q ends it.

Example: smoe-mp top smoe-demo"""


def top(
    name: Name,
    *,
    every: Annotated[
        float,
        typer.Option(
            "--every", metavar="S", min=0.1, max=60, callback=finite, help="Seconds between two looks."
        ),
    ] = 1.0,
    frames: Annotated[
        int, typer.Option("--frames", metavar="N", min=0, help="Print N frames one below the other, and end.")
    ] = 0,
) -> None:
    run_top(name, every, frames)


def add_to(app: typer.Typer) -> None:
    """Put the commands of this module into the command line."""
    app.command(help=help_text(Demand))(demand)
    app.command(help=help_text(Speculate))(speculate)
    app.command(help=help_text(Busy))(busy)
    app.command(help=help_text(Idle))(idle)
    app.command(help=help_text(Drain))(drain)
    app.command(help=EVENTS_HELP)(events)
    app.command(help=TOP_HELP)(top)
    app.add_typer(histogram_app, name="histogram")
