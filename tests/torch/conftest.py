"""Models for tests of the torch extras.  Where torch or transformers is not installed they are skipped by
name, each test module by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.append(str(Path(__file__).resolve().parents[1] / "process"))  # systems.py


@pytest.fixture(scope="session", autouse=True)
def quiet_torch() -> Iterator[None]:
    """One thread, so that tests beside each other do not wait for each other's; no progress bars."""
    try:
        import torch  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[Path]:
    """A run-time folder with a short path for all systems of these tests."""
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    before = os.environ.get("SMOE_RUNTIME_DIR")
    os.environ["SMOE_RUNTIME_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["SMOE_RUNTIME_DIR"]
    else:
        os.environ["SMOE_RUNTIME_DIR"] = before
    shutil.rmtree(path)


@pytest.fixture
def streamed() -> Iterator[Callable[..., Any]]:
    """`streamed(path, slots=..., **load's)`: a model on a ring of its own, which ends with the test."""
    from support import serve  # noqa: PLC0415

    import smoe_mp.transformers  # noqa: PLC0415
    from smoe_mp.sources import open_source  # noqa: PLC0415

    with contextlib.ExitStack() as stack:

        def load(path: Path, *, slots: int = 12, speculation_ranks: int = 0, **kwargs: Any) -> Any:
            served = stack.enter_context(
                serve(open_source(path), slots=slots, workers=2, speculation_ranks=speculation_ranks)
            )
            return smoe_mp.transformers.load(path, ring=served.name, **kwargs)

        yield load
