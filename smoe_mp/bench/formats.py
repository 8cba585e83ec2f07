"""bench formats: streaming experts from the files that people have, over the same experts from a vault.

A layer of bfloat16 experts of 9 MiB is made as a Hugging Face checkpoint and as a GGUF file, of random
bytes, and packed unchanged into a version-3 vault, one aligned block an expert.  A ring on the one and then a
ring on the other stream random experts that are all misses, in turn, the one that begins changing from round
to round.  Each ring is made anew for its run, since two segments that live side by side differ in how their
physical pages are scattered, which a direct read's speed depends on more than on the format.

What can differ: an expert in a checkpoint is two or three extents at offsets of no alignment, so that a read
begins and ends with bytes of its neighbours and needs more requests.  The device's own count of bytes stands
beside the bytes wanted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from smoe_mp import segments
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.io import BATCH, SPARE_BYTES, Device, batches, fill_random, scratch_folder, slots_for
from smoe_mp.bench.open import BF16, gguf_model, safetensors_model
from smoe_mp.bench.rings import bench_ring, native_one
from smoe_mp.errors import SegmentError, SmoeError
from smoe_mp.pack import pack
from smoe_mp.runtime import human_bytes
from smoe_mp.sources import open_source
from smoe_mp.sources.base import Source

#: Rows and columns of gate and up.
SHAPE = (768, 2048)
WORKERS = (4, 16)
MODELS: dict[str, Callable[[Path, int, int, int, int], Path]] = {
    "safetensors": safetensors_model,
    "gguf": partial(gguf_model, kinds=(BF16,)),
}

WHAT = (
    "bytes a second through the ring from a model's own files, over the same experts from a version-3 vault."
)


def run(progress: Progress, scratch: Path, *, quick: bool = False, workers: Sequence[int] = ()) -> Report:
    """Measure, with models in the folder `scratch` that are made once and kept."""
    rounds = 3 if quick else 10
    counts = tuple(workers) or ((2,) if quick else WORKERS)
    experts = 3 * max(slots_for(n) for n in counts) + 16
    report = Report("formats", WHAT, {"rounds": rounds, "workers": list(counts), "experts": experts})
    for number, name in enumerate(MODELS):
        with scratch_folder(scratch):
            model = _model(scratch, name, experts, progress)
            vault = _vault(model, progress)
        for n in counts:
            settings = len(MODELS) * len(counts)
            at = number * len(counts) + counts.index(n)
            pair = _Pair(open_source(model), open_source(vault), n)
            for turn in range(rounds):
                progress(f"{name}, {n} workers", at * rounds + turn, settings * rounds)
                pair.round(turn)
            progress(f"{name}, {n} workers", (at + 1) * rounds, settings * rounds)
            pair.add_to(report, f"{name}, {n} workers")
    return report


def _expert_bytes() -> int:
    return 3 * SHAPE[0] * SHAPE[1] * 2


class _Pair:
    """A model in place and its vault, with one number of workers."""

    def __init__(self, model: Source, vault: Source, workers: int) -> None:
        self.sides = (model, vault)
        self.workers = workers
        self.rates: tuple[list[float], list[float]] = ([], [])
        self.device = Device(model.files[0].path)
        self.bytes = [[0, 0], [0, 0]]  # wanted, device

    def round(self, turn: int) -> None:
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            self._stream(side, turn)

    def _stream(self, side: int, turn: int) -> None:
        source = self.sides[side]
        slots = slots_for(self.workers)
        align = max(4096, segments.probe(source.files[0].path).offset_align)
        with bench_ring(source, slots=slots, workers=self.workers, read_align=align) as ring:
            ring.settle()
            reads = 4 * slots // BATCH * BATCH
            before = self.device.bytes_read()
            line = native_one(
                *("stream", ring.name, "--reads", reads, "--seed", turn + 1),
                *("--batch", BATCH, "--batches", batches(self.workers)),
            )
            after = self.device.bytes_read()
            ring.check()
            modes = {file["mode"] for file in ring.segments.files()}
        if modes != {"direct"}:
            raise SmoeError(f"{source.path}: read in mode {', '.join(modes)}, not direct: no figures")
        if line["hits"]:
            raise SmoeError(f"{source.path}: {line['hits']} experts were hits where all should be read")
        self.rates[side].append(reads * _expert_bytes() / line["ns"])
        self.bytes[side][0] += reads * _expert_bytes()
        if before is not None and after is not None:
            self.bytes[side][1] += after - before

    def add_to(self, report: Report, where: str) -> None:
        for side, name in enumerate(("in place", "vault")):
            report.figures.append(Figure(f"{where}: {name}", "GB/s", self.rates[side]))
            wanted, device = self.bytes[side]
            if device:
                more = f"the device read {device / wanted:.3f} times that."
                report.notes.append(f"{where}: {name}: wanted {human_bytes(wanted)}; {more}")
        report.shares.append(Share(f"{where}: in place / vault, bytes/s", self.rates[0], self.rates[1]))


def _model(scratch: Path, name: str, experts: int, progress: Progress) -> Path:
    """The model's files, with every expert's bytes allocated and random."""
    folder = scratch / f"formats-{name}-{experts}x{SHAPE[0]}x{SHAPE[1]}"
    done = folder / "complete"
    if done.exists():
        return Path(done.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    need, free = 2 * experts * _expert_bytes(), shutil.disk_usage(folder).free
    if free < need + SPARE_BYTES:
        raise SegmentError(
            f"{folder}: model and vault need {human_bytes(need)}, and {human_bytes(free)} are free:"
            " give --scratch another folder"
        )
    path = MODELS[name](folder, 1, experts, *SHAPE)
    source = open_source(path)
    (file,) = source.files
    start = min(extent.offset for expert in source.experts for extent in expert.extents)
    fill_random(file.path, start, file.size, progress)
    done.write_text(str(path))
    return path


def _vault(model: Path, progress: Progress) -> Path:
    folder = model if model.is_dir() else model.parent
    vault = folder / "experts.smoe"
    if not vault.exists():
        progress("packing", 0, 1)
        pack(model, vault, raw=True)
        os.sync()
    return vault
