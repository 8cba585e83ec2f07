"""`smoe-mp pack`: from a model's files to a vault.

    plan ──► refuse, or --dry-run ──► scout file ──► experts, in threads ──► table, sync, rename

`--bits` quantises to the original system's format, version 2, byte for byte what its own packing script
writes; `--raw` changes no weight and writes version 3.  Everything that can be known beforehand (names,
shapes, sizes, free space, what is in the way) is known before the first byte is written.

Both files are written beside their places, synced and renamed at the end, the scout file first: where the
vault is, its scout is.  A pack that was killed left two `.partial` files, which the next one takes over.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smoe_mp._native import ffi, lib
from smoe_mp.errors import ConfigError, VaultError
from smoe_mp.parallel import byte_bar, cores, run_all
from smoe_mp.partial import SPARE_BYTES, PartialFile, free_bytes, partial_of
from smoe_mp.quant import quantize_q2, quantize_q4
from smoe_mp.raw_writer import RawWriter
from smoe_mp.reader import SourceReader
from smoe_mp.scout import Scout
from smoe_mp.sources import open_source
from smoe_mp.sources.base import SCOUT_SUFFIX, Source
from smoe_mp.sources.checkpoint import Checkpoint, open_folder
from smoe_mp.sources.smoe import ArchBlock
from smoe_mp.vault_writer import VaultWriter
from smoe_mp.weights import U8, matrices

__all__ = ["PackReport", "pack"]

SUFFIX = ".smoe"
_SPLIT = re.compile(r"-\d+-of-\d+$")
_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was written, or would be: sizes in bytes.  `bits` 0 is unchanged weights; `scout` "" is none."""

    source: str
    format: str
    out: str
    scout: str
    version: int
    bits: int
    checksums: bool
    layers: int
    experts: int
    source_bytes: int
    vault_bytes: int
    scout_bytes: int
    free_bytes: int
    dry_run: bool
    seconds: float = 0.0


def pack(
    src: Path,
    out: Path,
    *,
    bits: int = 4,
    raw: bool = False,
    checksums: bool = False,
    force: bool = False,
    dry_run: bool = False,
    shown: bool = True,
) -> PackReport:
    """Write the vault `out` of the model at `src`, and `<name>.scout.safetensors` of its other tensors.

    `bits`: 4 or 2, of a safetensors checkpoint.  `raw`: version 3 instead, of any source, with checksums
    always.  `checksums`: CRC-32C in the table's reserved fields.  `force`: replace what is there.  `dry_run`:
    only say what would be written.  `shown`: a progress bar.

    Raises ConfigError for names that cannot be, VaultError for the rest, with files and figures; then what
    was in the outputs' places is as it was.
    """
    _check_name(out)
    source = open_source(src)
    checkpoint = open_folder(src) if source.format == "safetensors" else None
    scout = Scout(checkpoint, source) if checkpoint else None
    scout_path = out.with_name(out.name.removesuffix(SUFFIX) + SCOUT_SUFFIX) if scout else None
    for path in (out, scout_path):
        _check_place(path, source, force)
    job: _Quantise | _Raw
    if raw:
        job = _Raw(source, out, scout_path.name if scout_path else "")
    else:
        job = _Quantise(source, checkpoint, out, bits, checksums)
    report = PackReport(
        source=str(src),
        format=source.format,
        out=str(out),
        scout=str(scout_path or ""),
        version=3 if raw else 2,
        bits=0 if raw else bits,
        checksums=raw or checksums,
        layers=len({x.layer for x in source.experts}),
        experts=len(source.experts),
        source_bytes=sum(e.length for x in source.experts for e in x.extents),
        vault_bytes=job.writer.file_size,
        scout_bytes=scout.file_size if scout else 0,
        free_bytes=free_bytes(out.parent, [partial_of(path) for path in (out, scout_path) if path]),
        dry_run=dry_run,
    )
    _check_space(report)
    if dry_run:
        return report
    began = time.monotonic()
    with byte_bar("pack", report.source_bytes + report.scout_bytes, shown=shown) as advance:
        _write(job, scout, scout_path, advance)
    return replace(report, seconds=time.monotonic() - began)


