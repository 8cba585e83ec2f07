"""Paths as users give them: what of them Python answers with an exception, in words or as no."""

from __future__ import annotations

from pathlib import Path

from smoe_mp.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """The path with ~ and ~USER replaced by that home folder.  ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: no home folder is known for {Path(path).parts[0]}") from error


def exists(path: Path) -> bool:
    """Whether the path can be seen to be there."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, not to be searched, or with a NUL: whoever opens it says so
        return False
