"""`bench peers`, as far as it needs no cgroup: what is asked for, and that all sides read the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smoe_mp.bench import peers
from smoe_mp.bench.peer import SIDES, Spec, main
from smoe_mp.errors import SmoeError

SIZE, COUNT = 3 * 4096, 16


def test_a_batch_names_no_expert_twice() -> None:
    batches = peers.picks(1, 20, 1.0, 801)
    assert [len(set(batch)) for batch in batches] == [peers.BATCH] * 101
    assert {x for batch in batches for x in batch} == set(range(20))
    assert batches == peers.picks(1, 20, 1.0, 801)
    assert batches != peers.picks(2, 20, 1.0, 801)


@pytest.mark.parametrize(("skew", "low", "high"), [(0.0, 0.25, 0.30), (1.0, 0.60, 0.80)])
def test_the_most_popular_quarter(skew: float, low: float, high: float) -> None:
    """By Zipf's law it has H(100) / H(400) = 0.79 of single picks, and less in batches without repetition."""
    counts = np.bincount([x for batch in peers.picks(3, 400, skew, 40_000) for x in batch], minlength=400)
    assert low <= np.sort(counts)[::-1][:100].sum() / counts.sum() <= high


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peers.experts_file(tmp_path_factory.mktemp("peers"), SIZE, COUNT, lambda *_: None)


def test_the_file_is_made_once_and_whole(file: Path) -> None:
    before = file.stat()
    assert before.st_size == peers.START + COUNT * SIZE
    assert peers.experts_file(file.parent, SIZE, COUNT, lambda *_: None) == file
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("side", [name for name in SIDES if name != "ring"])
def test_a_side_reads_what_it_is_asked(side: str, file: Path) -> None:
    if side.startswith("safetensors"):
        pytest.importorskip("safetensors")
    batches = [[0, 5, 15], [3, 0, 7], [15, 14, 13]]
    said = main(Spec(side, str(file), peers.START, SIZE, COUNT, batches, 1, 0, 2, 4096))
    whole = np.fromfile(file, np.uint64, offset=peers.START).reshape(COUNT, 3, 512)
    wanted = sum(int(word) for batch in batches[1:] for word in whole[batch, :, 0].ravel())
    assert said["check"] == wanted % (1 << 64)
    assert said["bytes"] == 6 * SIZE
    assert said["hits"] is None
    assert said["ns"] > 0


def test_sides_that_differ() -> None:
    peers.check_sums({"ring": 5, "pread": 5}, "uniform")
    with pytest.raises(SmoeError, match=r"uniform: the sides did not read the same bytes.*'pread': 6"):
        peers.check_sums({"ring": 5, "pread": 6}, "uniform")


def test_without_a_cgroup_it_says_so_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(limit_bytes: int) -> None:
        raise SmoeError("no memory cgroup, version 1 or 2, can be made here: none is mounted")

    monkeypatch.setattr(peers, "memory_group", none)
    report = peers.run(lambda *_: None, tmp_path / "scratch", quick=True)
    assert report.figures == []
    assert report.verdict is None
    assert report.notes == [
        "Skipped: no memory cgroup, version 1 or 2, can be made here: none is mounted. It needs root."
    ]
    assert report.plain()["skipped"]
    assert not (tmp_path / "scratch").exists()
