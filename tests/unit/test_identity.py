"""What a look at a source's files finds, and when the next look is due.  No system, no waiting."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import pytest
from support import StampedSource, stamped_source, until

from smoe_mp import identity
from smoe_mp.identity import HANG_S, Watch, look


@pytest.fixture
def source(tmp_path: Path) -> StampedSource:
    return stamped_source(tmp_path, files=3)


def test_nothing_changed(source: StampedSource) -> None:
    report = look(source, headers=False)
    assert not report.changes
    assert not report.away


def test_each_kind_of_change_is_named_with_its_figures(source: StampedSource) -> None:
    first, second, third = (file.path for file in source.files)
    os.utime(first, ns=(10**9, 2 * 10**9))
    os.truncate(second, 100)
    second_size = source.files[1].size
    third.unlink()
    third.symlink_to("nowhere")
    report = look(source, headers=True)
    assert [(change.file, change.what) for change in report.changes] == [
        (0, ("mtime",)),
        (1, ("size", "mtime")),
    ]
    assert f"mtime {source.files[0].mtime_ns}, now 2000000000" in report.changes[0].text
    assert f"size {second_size}, now 100" in report.changes[1].text
    assert report.away == {2: f"{third}: stat: No such file or directory"}


def test_another_file_under_the_name(source: StampedSource, tmp_path: Path) -> None:
    path = source.files[1].path
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(source.files[1].mtime_ns, source.files[1].mtime_ns))
    copy.rename(path)
    (change,) = look(source, headers=False).changes
    assert (change.file, change.what) == (1, ("inode",))
    assert f"{source.files[1].dev}:{source.files[1].ino}, now " in change.text


def test_headers_are_compared_once_all_files_are_there(
    source: StampedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*source.files[:2], dataclasses.replace(source.files[2], digest=b"another")]
    opened: list[Path] = []

    def reopen(path: Path) -> StampedSource:
        opened.append(path)
        return dataclasses.replace(source, files=files)

    monkeypatch.setattr(identity, "open_source", reopen)
    clock = [0.0]
    watch = Watch(source, 10, lambda: clock[0])
    away = source.files[0].path.with_name("away")

    def next_look() -> identity.Report:
        clock[0] += 10
        assert watch.poll() is None  # begins it
        reports: list[identity.Report] = []

        def ended() -> bool:
            reports.extend(report for report in [watch.poll()] if report)
            return bool(reports)

        until(ended, "its end")
        return reports[0]

    source.files[0].path.rename(away)
    assert list(next_look().away) == [0]
    assert opened == []
    away.rename(source.files[0].path)
    (change,) = next_look().changes
    assert (change.file, change.what) == (2, ("header",))
    assert opened == [source.path]
    assert not next_look().changes  # only once: the supervisor has ended the serving by then
    assert opened == [source.path]


def test_a_look_that_hangs_holds_nobody_up(source: StampedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    looks: list[bool] = []

    def hanging(source: StampedSource, headers: bool) -> identity.Report:
        looks.append(headers)
        go_on.wait()
        return identity.Report()

    monkeypatch.setattr(identity, "look", hanging)
    clock = [0.0]
    watch = Watch(source, 10, lambda: clock[0])
    assert watch.poll() is None
    assert looks == []  # not due
    assert watch.poll(hurry=True) is None
    until(lambda: looks == [True], "its begin")
    assert not watch.hangs
    clock[0] += HANG_S + 11
    assert watch.hangs
    assert watch.poll(hurry=True) is None
    assert looks == [True]  # one at a time
    go_on.set()
    until(lambda: watch.poll() is not None, "its end")
    assert not watch.hangs
    watch.poll()
    until(lambda: looks == [True, False], "the next one, which was due long ago")


def test_without_a_thread_to_be_had_the_next_look_is_the_next_one_due(
    source: StampedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10.0]
    watch = Watch(source, 10, lambda: clock[0])

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        assert watch.poll(hurry=True) is None
    clock[0] += HANG_S + 1
    assert not watch.hangs
    assert watch.poll() is None  # begins it
    until(lambda: watch.poll() is not None, "its end")
