"""The configuration: defaults, origins, overrides, and errors that name file, key, value and range."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from smoe_mp import config
from smoe_mp.config import OPTIONS, LoadedConfig
from smoe_mp.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LEAST = 'name = "r"\n[vault]\npath = "m.smoe"\n[ring]\nslots = 8\n'
FILE = Path("/etc/smoe/r.toml")


def parse(text: str, **overrides: int | None) -> LoadedConfig:
    return config.parse(text, FILE, {key.replace("__", "."): value for key, value in overrides.items()})


def refusal(text: str, **overrides: int | None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, **overrides)
    return str(caught.value)


def test_defaults() -> None:
    loaded = parse(LEAST)
    assert loaded.config.workers.count == 16
    assert loaded.config.vault.direct == "auto"
    assert loaded.config.ring.read_deadline_ms == 30_000
    assert loaded.config.speculation.ranks == 0
    assert loaded.slot_bytes is None
    assert parse(LEAST + "slot_mb = 3").slot_bytes == 3 << 20


def test_origins_are_told_apart() -> None:
    loaded = parse(LEAST + "[workers]\ncount = 4\n", ring__slots=12, workers__count=None)
    rows = {row["key"]: (row["value"], row["origin"]) for row in loaded.effective()}
    assert rows["ring.slots"] == (12, "--ring")
    assert rows["workers.count"] == (4, "file")
    assert rows["ring.slot_mb"] == (0, "default")
    assert list(rows) == list(OPTIONS)


def test_every_flag_overrides() -> None:
    loaded = parse(LEAST, ring__slots=9, ring__slot_mb=2, workers__count=3, speculation__ranks=5)
    flags = {row["key"]: row["origin"] for row in loaded.effective() if row["origin"].startswith("--")}
    assert flags == {
        "ring.slots": "--ring",
        "ring.slot_mb": "--slot-mb",
        "workers.count": "--workers",
        "speculation.ranks": "--spec",
    }


def test_relative_vault_counts_from_the_file() -> None:
    assert parse(LEAST).vault_path == Path("/etc/smoe/m.smoe")
    assert parse(LEAST.replace("m.smoe", "/v/m.smoe")).vault_path == Path("/v/m.smoe")


def test_slots_may_come_from_the_flag_alone() -> None:
    text = 'name = "r"\nvault.path = "m.smoe"\n'
    assert parse(text, ring__slots=6).config.ring.slots == 6


@pytest.mark.parametrize(
    ("line", "unknown", "nearest"),
    [
        ("[workers]\ncuont = 3", "workers.cuont", "workers.count"),
        ("[ring]\nslot = 3", "ring.slot", "ring.slots"),
        ("[vault]\ndirekt = 'auto'", "vault.direkt", "vault.direct"),
        ("slots = 3", "slots", "ring.slots"),
        ("[ring]\ncount = 3", "ring.count", "workers.count"),
        ("nmae = 'x'", "nmae", "name"),
    ],
)
def test_unknown_key_names_the_nearest(line: str, unknown: str, nearest: str) -> None:
    message = refusal(line)
    assert message == f"{FILE}: unknown key {unknown}; the nearest known one is {nearest}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ring.slots", "65536"),
        ("ring.slots", "-1"),
        ("ring.slots", '"many"'),
        ("ring.slots", "true"),
        ("ring.slots", "8.0"),
        ("ring.slots", "99999999999999999999"),
        ("workers.count", "0"),
        ("workers.count", "128"),
        ("ring.slot_mb", "4097"),
        ("ring.read_deadline_ms", "0"),
        ("vault.direct", '"maybe"'),
        ("vault.path", "3"),
        ("vault.path", '""'),
        ("name", "[]"),
        ("name", "{}"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(key: str, value: str) -> None:
    message = refusal(f"{key} = {value}")
    shown = repr(tomllib.loads(f"x = {value}")["x"])
    assert message.startswith(f"{FILE}: {key} = {shown}: must be {OPTIONS[key].allowed}")


def test_unknown_section_names_the_nearest() -> None:
    assert refusal("[wrokers]\ncount = 3") == (
        f"{FILE}: unknown section [wrokers]; the nearest known one is [workers]"
    )


def test_slots_are_automatic_unless_given() -> None:
    assert parse('name = "r"\nvault.path = "m.smoe"\n').config.ring.slots == 0


def test_flag_out_of_range_names_the_flag() -> None:
    assert refusal(LEAST, workers__count=300).startswith(
        "--workers 300: must be a whole number from 1 to 127"
    )


@pytest.mark.parametrize("missing", ["name", "vault.path"])
def test_missing_key(missing: str) -> None:
    lines = {"name": 'name = "r"', "vault.path": 'vault.path = "m"'}
    text = "\n".join(line for key, line in lines.items() if key != missing)
    assert f"{FILE}: {missing} is missing" in refusal(text)


def test_a_section_is_no_value() -> None:
    assert "[ring] is a section" in refusal("ring = 3")


def test_syntax_error_names_file_and_line() -> None:
    message = refusal('name = "r"\nslots = = 3\n')
    assert message.startswith(f"{FILE}: not valid TOML")
    assert "line 2" in message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot read the configuration"):
        config.load(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: not valid TOML: byte 8 is not UTF-8"):
        config.load(tmp_path / "latin.toml")


def reference_comments() -> dict[str, str]:
    """Of each key in reference.toml: the comment above it, as one line."""
    found, section, comment = {}, "", ""
    for line in (CONFIGS / "reference.toml").read_text().splitlines():
        if line.startswith("#"):
            comment += " " + line.lstrip("# ")
        elif line.startswith("["):
            section, comment = line.strip("[]") + ".", ""
        elif "=" in line:
            found[section + line.split("=")[0].strip()] = comment.strip()
        else:
            comment = ""
    return found


def test_reference_documents_every_option() -> None:
    comments = reference_comments()
    assert list(comments) == list(OPTIONS)
    for key, option in OPTIONS.items():
        assert comments[key].startswith(option.meaning), key
        rest = comments[key].removeprefix(option.meaning).strip()
        assert option.allowed.lower() in rest.lower(), key
        assert ("Must be given" in rest) == (option.default is None), key
        assert option.flag in rest, key


def test_reference_holds_the_defaults() -> None:
    values = {row["key"]: row["value"] for row in config.load(CONFIGS / "reference.toml").effective()}
    for key, option in OPTIONS.items():
        if option.default is not None:
            assert values[key] == option.default, key


def test_shipped_configurations_load() -> None:
    demo, chat = (config.load(CONFIGS / f"{name}.toml").config for name in ("demo", "chat"))
    assert (demo.name, demo.vault.path, demo.ring.slots, demo.workers.count) == (
        "smoe-demo",
        "tiny.smoe",
        256,
        4,
    )
    assert chat.workers.count == 4


# --- a model in place of a configuration --------------------------------------------------------------------


def test_a_model_has_defaults_but_for_what_is_given() -> None:
    loaded = config.for_model(Path("m.smoe"), "r", {"ring.slots": 9, "name": None}, {"workers.count": 3})
    rows = {row["key"]: (row["value"], row["origin"]) for row in loaded.effective()}
    assert rows.pop("name") == ("r", "model")
    assert rows.pop("vault.path") == (str(Path.cwd() / "m.smoe"), "model")
    assert rows.pop("ring.slots") == (9, "--ring")
    assert rows.pop("workers.count") == (3, "model")
    assert {origin for _, origin in rows.values()} == {"default"}
    assert loaded.vault_path == Path.cwd() / "m.smoe"
    assert config.for_model(Path("m.smoe"), "r", {"name": "other"}).config.name == "other"


def test_settings_of_a_model_are_held_against_their_options() -> None:
    with pytest.raises(ConfigError, match=r"m\.smoe: unknown key ring\.slot; the nearest .* ring\.slots"):
        config.for_model(Path("m.smoe"), "r", settings={"ring.slot": 3})
    with pytest.raises(ConfigError, match=r"workers\.count = True: must be a whole number"):
        config.for_model(Path("m.smoe"), "r", settings={"workers.count": True})
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.for_model(Path("m\udcff.smoe"), "r")


def test_a_configuration_in_a_place_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/caf\\udce9/r\.toml': the path is not UTF-8"):
        config.parse(LEAST, Path("/caf\udce9/r.toml"))


@pytest.mark.parametrize("key", [option.key for option in OPTIONS.values() if option.type.__origin__ is str])
def test_no_text_has_what_no_path_can_have_or_no_json(key: str) -> None:
    model = Path("/m.smoe")
    for wrong in ("a\0b", "a\udcffb"):
        with pytest.raises(ConfigError, match=re.escape(f"{wrong!r}: must be UTF-8 text without NUL")):
            config.for_model(model, "r", settings={key: wrong})
    assert config.for_model(model, "r", settings={"log.file": "caf\xe9.log"}).config.log.file == "caf\xe9.log"


@pytest.mark.parametrize(
    "name", ["m.smoe", 'a "quoted\\" one', "tab\tdel\x7f\nline", "模型 \U0001f600", "#x"]
)
def test_what_is_rendered_reads_as_the_same(name: str) -> None:
    loaded = config.for_model(
        Path("/models") / name, "r", {"ring.slots": 9}, {"vault.direct": "require", "prewarm.enabled": False}
    )
    again = config.parse(config.render(loaded), FILE)
    assert again.config == loaded.config
    assert {key for key, origin in again.origins.items() if origin == "file"} == {
        *("name", "vault.path", "ring.slots", "vault.direct", "prewarm.enabled")
    }


def test_rendered_paths_count_from_where_they_did() -> None:
    text = 'name = "r"\nvault.path = "m.smoe"\nlog.file = "😀.log"\nprewarm.histogram = "~/h.bin"\n'
    loaded = config.parse(text, FILE)
    again = config.parse(config.render(loaded), Path("/else/where.toml"))
    for name in ("vault_path", "histogram_path", "log_path"):
        assert getattr(again, name) == getattr(loaded, name)


def test_a_rendered_default_can_be_taken_back_in() -> None:
    text = config.render(config.for_model(Path("/m.smoe"), "r"))
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    settings = [line for line in lines if line.split(" = ")[0] in {key.split(".")[-1] for key in OPTIONS}]
    assert len(settings) == len(OPTIONS)
    whole = "\n".join(line for line in lines if line in settings or line.startswith("["))
    assert config.parse(whole, FILE).config == config.parse(text, FILE).config
    assert max(map(len, text.splitlines())) <= 110
