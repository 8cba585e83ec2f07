"""Builders of small models in every format, for the suite that each source must pass.

A builder makes a model in an empty folder and says what a client must see.  A format that leaves open where
its data begin puts them where `remainders` says, one layer after the other; one that does not has as many
layers as there are remainders, so that all are alike for the suite.

To add a format: write `def my_format(folder, remainders) -> Built`, decorate it, and the suite runs on it.
What only this format can get wrong goes into `damage`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from checkpoints import E, Part, Recipe, make, stacks
from gguffiles import I32, U16, placed_model

from smoe_mp.pack import pack
from smoe_mp.quant import packed_sizes
from smoe_mp.sources.smoe import ArchBlock
from smoe_mp.sources.smoe_file import ENTRY_DTYPE
from smoe_mp.vault_writer import VaultWriter

#: Around the edges of a cache line and of a page, and all in between of the line.
REMAINDERS = tuple(sorted({*range(66), *range(4030, 4096)}))


@dataclass(frozen=True)
class Built:
    """`path`: what `open_source` takes.  `tensors`: (layer, expert) to name to the bytes that a client sees
    under it.  `files`: those that hold experts, each of which the reader must look at when it opens."""

    path: Path
    tensors: dict[tuple[int, int], dict[str, bytes]]
    files: tuple[Path, ...]


Builder = Callable[[Path, Sequence[int]], Built]
BUILDERS: dict[str, Builder] = {}


@dataclass(frozen=True)
class Damage:
    """`do` damages a model of the format `builder`; the refusal names all of `says`."""

    builder: str
    name: str
    do: Callable[[Built], None]
    says: tuple[str, ...]


DAMAGES: list[Damage] = []


def builder(name: str) -> Callable[[Builder], Builder]:
    """Register a builder under the format's name."""

    def register(build: Builder) -> Builder:
        BUILDERS[name] = build
        return build

    return register


def damage(
    builder: str, name: str, *says: str
) -> Callable[[Callable[[Built], None]], Callable[[Built], None]]:
    """Register a way to damage a model of one format, and what its refusal must say."""

    def register(do: Callable[[Built], None]) -> Callable[[Built], None]:
        DAMAGES.append(Damage(builder, name, do, says))
        return do

    return register


# --- .smoe -------------------------------------------------------------------------------------------------


