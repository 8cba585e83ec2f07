"""Short forms of the benchmarks: that they run, add up and clean up; never how fast anything was."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from typer.testing import CliRunner

from smoe_mp.bench import control, formats, hit, idle, io, miss, peers, wake
from smoe_mp.bench.cgroup import memory_group
from smoe_mp.bench.cli import app
from smoe_mp.bench.rings import bench_ring, flat_source, memory_file, native, native_one
from smoe_mp.errors import ConfigError, SegmentError, SmoeError

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")

MIB = 1 << 20


class Steps:
    """Takes progress, and holds it to its word."""

    def __init__(self) -> None:
        self.last: tuple[str, float, float] = ("", 0, 0)

    def __call__(self, what: str, done: float, total: float) -> None:
        assert 0 <= done <= total
        self.last = (what, done, total)

    def assert_done(self) -> None:
        assert self.last[1] == self.last[2] > 0


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps()
    yield made
    made.assert_done()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No segment and no file of a benchmark of this process may be left in memory."""
    yield
    assert [p.name for p in Path("/dev/shm").glob(f"smoe?bench-{os.getpid()}-*")] == []


def test_hit(steps: Steps) -> None:
    report = hit.run(steps, quick=True, slots=(16, 64))
    traced = ("random", "batch of 8, random")
    kinds = ("one hot", *(kind + end for kind in traced for end in ("", ", recorded")), "one load")
    from_python = ("fetch one", "fetch one, recorded", "fetch 8", "fetch 8, recorded")
    assert [f.name for f in report.figures] == [
        *(f"C, {kind}, {n} slots" for kind in kinds for n in (16, 64)),
        *(f"Python, {kind}, 64 slots" for kind in from_python),
        *(f"Python, acquire + release {n}, 64 slots" for n in ("one", "8")),
    ]
    assert all(len(f.values) == report.settings["rounds"] and min(f.values) > 0 for f in report.figures)
    shares = [share.name for share in report.shares]
    assert [name for name in shares if name.startswith("a trace")] == [
        *(f"a trace, C, {kind}, {n} slots: recorded / not" for kind in traced for n in (16, 64)),
        *(f"a trace, Python, {kind}: recorded / not" for kind in ("fetch one", "fetch 8")),
    ]
    assert len(shares) == 4 + 6
    assert all(share.ratio.n == report.settings["rounds"] for share in report.shares)


def test_hit_with_other_clients(steps: Steps) -> None:
    report = hit.run(steps, quick=True, slots=(16,), clients=(3, 2))
    assert report.settings["clients"] == [1, 2, 3]
    beside = [f for f in report.figures if f.name.endswith(" clients")]
    kinds = ("one hot", "random", "batch of 8, random")
    assert [f.name for f in beside] == [f"C, {k}, 16 slots, {n} clients" for n in (2, 3) for k in kinds]
    assert all(len(f.values) == report.settings["rounds"] and f.goal is None for f in beside)
    assert len([s for s in report.shares if s.name.endswith(" clients / 1")]) == len(beside)


def test_miss(steps: Steps) -> None:
    report = miss.run(steps, quick=True, slots=(64, 128), hits=(0, 10))
    assert len(report.figures) == 2 * 2 * len(miss.SIDES) + 2 * 2
    python = [f.name for f in report.figures if f.name.startswith("Python")]
    assert python == [f"Python, acquire {what}, {n} slots" for n in (64, 128) for what in ("one", "8")]
    assert all(len(f.values) == report.settings["rounds"] and min(f.values) > 0 for f in report.figures)
    goals = {f.name.split(",")[0] for f in report.figures if f.goal}
    assert goals == {"issue"}
    assert len(report.shares) == 4


def test_miss_with_other_clients(steps: Steps) -> None:
    report = miss.run(steps, quick=True, slots=(64,), hits=(0, 10), clients=(4,))
    beside = [f for f in report.figures if f.name.endswith(", 4 clients")]
    assert [f.name for f in beside] == [f"issue, 64 slots, {h} hits between, 4 clients" for h in (0, 10)]
    assert all(len(f.values) == report.settings["rounds"] and f.goal is None for f in beside)


