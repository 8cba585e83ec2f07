"""bench cuda: experts from disk through the ring to a GPU, and what a model makes of it.

Copies, in GB/s, each over the same experts of a random model:

    pinned          from memory that torch pinned itself, to the GPU: the bus
    ring, pinned    from the ring, registered (`Ring.pin_cuda`)
    ring, bounced   from the ring, not registered, through pinned buffers
    disk            into the ring alone, experts that no cache has
    disk to GPU     the same, and on to the GPU: `ExpertCache`, while the next ones are read

Registration, in seconds: of rings of 1, 8 and 64 GB, as far as shared memory has room for them, by one
client and by a second one beside it.

Tokens/s of greedy decoding: stock transformers with everything on the GPU; with half of the experts' bytes
offloaded to memory by `device_map="auto"`; ours with ring and cache in GPU memory at a quarter, half and all
of the experts.  All get the same prompt, and ours and the first are held against each other: the same tokens.

The weights are random, so their routing is nearly uniform but for the skew that `randommoe` puts in: hit
rates say little about a trained model's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smoe_mp.bench import Figure, Progress, Report
from smoe_mp.bench.io import scratch_folder
from smoe_mp.bench.randommoe import Shape, build
from smoe_mp.bench.rings import MEMORY_FOLDER, bench_ring, flat_source, memory_file
from smoe_mp.bench.transformers import drop_caches
from smoe_mp.errors import SmoeError
from smoe_mp.launch import private_system
from smoe_mp.ring import Ring, attach
from smoe_mp.runtime import human_bytes

WHAT = "Experts on a GPU: bytes/s on the way there, tokens/s of a model of random experts."
COPY_EXPERTS = 48  # of one round of copies
FEW = 4  # experts of a demand that is no long prompt's
REGISTERED_GB, SLOT_BYTES = (1, 8, 64), 8 << 20
PROMPT, TOKENS = 64, 48
SHARES = (0.25, 0.5, 1.0)


def run(
    progress: Progress, scratch: Path, *, quick: bool = False, rounds: int = 0, shape: Shape | None = None
) -> Report:
    """Measure.  Raises SmoeError where there is no CUDA device."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise SmoeError("bench cuda: there is no CUDA device here, or torch was built without CUDA: skipped")
    shape = shape or (Shape() if quick else Shape(layers=24, experts=64, hidden=2048, width=512))
    rounds = rounds or (2 if quick else 3)
    with scratch_folder(scratch):
        folder = _model(torch, scratch, shape)
    report = Report("cuda", WHAT, {**asdict(shape), "rounds": rounds, "gpu": torch.cuda.get_device_name()})
    report.settings["experts"] = human_bytes(shape.experts_bytes)
    copies = _Copies(torch, folder, shape)
    values: dict[str, list[float]] = {}
    try:
        for at in range(rounds):
            progress("copies", at, rounds)
            for name, rate in copies.round():
                values.setdefault(name, []).append(rate)
    finally:
        copies.close()
    report.figures = [Figure(name, "GB/s", found) for name, found in values.items()]
    report.figures += _registrations(progress)
    report.figures += _tokens(torch, folder, shape, rounds, progress)
    return report