def _smoe(folder: Path, layers: int, bits: int, arch: ArchBlock | None) -> Built:
    path, rng = folder / "model.smoe", np.random.default_rng(layers + bits)
    pairs = list(itertools.product(range(layers), range(E)))
    shapes = {"gate": (16, 40), "up": (16, 40), "down": (40, 16)}
    codes, scales = packed_sizes(640, bits)
    tensors: dict[tuple[int, int], dict[str, bytes]] = {}
    with VaultWriter(
        path, pairs, bits=bits, shapes=shapes, d_model=40, vocab_size=9, ffn_dim=40, arch=arch
    ) as writer:
        for pair in pairs:
            packed = [
                (rng.integers(0, 256, codes, np.uint8), rng.standard_normal(scales // 2).astype(np.float16))
                for _ in shapes
            ]
            writer.add_packed(*pair, *packed)
            tensors[pair] = {
                name: array.tobytes()
                for stem, both in zip(shapes, packed, strict=True)
                for name, array in zip((stem, f"{stem}.scales"), both, strict=True)
            }
    return Built(path, tensors, (path,))


@builder("smoe 1")
def smoe_1(folder: Path, remainders: Sequence[int]) -> Built:
    return _smoe(folder, len(remainders), 4, None)


@builder("smoe 2")
def smoe_2(folder: Path, remainders: Sequence[int]) -> Built:
    numbers = dict.fromkeys(ArchBlock.__slots__, 1)
    arch = ArchBlock(**{**numbers, "rope_theta": 1.0, "rms_norm_eps": 1.0, "model_type": "m"})
    return _smoe(folder, len(remainders), 2, arch)


# --- safetensors -------------------------------------------------------------------------------------------

#: Odd sizes, so that each expert of a file lies at a remainder of its own, and every kind of companion.
_ODD = (
    Part("mlp.experts.{e}.gate_proj.weight", "gate", "BF16", (5, 7)),
    Part("mlp.experts.{e}.up_proj.weight", "up", "BF16", (5, 7)),
    Part("mlp.experts.{e}.down_proj.weight", "down", "F32", (7, 5)),
    Part("mlp.experts.{e}.down_proj.bias", "down.bias", "F8_E4M3", (3,), ""),
    Part("mlp.experts.{e}.odd", "odd", "U8", (4099,), "unknown"),
    Part("mlp.experts.factor", "factor", "F32", (), "unknown"),
)
_ODD_BIAS_SCALE = Part("mlp.experts.{e}.up_proj.weight_scale", "up.weight_scale", "F32", (1,))


def _safetensors(folder: Path, parts: Sequence[Part], remainders: Sequence[int]) -> Built:
    config = {"model_type": "olmoe", "num_hidden_layers": len(remainders), "num_experts": E}
    recipe = Recipe(config, tuple(parts), tuple(range(len(remainders))), others=())
    # The first shard has what is in no layer.
    made = make(recipe, folder, data_at=lambda shard: (0, *remainders)[shard], by_layer=True)
    seen = {
        pair: {name: data for name, (_, _, _, data) in tensors.items()}
        for pair, tensors in made.expected.items()
    }
    return Built(folder, seen, tuple(sorted(folder.glob("*.safetensors"))))


@builder("safetensors")
def safetensors_each(folder: Path, remainders: Sequence[int]) -> Built:
    return _safetensors(folder, (*_ODD, _ODD_BIAS_SCALE), remainders)


@builder("safetensors stacks")
def safetensors_stacks(folder: Path, remainders: Sequence[int]) -> Built:
    bias = Part("mlp.experts.gate_up_proj_bias", "gate_up.bias", "F32", (13,), "concatenated")
    return _safetensors(folder, (*stacks("mlp.", "F32"), bias), remainders)


@damage("safetensors", "one expert's matrix is gone", "down_proj.weight' is missing", "config.json")
def _without_a_matrix(built: Built) -> None:
    path = built.files[-1]
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(name for name in header if "experts.2.down_proj.weight" in name)
    header[name.replace("layers.", "other.")] = header.pop(name)
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    index = built.path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    whole["weight_map"][name.replace("layers.", "other.")] = whole["weight_map"].pop(name)
    index.write_text(json.dumps(whole))


@damage("safetensors stacks", "config.json says another number of experts", "no stack of the 5 experts")
def _another_number(built: Built) -> None:
    config = built.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": 5}))


# --- GGUF --------------------------------------------------------------------------------------------------


@builder("gguf")
def gguf_one(folder: Path, remainders: Sequence[int]) -> Built:
    """With an alignment of 1, so that a stack may begin anywhere, and two layouts in turn."""
    made, tensors = placed_model(range(len(remainders)), E, remainders, alignment=1)
    path = made.write(folder / "model.gguf")
    return Built(path, tensors, (path,))


@builder("gguf 2 in parts")
def gguf_split(folder: Path, remainders: Sequence[int]) -> Built:
    """Version 2, the usual alignment; even layers in the first part, odd ones in the second."""
    files: list[Path] = []
    tensors: dict[tuple[int, int], dict[str, bytes]] = {}
    total = 4 * len(remainders)
    for number in range(2):
        split = {"split.no": (U16, number), "split.count": (U16, 2), "split.tensors.count": (I32, total)}
        layers = range(number, len(remainders), 2)
        made, wanted = placed_model(layers, E, remainders[number::2], alignment=32, more=split)
        made.version = 2
        files.append(made.write(folder / f"model-0000{number + 1}-of-00002.gguf"))
        tensors |= wanted
    return Built(files[1], tensors, tuple(files))


@damage("gguf", "the last byte is gone", "blk.1.ffn_gate_exps.scale", "1 bytes are missing")
def _gguf_short(built: Built) -> None:
    os.truncate(built.path, built.path.stat().st_size - 1)


@damage("gguf", "one stack is gone", "ffn_up_exps.weight is missing")
def _gguf_without_a_stack(built: Built) -> None:
    raw = built.path.read_bytes()
    built.path.write_bytes(raw.replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_un_exps.weight"))


@damage("gguf 2 in parts", "the first part is gone", "of which 1 are missing: model-00001-of-00002.gguf")
def _gguf_without_a_part(built: Built) -> None:
    built.files[0].unlink()


@damage("gguf 2 in parts", "the other byte order", "other byte order", "model-00001-of-00002.gguf")
def _gguf_swapped(built: Built) -> None:
    with built.files[0].open("r+b") as file:
        file.seek(4)
        file.write((3).to_bytes(4, "big"))


# --- .smoe version 3 ---------------------------------------------------------------------------------------


@builder("smoe 3")
def smoe_3(folder: Path, remainders: Sequence[int]) -> Built:
    """Of a checkpoint with every kind of companion, in which the experts lie at all remainders."""
    (folder / "from").mkdir()
    source = _safetensors(folder / "from", (*_ODD, _ODD_BIAS_SCALE), remainders)
    path = folder / "model.smoe"
    pack(source.path, path, raw=True)
    return Built(path, source.tensors, (path,))


@damage("smoe 3", "another layout for one expert", "expert 2 of layer 0", "layout 9, but the description has")
def _another_layout(built: Built) -> None:
    raw = bytearray(built.path.read_bytes())
    np.frombuffer(raw, ENTRY_DTYPE, E, 64)["group_size"][2] = 9
    built.path.write_bytes(raw)


@damage("smoe 3", "a name changed in the description", "CRC-32C", "description at")
def _another_name(built: Built) -> None:
    built.path.write_bytes(built.path.read_bytes().replace(b'"down.bias"', b'"down.bios"', 1))


# --- manifests ---------------------------------------------------------------------------------------------


@builder("manifest")
def manifest(folder: Path, remainders: Sequence[int]) -> Built:
    """Parts of two files, in one of them in the reverse order; two experts share a part."""
    rng = np.random.default_rng(7)
    chunks: list[list[bytes]] = [[], []]
    at = [0, 0]
    experts, tensors = [], {}

    def put(file: int, data: bytes, remainder: int) -> list[int]:
        pad = (remainder - at[file]) % 4096
        chunks[file] += [bytes(pad), data]
        begin, at[file] = at[file] + pad, at[file] + pad + len(data)
        return [file, begin, len(data)]

    shared = rng.bytes(33)
    shared_part = put(1, shared, 1)
    for layer, remainder in enumerate(remainders):
        for expert in range(E):
            gate, down = rng.bytes(60), rng.bytes(5001)
            parts = [put(expert % 2, down, remainder), put(0, gate, remainder), shared_part]
            experts.append({"layer": layer, "expert": expert, "parts": parts})
            tensors[layer, expert] = {"gate": gate[4:], "down": down, "shared": shared}
    for number in range(2):
        (folder / f"part{number}.bin").write_bytes(b"".join(chunks[number]))
    layout = [
        {"name": "gate", "dtype": "F32", "shape": [2, 7], "part": 1, "offset": 4, "bytes": 56},
        {"name": "down", "dtype": "MINE", "shape": [5001], "part": 0, "offset": 0, "bytes": 5001},
        {"name": "shared", "dtype": "U8", "shape": [3, 11], "part": 2, "offset": 0, "bytes": 33},
    ]
    files = [{"path": "part0.bin", "size": at[0]}, {"path": "part1.bin", "size": at[1]}]
    whole = {
        "format": "smoe-mp manifest",
        "version": 1,
        "files": files,
        "layouts": [layout],
        "experts": experts,
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(whole))
    return Built(path, tensors, (folder / "part0.bin", folder / "part1.bin"))


@damage(
    "manifest", "a part past the end of its file", "expert 1 of layer 0", "bytes are missing", "part1.bin"
)
def _past_the_end(built: Built) -> None:
    whole = json.loads(built.path.read_text())
    whole["experts"][1]["parts"][0][2] += 1 << 40
    built.path.write_text(json.dumps(whole))
