"""Experts of safetensors checkpoints, streamed from the very files that people have.

    checkpoint   which files, and every tensor's place
    families     how models name their experts, and in what order the numbers stand
    here         from the two: experts, each with everything that carries its index

What decides is the names of the tensors that are there, held against config.json: each layer that should
have routed experts must have them all, each with all its matrices, and every matrix of a block-scaled type
with its scales.  Less is refused by the first name that is missing, since a model with a few experts too few
computes fluent nonsense.  Shared experts and the layers that only draft tokens stay out.

The work is done by columns.  Every tensor of an expert has a *role*: the projection and the suffix behind it,
or, for what no family knows, its own name.  A table of experts x roles says in which file and where each
lies; experts with equal rows of sizes, types and shapes share a layout.

An expert's parts stand in the order gate, up, down, then what goes with them.  Gate and up that follow each
other in the file are one part, so that one view can show both; nothing else is joined, since a part that must
be moved in its slot should be small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smoe_mp.errors import VaultError
from smoe_mp.sources import families
from smoe_mp.sources.base import ExpertTable, ModelFacts, PlainSource, Source, Tensor
from smoe_mp.sources.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    SafetensorsFile,
    StoredTensor,
    open_folder,
    read_header,
)
from smoe_mp.sources.checks import MAX_EXPERTS, MAX_GRID_CELLS, check_experts
from smoe_mp.sources.families import Key, MoeLayers, Projection

__all__ = ["Checkpoint", "SafetensorsFile", "StoredTensor", "open_folder", "open_safetensors", "read_header"]

#: The order in which an expert's tensors stand; what has no place here follows, by name.
ORDER = ("gate", "up", "gate_up", "down")
#: The table of experts x roles is at least this part full: 1 in 16.
SPARSEST = 16
#: Several times what the deepest model has; it bounds the work that config.json alone can cause.
MAX_LAYERS = 1 << 14

Column = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def open_safetensors(path: Path) -> Source:
    """The routed experts of the checkpoint at `path`: a folder, its config.json, its index file or one file.

    Raises VaultError with the file, the tensor and the figures where something is missing or does not add up.
    """
    checkpoint = open_folder(path)
    wanted = _Wanted(checkpoint.path, checkpoint.config)
    found = _Found(checkpoint, wanted)
    table = _Table(found, wanted)
    _Completeness(table, found, wanted).check()
    experts, layouts = _lay_out(table, found, wanted)
    files = tuple(file.source for file in checkpoint.files)
    check_experts(checkpoint.path, experts, files, layouts)
    facts = _model_facts(wanted, found)
    return PlainSource("safetensors", checkpoint.path, files, experts, layouts, facts)


# --- what config.json says ---------------------------------------------------------------------------------


class _Wanted:
    """What config.json says of the experts: family, layers that have some, and how many each."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        if not config:
            raise self.refuse(
                f"no {CONFIG_NAME} beside it, without which neither the number of experts nor the order of"
                " their numbers is known; put it there, or write a manifest (docs/formats.md)"
            )
        self.config = self._text_config(config)
        quantization = config.get("quantization_config", self.config.get("quantization_config"))
        self.quantization: dict[str, Any] = quantization if isinstance(quantization, dict) else {}
        model_type = self.config.get("model_type", config.get("model_type", ""))
        self.model_type = model_type if isinstance(model_type, str) and model_type.isprintable() else ""
        known = (f for f in families.FAMILIES if self.model_type in f.model_types)
        self.family = next(known, families.UNKNOWN)
        self.n_layers = self._number(families.LAYERS_KEYS)
        self.n_experts = self._number(self.family.experts)
        self._check()
        dense = self.config.get(self.family.layers.dense)
        self._dense = {n for n in dense if type(n) is int} if isinstance(dense, list) else set()
        self.layers = [n for n in range(self.n_layers) if self._has_experts(n, self.family.layers)]

    def refuse(self, what: str) -> VaultError:
        return VaultError(f"{self.path}: {what}")

    def _text_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of config.json that has the number of experts; the whole where none has it."""
        for _ in range(3):  # a model of speech and pictures has its text model two levels down
            if any(key in config for key in families.UNKNOWN.experts):
                break
            inner = (config.get(key) for key in families.TEXT_CONFIG_KEYS)
            config = next((part for part in inner if isinstance(part, dict)), config)
        return config

    def _number(self, keys: Iterable[str]) -> int:
        """The whole number of the first of `keys` that has one above 0, else 0."""
        values = (self.config.get(key) for key in keys)
        return next((v for v in values if type(v) is int and 0 < v < 2**31), 0)

    def facts(self) -> dict[str, int]:
        """Sizes of the model, as `ModelFacts` names them."""
        return {
            "num_layers": self.n_layers,
            "d_model": self._number(families.HIDDEN_KEYS),
            "ffn_dim": self._number(families.WIDTH_KEYS),
            "vocab_size": self._number(families.VOCAB_KEYS),
            "top_k": self._number(families.TOP_K_KEYS),
        }

    def _check(self) -> None:
        if not self.n_experts:
            raise self.refuse(
                f"{CONFIG_NAME} (model_type {self.model_type!r}) has no number of routed experts: none of"
                f" {', '.join(self.family.experts)} is a whole number above 0"
            )
        if not self.n_layers:
            kinds = (self.config.get(key) for key, _ in self.family.layers.kinds)
            self.n_layers = next((len(k) for k in kinds if isinstance(k, list | str)), 0)
        if not self.n_layers:
            raise self.refuse(f"{CONFIG_NAME}: {families.LAYERS_KEYS[0]} is no whole number above 0")
        if self.n_layers > MAX_LAYERS:
            raise self.refuse(f"{CONFIG_NAME}: {self.n_layers} layers, at most {MAX_LAYERS} are accepted")
        cells = self.n_layers * self.n_experts
        if cells > min(MAX_EXPERTS, MAX_GRID_CELLS):
            raise self.refuse(
                f"{CONFIG_NAME}: {self.n_layers} layers of {self.n_experts} experts; at most {MAX_EXPERTS}"
                " experts can be served"
            )

    def _has_experts(self, layer: int, rule: MoeLayers) -> bool:
        for key, kind in rule.kinds:
            kinds = self.config.get(key)
            if isinstance(kinds, list | str):
                return layer < len(kinds) and kinds[layer] == kind
        last = self._rule(rule.last, -1)
        step = max(1, self._rule(rule.step, 1))
        return (
            layer not in self._dense
            and self._rule(rule.first, 0) <= layer
            and (last < 0 or layer <= last)
            and (layer + rule.shift - self._rule(rule.remainder, 0)) % step == 0
        )

    def _rule(self, key: Key | None, neutral: int) -> int:
        if key is None:
            return neutral
        value = self.config.get(key.name, key.default)
        return value if type(value) is int else neutral


# --- what the checkpoint has -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Role:
    """What a tensor is to its expert.  `projection` is None for what no family knows; then `suffix` is the
    name that the checkpoint gives it.  `stored` is the end of its name there."""

    projection: Projection | None
    suffix: str
    stored: str
    stacked: bool

    @property
    def main(self) -> bool:
        """Whether it is a projection's matrix itself."""
        suffixes = families.DENSE_SUFFIXES | families.PACKED_SUFFIXES
        return self.projection is not None and self.projection.name in ORDER and self.suffix in suffixes

    @property
    def packed(self) -> bool:
        return self.suffix in families.PACKED_SUFFIXES

    @property
    def name(self) -> str:
        """What a client calls it."""
        if self.projection is None:
            return self.suffix
        dense = self.suffix in families.DENSE_SUFFIXES
        return self.projection.name if dense else f"{self.projection.name}.{self.suffix}"

    @property
    def tag(self) -> str:
        p = self.projection
        if p is None:
            return "unknown"
        if "bias" in self.suffix:
            return p.order
        if self.suffix in ("blocks", "scales") and p.packed:
            return ",".join(filter(None, (p.packed, p.order)))
        if self.suffix not in families.ORDERED_SUFFIXES or p.orientation == "unknown":
            return "unknown"
        return ",".join(filter(None, (p.orientation, p.order)))

    def place(self) -> tuple[bool, int, str]:
        """By which roles are ordered."""
        name = self.projection.name if self.projection else ""
        return not self.main, ORDER.index(name) if name in ORDER else len(ORDER), self.name


