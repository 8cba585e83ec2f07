"""Real systems for tests: `up` starts them, and what they leave behind is a failure.

Every ring has a name of its own, so tests may run side by side; the run-time folder is the test's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import until
from systems import VAULT, System, Up, assert_nothing_left, processes_of, write_config

from smoe_mp import segments


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    """A copy of the original's small vault, 3 layers of 8 experts: a system writes its histogram beside."""
    if not VAULT.is_file():
        pytest.skip(f"{VAULT.name}: the shared vaults are not here")
    return Path(shutil.copy(VAULT, tmp_path / VAULT.name))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder where direct reads work."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 16))
    mode = segments.probe(probe).mode
    if mode != "direct":
        pytest.skip(f"{tmp_path}: reads are {mode}, not direct")
    return tmp_path


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run-time folder with a short path, wherever pytest keeps its own."""
    path = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ring_name(runtime_dir: Path) -> Iterator[str]:
    """A ring name that no other test uses; at the end nothing of that name may be left."""
    name = f"t{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    assert_nothing_stays(name)


@pytest.fixture
def up(ring_name: str, vault: Path, tmp_path: Path) -> Iterator[Up]:
    """Starts systems (`Up`), by default with the name `ring_name`; they are stopped at the end."""
    started: list[System] = []

    fixture_vault = vault

    def start(
        *,
        slots: int = 16,
        workers: int = 2,
        name: str = "",
        flags: tuple[str, ...] = (),
        vault: Path | None = None,
        more: str = "",
    ) -> System:
        stem = f"system{len(started)}"
        path = tmp_path / f"{stem}.toml"
        config = write_config(path, name or ring_name, vault or fixture_vault, slots, workers, more=more)
        system = System(name or ring_name, config, flags, tmp_path / f"{stem}.stderr")
        started.append(system)
        return system

    yield start
    for system in started:
        system.end()
    for system in started:
        assert_nothing_stays(system.name)


def assert_nothing_stays(name: str) -> None:
    """Nothing is left, once the children of supervisors that the test killed have ended too."""
    until(lambda: processes_of(name) == [], "an end of all processes")
    assert_nothing_left(name)