def _write(
    job: _Quantise | _Raw, scout: Scout | None, scout_path: Path | None, advance: Callable[[int], None]
) -> None:
    """Write both files; at any error neither is there, and what was there before still is.

    Both are synced before either is renamed.  Only what fails after the scout's rename leaves a new scout
    file beside what was in the vault's place.
    """
    experts = job.source.experts
    with ExitStack() as undo:
        # The vault first: what a killed pack left is most of it, and is free before more is looked for.
        undo.callback(job.writer.abort)
        job.writer.begin()
        scout_file = PartialFile(scout_path, scout.file_size, "scout file") if scout and scout_path else None
        if scout_file:
            undo.callback(scout_file.abort)
        if scout and scout_file:
            scout.write(scout_file, advance)
        with SourceReader(job.source) as reader:

            def one(index: int) -> int:
                expert = experts[index]
                parts = [np.frombuffer(part, np.uint8) for part in reader.read(expert.extents)]
                job.writer.write_blob(index, job.blob(index, parts))
                return sum(part.size for part in parts)

            run_all(len(experts), one, advance, cores())
            reader.check_unchanged()
        job.writer.close(scout_file.publish if scout_file else None)


class _Raw:
    """Experts unchanged, each tensor at its place in a version-3 blob."""

    def __init__(self, source: Source, out: Path, scout: str) -> None:
        self.source = source
        self.writer = RawWriter(out, source, scout)

    def blob(self, index: int, parts: Sequence[U8]) -> bytearray:
        layout = self.source.experts[index].layout
        tensors = {t.name: t for t in self.source.layouts[layout]}
        blob = bytearray(int(self.writer.table["padded_size"][index]))
        bytes_of = np.frombuffer(blob, np.uint8)
        for record in self.writer.records[layout]:
            t = tensors[record.name]
            bytes_of[record.offset : record.offset + t.nbytes] = parts[t.part][t.offset : t.offset + t.nbytes]
        return blob


class _Quantise:
    """Experts of a checkpoint, quantised into version-2 blobs."""

    def __init__(
        self, source: Source, checkpoint: Checkpoint | None, out: Path, bits: int, checksums: bool
    ) -> None:
        if checkpoint is None:
            raise VaultError(
                f"{source.path}: a {source.format} source; what can be quantised is a safetensors checkpoint:"
                " pack it with --raw"
            )
        self.source = source
        self._quantise = quantize_q4 if bits == 4 else quantize_q2
        self._matrices = [matrices(source.path, layout) for layout in source.layouts]
        first = self._matrices[0]
        for number, other in enumerate(self._matrices):
            if [(m.rows, m.cols) for m in other] != [(m.rows, m.cols) for m in first]:
                raise VaultError(
                    f"{source.path}: experts of different shapes (layouts 0 and {number}); version 2 has one"
                    " shape for all: pack it with --raw"
                )
        facts = _Facts(checkpoint)
        d_model, vocab_size = facts.embedding()
        self.writer = VaultWriter(
            out,
            [(x.layer, x.expert) for x in source.experts],
            bits=bits,
            shapes={m.name: (m.rows, m.cols) for m in first},
            d_model=d_model,
            vocab_size=vocab_size,
            ffn_dim=first[2].rows,  # as the original has it: see sources/smoe.py
            arch=facts.arch(),
            checksum=_crc32c if checksums else None,
            begin=False,
        )

    def blob(self, index: int, parts: Sequence[U8]) -> bytearray:
        expert = self.source.experts[index]
        blob = bytearray(self.writer.padded_size)
        bytes_of = np.frombuffer(blob, np.uint8)
        for matrix in self._matrices[expert.layout]:
            codes_at, scales_at = self.writer.places(matrix.name)
            for weights in matrix.pieces(parts):
                try:
                    codes, scales = self._quantise(weights)
                except ValueError as error:
                    file = self.source.files[expert.extents[matrix.tensor.part].file].path
                    raise VaultError(
                        f"{file}: {matrix.name} of expert {expert.expert} of layer {expert.layer}: {error}"
                    ) from error
                bytes_of[codes_at : codes_at + codes.nbytes] = codes
                bytes_of[scales_at : scales_at + scales.nbytes] = scales.view(np.uint8)
                codes_at, scales_at = codes_at + codes.nbytes, scales_at + scales.nbytes
        return blob


def _crc32c(blob: memoryview) -> int:
    return int(lib.smoe_crc32c(0, ffi.from_buffer(blob), len(blob)))


# --- what config.json says ---------------------------------------------------------------------------------


