"""Manifests: experts in files of one's own, described by a JSON file.

    {"format": "smoe-mp manifest", "version": 1,
     "model": {"model_type": "...", "top_k": 8},
     "files": [{"path": "experts.bin", "size": 1048576}],
     "layouts": [[{"name": "gate", "dtype": "BF16", "shape": [64, 32], "part": 0, "offset": 0,
                   "bytes": 4096}]],
     "experts": [{"layer": 0, "expert": 0, "layout": 0, "parts": [[0, 128, 4096]]}]}

docs/formats.md says what each field means.  A manifest is written by its owner's own program, or by `smoe-mp
inspect --manifest` for a model of any other format; it is checked like any file that somebody else wrote.
Fields that this version does not know are refused, since they would say something that is not heeded.

Parts of different experts, and of one, may overlap: the ring only reads, and models that share tensors
between experts exist.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import ExpertTable, ModelFacts, PlainSource, Source, SourceFile, Tensor
from smoe_mp.sources.checks import MAX_EXPERTS, check_experts
from smoe_mp.sources.dtypes import BITS
from smoe_mp.sources.files import open_input

__all__ = ["MANIFEST_NAME", "open_manifest", "write_manifest"]

MANIFEST_NAME = "manifest.json"
FORMAT = "smoe-mp manifest"
VERSION = 1
#: About twice what the largest model of which we know needs.
MAX_BYTES = 256 << 20
#: How much of each file's start goes into its digest.
DIGESTED_BYTES = 64 << 10

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    size: _Natural | None = None


class _Tensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=4)]
    part: _Small
    offset: _Natural
    bytes: _Natural
    tag: _Text = ""


class _Expert(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    layer: _Small
    expert: _Small
    parts: list[tuple[_Small, _Natural, _Natural]]
    layout: _Small = 0
    crc32c: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0


class _Model(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    model_type: _Text = ""
    num_layers: _Small = 0
    d_model: _Small = 0
    ffn_dim: _Small = 0
    vocab_size: _Small = 0
    top_k: _Small = 0
    extra: dict[str, float | int | str] = {}


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    files: list[_File]
    layouts: list[list[_Tensor]]
    experts: list[_Expert]
    model: _Model = msgspec.field(default_factory=_Model)


class _Kind(msgspec.Struct):
    """What is looked at first, so that another version is told from a damaged file."""

    format: str
    version: int


def open_manifest(path: Path) -> Source:
    """The experts that the manifest at `path` describes; its files' relative paths count from its folder.

    Raises VaultError with the manifest or the file, the expert and the figures.
    """
    with open_input(path, "a manifest") as file:
        if file.size > MAX_BYTES:
            raise file.refuse(f"{file.size} bytes, at most {MAX_BYTES} are accepted of a manifest")
        raw = file.read(0, file.size, "the manifest")
    manifest = _decode(path, raw)
    layouts = tuple(tuple(map(_tensor, tensors)) for tensors in manifest.layouts)
    for number, layout in enumerate(layouts):
        _check_layout(path, number, layout)
    files = tuple(_open_file(path, file, raw) for file in manifest.files)
    experts = _columns(path, manifest.experts)
    check_experts(path, experts, files, layouts)
    model = ModelFacts(**{name: getattr(manifest.model, name) for name in _Model.__struct_fields__})
    return PlainSource("manifest", path, files, experts, layouts, model)


def _decode(path: Path, raw: bytearray) -> _Manifest:
    try:
        kind = msgspec.json.decode(raw, type=_Kind)
        if kind.format != FORMAT:
            raise VaultError(f'{path}: its "format" is {kind.format!r}, not {FORMAT!r}')
        if kind.version != VERSION:
            raise VaultError(f"{path}: version {kind.version} of the format; this program reads {VERSION}")
        return msgspec.json.decode(raw, type=_Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise VaultError(f"{path}: not a manifest: {error}") from error


def _tensor(t: _Tensor) -> Tensor:
    return Tensor(t.name, t.dtype, t.shape, t.part, t.offset, t.bytes, t.tag)


def _check_layout(path: Path, number: int, layout: tuple[Tensor, ...]) -> None:
    """Names stand once, can be passed on, and bytes are those of type and shape, where the type is known."""
    where = f"{path}: layout {number}"
    for name, count in Counter(t.name for t in layout).items():
        if count > 1:
            raise VaultError(f"{where}: {count} tensors are named {name!r}")
    for t in layout:
        if "\0" in t.name + t.dtype + t.tag:
            raise VaultError(f"{where}: tensor {t.name!r}: a NUL in its name, dtype or tag")
        bits = BITS.get(t.dtype)
        if bits is not None and prod(t.shape) * bits != t.nbytes * 8:
            raise VaultError(
                f"{where}: tensor {t.name!r}: {t.nbytes} bytes, but {t.dtype} of shape {list(t.shape)} has"
                f" {prod(t.shape) * bits} bits"
            )


def _open_file(manifest: Path, file: _File, raw: bytearray) -> SourceFile:
    """The identity of one of its files; the digest covers the manifest and the file's first bytes."""
    with open_input(manifest.parent / file.path, "a file of experts") as opened:
        if file.size is not None and file.size != opened.size:
            raise opened.refuse(f"{opened.size} bytes, but {manifest} says {file.size}")
        digest = hashlib.blake2b(raw, digest_size=16)
        digest.update(opened.read(0, min(opened.size, DIGESTED_BYTES), "its first bytes"))
        return opened.identity(digest.digest())


