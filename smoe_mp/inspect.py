"""What a source holds, for programs (plain dictionaries) and for people (tables).

Everything here is worked out from the checked description alone; no expert's bytes are read, so it costs
the same for a vault of 100 GB as for one of 1 MB.  Text that comes from a file is escaped before it reaches
a terminal.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from smoe_mp.errors import IdError
from smoe_mp.sources.base import Expert, Source, Tensor
from smoe_mp.sources.smoe import SmoeVault
from smoe_mp.sources.smoe3 import RawVault

__all__ = ["experts", "one_expert", "render", "render_expert", "summary"]

Json = dict[str, Any]


def _bytes_of(expert: Expert) -> int:
    return sum(extent.length for extent in expert.extents)


def _tensor(tensor: Tensor) -> Json:
    return {
        **({"tag": tensor.tag} if tensor.tag else {}),
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "part": tensor.part,
        "offset": tensor.offset,
        "bytes": tensor.nbytes,
    }


def summary(source: Source) -> Json:
    """The source as a whole, as what JSON can hold.  Sizes in bytes; digests in hexadecimal.

    Keys: `format`, `path`, `files`, `layers` and `experts` (counts), `experts_per_layer` (least and most),
    `expert_bytes` (least, most and all), `checksums` (experts that have one), `layouts`, `model`, and what
    the format says beyond that under its own name.
    """
    sizes = [_bytes_of(expert) for expert in source.experts]
    per_layer = Counter(expert.layer for expert in source.experts)
    uses = Counter(expert.layout for expert in source.experts)
    model = source.model
    out: Json = {
        "format": source.format,
        "path": str(source.path),
        "files": [
            {
                "path": str(file.path),
                "bytes": file.size,
                "mtime_ns": file.mtime_ns,
                "device": file.dev,
                "inode": file.ino,
                "header_digest": file.digest.hex(),
            }
            for file in source.files
        ],
        "layers": len(per_layer),
        "experts": len(sizes),
        "experts_per_layer": {"least": min(per_layer.values()), "most": max(per_layer.values())},
        "expert_bytes": {"least": min(sizes), "most": max(sizes), "all": sum(sizes)},
        "checksums": sum(expert.crc32c != 0 for expert in source.experts),
        "layouts": [
            {"experts": uses[number], "tensors": [_tensor(tensor) for tensor in layout]}
            for number, layout in enumerate(source.layouts)
        ],
        "model": {
            "model_type": model.model_type,
            "num_layers": model.num_layers,
            "d_model": model.d_model,
            "ffn_dim": model.ffn_dim,
            "vocab_size": model.vocab_size,
            "top_k": model.top_k,
            **model.extra,
        },
    }
    if isinstance(source, SmoeVault):
        h = source.header
        out["smoe"] = {
            "version": h.version,
            "bits": h.bits,
            "group_size": h.group_size,
            "data_offset": h.data_offset,
            "arch_offset": h.arch_offset,
            "num_moe_layers": h.num_moe_layers,
            "max_experts_per_layer": h.max_experts_per_layer,
            "header_ffn_dim": h.ffn_dim,
        }
    if isinstance(source, RawVault):
        out["smoe"] = {
            "version": source.header.version,
            "data_offset": source.header.data_offset,
            "origin": msgspec.to_builtins(source.origin),
        }
    return out


def experts(source: Source) -> list[Json]:
    """One dictionary an expert, in the source's order: `index`, `layer`, `expert`, `bytes`, `layout`,
    `crc32c` (8 hexadecimal digits, None without one) and `extents` (path, offset and length in bytes)."""
    return [
        {
            "index": index,
            "layer": expert.layer,
            "expert": expert.expert,
            "bytes": _bytes_of(expert),
            "layout": expert.layout,
            "crc32c": f"{expert.crc32c:08x}" if expert.crc32c else None,
            "extents": [
                {"path": str(source.files[e.file].path), "offset": e.offset, "length": e.length}
                for e in expert.extents
            ],
        }
        for index, expert in enumerate(source.experts)
    ]


def one_expert(source: Source, layer: int, expert: int) -> Json:
    """One expert in full: what `experts` says of it, and its `tensors` with the `path` and the place in it
    (`file_offset`, bytes) of each.  IdError where the source has no such expert."""
    for row, x in zip(experts(source), source.experts, strict=True):
        if (x.layer, x.expert) == (layer, expert):
            return row | {"tensors": [_placed(source, x, t) for t in source.layouts[x.layout]]}
    raise IdError(f"{source.path}: there is no expert {expert} in layer {layer}")


def _placed(source: Source, expert: Expert, tensor: Tensor) -> Json:
    extent = expert.extents[tensor.part]
    path = str(source.files[extent.file].path)
    return _tensor(tensor) | {"path": path, "file_offset": extent.offset + tensor.offset}


def _size(count: int) -> str:
    """A number of bytes with a unit, and exact where that is short."""
    if count < 10_000:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _facts(about: Json) -> Table:
    table = Table.grid(padding=(0, 2))
    model = about["model"]
    per_layer, sizes = about["experts_per_layer"], about["expert_bytes"]
    version = f" version {about['smoe']['version']}" if "smoe" in about else ""
    least, most = _size(sizes["least"]), _size(sizes["most"])
    known = {name: value for name, value in model.items() if value not in (0, "")}
    rows = {
        "source": about["path"],
        "format": f"{about['format']}{version}",
        "model": ", ".join(f"{name} {value}" for name, value in known.items()) or "the file does not say",
        "experts": f"{about['experts']} in {about['layers']} layers of"
        f" {_range(per_layer['least'], per_layer['most'])}",
        "size": f"{_size(sizes['all'])}, an expert {least if least == most else f'{least} to {most}'}",
        "checksums": f"{about['checksums']} of {about['experts']} experts have one",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


def _files(about: Json) -> Table:
    table = Table(title="files", title_justify="left")
    table.add_column("path", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("header digest")
    for file in about["files"]:
        table.add_row(escape(file["path"]), _size(file["bytes"]), file["header_digest"])
    return table


def _layout(number: int, layout: Json) -> Table:
    table = Table(title=f"layout {number}: {layout['experts']} experts", title_justify="left")
    for name in ("tensor", "type", "shape", "tag"):
        table.add_column(name)
    for name in ("part", "offset", "bytes"):
        table.add_column(name, justify="right")
    for tensor in layout["tensors"]:
        table.add_row(
            escape(tensor["name"]),
            escape(tensor["dtype"]),
            " x ".join(map(str, tensor["shape"])),
            escape(tensor.get("tag", "")),
            *(str(tensor[key]) for key in ("part", "offset", "bytes")),
        )
    return table


def _expert_rows(source: Source) -> Table:
    table = Table(title="experts", title_justify="left")
    for name in ("index", "layer", "expert", "layout"):
        table.add_column(name, justify="right")
    table.add_column("extents (file: offset + bytes)", overflow="fold")
    table.add_column("crc32c")
    for row, expert in zip(experts(source), source.experts, strict=True):
        extents = ", ".join(f"{e.file}: {e.offset} + {e.length}" for e in expert.extents)
        table.add_row(
            *(str(row[key]) for key in ("index", "layer", "expert", "layout")), extents, row["crc32c"] or "-"
        )
    return table


def render_expert(about: Json, console: Console) -> None:
    """Print what `one_expert` gave."""
    title = f"expert {about['expert']} of layer {about['layer']}: {_size(about['bytes'])}"
    parts = Table(title=title, title_justify="left")
    for name in ("part", "offset", "bytes"):
        parts.add_column(name, justify="right")
    parts.add_column("path", overflow="fold")
    for number, e in enumerate(about["extents"]):
        parts.add_row(str(number), str(e["offset"]), str(e["length"]), escape(e["path"]))
    console.print(parts)
    tensors = Table()
    for name in ("tensor", "type", "shape", "tag"):
        tensors.add_column(name)
    for name in ("part", "at in the file", "bytes"):
        tensors.add_column(name, justify="right")
    for t in about["tensors"]:
        words = escape(t["name"]), escape(t["dtype"]), " x ".join(map(str, t["shape"])), t.get("tag", "")
        tensors.add_row(*words[:3], escape(words[3]), str(t["part"]), str(t["file_offset"]), str(t["bytes"]))
    console.print(tensors)


def render(source: Source, experts: bool, console: Console) -> None:
    """Print the source for people: facts, files, layouts, and each expert where `experts` is true."""
    about = summary(source)
    console.print(_facts(about))
    console.print(_files(about))
    for number, layout in enumerate(about["layouts"]):
        console.print(_layout(number, layout))
    if experts:
        console.print(_expert_rows(source))
