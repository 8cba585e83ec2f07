"""The command line without a system: help, errors in one line with their exit status, drawing."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support import SHARED

from smoe_mp import cli, segments
from smoe_mp.config import OPTIONS, load
from smoe_mp.control.commands import (
    ClientStatus,
    ConfigValue,
    DemandStatus,
    Figures,
    FileStatus,
    LatencyStatus,
    PrewarmStatus,
    RingStatus,
    StatusResult,
    StopResult,
    VaultStatus,
    WorkerStatus,
)
from smoe_mp.errors import SmoeError
from smoe_mp.models import TINY

COMMANDS = (
    "up",
    "down",
    "status",
    "workers",
    "prewarm",
    "size",
    "init",
    "doctor",
    "inspect",
    "pack",
    "verify",
    "demo",
)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path))
    monkeypatch.setenv("COLUMNS", "80")
    yield path
    shutil.rmtree(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command line in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["smoe-mp", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, less its prefix."""
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("smoe-mp: error: ")
    return line.removeprefix("smoe-mp: error: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    out = capsys.readouterr().out
    assert f"Example: smoe-mp {command}" in out
    if command == "up":
        assert all(option.flag in out for option in OPTIONS.values())


ON_A_RING: list[tuple[str, tuple[str, ...]]] = [
    ("status", ()),
    ("down", ()),
    ("down", ("--keep-ring",)),
    ("workers", ("4",)),
    ("prewarm", ("pause",)),
]


@pytest.mark.parametrize(("command", "more"), ON_A_RING)
def test_unknown_ring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, more: tuple[str, ...]
) -> None:
    assert run(monkeypatch, command, "nobody", *more) == 4
    assert "no system serves the ring 'nobody'" in error_of(capsys)


@pytest.mark.parametrize(("command", "more"), ON_A_RING)
def test_a_name_that_no_ring_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, more: tuple[str, ...]
) -> None:
    assert run(monkeypatch, command, "x" * 31, *more) == 2
    assert "31" in error_of(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ("workers", "r", "0"),
        ("workers", "r", "128"),
        ("workers", "r", "some"),
        ("prewarm", "r", "dance"),
        ("prewarm", "r", "trickle", "--ms", "-1"),
    ],
)
def test_numbers_and_words_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *words) == 2
    assert "Usage: " in capsys.readouterr().err


def test_size_of_a_configuration_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('name = "r"\nvault.path = "none.smoe"\n')
    assert run(monkeypatch, "size", config) == 3
    assert "none.smoe" in error_of(capsys)
    assert run(monkeypatch, "size", config, "--ring", "70000") == 2
    assert error_of(capsys).startswith("--ring 70000: must be a whole number")


def test_what_the_doctor_says() -> None:
    out = io.StringIO()
    found = [
        segments.Found("a", "live", 5 << 20, True, ("supervisor (pid 3)",), 0),
        segments.Found("b", "live", 1 << 20, False, ("[bold]engine[/bold] (pid 4)",), 0),
        segments.Found("c", "creating", 0, False, (), 1000),
        segments.Found("d", "gone", 0, False, (), 0),
    ]
    assert [f.orphan for f in found] == [False, False, True, True]
    cli._draw_rings(found, ["d"], Console(file=out, width=100))
    rows = {line.split()[1]: line for line in out.getvalue().splitlines() if line.startswith("│ ")}
    assert "served" in rows["a"]
    assert "no supervisor, but in use by [bold]engine[/bold] (pid 4)" in rows["b"]
    assert "ORPHAN" in rows["c"]
    assert "orphan, removed" in rows["d"]
    assert "1 orphans: smoe-mp doctor --clean removes them" in out.getvalue()
    out = io.StringIO()
    cli._draw_rings([], [], Console(file=out))
    assert out.getvalue() == "no rings in shared memory\n"


def test_wrong_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('name = "r"\n[ring]\nslost = 4\n')
    assert run(monkeypatch, "up", config) == 2
    assert error_of(capsys) == f"{config}: unknown key ring.slost; the nearest known one is ring.slots"
    assert run(monkeypatch, "up", tmp_path / "none.toml") == 2
    assert "none.toml: cannot read the configuration" in error_of(capsys)


def test_flags_are_checked_like_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('name = "r"\nvault.path = "m"\n')
    assert run(monkeypatch, "up", config, "--ring", "-1") == 2
    assert error_of(capsys).startswith("--ring -1: must be a whole number from 0 to 65535")


REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    (("up", "~nosuchuser/c.toml"), 2, "no home folder is known for ~nosuchuser"),
    (("size", "~nosuchuser/m.smoe"), 2, "no home folder is known for ~nosuchuser"),
    (("init", "~nosuchuser/m.smoe"), 2, "no home folder is known for ~nosuchuser"),
    (("up", "c.toml", "--log-file", "~nosuchuser/log"), 2, "no home folder is known for ~nosuchuser"),
    (("size", "x/" + "y" * 300), 3, "no such file or folder, and not in the local cache"),
    (("size", "elsewhere.toml"), 2, "no home folder is known for ~nosuchuser"),
    (("inspect", str(TINY / "tiny.smoe"), "--expert=1234567890:0"), 2, "--expert 1234567890:0: not LAYER"),
    (("trace", "record", "r", "-o", "elsewhere.toml"), 2, "elsewhere.toml: there already; --force"),
    (("trace", "record", "r", "-o", ".", "--force"), 2, "in the way, and no ordinary file"),
    (("trace", "record", "r", "-o", "x" * 300), 3, "cannot be written: File name too long"),
]


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    refused: tuple[tuple[str, ...], int, str],
) -> None:
    arguments, status, words = refused
    monkeypatch.chdir(tmp_path)
    Path("elsewhere.toml").write_text('name = "r"\nvault.path = "~nosuchuser/m.smoe"\n')
    assert run(monkeypatch, *arguments) == status
    assert words in error_of(capsys)


def test_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "up", "c.toml", "--rings", "4") == 2
    assert "--rings" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["nan", "inf", "1e12"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("status", "r"), "--watch"),
        (("down", "r"), "--timeout"),
        (("demand", "r", "0:0"), "--timeout"),
        (("drain", "r"), "--timeout"),
        (("busy", "r"), "--lease"),
        (("top", "r"), "--every"),
        (("demo",), "--temperature"),
    ],
)
def test_a_number_that_is_none_or_out_of_range(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    option: str,
    number: str,
) -> None:
    assert run(monkeypatch, *command, option, number) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [("--version",), ("inspect", TINY / "tiny.smoe")])
def test_output_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str | Path, ...]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(monkeypatch, *arguments) == 1
    assert error_of(capsys) == "stdout: write: No space left on device (errno 28)"


def test_exit_codes_are_documented() -> None:
    def kinds(kind: type[SmoeError]) -> set[type[SmoeError]]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    page = Path(__file__).resolve().parents[2] / "docs/operations.md"
    table = re.findall(r"^\| (\d+) \| ", page.read_text(), re.MULTILINE)
    assert table == sorted(table, key=int)
    assert {int(code) for code in table} == {0, 130, 143} | {kind.exit_code for kind in kinds(SmoeError)}


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check_served", interrupted)
    assert run(monkeypatch, "status", "r") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    vault = SHARED / "vaults/qwen3-tiny.q4.smoe"
    if not vault.is_file():
        pytest.skip("the shared vaults are not here")
    assert run(monkeypatch, "inspect", vault, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["experts"] == len(shown["expert_table"]) == 24


@pytest.mark.parametrize("text", ["3", "3:", ":3", "a:b", "-1:2", "1:2:3"])
def test_inspect_of_an_expert_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    vault = SHARED / "vaults/qwen3-tiny.q4.smoe"
    if not vault.is_file():
        pytest.skip("the shared vaults are not here")
    assert run(monkeypatch, "inspect", vault, f"--expert={text}") == 2
    assert f"--expert {text}" in error_of(capsys)


def test_inspect_of_no_vault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "inspect", tmp_path / "none.smoe") == 3
    assert "none.smoe" in error_of(capsys)


def some_status() -> StatusResult:
    long_path = "/srv/models/" + "deep/" * 30 + "model.smoe"
    return StatusResult(
        name="r",
        pid=12,
        version="0.1",
        state="live",
        uptime_s=4000.0,
        vault=VaultStatus(long_path, "smoe", 6144, 16 << 30),
        files=[FileStatus(long_path, "direct", 16 << 30)],
        ring=RingStatus(512, 2654208, 512 * 2654208, "4 KiB pages", {"EMPTY": 500, "READY": 12}),
        workers=[
            WorkerStatus(0, 13, True, None),
            WorkerStatus(1, 14, True, 7),
            WorkerStatus(2, 15, False, None),
        ],
        clients=[
            ClientStatus(
                0,
                1234567,
                True,
                "[bold]engine[/bold]",
                8,
                demand=DemandStatus(10, 5, 1, 1, 3, 0.5, LatencyStatus(3, 0.1, 0.02, 0.03, 0.04)),
            )
        ],
        departed=Figures(demand=DemandStatus(7, 7, coverage=1.0)),
        counters={"hits": 12345, "device_bytes": 5 << 30, "guesses": 9, "guess_hits": 2, "promoted": 1},
        demand=DemandStatus(12345678, 12345670, 1, 2, 5, 0.464),
        phases={"prefill": DemandStatus(10, 4, 1, 2, 3, 0.4, LatencyStatus(2, 5.0, 1.5, 3.25, 66.0))},
        read_latency=LatencyStatus(4, 0.002, 0.0004996, 0.0009999, 1.0),
        hit_rate=0.464,
        health="ok",
        prewarm=PrewarmStatus("running", 30, 100, 4, "/m.freq", []),
        config=[ConfigValue("ring.slots", 512, "--ring")],
        warnings=["[red]too small"],
    )


