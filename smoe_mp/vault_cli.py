"""`smoe-mp pack` and `smoe-mp verify`: arguments in, a few lines or JSON out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from smoe_mp import pack as packing
from smoe_mp import verify as verifying
from smoe_mp.control_cli import verify_live
from smoe_mp.errors import ConfigError
from smoe_mp.runtime import human_bytes, human_duration
from smoe_mp.sources import open_source

PACK_HELP = """Write a vault of a model, and a scout file of its other tensors beside it.

Example: smoe-mp pack ./Qwen3-30B-A3B qwen3-30b.smoe --bits 4 --checksums"""
VERIFY_HELP = """Read all of a model's experts, check them, and name each bad one.

Exit status 1 if there is any.

Example: smoe-mp verify qwen3-30b.smoe"""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pack(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A safetensors folder; with --raw any model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The vault, NAME.smoe.")],
    *,
    bits: Annotated[
        int | None,
        typer.Option("--bits", metavar="4|2", help="Quantise to 4 (the default) or 2 bits a weight."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Change no weight: a version-3 vault.")] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="With CRC-32C of each expert; --raw always has them.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be written.")] = False,
    as_json: AsJson = False,
) -> None:
    if raw and bits is not None:
        raise ConfigError("--raw changes no weight, so there is nothing for --bits to say: give one of them")
    if bits not in (None, 4, 2):
        raise ConfigError(f"--bits {bits}: must be 4 or 2")
    report = packing.pack(
        src,
        out,
        bits=bits or 4,
        raw=raw,
        checksums=checksums,
        force=force,
        dry_run=dry_run,
        shown=not as_json,
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _draw_pack(report)


def _draw_pack(report: packing.PackReport) -> None:
    what = f"{report.bits} bits a weight" if report.bits else "weights unchanged"
    sums = "with" if report.checksums else "without"
    verb = "would be written" if report.dry_run else "written"
    print(
        f"{report.out}: {verb}: version {report.version}, {what}, {sums} checksums, {report.experts} experts"
        f" in {report.layers} layers, {human_bytes(report.vault_bytes)} of {human_bytes(report.source_bytes)}"
    )
    if report.scout:
        print(f"{report.scout}: {verb}: {human_bytes(report.scout_bytes)}")
    if report.dry_run:
        print(f"free there: {human_bytes(report.free_bytes)}")
    else:
        all_bytes = report.source_bytes + report.scout_bytes
        print(f"{human_duration(report.seconds)}, {_rate(all_bytes, report.seconds)} of the source")


def _rate(count: int, seconds: float) -> str:
    return f"{human_bytes(int(count / max(seconds, 1e-9)))}/s"


def verify(
    vault: Annotated[
        Path | None, typer.Argument(metavar="VAULT", help="A model file or folder.", show_default=False)
    ] = None,
    *,
    ring: Annotated[
        str,
        typer.Option("--ring", metavar="NAME", help="The model of this running system, between its demands."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    if (vault is None) == (not ring):
        raise ConfigError("verify takes a VAULT, or --ring and the name of a running system: one of them")
    if vault is None:
        raise typer.Exit(verify_live(ring, as_json))
    report = verifying.verify(open_source(vault), shown=not as_json)
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _draw_verify(report)
    raise typer.Exit(1 if report.bad else 0)


def _draw_verify(report: verifying.Report) -> None:
    for bad in report.bad:
        print(f"BAD: expert {bad.expert} of layer {bad.layer}: {bad.path} at {bad.offset}: {bad.fault}")
    sums = f"{report.checked} of {report.experts} checksums" if report.checked else "no checksums in it"
    wrong = len({(bad.layer, bad.expert) for bad in report.bad})
    print(
        f"{report.path}: {report.experts} experts, {human_bytes(report.bytes)} read"
        f" ({', '.join(report.modes)}) in {human_duration(report.seconds)},"
        f" {_rate(report.bytes, report.seconds)}; {sums}; {f'{wrong} BAD' if wrong else 'all good'}"
    )
