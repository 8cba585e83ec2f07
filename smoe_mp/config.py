"""The configuration: what can be set, from a TOML file and from the command line.

An option exists once: as a field of the structs below, with its type, range, default and meaning.  From
the fields come the checks, the error messages, the command line's help (`OPTIONS`) and, by a test,
`configs/reference.toml`, which is the manual.

    TOML file ──► flat keys ("ring.slots") ──► each value held against its field ──► Config
    or a model ──────────▲                                                      └──► origins, for status
    flags ───────────────┘

A key is accepted only if what it sets works; an unknown one is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field

from smoe_mp.errors import ConfigError
from smoe_mp.listener import PATTERN
from smoe_mp.paths import expanded

MIB = 1 << 20


class VaultConfig(Struct, frozen=True, kw_only=True):
    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="The model file whose experts are streamed. A relative path counts from the"
            " folder of this file.",
        ),
    ]
    direct: Annotated[
        Literal["auto", "require"],
        Meta(
            description="Reads that pass the page cache by. auto: where the file system refuses them, read"
            " buffered and warn once; require: refuse to start."
        ),
    ] = "auto"
    verify: Annotated[
        bool,
        Meta(
            description="Hold each expert that is read against the vault's checksum before anybody gets it."
            " What does not match is a read error. Vaults have checksums from `smoe-mp pack --checksums`"
            " or `--raw`."
        ),
    ] = False
    check_s: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400,
            description="How often the model's files are looked up anew, in seconds. One that was replaced,"
            " overwritten or cut is served no more until the system is started anew; one that is only away"
            " is said once.",
        ),
    ] = 10


class RingConfig(Struct, frozen=True, kw_only=True):
    slots: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="Slots in the ring; each holds one expert. At least top-k + 1; below MoE layers x"
            " top-k nothing survives from token to token. 0: as memory allows, at most 4096, see"
            " `smoe-mp size`.",
            extra={"flag": "--ring"},
        ),
    ] = 0
    slot_mb: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="Size of a slot in MiB; 0: as large as the vault's largest expert needs.",
            extra={"flag": "--slot-mb"},
        ),
    ] = 0
    lock: Annotated[
        bool,
        Meta(
            description="Lock the ring's pages in memory, so that the system cannot swap them out. Where the"
            " limit of locked memory does not allow it, it is said once and the start goes on."
        ),
    ] = False
    read_deadline_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="How long a client waits for an expert before it gets an error, in milliseconds,"
            " unless it asks for another limit.",
        ),
    ] = 30_000


class ReserveConfig(Struct, frozen=True, kw_only=True):
    scout_mb: Annotated[
        int,
        Meta(
            ge=-1,
            le=1 << 24,
            description="Memory that automatic sizing leaves for the engine's resident part of the model, in"
            " MiB; -1: as much as the source has bytes that are no experts.",
        ),
    ] = -1


class PrewarmConfig(Struct, frozen=True, kw_only=True):
    enabled: Annotated[
        bool,
        Meta(description="Load the most popular experts while no client is busy."),
    ] = True
    trickle_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="Pause between two of its reads, in milliseconds, so that the queue stays shallow;"
            " 0 is the shortest, 1 ms.",
        ),
    ] = 4
    histogram: Annotated[
        str,
        Meta(
            description="The file that keeps each expert's popularity from run to run. Empty:"
            " <vault>.expert_freq.bin beside the vault, in the state folder where that is read-only."
            " A relative path counts from the folder of this file."
        ),
    ] = ""


class WorkersConfig(Struct, frozen=True, kw_only=True):
    count: Annotated[
        int,
        Meta(
            ge=1,
            le=127,
            description="Worker processes; each reads one expert at a time.",
            extra={"flag": "--workers"},
        ),
    ] = 16


class SpeculationConfig(Struct, frozen=True, kw_only=True):
    ranks: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="How many router ranks behind the top-k route() has read as a guess; 0: none.",
            extra={"flag": "--spec"},
        ),
    ] = 0


class AccessConfig(Struct, frozen=True, kw_only=True):
    group: Annotated[
        str,
        Meta(
            description="A group whose members may attach and command the system too, by name or number;"
            " its user must be in it. They are trusted like that user: see docs/operations.md. Empty: nobody"
            " else."
        ),
    ] = ""


class LogConfig(Struct, frozen=True, kw_only=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(
            description="The least that is logged; debug: each command of the control plane too.",
            extra={"flag": "--log-level"},
        ),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="Lines for people, or one JSON object a line.", extra={"flag": "--log-format"}),
    ] = "text"
    file: Annotated[
        str,
        Meta(
            description="A file that the lines are added to, besides stdout. It may be renamed at any time:"
            " the next line begins a new one. Empty: none, with --detach NAME.log in the state folder. A"
            " relative path counts from the folder of this file.",
            extra={"flag": "--log-file"},
        ),
    ] = ""


class MetricsConfig(Struct, frozen=True, kw_only=True):
    listen: Annotated[
        str,
        Meta(
            pattern=PATTERN,
            description="Where the figures of status can be fetched for Prometheus, without a password:"
            ' "127.0.0.1:9464", or "unix:/run/smoe/metrics.sock", which only its owner can open. Port 0: a'
            " free one, which up names. Empty: nowhere.",
            extra={
                "allowed": "a port of this machine alone (127.x.x.x:PORT, [::1]:PORT, localhost:PORT),"
                ' "unix:/PATH", or ""',
                "remedy": "for other machines put a reverse proxy before it, which can ask for a password",
            },
        ),
    ] = ""


class Config(Struct, frozen=True, kw_only=True):
    """All settings.  `name` is held against the rules for ring names where the ring is made."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            description="The ring's name, by which clients attach: at most 22 of A-Z a-z 0-9 . _ -",
            extra={"flag": "--name"},
        ),
    ]
    vault: VaultConfig
    ring: RingConfig = field(default_factory=RingConfig)
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    prewarm: PrewarmConfig = field(default_factory=PrewarmConfig)
    access: AccessConfig = field(default_factory=AccessConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: dotted `key`, `type` (annotated), `default` (None: must be given) and `meaning`.

    `allowed` says the accepted values for people; `flag` is the command-line override, "" for none;
    `remedy` is added to its error messages.
    """

    key: str
    type: Any
    default: bool | int | str | None
    meaning: str
    allowed: str
    flag: str
    remedy: str


def _meta(annotated: Any) -> Meta:
    return next(a for a in get_args(annotated) if isinstance(a, Meta))


def _allowed(annotated: Any) -> str:
    base, meta = get_args(annotated)[0], _meta(annotated)
    if allowed := (meta.extra or {}).get("allowed"):
        return str(allowed)
    if get_origin(base) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(base))
    if base is bool:
        return "true or false"
    if base is int:
        return f"a whole number from {meta.ge} to {meta.le}"
    return "text"


def _options(struct: type[Struct], prefix: str = "") -> Iterator[Option]:
    for info in msgspec.structs.fields(struct):
        key = prefix + info.name
        if isinstance(info.type, type) and issubclass(info.type, Struct):
            yield from _options(info.type, key + ".")
            continue
        meta = _meta(info.type)
        extra = meta.extra or {}
        yield Option(
            key=key,
            type=info.type,
            default=None if info.required else info.default,
            meaning=meta.description or "",
            allowed=_allowed(info.type),
            flag=extra.get("flag", ""),
            remedy=extra.get("remedy", ""),
        )


OPTIONS: dict[str, Option] = {option.key: option for option in _options(Config)}
SECTIONS = frozenset(key.split(".")[0] for key in OPTIONS if "." in key)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration, with the file it is from and where each value came from.

    `origins` maps each key to "default", "file", "model" (named in place of a configuration; `path` is then
    the model's) or the flag that set it.
    """

    config: Config
    path: Path
    origins: Mapping[str, str]

    @property
    def vault_path(self) -> Path:
        """The vault, absolute; a relative path counts from the configuration file's folder."""
        return self._beside(self.config.vault.path)

    @property
    def histogram_path(self) -> Path | None:
        """The histogram's file, absolute, or None where the vault's place decides."""
        given = self.config.prewarm.histogram
        return self._beside(given) if given else None

    @property
    def log_path(self) -> Path | None:
        """The log's file, absolute, or None where there is none."""
        given = self.config.log.file
        return self._beside(given) if given else None

    def _beside(self, path: str) -> Path:
        return (self.path.parent / expanded(path)).absolute()

    @property
    def slot_bytes(self) -> int | None:
        """Bytes of a slot, or None where the vault decides."""
        return self.config.ring.slot_mb * MIB or None

    def effective(self) -> list[dict[str, Any]]:
        """Every option's key, effective value and origin, in the order of the manual."""
        values = msgspec.to_builtins(self.config)
        return [{"key": key, "value": _dig(values, key), "origin": self.origins[key]} for key in OPTIONS]


Overrides = Mapping[str, int | str | None]


def load(path: str | Path, overrides: Overrides | None = None) -> LoadedConfig:
    """Read and check the configuration at `path`; `overrides` maps keys to values of flags, None: not given.

    Raises ConfigError, with the file, the key, the value and what is allowed.
    """
    path = expanded(path)
    return parse(_read(path), path, overrides)


def parse(text: str, path: Path, overrides: Overrides | None = None) -> LoadedConfig:
    """Check the configuration `text`; `path` is used for messages and relative paths only."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # the former's text has line and column
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return _settled(dict(_flatten(document, path)), path, "file", overrides)


def for_model(
    model: Path,
    name: str,
    overrides: Overrides | None = None,
    settings: Mapping[str, bool | int | str] | None = None,
) -> LoadedConfig:
    """The configuration of a model that is named in place of one: `settings` and flags, else defaults.

    Raises ConfigError as `load` does, and where the path is one that no configuration can hold.
    """
    where = _utf8(model)
    for key in settings or {}:
        _check_known(key, model)
    return _settled({"name": name, "vault.path": where, **(settings or {})}, model, "model", overrides)


def _utf8(path: Path) -> str:
    """The absolute path, which status and events tell in JSON; ConfigError where they cannot."""
    where = str(path.absolute())
    if not _is_utf8(where):
        raise ConfigError(f"{where!r}: the path is not UTF-8, which a configuration is: rename it")
    return where


def _is_utf8(text: str) -> bool:
    """False where it has bytes of a command line or a folder that are not."""
    return text.encode(errors="replace").decode() == text


def render(loaded: LoadedConfig) -> str:
    """The configuration as a TOML file that explains itself: a value that is its default is commented out.
    Its paths are absolute: it may lie in another folder than what it was made of."""
    placed = {
        "vault.path": loaded.vault_path,
        "prewarm.histogram": loaded.histogram_path,
        "log.file": loaded.log_path,
    }
    lines = ["# Start it with `smoe-mp up FILE`. What is commented out is the default."]
    section = ""
    for row in loaded.effective():
        option = OPTIONS[row["key"]]
        head, _, name = option.key.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"]
            section = head
        mark = "# " if row["value"] == option.default else ""
        comment = f"{option.meaning} {option.allowed[0].upper()}{option.allowed[1:]}."
        lines += ["", *(f"# {line}" for line in textwrap.wrap(comment, 105))]
        lines.append(f"{mark}{name} = {_toml(str(placed.get(option.key) or '') or row['value'])}")
    return "\n".join(lines) + "\n"


def _toml(value: bool | int | str) -> str:
    """The value as TOML, whose strings are JSON's but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _settled(given: Mapping[str, Any], path: Path, origin: str, overrides: Overrides | None) -> LoadedConfig:
    """Hold the values `given` by key, and those of flags, against their options."""
    _utf8(path)
    flat = dict(given)
    for key, value in flat.items():
        _check_value(OPTIONS[key], value, f"{path}: {key} =")
    origins = {key: origin if key in flat else "default" for key in OPTIONS}
    for key, value in (overrides or {}).items():
        if value is not None:
            option = OPTIONS[key]
            _check_value(option, value, option.flag)
            flat[key], origins[key] = value, option.flag
    for option in OPTIONS.values():
        if option.default is None and option.key not in flat:
            remedy = f"; {option.remedy}" if option.remedy else ""
            raise ConfigError(f"{path}: {option.key} is missing: it must be {option.allowed}{remedy}")
    return LoadedConfig(msgspec.convert(_nest(flat), Config), path.absolute(), origins)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error


def _flatten(document: dict[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and key not in SECTIONS and key not in OPTIONS:
            nearest = max(SECTIONS, key=lambda known: _likeness(key, known))
            raise ConfigError(f"{path}: unknown section [{key}]; the nearest known one is [{nearest}]")
        if key not in SECTIONS:
            _check_known(key, path)
            yield key, value
        elif not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} = {_shown(value)}: [{key}] is a section, not a value")
        else:
            for name, inner in value.items():
                _check_known(f"{key}.{name}", path)
                yield f"{key}.{name}", inner


def _check_known(key: str, path: Path) -> None:
    if key in OPTIONS:
        return
    raise ConfigError(f"{path}: unknown key {key}; the nearest known one is {_nearest(key)}")


def _nearest(key: str) -> str:
    last = key.rsplit(".", 1)[-1]

    def likeness(known: str) -> tuple[float, float]:
        """The last part counts most: a key in the wrong section is likelier than another key."""
        tail = known.rsplit(".", 1)[-1]
        return _likeness(last, tail) + _likeness(key, known), -len(known)

    return max(OPTIONS, key=likeness)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _check_value(option: Option, value: Any, where: str) -> None:
    if isinstance(value, str) and not (_is_utf8(value) and "\0" not in value):
        raise ConfigError(f"{where} {_shown(value)}: must be UTF-8 text without NUL")
    try:
        msgspec.convert(value, option.type)
    except msgspec.ValidationError:
        remedy = f"; {option.remedy}" if option.remedy else ""
        raise ConfigError(f"{where} {_shown(value)}: must be {option.allowed}{remedy}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested


def _dig(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