class _Facts:
    """What a checkpoint says of its model, for the header and the arch block of version 2."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._where = checkpoint.path
        config = checkpoint.config
        inner = config.get("text_config")  # of models that see and hear, too
        self._config: Mapping[str, Any] = {**config, **inner} if isinstance(inner, dict) else config
        if not config:
            raise VaultError(
                f"{self._where}: no config.json, from which a quantised vault's arch block is filled: put it"
                " beside the checkpoint, or pack with --raw"
            )

    def _number(self, *keys: str, default: float | None = 0) -> float:
        """The first of the keys that is there, as a number."""
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise VaultError(f"{self._where}: config.json: {key} is {value!r}, not a number")
            return value
        if default is None:
            raise VaultError(f"{self._where}: config.json has no {' or '.join(keys)}")
        return default

    def _count(self, *keys: str, default: int | None = 0) -> int:
        value = self._number(*keys, default=default)
        if value != int(value) or not 0 <= value < 2**32:
            raise VaultError(
                f"{self._where}: config.json: {' or '.join(keys)} is {value}, not a whole number from 0 to"
                f" {2**32 - 1}"
            )
        return int(value)

    def _has(self, ending: str) -> bool:
        return any(name.endswith(ending) for name in self._checkpoint)

    def embedding(self) -> tuple[int, int]:
        """Width of the model and number of tokens, from the embedding itself where it is there."""
        for name in self._checkpoint:
            if name.endswith("embed_tokens.weight"):
                shape = self._checkpoint[name][1].shape
                if len(shape) == 2 and max(shape) < 2**32:
                    return shape[1], shape[0]
        return self._count("hidden_size"), self._count("vocab_size")

    def _rope_theta(self) -> float:
        rope = self._config.get("rope_parameters")
        inner = rope.get("rope_theta") if isinstance(rope, dict) else None
        if isinstance(inner, int | float) and math.isfinite(inner):
            return inner
        return self._number("rope_theta", default=10000.0)

    def arch(self) -> ArchBlock:
        activation = self._config.get("hidden_act", "silu")
        if activation not in _SILU:
            raise VaultError(
                f"{self._where}: config.json: hidden_act is {activation!r}; the format knows SiLU alone: pack"
                " with --raw"
            )
        heads = self._count("num_attention_heads")
        width = self._count("moe_intermediate_size", "intermediate_size")
        return ArchBlock(
            flags=1 * bool(self._config.get("norm_topk_prob"))
            + 2 * self._has("layers.0.self_attn.q_norm.weight")
            + 4 * self._has("layers.0.mlp.gate_proj.weight"),
            rope_theta=self._rope_theta(),
            num_heads=heads,
            num_kv_heads=self._count("num_key_value_heads", default=heads),
            head_dim=self._count("head_dim", default=self._count("hidden_size") // heads if heads else 0),
            moe_top_k=self._count("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
            moe_ffn_dim=width,
            dense_ffn_dim=self._count("intermediate_size"),
            shared_expert_ffn_dim=self._count("n_shared_experts") * self._count("moe_intermediate_size"),
            activation=0,
            num_hidden_layers=self._count("num_hidden_layers"),
            rms_norm_eps=self._number("rms_norm_eps", default=0.0),
            model_type=self._model_type(),
        )

    def _model_type(self) -> str:
        value = self._config.get("model_type", "")
        if not isinstance(value, str) or not value.isprintable():
            raise VaultError(f"{self._where}: config.json: model_type is {value!r}, no printable text")
        return value


# --- what is in the way ------------------------------------------------------------------------------------


def _check_name(out: Path) -> None:
    if out.suffix != SUFFIX:
        raise ConfigError(f"{out}: a vault's name ends in {SUFFIX}, by which it is known for one")
    if _SPLIT.search(out.stem):
        raise ConfigError(
            f"{out}: {out.stem!r} reads as one part of a split model, and a vault is whole: choose another"
            " name"
        )


def _check_place(path: Path | None, source: Source, force: bool) -> None:
    """Nothing is there, or may be replaced; least of all the source itself."""
    if path is None:
        return
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise VaultError(f"{path}: {error.strerror} (errno {error.errno})") from error
    if stat.S_ISDIR(there.st_mode):
        raise VaultError(f"{path}: a folder is in the way")
    if (there.st_dev, there.st_ino) in {(file.dev, file.ino) for file in source.files}:
        raise ConfigError(f"{path}: that is the source itself: give the vault another name")
    if not force:
        raise VaultError(f"{path}: is there already: --force replaces it")


def _check_space(report: PackReport) -> None:
    need = report.vault_bytes + report.scout_bytes + 2 * SPARE_BYTES
    if report.free_bytes < need:
        raise VaultError(
            f"{report.out}: vault and scout file need {report.vault_bytes} + {report.scout_bytes} bytes,"
            f" their file system has {report.free_bytes} free: {need - report.free_bytes} bytes too few, with"
            f" {2 * SPARE_BYTES} to spare"
        )
