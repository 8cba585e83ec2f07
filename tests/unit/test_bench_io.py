"""How `bench io` asks a ring, in numbers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe_mp.bench.io import ASKING_FULL, BATCH, PLAIN, Asking, asked, batches, scratch_file, slots_for
from smoe_mp.errors import ConfigError


@pytest.mark.parametrize(
    ("asking", "name"),
    [
        (PLAIN, "ring"),
        (Asking(batch=1), "ring, one at a time"),
        (Asking(clients=4), "ring, 4 clients"),
        (Asking(python=True, batch=2), "ring, from Python, 2 at a time"),
    ],
)
def test_names(asking: Asking, name: str) -> None:
    assert str(asking) == name


def test_all_of_them_have_names_of_their_own() -> None:
    assert len({str(a) for a in ASKING_FULL}) == len(ASKING_FULL)
    assert asked((1, 2), (1, 8), python=True) == (
        *(Asking(1, 1), PLAIN, Asking(2, 1), Asking(2, 8)),
        *(Asking(1, 1, True), Asking(1, 8, True)),
    )


def test_the_plain_form_by_hand() -> None:
    assert [(batches(n), PLAIN.flight(n), slots_for(n)) for n in (1, 4, 16)] == [
        (2, 2, 24),
        (2, 2, 24),
        (5, 5, 48),
    ]


@given(st.integers(1, 127), st.integers(1, 8), st.integers(1, BATCH), st.booleans())
def test_workers_have_work_and_clients_room(workers: int, clients: int, batch: int, python: bool) -> None:
    a = Asking(clients, batch, python)
    in_flight = a.clients * a.flight(workers) * a.batch
    assert in_flight - batch >= 2 * workers  # also while one call's last expert is awaited
    assert in_flight + BATCH <= a.slots(workers)


@pytest.mark.parametrize("place", ["file", "file/in", "x" * 300])
def test_a_scratch_folder_that_cannot_be_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{place}: cannot be used .* give --scratch another"):
        scratch_file(tmp_path / place, 1, lambda *_: None)


def test_a_write_that_fails_is_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        scratch_file(tmp_path, 1, lambda *_: None)
    assert list(tmp_path.iterdir()) == []
