"""bench dequant: one expert's weights out of their blocks, by C and by gguf-py.

An expert of 2048 x 768 (gate and up of 768 rows, down of 2048), each type in turn, one thread.  The sides:
gguf-py, which makes new arrays; C into new arrays as float32; and C into arrays that are used again, as an
engine does that computes with one expert after the other, as float32, float16 and bfloat16.  For the types of
`.smoe` vaults `smoe_mp.quant` stands in gguf-py's place, and MXFP4 with its scales apart is held against
gguf-py's MXFP4, which has the same weights in another order.

What is measured is the thread's CPU time: the work is one thread's alone, and what else the machine does
falls out.

The blocks are random bytes without bit 6, so no float16 among them is infinite or no number; how long a
decoder takes does not depend on the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp import quant
from smoe_mp.bench import Figure, Progress, Report, Share
from smoe_mp.bench.stats import Goal, median
from smoe_mp.dequant import TYPES, BlockType, Dtype, dequantize
from smoe_mp.errors import ConfigError

MATRICES = ((768, 2048), (768, 2048), (2048, 768))
WEIGHTS = sum(rows * columns for rows, columns in MATRICES)
JUDGED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4", "IQ4_XS")
REPEATS = 5  # of the sides in C, which are short
AT_LEAST = 10.0
_SMOE_BITS = {"SMOE_Q4": 4, "SMOE_Q2": 2}

WHAT = (
    "ms of CPU time for the weights of one 2048 x 768 expert (three matrices), one thread: gguf-py's"
    " dequantiser (smoe_mp.quant for the types of .smoe vaults) and the one in C."
)

NOTE = "gguf-py makes float32 only: a 16-bit result is held against that, not against one that is rounded too"
_DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")

U8 = npt.NDArray[np.uint8]
Side = Callable[[], object]
Inputs = Sequence[tuple[tuple[int, int], U8, U8 | None]]  # shape, blocks, scales of each matrix


def run(progress: Progress, *, quick: bool = False, types: Sequence[str] = ()) -> Report:
    """Measure.  `types`: names, none for all that there is a reference for.  ConfigError for an unknown name,
    and where gguf-py is not installed."""
    rounds = 5 if quick else 20
    kinds = _kinds(types)
    report = Report("dequant", WHAT, {"rounds": rounds, "matrices": MATRICES, "threads": 1}, notes=[NOTE])
    for at, kind in enumerate(kinds):
        found = _measure(kind, rounds, progress, at, len(kinds))
        title, (reference, *ours) = _title(kind), found
        nbytes = sum(kind.data_nbytes(shape) + kind.scales_nbytes(shape) for shape in MATRICES)
        speed = [nbytes / 1e6 / ms for ms in found["float32"]]
        report.figures += [Figure(f"{title}, {side}", "ms", ms) for side, ms in found.items()]
        report.figures.append(Figure(f"{title}, blocks to float32", "GB/s", speed))
        for side in ours:
            goal = Goal("at least", AT_LEAST) if side == "float32" and kind.name in JUDGED else None
            report.shares.append(Share(f"{title}: {reference} / {side}", found[reference], found[side], goal))
    return report


def _title(kind: BlockType) -> str:
    return f"{kind.name}, scales apart" if kind.name == "MXFP4" and kind.scale_nbytes else kind.name


def _kinds(names: Sequence[str]) -> list[BlockType]:
    """The types of these names, or all; float8 aside, which gguf-py does not know."""
    known = [kind for kind in TYPES.values() if not kind.name.startswith("F8")]
    for name in names:
        if name not in {kind.name for kind in known}:
            there = ", ".join(dict.fromkeys(kind.name for kind in known))
            raise ConfigError(f"--types: {name!r} is none of {there}")
    return [kind for kind in known if not names or kind.name in names]


def _tame_bytes(rng: np.random.Generator, n: int) -> U8:
    return rng.integers(0, 256, n, dtype=np.uint8) & np.uint8(0xBF)


def _measure(kind: BlockType, rounds: int, progress: Progress, at: int, of: int) -> dict[str, list[float]]:
    """ms of each side in each round, gguf-py's or quant's first."""
    sides = _sides(kind)
    reference = next(iter(sides))
    for side in sides.values():
        side()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name, side in sides.items():
            repeats = REPEATS if name != reference else 1
            found[name].append(median([_timed(side) for _ in range(repeats)]))
        progress(_title(kind), at * rounds + i + 1, of * rounds)
    return found


def _timed(side: Side) -> float:
    began = time.thread_time_ns()
    side()
    return (time.thread_time_ns() - began) / 1e6


def _sides(kind: BlockType) -> dict[str, Side]:
    rng = np.random.default_rng(1)
    inputs = [
        (
            shape,
            _tame_bytes(rng, kind.data_nbytes(shape)),
            _tame_bytes(rng, kind.scales_nbytes(shape)) if kind.scale_nbytes else None,
        )
        for shape in MATRICES
    ]
    name, reference = _reference(kind, inputs)
    sides: dict[str, Side] = {
        name: reference,
        "float32, new arrays": lambda: [
            dequantize(kind.name, data, shape, scales=scales) for shape, data, scales in inputs
        ],
    }
    for dtype in _DTYPES:
        outs = [dequantize(kind.name, data, shape, scales=s, dtype=dtype) for shape, data, s in inputs]
        sides[dtype] = _into(kind, inputs, outs, dtype)
    return sides


def _into(kind: BlockType, inputs: Inputs, outs: Sequence[npt.NDArray[Any]], dtype: Dtype) -> Side:
    def side() -> None:
        for (shape, data, scales), out in zip(inputs, outs, strict=True):
            dequantize(kind.name, data, shape, scales=scales, out=out, dtype=dtype)

    return side


def _reference(kind: BlockType, inputs: Inputs) -> tuple[str, Side]:
    if bits := _SMOE_BITS.get(kind.name):
        return "smoe_mp.quant", lambda: [
            quant.dequantize(data, scales.view(np.float16), shape, bits)
            for shape, data, scales in inputs
            if scales is not None
        ]
    try:
        from gguf import GGMLQuantizationType, quants  # noqa: PLC0415 - only this benchmark needs it
    except ImportError:
        raise ConfigError("bench dequant measures against gguf-py: pip install 'gguf>=0.19'") from None
    qtype, embedded = GGMLQuantizationType[kind.name], TYPES[kind.name, False]
    rng = np.random.default_rng(1)
    blocks = [_tame_bytes(rng, embedded.data_nbytes(shape)).reshape(shape[0], -1) for shape in MATRICES]
    return "gguf-py", lambda: [quants.dequantize(rows, qtype) for rows in blocks]