#: What a row of `_Found` says: tensor `row` of file `file` is in this role of this layer and expert.
_ROW = ("layer", "expert", "role", "file", "row")
#: In the place of a layer's number.
_NO_LAYER, _DRAFT = -1, -2


class _Found:
    """The checkpoint's tensors that belong to routed experts."""

    def __init__(self, checkpoint: Checkpoint, wanted: _Wanted) -> None:
        self.checkpoint = checkpoint
        self.wanted = wanted
        self.roles: list[_Role] = []
        self._each: list[int] = []  # rows of `_ROW`, one behind the other
        self._stacks: list[int] = []
        self.drafts = 0  # tensors of draft layers' experts
        self.prefix: str | None = None
        self.module = "mlp."
        self._layer_of: dict[str, int] = {}
        self._expert_of: dict[str, int | None] = {}
        self._each_role: dict[str, int] = {}
        self._stack_role: dict[str, int | None] = {}
        for number, file in enumerate(checkpoint.files):
            for row, name in enumerate(file.names):
                self._look_at(name, number, row)
        self.each = np.array(self._each, np.int64).reshape(-1, len(_ROW)).T
        self.stacks = np.array(self._stacks, np.int64).reshape(-1, len(_ROW)).T

    def stored_name(self, layer: int, expert: int, role: _Role) -> str:
        """What the checkpoint calls a tensor, or would."""
        prefix = self.prefix if self.prefix is not None else "model."
        if role.stacked:
            module = "" if role.stored.startswith("block_sparse_moe.") else self.module
            return f"{prefix}layers.{layer}.{module}{role.stored}"
        return f"{prefix}layers.{layer}.{self.module}experts.{expert}.{role.stored}"

    def example(self, projection: str) -> _Role:
        """How this checkpoint names the projection's matrix, or would."""
        for role in self.roles:
            if role.main and role.projection and role.projection.name == projection:
                return role
        family = self.wanted.family
        each = [_Role(p, "weight", p.stored + ".weight", False) for p in family.each if p.name == projection]
        stacks = [
            _Role(p, "", p.stored + ("" if p.stored.startswith("experts.") else ".weight"), True)
            for p in family.stacks
            if p.name == projection
        ]
        stacked = any(role.stacked for role in self.roles)
        return (stacks + each if stacked else each + stacks)[0]

    def first_needed(self) -> _Role:
        """The first matrix that an expert of this checkpoint should have."""
        found = {role.projection.name for role in self.roles if role.main and role.projection}
        sets = self.wanted.family.needs
        needs = _closest(sets, found, found) if found else sets[0]
        return self.example(min(needs, key=ORDER.index))

    def _look_at(self, name: str, file: int, row: int) -> None:
        head, found, tail = name.partition(".experts.")
        if found:
            digits, _, each = tail.partition(".")
            expert = self._expert_of.get(digits)
            if expert is None and digits not in self._expert_of:
                expert = self._expert_of[digits] = _number(digits)
            if expert is not None and each:
                layer = self._layer(head, name)
                if layer >= 0:
                    self._each += (layer, expert, self._role_of_each(each), file, row)
                self.drafts += layer == _DRAFT
                return
        self._look_at_stack(name, file, row)

    def _layer(self, head: str, name: str) -> int:
        """The number of the layer that is in what stands before `.experts.`."""
        layer = self._layer_of.get(head)
        if layer is None:
            prefix, layer, module = self._split(head)
            if layer >= 0:
                self._check_prefix(prefix, name)
                self.module = module + "." if module else ""
            self._layer_of[head] = layer
        return layer

    def _split(self, name: str) -> tuple[str, int, str]:
        """The prefix of a name, the number of its layer, and what follows."""
        prefix, found, rest = name.partition("layers.")
        digits, _, rest = rest.partition(".")
        layer = _number(digits)
        if not found or (prefix and not prefix.endswith(".")) or layer is None:
            return prefix, _NO_LAYER, ""
        draft = layer >= self.wanted.n_layers or not families.DRAFT_WORDS.isdisjoint(prefix.split("."))
        return prefix, _DRAFT if draft else layer, rest

    def _look_at_stack(self, name: str, file: int, row: int) -> None:
        prefix, layer, rest = self._split(name)
        if layer == _NO_LAYER:
            return
        role = self._role_of_stack(rest, file, row)
        if role is None:
            return
        if layer == _DRAFT:
            self.drafts += 1
            return
        self._check_prefix(prefix, name)
        self._stacks += (layer, 0, role, file, row)

    def _check_prefix(self, prefix: str, name: str) -> None:
        if self.prefix is None:
            self.prefix = prefix
        elif self.prefix != prefix:
            raise self.wanted.refuse(
                f"tensor {name!r}: experts under the prefix {prefix!r}, and others under {self.prefix!r};"
                " which of the two models is meant, only a manifest can say (docs/formats.md)"
            )

    def _role_of_each(self, each: str) -> int:
        """The role of what stands behind `experts.E.`."""
        role = self._each_role.get(each)
        if role is None:
            stored, _, suffix = each.partition(".")
            known = next((p for p in self.wanted.family.each if p.stored == stored), None)
            made = _Role(known, suffix, each, False) if known else _Role(None, each, each, False)
            role = self._each_role[each] = self._role(made)
        return role

    def _role_of_stack(self, rest: str, file: int, row: int) -> int | None:
        """The role of a tensor that is no single expert's; None where it is no stack of experts."""
        if rest not in self._stack_role:
            made = self._stack_kind(rest) or self._unknown_stack(rest, file, row)
            self._stack_role[rest] = None if made is None else self._role(made)
            if made is not None and made.projection is not None and rest.endswith(made.stored):
                self.module = rest[: len(rest) - len(made.stored)]
        return self._stack_role[rest]

    def _stack_kind(self, rest: str) -> _Role | None:
        for p in (*self.wanted.family.stacks, *self.wanted.family.rows):
            at = 0 if rest.startswith(p.stored) else rest.find("." + p.stored) + 1
            if not at and not rest.startswith(p.stored):
                continue
            suffix = rest[at + len(p.stored) :]
            if not suffix or suffix[0] in "._":
                return _Role(p, suffix[1:], rest[at:], True)
        return None

    def _unknown_stack(self, rest: str, file: int, row: int) -> _Role | None:
        """A tensor of the experts' module that no family names, but that has one row an expert."""
        at = 0 if rest.startswith("experts.") else rest.find(".experts.") + 1
        if not at and not rest.startswith("experts."):
            return None
        shape = self.checkpoint.files[file].tensor(row).shape
        name = rest[at + len("experts.") :]
        one_row_each = bool(shape) and shape[0] == self.wanted.n_experts
        return _Role(None, name, rest[at:], True) if one_row_each else None

    def _role(self, role: _Role) -> int:
        self.roles.append(role)
        return len(self.roles) - 1