def _model(torch: Any, scratch: Path, shape: Shape) -> Path:
    """The folder of the model, made if it is not there; on the GPU, which draws faster."""
    folder = scratch / f"cuda-{shape.layers}x{shape.experts}x{shape.hidden}x{shape.width}"
    if not (folder / "complete").exists():
        model = build(shape, torch.device("cuda"))
        model.save_pretrained(folder, save_original_format=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        (folder / "complete").write_text(json.dumps(asdict(shape)))
        os.sync()
    return folder


# --- copies ------------------------------------------------------------------------------------------------


class _Copies:
    """The sides of the copies, on one ring of all experts of a few layers."""

    def __init__(self, torch: Any, folder: Path, shape: Shape) -> None:
        self._torch, self._folder, self._shape = torch, folder, shape
        self._cuda: Any = importlib.import_module("smoe_mp.cuda")
        # Room for what was read before: a long demand enters the LRU at its cold end.
        self._system = private_system(folder, slots=4 * COPY_EXPERTS, settings={"prewarm.enabled": False})
        self._ring = attach(self._system.name, "bench")
        self._bytes = COPY_EXPERTS * shape.expert_bytes
        self._there = torch.empty((COPY_EXPERTS, self._ring.slot_bytes), dtype=torch.uint8, device="cuda")
        self._own = torch.empty((COPY_EXPERTS, shape.expert_bytes), dtype=torch.uint8, pin_memory=True)
        self._layer = 0

    def close(self) -> None:
        self._ring.close()
        self._system.stop()

    def round(self) -> list[tuple[str, float]]:
        """Each side once."""
        found = [("pinned", self._pinned())]
        pinned = self._ring.pin_cuda()
        found.append(("ring, pinned", self._from_ring(pinned)))
        if pinned is not None:
            pinned.close()
        found.append(("ring, bounced", self._from_ring(None)))
        found.append(("disk", self._disk()))
        pinned = self._ring.pin_cuda()
        found.append(("disk to GPU", self._to_gpu(pinned)))
        if pinned is not None:
            pinned.close()
        return found

    def _clocked(self, call: Callable[[], object]) -> float:
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        self._torch.cuda.synchronize()
        return self._bytes / (time.perf_counter() - began) / 1e9

    def _pinned(self) -> float:
        def copy() -> None:
            for there, own in zip(self._there, self._own, strict=True):
                there[: len(own)].copy_(own, non_blocking=True)

        copy()
        return self._clocked(copy)

    def _experts(self) -> list[tuple[int, Sequence[int]]]:
        """COPY_EXPERTS experts that are not in the ring: of the next layers."""
        per_layer = self._shape.experts
        found: list[tuple[int, Sequence[int]]] = []
        left = COPY_EXPERTS
        while left:
            self._layer = (self._layer + 1) % self._shape.layers
            found.append((self._layer, range(min(left, per_layer))))
            left -= len(found[-1][1])
        return found

    def _from_ring(self, pinned: Any) -> float:
        """What is in the ring already, by the cache's own copies.  SmoeError if it was not."""
        wanted = self._experts()
        self._read(self._ring, wanted)
        before = self._ring.stats()["misses"]
        rate = self._through_cache(wanted, pinned)
        if self._ring.stats()["misses"] != before:
            raise SmoeError("bench cuda: experts had left the ring before they were copied out of it")
        return rate

    def _through_cache(self, wanted: list[tuple[int, Sequence[int]]], pinned: Any) -> float:
        size = COPY_EXPERTS * (self._ring.slot_bytes + self._cuda.PADDING)
        cache = self._cuda.ExpertCache(self._ring, size, "cuda", pinned)
        try:
            return self._clocked(lambda: self._hold(cache, wanted))
        finally:
            cache.close()

    def _hold(self, cache: Any, wanted: list[tuple[int, Sequence[int]]]) -> None:
        for layer, experts in wanted:
            with cache.hold(layer, list(experts)):
                pass

    def _read(self, ring: Ring, wanted: list[tuple[int, Sequence[int]]]) -> None:
        for layer, experts in wanted:
            for at in range(0, len(experts), FEW):
                for _ in ring.as_ready(layer, experts[at : at + FEW]):
                    pass

    def _disk(self) -> float:
        drop_caches(self._folder)
        wanted = self._experts()
        return self._clocked(lambda: self._read(self._ring, wanted))

    def _to_gpu(self, pinned: Any) -> float:
        drop_caches(self._folder)
        return self._through_cache(self._experts(), pinned)


def _registrations(progress: Progress) -> list[Figure]:
    """Seconds to register rings of some sizes, by one client and by another beside it."""
    figures = []
    for at, size in enumerate(REGISTERED_GB):
        progress("registration", at, len(REGISTERED_GB))
        slots = size * 10**9 // SLOT_BYTES
        if shutil.disk_usage(MEMORY_FOLDER).free < 2 * slots * SLOT_BYTES:
            continue
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(memory_file(slots * SLOT_BYTES))
            source = flat_source(path, SLOT_BYTES, slots)
            made = stack.enter_context(bench_ring(source, slots=slots, workers=1))
            for who in ("one client", "another beside it"):
                ring = stack.enter_context(attach(made.name, who))
                began = time.perf_counter()
                pinned = ring.pin_cuda()
                took = time.perf_counter() - began
                if pinned is not None:
                    stack.callback(pinned.close)
                    figures.append(Figure(f"register {size} GB, {who}", "s", [took]))
    return figures


# --- tokens ------------------------------------------------------------------------------------------------


def _tokens(torch: Any, folder: Path, shape: Shape, rounds: int, progress: Progress) -> list[Figure]:
    hub: Any = importlib.import_module("transformers")
    hub.utils.logging.set_verbosity_error()
    hub.utils.logging.disable_progress_bar()
    prompt = torch.randint(
        3, shape.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(2)
    ).cuda()

    def stock(**how: Any) -> Any:
        return hub.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)

    dense = shape.dense_bytes + (2 << 30)
    sides: list[tuple[str, Callable[[], Any]]] = [
        ("stock, all on the GPU", lambda: stock(experts_implementation="grouped_mm").cuda()),
        (
            "stock, device_map=auto, half on the GPU",
            lambda: stock(
                device_map="auto", max_memory={0: dense + shape.experts_bytes // 2, "cpu": "100GiB"}
            ),
        ),
    ]
    sides += [
        (f"smoe-mp, {share:.0%} in ring and GPU cache", _ours(torch, folder, shape, share))
        for share in SHARES
    ]
    figures, reference = [], None
    for at, (name, make) in enumerate(sides):
        progress("tokens", at, len(sides))
        model = make()
        rates, text = _decode(torch, model, prompt, rounds)
        if at == 0:
            reference = text
        elif name.startswith("smoe-mp") and text != reference:
            raise SmoeError(f"bench cuda: {name}: other tokens than stock transformers'")
        figures.append(Figure(f"{name}: decode", "tokens/s", rates))
        if name.startswith("smoe-mp"):
            figures += _shares_of(model, name)
        _end(torch, model)
        del model
    return figures


def _ours(torch: Any, folder: Path, shape: Shape, share: float) -> Callable[[], Any]:
    def make() -> Any:
        streamed: Any = importlib.import_module("smoe_mp.transformers")
        slots = max(2 * shape.experts, int(shape.layers * shape.experts * share))
        return streamed.load(
            folder,
            device="cuda",
            dtype=torch.bfloat16,
            gpu_cache_gb=max(1.0, shape.experts_bytes * share * 1.01 / 1e9),
            system={"slots": slots, "settings": {"prewarm.enabled": False}},
        )

    return make


def _decode(torch: Any, model: Any, prompt: Any, rounds: int) -> tuple[list[float], list[int]]:
    """Tokens/s of each round, the first not counted, and the text."""
    rates: list[float] = []
    text: list[int] = []
    for _ in range(rounds + 1):
        short = _clock(torch, model, prompt, 1)[0]
        took, text = _clock(torch, model, prompt, TOKENS)
        rates.append((TOKENS - 1) / max(took - short, 1e-9))
    return rates[1:], text


def _clock(torch: Any, model: Any, prompt: Any, tokens: int) -> tuple[float, list[int]]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    return time.perf_counter() - began, made[0].tolist()


def _shares_of(model: Any, name: str) -> list[Figure]:
    streamed: Any = importlib.import_module("smoe_mp.transformers")
    stats, ring = streamed.cache_of(model).stats, streamed.ring_of(model).stats()
    asked = max(1, stats.hits + stats.misses)
    return [
        Figure(f"{name}: hits in GPU memory", "%", [100 * stats.hits / asked]),
        Figure(f"{name}: hits in the ring of the rest", "%", [100 * ring["hit_rate"]]),
        Figure(f"{name}: over the bus", "GB", [stats.copied_bytes / 1e9]),
    ]


def _end(torch: Any, model: Any) -> None:
    cache = getattr(getattr(model, "_smoe_stream", None), "cache", None)
    if cache is not None:
        cache.close()
    del model
    gc.collect()
    torch.cuda.empty_cache()
