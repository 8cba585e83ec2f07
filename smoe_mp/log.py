"""The system's log: where the lines go that a supervisor says.

    logging.getLogger("smoe_mp") ──► stdout, as text without a time, or as JSON
                                └──► [log] file, as text with the time, or as JSON

A record is a line, whatever is in it: what cannot be printed stands as "?", since a path may hold line breaks
or terminal commands.  In JSON it is an object with time (UTC), level, system, pid and message, the fields
that the record was given (`extra={"fields": {...}}`), and the traceback of a fault.

The file is looked up before each line, so whoever rotates it just renames it; nobody has to be told.  A disk
that is full, a folder that is gone and a reader that went away lose lines, never the system.

Some start a system to read its lines up to "ready" (`launch`): these get them as text, at level info,
whatever [log] says.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

import msgspec

from smoe_mp.config import LoadedConfig
from smoe_mp.errors import ConfigError, SmoeError
from smoe_mp.runtime import printable, runtime_folder, state_folder, version

logger = logging.getLogger("smoe_mp")


class Text(logging.Formatter):
    """ "message", "warning: message" or "error: message"; `timed`: behind the time."""

    def __init__(self, timed: bool) -> None:
        super().__init__()
        self._timed = timed

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        line = printable(record.getMessage())
        line = f"{level}: {line}" if record.levelno >= logging.WARNING else line
        line = f"{_time(record)} {line}" if self._timed else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Json(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, system: str) -> None:
        super().__init__()
        self._system = system

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "system": self._system,
            "pid": os.getpid(),
            "message": printable(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info).encode(errors="replace").decode()
        return msgspec.json.encode(line).decode()


def _time(record: logging.LogRecord) -> str:
    """When it was said: UTC, to the millisecond (RFC 3339)."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _Stdout(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A reader that went away: its pipe is replaced by nothing."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
        else:
            _point(os.devnull, sys.stdout.fileno())


class _File(WatchedFileHandler):
    """The [log] file."""

    _takes_over = False

    def take_over(self) -> None:
        """Have stdout and stderr lead to the file, and to those that follow it."""
        self._takes_over = True
        if self.stream is not None:
            self._lead_here(self.stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it could not be opened anew; the next line tries again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def _open(self) -> io.TextIOWrapper[Any]:
        stream = super()._open()
        if self._takes_over:
            self._lead_here(stream)
        return stream

    def _lead_here(self, stream: TextIO) -> None:
        for fd in (1, 2):
            os.dup2(stream.fileno(), fd)


def _point(path: str, fd: int) -> None:
    """Have the descriptor lead to another file."""
    with contextlib.suppress(OSError):
        other = os.open(path, os.O_RDWR)
        os.dup2(other, fd)
        os.close(other)


def escape_stdout() -> None:
    """Have stdout escape what it cannot hold: a locale may lack what a path has."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Log:
    """An open log.  `file`: where it is, None for stdout alone."""

    def __init__(self, loaded: LoadedConfig, *, read: bool, to_file: bool) -> None:
        self._config = loaded.config
        self.file = loaded.log_path or (default_file(loaded.config.name) if to_file else None)
        self._level = logging.getLevelName(loaded.config.log.level.upper())
        self._stdout = _Stdout(sys.stdout)
        self._stdout.setFormatter(Text(timed=False) if read else self._formatter(timed=False))
        self._stdout.setLevel(logging.INFO if read else self._level)
        self._file: _File | None = None
        if self.file is not None:
            try:
                self._file = _File(self.file, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise ConfigError(f"log.file {self.file}: open: {error.strerror}") from error
            self._file.setFormatter(self._formatter(timed=True))
            self._file.setLevel(self._level)
        self._left = False
        logger.setLevel(min(h.level for h in self._handlers))
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)
        if self.file is not None:
            logger.info("log: %s: smoe-mp %s, pid %d", self.file, version(), os.getpid())

    @property
    def _handlers(self) -> list[logging.Handler]:
        return [self._stdout] if self._file is None else [self._stdout, self._file]

    def _formatter(self, timed: bool) -> logging.Formatter:
        return Json(self._config.name) if self._config.log.format == "json" else Text(timed)

    def leave_terminal(self) -> None:
        """From now on nothing comes from or goes to whoever started this process, only to the file."""
        assert self._file is not None
        self._left = True
        logger.removeHandler(self._stdout)
        _point(os.devnull, 0)
        self._file.take_over()

    def failed(self, error: SmoeError) -> None:
        """The system ends with `error`, which main() says on stderr: have the file say it too.  Where stderr
        is that file, it says it alone."""
        if self._file is not None:
            logger.removeHandler(self._stdout)
            logger.error("%s", error)
        if self._left:
            sys.exit(error.exit_code)

    def close(self) -> None:
        logger.propagate = True
        for handler in self._handlers:
            logger.removeHandler(handler)
            if handler is not self._stdout:
                with contextlib.suppress(OSError):  # a full disk
                    handler.close()


@contextlib.contextmanager
def opened(loaded: LoadedConfig, *, read: bool = False, to_file: bool = False) -> Iterator[Log]:
    """The log of a system, as its [log] says, until the block ends; an error or a fault is its last line.

    `read`: a program reads stdout up to "ready".  `to_file`: there must be a file, where none is configured
    the default one.  Raises ConfigError if the file cannot be opened.
    """
    log = Log(loaded, read=read, to_file=to_file)
    try:
        yield log
    except SmoeError as error:
        log.failed(error)
        raise
    except Exception:  # the traceback follows on stderr
        name = loaded.config.name
        logger.critical(
            "ring %s: a fault of smoe-mp itself, or somebody wrote over its shared memory /smoe.%s",
            name,
            name,
            exc_info=log.file is not None,
        )
        raise
    finally:
        log.close()


def default_file(name: str) -> Path:
    """NAME.log in the state folder, which is made; in the run-time folder where it cannot be written."""
    folder = state_folder(os.environ)
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder / f"{name}.log"
    return runtime_folder() / f"{name}.log"