def _number(digits: str) -> int | None:
    """The number that the digits of a name are."""
    return int(digits) if len(digits) <= 9 and digits.isascii() and digits.isdigit() else None


# --- experts x roles ---------------------------------------------------------------------------------------


def _check_extent(found: _Found, wanted: _Wanted) -> None:
    """Refuse numbers in config.json that the checkpoint does not bear out, before room is made for them."""
    n, cells = wanted.n_experts, len(wanted.layers) * wanted.n_experts
    for file, row in found.stacks[3:].T.tolist():
        tensor = found.checkpoint.files[file].tensor(row)
        if not tensor.shape or tensor.shape[0] != n or tensor.nbytes < n or tensor.nbytes % n:
            raise wanted.refuse(
                f"tensor {tensor.name!r}: {tensor.nbytes} bytes of shape {list(tensor.shape)} are no stack of"
                f" the {n} experts that {CONFIG_NAME} says"
            )
    filled = found.each.shape[1] + n * found.stacks.shape[1]
    stacked = set(found.stacks[0].tolist())
    layer, expert = found.each[:2]
    there = np.unique(layer[expert < n] * n + expert[expert < n])  # below 2^14 x 2^21
    for number in wanted.layers:
        ids = there[np.searchsorted(there, number * n) : np.searchsorted(there, number * n + n)] - number * n
        if number not in stacked and len(ids) < n:
            first = int(np.argmax(np.append(ids, n) != np.arange(len(ids) + 1)))
            name = found.stored_name(number, first, found.first_needed())
            raise wanted.refuse(
                f"{name!r} is missing, and all else of expert {first} of layer {number}; {CONFIG_NAME}"
                f" (model_type {wanted.model_type!r}) says {len(wanted.layers)} layers of {n} experts, and"
                f" tensors of {len(there) + n * len(stacked)} experts are there"
            )
    if cells * len(found.roles) > SPARSEST * filled:
        raise wanted.refuse(
            f"the {cells} experts have {filled} tensors of {len(found.roles)} different names: too different"
            " from each other for a model of one kind"
        )


