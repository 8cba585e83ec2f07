"""The command line: `smoe-mp COMMAND`.

Nothing is done here that cannot be done from Python: each command reads its arguments, calls what does the
work, and draws the result.  Errors are one line on stderr with the remedy in it, and the exit status is the
error's: 1 a system that failed, 2 configuration or usage, 3 vault, 4 shared memory, 5 shared memory too
small, 6 ring, 7 control plane, 8 model, 130 Ctrl-C (docs/operations.md).  A traceback is a fault of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from smoe_mp import control_cli, log, models, segments, vault_cli
from smoe_mp import detach as detaching
from smoe_mp import inspect as inspecting
from smoe_mp._native import lib
from smoe_mp.bench.cli import app as bench_app
from smoe_mp.completion import Name, running
from smoe_mp.config import MIB, OPTIONS, LoadedConfig, for_model, load, render
from smoe_mp.control import protocol
from smoe_mp.control.client import ControlClient, check_served
from smoe_mp.control.commands import (
    Prewarm,
    Status,
    Stop,
    StopResult,
    Workers,
    help_text,
)
from smoe_mp.control.server import ControlServer
from smoe_mp.demo import PROMPT, Writing, run_demo
from smoe_mp.errors import ConfigError, NoAnswer, SmoeError
from smoe_mp.finite import finite
from smoe_mp.fit import fit, slots_in
from smoe_mp.paths import expanded
from smoe_mp.process import ExitWatch, ignore
from smoe_mp.run import Sampling, speak
from smoe_mp.runtime import (
    group_id,
    human_bytes,
    human_duration,
    is_served,
    make_runtime_folder,
    serving_pid,
    socket_path,
    version,
)
from smoe_mp.sizing import Sizing
from smoe_mp.sources import open_source
from smoe_mp.sources.manifest import write_manifest
from smoe_mp.status_view import draw_status, status_view, titled_table
from smoe_mp.supervisor import Supervisor
from smoe_mp.trace_cli import app as trace_app
from smoe_mp.watch import WatchCommand, watch

app = typer.Typer(
    name="smoe-mp",
    help="Stream the experts of a Mixture-of-Experts model from disk through a ring in shared memory.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)

NOT_WRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing alone
LOOK_S = 0.05  # between looks at a socket whose process cannot be watched

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """The entry point: runs the command and turns errors into one line and an exit status."""
    log.escape_stdout()
    try:
        app()
    except SmoeError as error:
        text = " ".join(str(error).split())
        print(f"smoe-mp: error: {text}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != 130:
            _flush_output()
            raise
        ignore(signal.SIGINT)  # one more would be a traceback of the interpreter's end
        sys.exit(130)
    except OSError as error:
        if error.filename is not None or error.errno not in NOT_WRITTEN:
            raise
        _output_failed(error)


def _flush_output() -> None:
    """Write what was printed, and end where that fails: the interpreter would only complain of it."""
    try:
        if sys.stdout is not None:  # which is so where fd 1 was closed
            sys.stdout.flush()
    except OSError as error:
        _output_failed(error)


def _output_failed(error: OSError) -> NoReturn:
    """End because stdout takes no more: without a word where its reader has seen enough."""
    with contextlib.suppress(OSError, ValueError):  # what is left in its buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        print(f"smoe-mp: error: stdout: write: {error.strerror} (errno {error.errno})", file=sys.stderr)
    sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        numbers = lib.smoe_api_version(), lib.smoe_layout_version(), protocol.VERSION
        print("smoe-mp {} (C API {}, memory layout {}, control protocol {})".format(version(), *numbers))
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _override(key: str) -> Any:
    """The flag of an option of the configuration, with the option's own words."""
    option = OPTIONS[key]
    metavar = key.rpartition(".")[2].upper() if isinstance(option.default, str | None) else "N"
    return typer.Option(option.flag, metavar=metavar, help=f"Override {key}: {option.meaning}")