def test_control(steps: Steps, runtime_dir: Path) -> None:
    report = control.run(steps, quick=True)
    assert len(report.figures) == 6
    assert all(value > 0 for figure in report.figures for value in figure.values)


def test_idle(steps: Steps, runtime_dir: Path) -> None:
    report = idle.run(steps, quick=True, workers=(2, 1))
    assert [f.name for f in report.figures[2::3]] == ["all, 1 workers", "all, 2 workers"]
    for supervisor, workers, both in zip(*(report.figures[i::3] for i in range(3)), strict=True):
        assert [a + b for a, b in zip(supervisor.values, workers.values, strict=True)] == list(both.values)
        assert both.goal is not None


def test_io(steps: Steps, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "FILE_BYTES_QUICK", 16 * MIB)
    report = io.run(steps, disk / "scratch", quick=True, sizes_mib=(1,), workers=(2,))
    file = disk / "scratch/bench-io.bin"
    assert report.settings["file"] == str(file)
    assert file.stat().st_blocks * 512 >= file.stat().st_size
    assert {s.name for s in report.shares} == {
        "1 MiB, 2 workers: ring / bare, bytes/s",
        "1 MiB, 2 workers: ring / bare, CPU",
    }
    for side in report.extra["bytes"]:
        assert side["wanted"] % MIB == 0
        # Others may read meanwhile; and nothing came from the page cache.
        assert side["device"] is None or side["device"] >= side["wanted"]
    assert sorted(p.name for p in file.parent.iterdir()) == ["bench-io.bin"]


def test_io_asked_in_other_ways(steps: Steps, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "FILE_BYTES_QUICK", 16 * MIB)
    asking = (io.Asking(batch=1), io.Asking(clients=3), io.Asking(python=True))
    report = io.run(steps, disk / "scratch", quick=True, sizes_mib=(1,), workers=(2,), asking=asking)
    names = [f"1 MiB, 2 workers: ring, {a}" for a in ("one at a time", "3 clients", "from Python")]
    assert [side["side"] for side in report.extra["bytes"]] == ["1 MiB, 2 workers: bare", *names]
    assert len({side["wanted"] for side in report.extra["bytes"]}) == 1
    assert [s.name for s in report.shares[::2]] == [f"{name} / bare, bytes/s" for name in names]


def test_wake(steps: Steps, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "FILE_BYTES_QUICK", 16 * MIB)
    report = wake.run(steps, disk / "scratch", quick=True, workers=(2, 1))
    sides = [f"{n}, client {does}" for n in ("1 worker", "2 workers") for does in ("sleeps", "spins")]
    others = ("bare", "relay")
    assert [s.name for s in report.shares] == [f"{side}: ring / {x}" for side in sides for x in others]
    found = {f.name: f for f in report.figures}
    for side in sides:
        assert found[f"{side}: ring, over bare"].goal is not None
        assert min(found[f"{side}: bare, in all"].values) > 0
        for reader in ("ring", "relay"):
            parts = [found[f"{side}: {reader}, {x}"] for x in ("in all", "reader has it", "its read")]
            assert all(len(f.values) == report.settings["rounds"] and min(f.values) > 0 for f in parts)