def _columns(path: Path, experts: list[_Expert]) -> ExpertTable:
    if not 1 <= len(experts) <= MAX_EXPERTS:
        raise VaultError(f"{path}: {len(experts)} experts; 1 to {MAX_EXPERTS} can be served")
    ids = np.array([(x.layer, x.expert, x.layout, x.crc32c) for x in experts], np.int64).reshape(-1, 4)
    parts = np.array([part for x in experts for part in x.parts], np.int64).reshape(-1, 3)
    return ExpertTable(
        layer=ids[:, 0],
        expert=ids[:, 1],
        layout=ids[:, 2],
        crc32c=ids[:, 3],
        first=np.cumsum([0, *(len(x.parts) for x in experts)], dtype=np.int64),
        file=parts[:, 0],
        offset=parts[:, 1],
        length=parts[:, 2],
    )


def write_manifest(source: Source, path: Path) -> None:
    """Write the manifest of `source` to `path`, which must not exist yet.

    Files below the manifest's folder get relative paths, others absolute ones.  VaultError where it cannot be
    written, naming the system call.
    """
    try:
        text = msgspec.json.encode(_describe(source, path))
    except UnicodeEncodeError as error:
        raise VaultError(f"{path}: a name in {source.path} is not UTF-8: {error}") from error
    _write_new(path, text)


def _describe(source: Source, path: Path) -> _Manifest:
    model = source.model
    return _Manifest(
        format=FORMAT,
        version=VERSION,
        files=[_File(_path_from(path, file.path), file.size) for file in source.files],
        layouts=[
            [_Tensor(t.name, t.dtype, t.shape, t.part, t.offset, t.nbytes, t.tag) for t in layout]
            for layout in source.layouts
        ],
        experts=[
            _Expert(x.layer, x.expert, [(e.file, e.offset, e.length) for e in x.extents], x.layout, x.crc32c)
            for x in source.experts
        ],
        model=_Model(**{name: getattr(model, name) for name in _Model.__struct_fields__}),
    )


def _write_new(path: Path, text: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise VaultError(f"{path}: there is a file of that name already; it is left as it is") from error
    except (OSError, ValueError) as error:
        raise VaultError(f"{path}: open: {error}") from error
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        os.unlink(path)
        raise VaultError(f"{path}: write: {error.strerror} (errno {error.errno})") from error


def _path_from(manifest: Path, file: Path) -> str:
    folder = manifest.absolute().parent
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)
