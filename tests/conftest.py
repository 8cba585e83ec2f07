"""What all tests share: the folder ../shared, made-up sources of experts, and what their children inherit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import SHARED, StampedSource, stamped_source


def pytest_configure(config: pytest.Config) -> None:
    """What children inherit: signals that they may be sent, and a place for bytecode."""
    _take_signals()
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", "") and getattr(config, "cache", None) is not None:
        # The children are many, and each would compile all that it imports.
        os.environ["PYTHONPYCACHEPREFIX"] = str(config.cache.mkdir("bytecode"))


def _take_signals() -> None:
    """A shell's background job ignores SIGINT, and one under nohup SIGHUP; so would their children, to whom
    tests send both.  What is caught here is the default in a child."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    """A command that is run in this process and ends by Ctrl-C ignores signals from then on; later tests'
    children would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def shared() -> Path:
    """The folder with the original's vaults and the traces."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not here")
    return SHARED


@pytest.fixture
def source(tmp_path: Path) -> StampedSource:
    """2 layers of 8 experts, of 1 to 3 extents at odd places of 3 files."""
    return stamped_source(tmp_path / "source")
