"""The log: its lines as text and JSON, rotation, and what is lost with a file without harm."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from smoe_mp import config, log
from smoe_mp.config import LoadedConfig
from smoe_mp.errors import ConfigError, VaultError

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def loaded(folder: Path, **settings: str) -> LoadedConfig:
    lines = "".join(f"log.{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return config.parse(f'name = "r"\nvault.path = "m"\n{lines}', folder / "c.toml")


def ours() -> list[logging.Handler]:
    """Handlers of the logger, less pytest's own."""
    return [h for h in log.logger.handlers if type(h).__module__ == log.__name__]


def said(path: Path) -> list[str]:
    """Lines of the file less the time before each, but for the first, which names the file."""
    lines = path.read_text().splitlines()
    assert all(re.match(TIME + " ", line) for line in lines), lines
    return [line.split(" ", 1)[1] for line in lines if " log: " not in line]


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.opened(loaded(tmp_path)) as opened:
        assert opened.file is None
        logging.getLogger("smoe_mp.supervisor").info("vault: %s", "a")
        log.logger.warning("b")
        log.logger.error("c")
        log.logger.debug("not said")
    out, err = capsys.readouterr()
    assert (out, err) == ("vault: a\nwarning: b\nerror: c\n", "")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.opened(loaded(tmp_path, format="json", file="x.log")):
        log.logger.warning("worker 3: %d", 7, extra={"fields": {"child": "worker 3"}})
    lines = objects(capsys.readouterr().out)
    assert lines == objects((tmp_path / "x.log").read_text())
    assert re.fullmatch(TIME, lines[1].pop("time"))
    assert lines[1] == {
        "level": "warning",
        "system": "r",
        "pid": os.getpid(),
        "message": "worker 3: 7",
        "child": "worker 3",
    }


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, count: int) -> None:
    with log.opened(loaded(tmp_path, level=level, file="x.log")):
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            log.logger.log(number, "x")
    assert len(said(tmp_path / "x.log")) == count
    assert sum(line.endswith("x") for line in capsys.readouterr().out.splitlines()) == count


def test_a_program_that_reads_gets_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log.opened(loaded(tmp_path, level="error", format="json", file="x.log"), read=True):
        log.logger.info("ready: now")
        log.logger.error("e")
    assert capsys.readouterr().out.splitlines()[-2:] == ["ready: now", "error: e"]
    assert [line["message"] for line in objects((tmp_path / "x.log").read_text())] == ["e"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_record_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Whatever a path holds: line breaks that forge a line, terminal commands, bytes that are no UTF-8."""
    with log.opened(loaded(tmp_path, format=form, file="x.log")):
        log.logger.info("a\nerror: forged \x1b[2J %s", os.fsdecode(b"\xff"))
    for text in (capsys.readouterr().out, (tmp_path / "x.log").read_text(encoding="ascii")):
        assert text.splitlines()[-1].count("a?error: forged ?[2J ?") == 1


def test_rotation(tmp_path: Path) -> None:
    """Renamed, removed, or copied and cut: nobody has to tell."""
    path = tmp_path / "x.log"
    with log.opened(loaded(tmp_path, file="x.log")):
        log.logger.info("one")
        path.rename(tmp_path / "x.log.1")
        log.logger.info("two")
        assert said(path) == ["two"]
        path.unlink()
        log.logger.info("three")
        assert said(path) == ["three"]
        os.truncate(path, 0)
        log.logger.info("four")
    assert said(path) == ["four"]
    assert said(tmp_path / "x.log.1") == ["one"]


def test_a_folder_that_is_gone_for_a_while(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with log.opened(loaded(tmp_path, file="logs/x.log")):
        shutil.rmtree(folder)
        log.logger.info("lost")
        folder.mkdir()
        log.logger.info("found")
    assert said(folder / "x.log") == ["found"]
    assert capfd.readouterr().err == ""


def test_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with log.opened(loaded(tmp_path, file="/dev/full")):
        for number in range(1000):
            log.logger.info("line %d", number)
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "line 999"
    assert err == ""


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"log.file .*/none/x.log: open: No such file or directory"),
        log.opened(loaded(tmp_path, file="none/x.log")),
    ):
        pass
    assert ours() == []


def test_the_last_line_is_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an error, which main() prints, only the file is told; of a fault with its traceback."""
    with pytest.raises(VaultError), log.opened(loaded(tmp_path, file="x.log")):
        raise VaultError("no vault")
    assert said(tmp_path / "x.log") == ["error: no vault"]
    assert "no vault" not in "".join(capsys.readouterr())
    with pytest.raises(ZeroDivisionError), log.opened(loaded(tmp_path, file="y.log", format="json")):
        raise ZeroDivisionError("fault")
    assert "ZeroDivisionError: fault" in objects((tmp_path / "y.log").read_text())[-1]["traceback"]
    assert ours() == []


def test_the_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert log.default_file("r") == tmp_path / "state/smoe-mp/r.log"
    assert (tmp_path / "state/smoe-mp").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert log.default_file("r") == tmp_path / "run/r.log"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    assert log.default_file("r") == tmp_path / "run/r.log"


def test_a_reader_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """It must not end the system, nor keep lines from the file."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with log.opened(loaded(tmp_path, file="x.log")):
            for number in range(3):
                log.logger.info("line %d", number)
        assert os.readlink(f"/proc/self/fd/{write_fd}") == os.devnull
    assert said(tmp_path / "x.log") == ["line 0", "line 1", "line 2"]
    assert capfd.readouterr().err == ""
