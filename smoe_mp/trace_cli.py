"""`smoe-mp trace`: record what is asked of a running system, and show what was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from smoe_mp import trace_view
from smoe_mp.completion import Name
from smoe_mp.finite import finite
from smoe_mp.segments import check_name
from smoe_mp.trace import read_trace
from smoe_mp.trace import record as record_trace

app = typer.Typer(
    help="Record and show what is asked of a ring.", no_args_is_help=True, rich_markup_mode=None
)


@app.command(
    help="Record what the clients of a running system ask for, until Ctrl-C or SIGTERM.\n\n"
    "Example: smoe-mp trace record my-model -o evening.trace"
)
def record(
    name: Name,
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The file; NAME.trace if left out.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="S", min=0, callback=finite, help="End after so long; 0: at Ctrl-C."
        ),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    path = out or Path(f"{check_name(name)}.trace")
    trace = record_trace(check_name(name), path, seconds, lambda line: print(line, flush=True), force=force)
    lost = f"; {trace.lost} cells of the log were lost: not whole" if trace.lost else ""
    print(f"{path}: {len(trace)} records, {len(trace.expert)} experts, {path.stat().st_size} bytes{lost}")


@app.command(
    help="Show a trace: popularity, overlap of adjacent tokens, reuse, turns.\n\n"
    "Example: smoe-mp trace show evening.trace --slots 512"
)
def show(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A trace; also a routing CSV or JSON lines, gzipped or not."),
    ],
    slots: Annotated[
        list[int] | None,
        typer.Option("--slots", metavar="N", min=1, help="A ring size to reckon with; more than once."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="OUT.png", help="Draw the popularity (needs matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    trace = read_trace(file)
    about = trace_view.summary(trace, slots or trace_view.SLOTS)
    if picture is not None:
        trace_view.plot(trace, picture)
    if as_json:
        plain = trace_view.as_plain(about) | {"popularity": trace_view.popularity(trace).tolist()}
        print(json.dumps(plain, indent=2))
    else:
        trace_view.draw(trace, about, Console())