Target = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|MODEL",
        help="The configuration, a TOML file; or a model itself (safetensors folder, GGUF file, .smoe vault,"
        " manifest, or a hub id in the local cache) with defaults for the rest.",
    ),
]


def _loaded(target: str, overrides: dict[str, int | str | None]) -> LoadedConfig:
    """The configuration that `target` is, or that of the model that it names."""
    if not models.names_model(target):
        return load(target, overrides)
    model = models.resolve(target)
    return for_model(model, models.free_name(model), overrides)


@app.command(
    help="Start a system in the foreground; Ctrl-C stops it. With --detach, in the background: that returns"
    " once the system is ready.\n\nExample: smoe-mp up my.toml --ring 96"
)
def up(
    target: Target,
    *,
    name: Annotated[str | None, _override("name")] = None,
    ring: Annotated[int | None, _override("ring.slots")] = None,
    slot_mb: Annotated[int | None, _override("ring.slot_mb")] = None,
    worker_count: Annotated[int | None, _override("workers.count")] = None,
    spec: Annotated[int | None, _override("speculation.ranks")] = None,
    log_level: Annotated[str | None, _override("log.level")] = None,
    log_format: Annotated[str | None, _override("log.format")] = None,
    log_file: Annotated[str | None, _override("log.file")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Go on in the background, and log to a file.")
    ] = False,
    parent: Annotated[int, typer.Option("--parent", metavar="PID", min=0, hidden=True)] = 0,
    detached: Annotated[bool, typer.Option("--detached", hidden=True)] = False,
) -> None:
    overrides: dict[str, int | str | None] = {
        "name": name,
        "ring.slots": ring,
        "ring.slot_mb": slot_mb,
        "workers.count": worker_count,
        "speculation.ranks": spec,
        "log.level": log_level,
        "log.format": log_format,
        "log.file": str(expanded(log_file).absolute()) if log_file else log_file,  # of this folder
    }
    if detach:
        _start_detached(target, overrides)
        return
    loaded = _loaded(target, overrides)
    gid = group_id(loaded.config.access.group)
    make_runtime_folder(gid)  # before anything is started
    path = socket_path(loaded.config.name)

    def open_control(supervisor: Supervisor) -> ControlServer:
        server = ControlServer(path, supervisor, gid)
        log.logger.info("control: %s", path)
        return server

    with log.opened(loaded, read=detached or parent > 0, to_file=detached) as opened:
        Supervisor(loaded, parent).run(open_control, opened.leave_terminal if detached else None)


def _start_detached(target: str, overrides: dict[str, int | str | None]) -> None:
    flags = [f"{OPTIONS[key].flag}={value}" for key, value in overrides.items() if value is not None]
    pid, lines = detaching.start([*flags, "--", target])
    for line in lines:
        print(line)
    print(f"detached: pid {pid}")


@app.command(help=help_text(Status), cls=WatchCommand)
def status(
    name: Name,
    as_json: AsJson = False,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="[S]",
            min=0.1,
            max=86_400,
            callback=finite,
            help="Look again every S seconds, 2 by default, until Ctrl-C.",
        ),
    ] = None,
) -> None:
    check_served(name)
    with ControlClient(name) as control:
        if every_s is not None:
            console = Console(soft_wrap=True, force_terminal=False) if as_json else Console()
            watch(lambda: status_view(control.call(Status()), as_json), every_s, console)
        result = control.call(Status())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        draw_status(result, Console())


@app.command(help=help_text(Stop))
def down(
    name: Name,
    keep_ring: Annotated[
        bool, typer.Option("--keep-ring", help="Leave the ring with its contents to the next smoe-mp up.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="S",
            min=0.1,
            max=86_400,
            callback=finite,
            help="How many seconds to wait for its end.",
        ),
    ] = 60.0,
) -> None:
    deadline = time.monotonic() + timeout
    check_served(name)
    with contextlib.closing(_End(socket_path(name))) as end:  # looked at while it surely lives
        with ControlClient(name, timeout_ms=min(int(timeout * 1000), 5000)) as control:
            done = control.call(Stop(keep_ring=keep_ring))
        if not end.wait(deadline):
            raise NoAnswer(
                f"ring {name!r}: the supervisor (pid {done.pid}) was told to stop and has not ended in"
                f" {timeout:g} s; it goes on stopping, look with smoe-mp status {name}"
            )
    print(_stopped(done))