class _Table:
    """One row an expert, one column a role: where each tensor lies.  `kind` is -1 where there is none, else
    an index into `kinds`, the (dtype, shape) pairs."""

    def __init__(self, found: _Found, wanted: _Wanted) -> None:
        self.found, self.wanted = found, wanted
        _check_extent(found, wanted)
        order = sorted(range(len(found.roles)), key=lambda i: found.roles[i].place())
        self.roles = [found.roles[i] for i in order]
        self._column = np.argsort(np.array(order, np.int64))
        layers = np.array(wanted.layers, np.int64)
        n = wanted.n_experts
        self.layer = np.repeat(layers, n)
        self.expert = np.tile(np.arange(n), len(layers))
        self._first = np.full(wanted.n_layers, -1, np.int64)
        self._first[layers] = np.arange(len(layers)) * n
        self.kinds: list[tuple[str, tuple[int, ...]]] = []
        self._kind_number: dict[tuple[str, tuple[int, ...]], int] = {}
        shape = (len(self.layer), len(self.roles))
        self.kind, self.file = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        self.offset, self.size = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._fill_each()
        self._fill_stacks()

    def _kind(self, dtype: str, shape: tuple[int, ...]) -> int:
        number = self._kind_number.setdefault((dtype, shape), len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append((dtype, shape))
        return number

    def _name(self, file: int, row: int) -> str:
        return self.found.checkpoint.files[file].names[row]

    def _fill_each(self) -> None:
        layer, expert, role, file, row = self.found.each
        if not len(layer):
            return
        wrong = (self._first[layer] < 0) | (expert >= self.wanted.n_experts)
        if wrong.any():
            i = int(np.argmax(wrong))
            self._refuse_extra(int(layer[i]), self._name(int(file[i]), int(row[i])))
        place = self._first[layer] + expert, self._column[role]
        kind, offset, size = self._columns_of(file, row)
        before = self.kind.copy()
        self.kind[place] = kind
        if (self.kind != before).sum() != len(layer):
            self._refuse_twice(layer, expert, role, file, row)
        self.file[place], self.offset[place], self.size[place] = file, offset, size

    def _columns_of(self, file: Column, row: Column) -> tuple[Column, Column, Column]:
        """Kind, offset and size of tensors of any files."""
        kind, offset, size = np.zeros_like(row), np.zeros_like(row), np.zeros_like(row)
        for number, stored in enumerate(self.found.checkpoint.files):
            mine = file == number
            if not mine.any():
                continue
            rows = row[mine]
            used = np.unique(stored.kinds[rows])
            numbers = np.zeros(len(stored.kind_table), np.int64)
            numbers[used] = [self._kind(*stored.kind_table[k]) for k in used.tolist()]
            kind[mine] = numbers[stored.kinds[rows]]
            offset[mine], size[mine] = stored.offsets[rows], stored.sizes[rows]
        return kind, offset, size

    def _refuse_extra(self, layer: int, name: str) -> None:
        w = self.wanted
        of = f"no experts in layer {layer}" if self._first[layer] < 0 else f"{w.n_experts} experts a layer"
        raise w.refuse(f"tensor {name!r} is there, but by {CONFIG_NAME} there are {of}")

    def _refuse_twice(self, *columns: Column) -> None:
        seen: dict[tuple[int, int, str], str] = {}
        for layer, expert, role, file, row in zip(*(c.tolist() for c in columns), strict=True):
            key, name = (layer, expert, self.found.roles[role].name), self._name(file, row)
            if key in seen:
                raise self.wanted.refuse(f"tensors {seen[key]!r} and {name!r} are the same part of an expert")
            seen[key] = name

    def _fill_stacks(self) -> None:
        n = self.wanted.n_experts
        for layer, _, role, file, row in self.found.stacks.T.tolist():
            tensor = self.found.checkpoint.files[file].tensor(row)
            first = int(self._first[layer])
            if first < 0:
                self._refuse_extra(layer, tensor.name)
            rows, column, size = slice(first, first + n), int(self._column[role]), tensor.nbytes // n
            if (self.kind[rows, column] >= 0).any():
                raise self.wanted.refuse(f"tensor {tensor.name!r}: its experts have this part already")
            self.kind[rows, column] = self._kind(tensor.dtype, tensor.shape[1:])
            self.file[rows, column], self.size[rows, column] = file, size
            self.offset[rows, column] = tensor.offset + np.arange(n) * size


# --- is it all there ---------------------------------------------------------------------------------------


def _closest(sets: Iterable[frozenset[str]], here: set[str], anywhere: set[str]) -> frozenset[str]:
    """The set of which most is here, then anywhere; the smallest of several."""
    return max(sets, key=lambda s: (len(s & here), len(s & anywhere), -len(s)))


class _Completeness:
    """The checks that no expert lacks anything."""

    def __init__(self, table: _Table, found: _Found, wanted: _Wanted) -> None:
        self.table, self.found, self.wanted = table, found, wanted
        self.has = table.kind >= 0

    def check(self) -> None:
        if not self.wanted.layers:
            raise self.wanted.refuse(f"by {CONFIG_NAME} no layer of {self.wanted.n_layers} has experts")
        self._check_names()
        self._check_matrices()
        self._check_scales()
        self._check_companions()

    def _refuse(self, row: int, role: _Role, missing: int, why: str) -> VaultError:
        w, layer, expert = self.wanted, int(self.table.layer[row]), int(self.table.expert[row])
        name = self.found.stored_name(layer, expert, role)
        more = f" and {missing - 1} more like it" if missing > 1 else ""
        return w.refuse(
            f"expert {expert} of layer {layer}: {name!r} is missing{more}; {why} ({CONFIG_NAME}, model_type"
            f" {w.model_type!r}: {len(w.layers)} layers of {w.n_experts} experts)"
        )

    def _check_names(self) -> None:
        """No two roles have one name, as `gate_proj.weight` and `gate_proj` would, in one expert."""
        names: dict[str, int] = {}
        for column, role in enumerate(self.table.roles):
            other = names.setdefault(role.name, column)
            both = self.has[:, other] & self.has[:, column]
            if other != column and both.any():
                row = int(np.argmax(both))
                layer, expert = int(self.table.layer[row]), int(self.table.expert[row])
                one, two = (
                    self.found.stored_name(layer, expert, self.table.roles[c]) for c in (other, column)
                )
                raise self.wanted.refuse(f"tensors {one!r} and {two!r} are the same part of an expert")

    def _mains(self, projection: str) -> list[int]:
        roles = self.table.roles
        return [i for i, r in enumerate(roles) if r.main and r.projection and r.projection.name == projection]

    def _has(self, projection: str) -> Mask:
        return np.asarray(self.has[:, self._mains(projection)].any(axis=1))

    def _check_matrices(self) -> None:
        """Every expert has all matrices of one of the family's sets: the one of which its layer, and then the
        model, has the most different ones."""
        n = self.wanted.n_experts
        sets = self.wanted.family.needs
        has = {name: self._has(name) for name in sorted(frozenset().union(*sets))}
        anywhere = {name for name, column in has.items() if column.any()}
        for first in range(0, len(self.table.layer), n):
            rows = slice(first, first + n)
            here = {name for name, column in has.items() if column[rows].any()}
            needs = _closest(sets, here, anywhere)
            for name in sorted(needs, key=ORDER.index):
                missing = ~has[name][rows]
                if missing.any():
                    row = first + int(np.argmax(missing))
                    example = self.found.example(name)
                    raise self._refuse(row, example, int(missing.sum()), self._count(has, sets))

    def _count(self, has: dict[str, Mask], sets: tuple[frozenset[str], ...]) -> str:
        whole = np.any([np.all([has[name] for name in s], axis=0) for s in sets], axis=0)
        return f"{int(whole.sum())} of {len(whole)} experts are whole"

    def _check_scales(self) -> None:
        """What is of a block-scaled type has its scales."""
        dtype_scaled = np.array([dtype in families.SCALED_DTYPES for dtype, _ in self.table.kinds] + [False])
        for column, role in enumerate(self.table.roles):
            if not role.main:
                continue
            needs = self.has[:, column] & (role.packed | dtype_scaled[self.table.kind[:, column]])
            scales = [
                i for i, r in enumerate(self.table.roles)
                if not r.main and r.projection is role.projection and "scale" in r.suffix
            ]  # fmt: skip
            missing = needs & ~self.has[:, scales].any(axis=1)
            if missing.any():
                row = int(np.argmax(missing))
                dtype, _ = self.table.kinds[self.table.kind[row, column]]
                scale = self.table.roles[scales[0]] if scales else self._scale_of(role)
                raise self._refuse(
                    row, scale, int(missing.sum()), f"{role.name!r} is {dtype}, which means nothing without"
                )

    def _scale_of(self, role: _Role) -> _Role:
        """A scale's role where the checkpoint has none at all."""
        end = "scales" if role.packed else "weight_scale_inv"
        stem = role.stored.removesuffix(role.suffix)
        return _Role(role.projection, end, stem + end if role.suffix else f"{stem}.{end}", role.stacked)

    def _check_companions(self) -> None:
        """What some experts have beside a matrix, all have whose matrix is of the same type and shape."""
        for column, role in enumerate(self.table.roles):
            if role.main:
                continue
            group = np.zeros(len(self.table.layer), np.int64)
            mains = self._mains(role.projection.name) if role.projection else []
            for main in mains:
                _, group = np.unique(
                    np.stack([group, self.table.kind[:, main]], axis=1), axis=0, return_inverse=True
                )
                group = group.reshape(-1)
            has = self.has[:, column]
            some = np.bincount(group, has) > 0
            missing = some[group] & ~has
            if missing.any():
                raise self._refuse(
                    int(np.argmax(missing)), role, int(missing.sum()), "other experts like it have it"
                )


# --- layouts and places ------------------------------------------------------------------------------------


def _joined(table: _Table) -> Mask:
    """Where gate is followed by up in the file."""
    columns = {role.name: i for i, role in enumerate(table.roles) if role.main}
    if "gate" not in columns or "up" not in columns:
        return np.zeros(len(table.layer), np.bool_)
    gate, up = columns["gate"], columns["up"]
    both = (table.kind[:, gate] >= 0) & (table.kind[:, up] >= 0)
    follows = table.offset[:, gate] + table.size[:, gate] == table.offset[:, up]
    return np.asarray(both & follows & (table.file[:, gate] == table.file[:, up]))


def _lay_out(
    table: _Table, found: _Found, wanted: _Wanted
) -> tuple[ExpertTable, tuple[tuple[Tensor, ...], ...]]:
    """The experts with their parts, and their layouts in the order of the first expert of each."""
    joined = _joined(table)
    signature = np.concatenate([joined[:, None], table.kind], axis=1)
    _, first, layout = np.unique(signature, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    layout, first = rank[layout.reshape(-1)], np.sort(first)
    # A tensor that is joined to the one before it adds to that one's part and begins none.
    names = [role.name if role.main else "" for role in table.roles]
    begins = table.kind >= 0
    length = table.size.copy()
    if joined.any():
        gate, up = names.index("gate"), names.index("up")
        begins[joined, up] = False
        length[joined, gate] += table.size[joined, up]
    experts = ExpertTable(
        layer=table.layer,
        expert=table.expert,
        layout=layout,
        crc32c=np.zeros(len(layout), np.int64),
        first=np.concatenate(([0], np.cumsum(begins.sum(axis=1)))),
        file=table.file[begins],
        offset=table.offset[begins],
        length=length[begins],
    )
    return experts, tuple(_layout(table, row, bool(joined[row]), wanted) for row in first.tolist())


def _layout(table: _Table, row: int, joined: bool, wanted: _Wanted) -> tuple[Tensor, ...]:
    """The tensors of the experts that are like the one of `row`."""
    tensors: list[Tensor] = []
    part = -1
    for column in np.flatnonzero(table.kind[row] >= 0).tolist():
        role, size = table.roles[column], int(table.size[row, column])
        dtype, shape = table.kinds[table.kind[row, column]]
        behind = joined and role.main and role.name == "up"
        part += not behind
        offset = tensors[-1].nbytes if behind else 0
        tag = ",".join(filter(None, (role.tag, _block(role, wanted))))
        tensors.append(Tensor(role.name, dtype, shape, part, offset, size, tag))
    return tuple(tensors)


def _block(role: _Role, wanted: _Wanted) -> str:
    """The word for the block of weights that one scale is for, where config.json says it."""
    block = wanted.quantization.get("weight_block_size")
    if "scale" not in role.suffix or not isinstance(block, list) or len(block) != 2:
        return ""
    return f"block={block[0]}x{block[1]}" if all(type(n) is int and 0 < n < 2**31 for n in block) else ""


def _model_facts(wanted: _Wanted, found: _Found) -> ModelFacts:
    family = wanted.family.model_types[0] if wanted.family.model_types else "unknown"
    extra: dict[str, float | int | str] = {"family": family, "experts_per_layer": wanted.n_experts}
    method = wanted.quantization.get("quant_method")
    if isinstance(method, str) and method.isprintable():
        extra["quantization"] = method
    if found.drafts:
        extra["draft_tensors_left_out"] = found.drafts
    return ModelFacts(model_type=wanted.model_type, extra=extra, **wanted.facts())