def test_status_is_readable_at_80_columns_without_colour() -> None:
    out = io.StringIO()
    cli.draw_status(some_status(), Console(file=out, width=80))
    text = out.getvalue()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    for wanted in (
        "r: live for 1 h 6 min",
        "6144 experts, 16 GiB",
        "46.4%",
        "running, 30 of 100 experts, every 4 ms",
        "12 READY",
        "reads into slot 7",
        "dead",
        "[bold]engine[/bold]",
        "12,345",
        "9: 3 used",
        "5 GiB read for 0 B of experts",
        "--ring",
        "warning: [red]too small",
    ):
        assert wanted in text, wanted
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["0", "1234567", "[bold]engine[/bold]", "8", "10", "50.0%", "40 ms"] in rows
    assert ["", "", "(gone)", "", "7", "100.0%", ""] in rows
    assert ["prefill", "10", "4", "1", "2", "3", "40.0%"] in rows
    assert ["all", "12,345,678", "12,345,670", "1", "2", "5", "46.4%"] in rows
    assert ["wait, prefill", "2", "2.5 s", "1.5 s", "3.25 s", "66 s"] in rows
    assert ["read", "4", "500 µs", "500 µs", "1 ms", "1 s"] in rows


def test_what_down_says() -> None:
    done = StopResult("r", 12, 75.0, {"device_bytes": 3 << 20}, 0.5)
    assert cli._stopped(done) == "r: stopped after 1 min 15 s; hit rate 50.0%, 3 MiB read"
    idle = StopResult("r", 12, 2.0, {}, None)
    assert cli._stopped(idle) == "r: stopped after 2.0 s; no demand, 0 B read"


@pytest.fixture
def vault(shared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(shared / "vaults" / "qwen3-tiny.q4.smoe", tmp_path / "tiny.smoe"))


def out_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> str:
    """What a command prints that does its work."""
    monkeypatch.setattr(sys, "argv", ["smoe-mp", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


def without_amounts(said: str) -> str:
    """What is free is another amount a moment later."""
    return re.sub(r"\d+(\.\d+)? (B|KiB|MiB|GiB)", "", said)


def test_init_writes_what_up_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], vault: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said = out_of(monkeypatch, capsys, "init", vault, "--ring", "12", "--workers", "3")
    assert said.startswith("12 slots x 32 KiB")
    assert said.endswith("tiny.toml: start it with smoe-mp up tiny.toml\n")
    loaded = load(tmp_path / "tiny.toml")
    assert loaded.vault_path == vault
    assert (loaded.config.name, loaded.config.ring.slots, loaded.config.workers.count) == ("tiny", 12, 3)
    assert loaded.origins["speculation.ranks"] == "default"
    for what in (("tiny.toml",), (vault, "--ring", "12")):
        again = out_of(monkeypatch, capsys, "size", *what)
        assert without_amounts(again) == without_amounts(said.partition("tiny.toml:")[0])


def test_init_overwrites_by_force_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], vault: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.toml"
    out.write_text("precious")
    assert run(monkeypatch, "init", vault, out) == 2
    assert error_of(capsys) == f"{out}: there already; --force overwrites it"
    assert out.read_text() == "precious"
    out_of(monkeypatch, capsys, "init", vault, out, "--name", "other", "--force")
    assert load(out).config.name == "other"


def test_init_of_what_cannot_work_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], vault: Path, tmp_path: Path
) -> None:
    out = tmp_path / "c.toml"
    for arguments, status, words in (
        ((vault, out, "--ring", "1"), 2, "no client fits"),
        ((vault, out, "--name", "a b"), 2, "only letters"),
        ((tmp_path / "absent.smoe", out), 3, "no such file or folder"),
        ((vault, tmp_path / "no" / "c.toml"), 2, "cannot write the configuration: No such file"),
    ):
        assert run(monkeypatch, "init", *arguments) == status
        assert words in error_of(capsys)
    assert not out.exists()