class _End:
    """Waits for the end of the supervisor that serves a control socket: of its process or, where that is in
    another container, of its socket, which goes last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch: ExitWatch | None = None
        if pid := serving_pid(path):
            with contextlib.suppress(ProcessLookupError):
                self._watch = ExitWatch(pid)

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by then (monotonic time)."""
        if self._watch is not None:
            return self._watch.wait(deadline - time.monotonic())
        while served := is_served(self._path):
            if time.monotonic() >= deadline:
                break
            time.sleep(LOOK_S)
        return not served

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def _stopped(done: StopResult) -> str:
    rate = "no demand" if done.hit_rate is None else f"hit rate {done.hit_rate:.1%}"
    read = human_bytes(done.counters.get("device_bytes", 0))
    return f"{done.name}: stopped after {human_duration(done.uptime_s)}; {rate}, {read} read"


@app.command(help=help_text(Workers))
def workers(
    name: Name, count: Annotated[int, typer.Argument(metavar="COUNT", min=1, max=127, help="How many.")]
) -> None:
    check_served(name)
    with ControlClient(name) as control:
        result = control.call(Workers(count=count))
    print(f"{name}: {result.before} workers before, {result.count} from now on")


class PrewarmAction(StrEnum):
    run = "run"
    pause = "pause"
    resume = "resume"
    trickle = "trickle"


@app.command(help=help_text(Prewarm))
def prewarm(
    name: Name,
    action: Annotated[PrewarmAction, typer.Argument(help="What to do.")],
    ms: Annotated[
        int | None, typer.Option("--ms", metavar="N", min=0, help="For trickle: milliseconds between reads.")
    ] = None,
) -> None:
    check_served(name)
    with ControlClient(name) as control:
        result = control.call(Prewarm(action=action.value, trickle_ms=ms))
    print(f"{name}: prewarm is {result.state}, {result.done} of {result.goal} experts")


@app.command(
    help="Show how large a ring a configuration or model gets on this machine, without starting it.\n\n"
    "Example: smoe-mp size my.toml"
)
def size(
    target: Target,
    ring: Annotated[int | None, _override("ring.slots")] = None,
    slot_mb: Annotated[int | None, _override("ring.slot_mb")] = None,
    as_json: AsJson = False,
) -> None:
    result = _sized(_loaded(target, {"ring.slots": ring, "ring.slot_mb": slot_mb}))
    if as_json:
        print(json.dumps(dataclasses.asdict(result) | {"data_bytes": result.data_bytes}, indent=2))
    else:
        _print_sizing(result)


def _sized(loaded: LoadedConfig) -> Sizing:
    source = open_source(loaded.vault_path)
    return fit(loaded, source, segments.read_align([segments.probe(f.path) for f in source.files]))


def _print_sizing(result: Sizing) -> None:
    print(result.line)
    for text in result.notes:
        print(f"note: {text}")
    for text in result.warnings:
        print(f"warning: {text}")