@pytest.mark.root
def test_peers(steps: Steps, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with memory_group(peers.LEAST_BYTES):
            pass
    except SmoeError as error:
        steps("", 1, 1)
        pytest.skip(str(error))
    report = peers.run(steps, disk / "scratch", quick=True, rounds=1, workers=2)
    assert report.settings["limit_bytes"] < report.settings["experts"] * 3 * MIB
    for trace, rows in report.sheets.items():
        assert list(rows) == [side for side in peers.SIDES if side in rows]
        assert {"mmap + copy", "pread", "numpy memmap", "ring"} <= set(rows)
        # Nobody had what it was not asked for; and no cache below the limit holds the whole file.
        assert all(row["device"].values[0] > 0.05 for row in rows.values() if "device" in row), trace
        assert 0 < rows["ring"]["hits"].values[0] < 100
    uniform, zipf = report.sheets.values()
    assert uniform["ring"]["hits"].values[0] < zipf["ring"]["hits"].values[0]
    assert [f.name for f in report.figures if f.unit == "GB/s"] == [
        f"{trace}: {side}: wanted" for trace, rows in report.sheets.items() for side in rows
    ]


def test_formats(steps: Steps, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SHAPE", (64, 256))
    report = formats.run(steps, disk / "scratch", quick=True, workers=(2,))
    assert [share.name for share in report.shares] == [
        "safetensors, 2 workers: in place / vault, bytes/s",
        "gguf, 2 workers: in place / vault, bytes/s",
    ]
    assert all(len(f.values) == 3 and min(f.values) > 0 for f in report.figures)
    for vault in disk.glob("scratch/*/experts.smoe"):  # as many experts as the settings say, every byte there
        assert vault.stat().st_size >= report.settings["experts"] * 3 * 64 * 256 * 2
        assert vault.stat().st_blocks * 512 >= vault.stat().st_size


def test_io_takes_the_file_that_is_there(disk: Path) -> None:
    one = io.scratch_file(disk, MIB, lambda *_: None)
    before = one.stat()
    assert io.scratch_file(disk, MIB, lambda *_: None) == one
    assert one.stat().st_mtime_ns == before.st_mtime_ns
    with one.open("rb+") as f:  # a sparse one is none
        f.truncate(0)
        f.truncate(before.st_size)
    assert io.scratch_file(disk, MIB, lambda *_: None).stat().st_blocks * 512 >= before.st_size


def test_io_refuses_what_is_no_disk() -> None:
    with (
        tempfile.TemporaryDirectory(prefix=f"smoe-bench-{os.getpid()}-", dir="/dev/shm") as folder,
        pytest.raises(ConfigError, match="direct reads are refused here"),
    ):
        io.run(lambda *_: None, Path(folder), quick=True, sizes_mib=(1,), workers=(1,))


def test_io_wants_room(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="are free"):
        io.scratch_file(tmp_path, 1 << 60, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_the_stream_never_hits_and_wants_enough_experts(tmp_path: Path) -> None:
    with memory_file(64 * 16384) as path:
        args = ("--reads", 200, "--seed", 5, "--batch", 4, "--batches", 2)
        with bench_ring(flat_source(path, 16384, 64), slots=16, workers=2) as ring:
            for _ in range(3):
                line = native_one("stream", ring.name, *args)
                assert line["hits"] == 0
                assert line["bytes"] == 200 * 16384
            assert ring.segments.counters()["reads"] == 600
        with (
            bench_ring(flat_source(path, 16384, 64), slots=32, workers=1) as ring,
            pytest.raises(SmoeError, match="64 experts are too few for 32 slots"),
        ):
            native_one("stream", ring.name, *args)


def test_a_worker_that_dies_ends_the_benchmark() -> None:
    with memory_file(4 * 16384) as path, bench_ring(flat_source(path, 16384, 4), slots=4, workers=1) as ring:
        subprocess.run(["kill", "-KILL", str(ring.pids[0])], check=True)
        assert ring._loop.wait_until(lambda: ring._workers[0].exited, LIMIT_S)
        with pytest.raises(SmoeError, match="was killed by SIGKILL"):
            ring.check()


def test_the_native_programs_errors() -> None:
    with pytest.raises(SmoeError, match="usage"):
        list(native("hit", "x", "--no", 1))
    with pytest.raises(SmoeError, match="nobody"):
        list(native("hit", "nobody", "--rounds", 1, "--repeats", 1, "--ops", 1))


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(app, words)

    done = run("hit", "--quick", "--slots", "16", "--json")
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert plain["bench"] == "hit"
    assert plain["settings"]["slots"] == [16]
    assert isinstance(run("miss", "--slots", "7").exception, ConfigError)
    assert isinstance(run("hit", "--clients", "32").exception, ConfigError)
    assert isinstance(run("io", "--batches", "9").exception, ConfigError)
    assert isinstance(run("io", "--sizes", "1,x").exception, ConfigError)
    for command in ("io", "hit", "miss", "wake", "idle", "peers"):
        assert f"Example: smoe-mp bench {command}" in run(command, "--help").stdout
