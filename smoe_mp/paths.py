"""Paths as users give them.  What Path.exists() and is_dir() answer with an exception, a name too long or a
folder that must not be searched, os.path answers with no, and whoever opens it says why."""

from __future__ import annotations

from pathlib import Path

from smoe_mp.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """The path with ~ and ~USER replaced by that home folder.  ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: no home folder is known for {Path(path).parts[0]}") from error