@app.command(
    help="Write a configuration for a model, to be edited, and show the ring that it gets on this machine."
    "\n\nExample: smoe-mp init model.gguf my.toml"
)
def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What smoe-mp up takes as a model.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="The file to write; by default <ring name>.toml.")
    ] = None,
    *,
    name: Annotated[str | None, _override("name")] = None,
    ring: Annotated[int | None, _override("ring.slots")] = None,
    slot_mb: Annotated[int | None, _override("ring.slot_mb")] = None,
    worker_count: Annotated[int | None, _override("workers.count")] = None,
    spec: Annotated[int | None, _override("speculation.ranks")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    path = models.resolve(model)
    overrides: dict[str, int | str | None] = {
        "name": name,
        "ring.slots": ring,
        "ring.slot_mb": slot_mb,
        "workers.count": worker_count,
        "speculation.ranks": spec,
    }
    loaded = for_model(path, models.free_name(path), overrides)
    segments.check_name(loaded.config.name)
    sized = _sized(loaded)  # what cannot work is refused before anything is written
    out = out or Path(f"{loaded.config.name}.toml")
    _write_new(out, render(loaded), force)
    _print_sizing(sized)
    print(f"{out}: start it with smoe-mp up {out}")


def _write_new(path: Path, text: str, force: bool) -> None:
    """Write a file that must not be there yet, unless by `force`."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: there already; --force overwrites it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the configuration: {error.strerror}") from error


@app.command(
    help="Look for rings in shared memory: who serves and uses them, which are orphans.\n\n"
    "Example: smoe-mp doctor --clean"
)
def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove orphans: rings in which nobody living has a part.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    found = segments.find_rings()
    removed = []
    for entry in found if clean else []:
        if entry.orphan and os.geteuid() in (0, entry.uid):
            segments.remove_orphan(entry.name)
            removed.append(entry.name)
    if as_json:
        rows = [dataclasses.asdict(f) | {"orphan": f.orphan, "removed": f.name in removed} for f in found]
        print(json.dumps(rows, indent=2))
    else:
        _draw_rings(found, removed, Console())


def _draw_rings(found: list[segments.Found], removed: list[str], console: Console) -> None:
    table = titled_table("rings", "ring", "state", "size", "uid", "who", numbers=("size", "uid"))
    for f in found:
        who = "served" if f.served else "ORPHAN" if f.orphan else "no supervisor, but in use"
        who += f" by {', '.join(f.living)}" if f.living and not f.served else ""
        who = "orphan, removed" if f.name in removed else who
        table.add_row(escape(f.name), f.state, human_bytes(f.bytes), str(f.uid), escape(who))
    console.print(table if found else "no rings in shared memory")
    left = [f for f in found if f.orphan and f.name not in removed]
    if others := {f.uid for f in left if os.geteuid() not in (0, f.uid)}:
        console.print(
            f"orphans of other users: uid {', '.join(map(str, sorted(others)))} or root removes them"
        )
        left = [f for f in left if f.uid not in others]
    if left:
        console.print(f"{len(left)} orphans: smoe-mp doctor --clean removes them", highlight=False)


@app.command(help="Show what a model's files hold.\n\nExample: smoe-mp inspect model.smoe --experts")
def inspect(
    vault: Annotated[
        Path, typer.Argument(metavar="VAULT", help="A vault, GGUF file, safetensors folder or manifest.")
    ],
    experts: Annotated[bool, typer.Option("--experts", help="List every expert.")] = False,
    expert: Annotated[
        str, typer.Option("--expert", metavar="LAYER:EXPERT", help="Show one expert's parts and tensors.")
    ] = "",
    manifest: Annotated[
        Path | None, typer.Option("--manifest", metavar="OUT", help="Write a manifest of it to a new file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary and experts as JSON.")] = False,
) -> None:
    source = open_source(vault)
    if manifest is not None:
        write_manifest(source, manifest)
        print(f"{manifest}: {len(source.experts)} experts in {len(source.files)} files")
    elif expert:
        about = inspecting.one_expert(source, *_layer_and_expert(expert))
        if as_json:
            print(json.dumps(about, indent=2))
        else:
            inspecting.render_expert(about, Console())
    elif as_json:
        whole = {**inspecting.summary(source), "expert_table": inspecting.experts(source)}
        print(json.dumps(whole, indent=2))
    else:
        inspecting.render(source, experts, Console())


def _layer_and_expert(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if not found:
        raise ConfigError(f"--expert {text}: not LAYER:EXPERT, two whole numbers of at most 9 digits")
    return int(found[1]), int(found[2])


@app.command(
    help="Text from a model whose experts stream from disk; without -p, a conversation.\n\n"
    'Example: smoe-mp run Qwen3-30B-A3B/ -p "Why is the sky blue?"'
)
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="What smoe-mp up takes as a model; a vault with its scout file."
        ),
    ],
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this alone.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself: no chat template.")] = False,
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="The system's message, for a chat template.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="At most so many tokens an answer.")
    ] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="X",
            callback=finite,
            help="Of the sampling; 0: greedy. Default: the model's.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="X",
            callback=finite,
            help="Sample of the likeliest tokens with this probability.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**64 - 1, help="Of the sampling.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    ring: Annotated[
        str,
        typer.Option(
            "--ring",
            metavar="NAME",
            help="Use this running system, not one of its own.",
            autocompletion=running,
        ),
    ] = "",
    threads: Annotated[
        int,
        typer.Option(
            "--threads", metavar="N", min=0, max=1024, help="Threads that compute; 0: as torch chooses."
        ),
    ] = 0,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Compute on cpu, or on cuda.")
    ] = "cpu",
    gpu_cache_gb: Annotated[
        float | None,
        typer.Option(
            "--gpu-cache-gb", metavar="GB", callback=finite, help="With cuda: of experts kept in GPU memory."
        ),
    ] = None,
    look_ahead: Annotated[
        int,
        typer.Option("--look-ahead", metavar="N", min=0, help="Experts of the next layer to guess; 0: none."),
    ] = 0,
    ring_slots: Annotated[
        int | None, typer.Option("--ring-slots", metavar="N", min=1, max=65535, help="Slots of its own ring.")
    ] = None,
    memory: Annotated[
        int | None, typer.Option("--memory", metavar="MIB", min=1, help="Memory of its own ring, in MiB.")
    ] = None,
    worker_count: Annotated[int | None, _override("workers.count")] = None,
    spec: Annotated[int | None, _override("speculation.ranks")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and its figures as JSON, at the end.")
    ] = False,
) -> None:
    own = {"--ring-slots": ring_slots, "--memory": memory, "--workers": worker_count, "--spec": spec}
    given = [flag for flag, value in own.items() if value is not None]
    if ring and given:
        raise ConfigError(f"{given[0]} is for a system of its own, and --ring {ring} names one that runs")
    if ring_slots and memory:
        raise ConfigError("--ring-slots and --memory both say how large the ring is: give one")
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, greedy=greedy)
    slots = ring_slots or 0
    if memory is not None:
        slots = slots_in(open_source(models.resolve(model)), memory * MIB)
    options = {"slots": slots, "workers": worker_count, "ranks": spec}
    raise typer.Exit(
        speak(
            model,
            prompt,
            sampling,
            ring=ring,
            threads=threads,
            options=options,
            system=system,
            raw=raw,
            as_json=as_json,
            device=device,
            gpu_cache_gb=gpu_cache_gb,
            look_ahead=look_ahead,
        )
    )


app.command("pack", help=vault_cli.PACK_HELP)(vault_cli.pack)
app.command("verify", help=vault_cli.VERIFY_HELP)(vault_cli.verify)
control_cli.add_to(app)
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")


@app.command(
    help="Have the small model that comes along write through a ring of half its experts, and compare.\n\n"
    "Example: smoe-mp demo --prompt 'def read_lines(path):'"
)
def demo(
    *,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TEXT", help="What the text begins with.")
    ] = PROMPT,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=1, max=2000, help="Bytes to write at most in a turn.")
    ] = 240,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", metavar="T", min=0, max=10, callback=finite, help="0: always the likeliest byte."
        ),
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the draws.")] = 1,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A configuration other than the demo's.")
    ] = None,
) -> None:
    config = config or segments.installed("configs/demo.toml")
    asked = Writing(os.fsencode(prompt), tokens, temperature, seed)
    raise typer.Exit(run_demo(config, asked, Console()))
