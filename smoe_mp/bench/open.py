"""`bench open`: how long it takes, and how much memory, to open the index of a large model.

A model is made whose files have every name and number and no bytes: sparse files, which take no room.  It is
opened, and its read plans are made, in a process of its own, so that what it takes stands apart from what the
interpreter and its libraries take anyway.  On Linux the peak is the process's own VmHWM; `ru_maxrss` there
begins with the peak of whoever started it, so it serves only where there is nothing else.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smoe_mp.bench import Figure, Progress, Report
from smoe_mp.bench.stats import Goal
from smoe_mp.errors import ConfigError, SmoeError
from smoe_mp.sources import open_source
from smoe_mp.sources.manifest import write_manifest
from smoe_mp.sources.smoe import DESCRIPTOR_DTYPE, ENTRY_DTYPE, HEADER_DTYPE, MAGIC

__all__ = ["BF16", "BUILDERS", "GRIDS", "gguf_model", "run", "safetensors_model"]

#: Layers x experts of Qwen3-235B-A22B and of Kimi-K2.
GRIDS = ((94, 128), (61, 384))
WIDTH, HIDDEN = 64, 128
ROUNDS, QUICK_ROUNDS = 9, 3
#: Of the vocabulary, and as many merges.
GGUF_WORDS = 250_000
#: Of a GGUF block type: number, elements and bytes of a block.
_Q4_0, _Q8_0, BF16 = (2, 32, 18), (8, 32, 34), (30, 1, 2)
SECONDS = Goal("at most", 1.0)
MIB = Goal("at most", 95.0)  # 100 MB

_CHILD = """
import json, resource, sys, time
from smoe_mp import tables
from smoe_mp.platform import system
from smoe_mp.sources import open_source
def peak_mib():
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10
    except OSError:
        unit = system.MAXRSS_UNIT
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
before, began = peak_mib(), time.perf_counter()
source = open_source(sys.argv[1])
opened = time.perf_counter()
tables.build(source)
done = time.perf_counter()
print(json.dumps({"open_s": opened - began, "tables_s": done - opened, "mib": peak_mib() - before}))
"""


def safetensors_model(
    folder: Path, layers: int, experts: int, width: int = WIDTH, hidden: int = HIDDEN
) -> Path:
    """Per-expert tensors in one file a layer, with an index, as Hugging Face folders have them."""
    weight_map: dict[str, str] = {}
    shapes = {"down_proj": (hidden, width), "gate_proj": (width, hidden), "up_proj": (width, hidden)}
    size = 2 * width * hidden
    for layer in range(layers):
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        header: dict[str, Any] = {}
        for expert in range(experts):
            for stored, shape in shapes.items():
                at = len(header) * size
                full = f"model.layers.{layer}.mlp.experts.{expert}.{stored}.weight"
                header[full] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        weight_map |= dict.fromkeys(header, name)
        raw = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + len(header) * size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _stacked(folder: Path, layers: int, experts: int) -> Path:
    """The same experts as two stacks a layer in one file."""
    header: dict[str, Any] = {}
    at = 0
    for layer in range(layers):
        for stored, shape in (("gate_up_proj", (2 * WIDTH, HIDDEN)), ("down_proj", (HIDDEN, WIDTH))):
            size = 2 * experts * shape[0] * shape[1]
            name = f"model.layers.{layer}.mlp.experts.{stored}"
            header[name] = {"dtype": "BF16", "shape": (experts, *shape), "data_offsets": [at, at + size]}
            at += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    config = {"model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _manifest(folder: Path, layers: int, experts: int) -> Path:
    """A manifest of the per-expert safetensors files."""
    out = folder / "manifest.json"
    write_manifest(open_source(safetensors_model(folder, layers, experts)), out)
    return out


def _smoe(folder: Path, layers: int, experts: int) -> Path:
    """A version-1 vault of Q4 experts."""
    count, codes, scales = layers * experts, WIDTH * HIDDEN // 2, WIDTH * HIDDEN // 64 * 2
    blob = -(-3 * (codes + scales) // 16384) * 16384
    tables = HEADER_DTYPE.itemsize + count * (ENTRY_DTYPE.itemsize + 3 * DESCRIPTOR_DTYPE.itemsize)
    data = -(-tables // 16384) * 16384
    header = np.zeros((), HEADER_DTYPE)
    numbers = {"version": 1, "num_moe_layers": layers, "max_experts_per_layer": experts}
    numbers |= {"total_experts": count, "table_offset": 64, "data_offset": data, "group_size": 64, "bits": 4}
    numbers |= {"d_model": HIDDEN, "ffn_dim": HIDDEN}
    header["magic"] = MAGIC
    for name, value in numbers.items():
        header[name] = value
    entries = np.zeros(count, ENTRY_DTYPE)
    entries["layer_id"], entries["expert_id"] = np.divmod(np.arange(count), experts)
    entries["byte_offset"] = data + np.arange(count) * blob
    entries["raw_size"], entries["padded_size"] = 3 * (codes + scales), blob
    entries["group_size"], entries["num_groups"] = 64, 3 * scales // 2
    descriptors = np.zeros((count, 3), DESCRIPTOR_DTYPE)
    for number, (rows, cols) in enumerate(((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))):
        at = number * (codes + scales)
        descriptors[:, number] = (number, 2, 0, rows, cols, at, codes, at + codes, scales)
    out = folder / "model.smoe"
    with out.open("wb") as file:
        file.write(header.tobytes() + entries.tobytes() + descriptors.tobytes())
        file.truncate(data + count * blob)
    return out


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_model(
    folder: Path,
    layers: int,
    experts: int,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    *,
    kinds: Sequence[tuple[int, int, int]] = (_Q4_0, _Q8_0),
) -> Path:
    """Stacks, behind a vocabulary of the usual size.  Block types, each by number, elements and bytes, change
    from layer to layer: `down` has the layer's, gate and up the first."""
    words = b"".join(_gguf_text(f"word {i}") for i in range(GGUF_WORDS))
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    pairs = _gguf_text("general.architecture") + struct.pack("<I", 8) + _gguf_text("qwen3moe")
    pairs += b"".join(_gguf_text(key) + struct.pack("<IIQ", 9, 8, GGUF_WORDS) + words for key in keys)
    numbers = {"block_count": layers, "expert_count": experts, "expert_used_count": 8}
    for key, number in numbers.items():
        pairs += _gguf_text(f"qwen3moe.{key}") + struct.pack("<II", 4, number)
    table, end = b"", 0
    for layer in range(layers):
        for role, cols, rows in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
            kind, elements, nbytes = kinds[layer % len(kinds) if role == "down" else 0]
            table += _gguf_text(f"blk.{layer}.ffn_{role}_exps.weight")
            table += struct.pack("<IQQQIQ", 3, cols, rows, experts, kind, end)
            end += cols // elements * nbytes * rows * experts
            end += -end % 32
    head = b"GGUF" + struct.pack("<IQQ", 3, 3 * layers, len(keys) + len(numbers) + 1) + pairs + table
    out = folder / "model.gguf"
    with out.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + end)
    return out


