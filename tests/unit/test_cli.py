"""The command line without a system: help, errors in one line with their exit status, drawing."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from smoe_mp import cli
from smoe_mp.config import OPTIONS
from smoe_mp.control.commands import (
    ClientStatus,
    ConfigValue,
    FileStatus,
    RingStatus,
    StatusResult,
    StopResult,
    VaultStatus,
    WorkerStatus,
)

COMMANDS = ("up", "down", "status", "inspect", "demo")


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


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("smoe-mp ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    out = capsys.readouterr().out
    assert f"Example: smoe-mp {command}" in out
    if command == "up":
        assert all(option.flag in out for option in OPTIONS.values())


@pytest.mark.parametrize("command", ["status", "down"])
def test_unknown_ring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "nobody") == 4
    assert "no system serves the ring 'nobody'" in error_of(capsys)


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_name_that_no_ring_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "x" * 31) == 2
    assert "31" in error_of(capsys)


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
    assert run(monkeypatch, "up", config, "--ring", "0") == 2
    assert error_of(capsys).startswith("--ring 0: must be a whole number from 1 to 65535")


def test_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "up", "c.toml", "--rings", "4") == 2
    assert "--rings" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check_served", interrupted)
    assert run(monkeypatch, "status", "r") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    vault = Path(__file__).resolve().parents[3] / "shared/vaults/qwen3-tiny.q4.smoe"
    if not vault.is_file():
        pytest.skip(f"{vault.name}: the shared vaults are not here")
    assert run(monkeypatch, "inspect", vault, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["experts"] == len(shown["expert_table"]) == 24


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
        clients=[ClientStatus(0, 20, True, "[bold]engine[/bold]", 8)],
        counters={"hits": 12345, "device_bytes": 5 << 30},
        hit_rate=0.464,
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
        "12 READY",
        "reads into slot 7",
        "dead",
        "[bold]engine[/bold]",
        "12,345",
        "5 GiB",
        "--ring",
        "warning: [red]too small",
    ):
        assert wanted in text, wanted


def test_what_down_says() -> None:
    done = StopResult("r", 12, 75.0, {"device_bytes": 3 << 20}, 0.5)
    assert cli._stopped(done) == "r: stopped after 1 min 15 s; hit rate 50.0%, 3 MiB read"
    idle = StopResult("r", 12, 2.0, {}, None)
    assert cli._stopped(idle) == "r: stopped after 2.0 s; no demand, 0 B read"


def test_a_reader_that_went_away_does_not_end_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        say = cli._line_printer()
        say("one")
        say("two")