#: By the name of the format: a function that makes the files of `layers` x `experts` in a folder, and returns
#: what is to be opened.
BUILDERS: dict[str, Callable[[Path, int, int], Path]] = {
    "safetensors": safetensors_model,
    "safetensors stacks": _stacked,
    "gguf": gguf_model,
    "manifest": _manifest,
    "smoe": _smoe,
}


@contextlib.contextmanager
def _model(build: Callable[[Path, int, int], Path], layers: int, experts: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="smoe-bench-open-") as folder:
        yield build(Path(folder), layers, experts)


def _open_once(path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SmoeError(f"{path}: opening failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def run(progress: Progress, *, quick: bool = False, formats: tuple[str, ...] = ()) -> Report:
    """Measure each format with each grid.  `formats`: names of BUILDERS, all by default."""
    for name in formats:
        if name not in BUILDERS:
            raise ConfigError(f"--formats: {name!r} is none of {', '.join(BUILDERS)}")
    rounds = QUICK_ROUNDS if quick else ROUNDS
    report = Report(
        "open",
        "time and memory to open a model's index and to make its read plans",
        {"grids": [list(grid) for grid in GRIDS], "rounds": rounds},
        notes=["Memory: what the peak rises by over the interpreter with its libraries loaded."],
    )
    names = formats or tuple(BUILDERS)
    for number, name in enumerate(names):
        for layers, experts in GRIDS:
            progress(f"{name} {layers} x {experts}", number, len(names))
            with _model(BUILDERS[name], layers, experts) as path:
                _open_once(path)  # the files' pages are in the cache from here on
                seen = [_open_once(path) for _ in range(rounds)]
            side = f"{name}, {layers} x {experts}"
            whole = [s["open_s"] + s["tables_s"] for s in seen]
            report.figures.append(Figure(f"{side}: open and plan", "s", whole, SECONDS))
            report.figures.append(Figure(f"{side}: of it, plans", "s", [s["tables_s"] for s in seen]))
            report.figures.append(Figure(f"{side}: memory", "MiB", [s["mib"] for s in seen], MIB))
    return report
