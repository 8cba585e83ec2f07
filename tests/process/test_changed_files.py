"""Files that change, vanish or come back under a running system (`smoe-mp up`).

Changed: every demand is refused with the file and what of it changed, hits too, and what is held stays as it
was.  Away: said, and served on from what is resident and from what the workers have open.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from systems import System, Up, bytes_of, make_vault, smoe_mp, until

import smoe_mp as smoe
from smoe_mp.control.commands import Ping, Workers
from smoe_mp.errors import Refused, SourceChanged

CHECKED = "vault.check_s = 1\n"
UNCHECKED = "vault.check_s = 86400\n"  # no look, unless something gives reason to


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A vault of 8 experts, old enough that a rewrite has another mtime."""
    path = make_vault(tmp_path / "model.smoe")
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A vault of the same size with other bytes in every expert."""
    (tmp_path / "other").mkdir()
    path = make_vault(tmp_path / "other/model.smoe")
    raw = bytearray(path.read_bytes())
    raw[16384:] = bytes(b ^ 0x55 for b in raw[16384:])
    path.write_bytes(raw)
    return path


def copied_over(model: Path, other: Path) -> None:
    """In place, and never shorter meanwhile: a look may come at any moment."""
    with model.open("r+b") as file:
        file.write(other.read_bytes())


def moved_over(model: Path, other: Path) -> None:
    other.rename(model)


def truncated(model: Path, other: Path) -> None:
    os.truncate(model, model.stat().st_size - 4096)


def header_patched(model: Path, other: Path) -> None:
    """One byte of the header, with size and mtime as they were."""
    before = model.stat()
    with model.open("r+b") as f:
        f.seek(48)  # d_model, which nothing is checked against
        f.write(b"\xff")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))


def stale(system: System) -> bool:
    return bool(system.ask(Ping()).state == "stale")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (copied_over, ("mtime",)),
        (moved_over, ("inode", "mtime")),
        (truncated, ("size", "mtime")),
        (header_patched, ("header",)),
    ],
)
def test_a_file_that_changes_ends_the_serving(
    up: Up, model: Path, other: Path, change: Callable[[Path, Path], None], changed: tuple[str, ...]
) -> None:
    expected = bytes_of(model)
    in_header = change is header_patched  # which only the first look reads
    system = up(vault=model, more=UNCHECKED if in_header else CHECKED)
    with smoe.attach(system.name) as ring:
        with ring.fetch(0, [0, 1]) as batch:
            assert batch[0].raw.tobytes() == expected[0, 0]
            change(model, other)
            if in_header:
                os.kill(system.look().workers[0].pid, signal.SIGKILL)  # a death is reason to look
            until(lambda: stale(system), "the file's change was seen")
            assert batch[1].raw.tobytes() == expected[0, 1]  # what is held stays right
        for asked in (0, 5):  # resident, and not
            with pytest.raises(SourceChanged) as refused:
                ring.fetch(0, [asked])
            assert refused.value.path == str(model)
            assert refused.value.changed == changed
            assert str(model) in str(refused.value)
            assert ", ".join(changed) in str(refused.value)
        with pytest.raises(SourceChanged):
            ring.claim_specific(0, 0)
        with pytest.raises(SourceChanged):
            ring.speculate(0, [3])
    with smoe.attach(system.name) as late, pytest.raises(SourceChanged, match="nothing is served"):
        late.fetch(0, [0])
    status = system.look()
    assert status.health.startswith(f"stale: {model} was ")
    assert any(str(model) in warning for warning in status.warnings)
    assert smoe_mp("down", system.name, "--keep-ring").returncode == 0
    system.wait()
    events = [line for line in system.lines if line.startswith("error: ")]
    assert len(events) == 1
    assert str(model) in events[0]
    assert system.lines[-1].endswith("removed")  # not even when asked to: its bytes are of no file any more


def test_a_new_start_serves_the_new_file(up: Up, model: Path, other: Path) -> None:
    system = up(vault=model, more=CHECKED)
    with smoe.attach(system.name) as ring, ring.fetch(0, [0]):
        pass
    moved_over(model, other)
    until(lambda: stale(system), "the file's change was seen")
    system.kill()  # it cannot say goodbye: the stale ring is there still
    again = up(vault=model, more=CHECKED)
    assert any("its state is stale" in line for line in again.lines)
    with smoe.attach(again.name) as ring, ring.fetch(0, [0]) as batch:
        assert not batch[0].hit
        assert batch[0].raw.tobytes() == bytes_of(model)[0, 0]


def test_workers_of_a_changed_file_are_not_replaced(up: Up, model: Path, other: Path) -> None:
    """They could not open it; each would be a death, and soon a crash loop that hides what happened."""
    system = up(vault=model, workers=3, more=CHECKED)
    moved_over(model, other)
    until(lambda: stale(system), "the file's change was seen")
    pid = system.look().workers[0].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: any(f"(pid {pid}) was killed" in text for text in system.look().warnings), "the death")
    assert [row.id for row in system.look().workers] == [1, 2]
    with pytest.raises(Refused, match="nothing is served until the system is stopped"):
        system.ask(Workers(count=4))


def test_a_waiter_is_told(up: Up, model: Path, other: Path) -> None:
    """A failed read brings the look forward: nobody waits for the timer."""
    system = up(vault=model, more=UNCHECKED)
    with smoe.attach(system.name) as ring:
        copied_over(model, other)
        with pytest.raises((smoe.SmoeError, SourceChanged)):
            ring.fetch(0, [2])
        until(lambda: stale(system), "the failed read brought the look forward")
        with pytest.raises(SourceChanged):
            ring.fetch(0, [3])


def test_a_file_that_comes_back_is_not_trusted(up: Up, model: Path, other: Path) -> None:
    system = up(vault=model, more=CHECKED)
    kept = model.with_name("kept")
    model.rename(kept)
    moved_over(model, other)
    until(lambda: stale(system), "the file's change was seen")
    kept.rename(model)
    with smoe.attach(system.name) as ring, pytest.raises(SourceChanged):
        ring.fetch(0, [0])
    assert system.look().state == "stale"


def test_a_deleted_file_is_served_on(up: Up, model: Path) -> None:
    """The workers have it open: its bytes are there until the last of them ends."""
    expected = bytes_of(model)
    system = up(vault=model, more=CHECKED)
    with smoe.attach(system.name) as ring:
        with ring.fetch(0, [0]):
            pass
        kept = model.with_name("kept")
        os.link(model, kept)
        model.unlink()
        until(lambda: system.look().health.startswith("files away"), "the loss was seen")
        with ring.fetch(0, [0, 6]) as batch:
            assert batch[0].hit
            assert batch[1].raw.tobytes() == expected[0, 6]
        kept.rename(model)
        until(lambda: system.look().health == "ok", "the return was seen")
        with ring.fetch(0, [7]) as batch:
            assert np.array_equal(batch[0].raw, np.frombuffer(expected[0, 7], np.uint8))
    status = system.look()
    assert status.state == "live"
    assert sum(f"{model}: stat: No such file" in warning for warning in status.warnings) == 1


def test_symbolic_links(up: Up, model: Path, other: Path) -> None:
    """A link is followed: dangling it leads nowhere, which is no change; led elsewhere it is another file."""
    link = model.with_name("link.smoe")
    link.symlink_to(model)
    system = up(vault=link, more=CHECKED)
    with smoe.attach(system.name) as ring:
        link.unlink()
        link.symlink_to("nowhere")
        until(lambda: system.look().health.startswith("files away"), "the dangling link was seen")
        with ring.fetch(0, [4]):
            pass
        link.unlink()
        link.symlink_to(other)
        until(lambda: stale(system), "the link was seen to lead elsewhere")
        with pytest.raises(SourceChanged) as refused:
            ring.fetch(0, [4])
        assert refused.value.path == str(link)
        assert "inode" in refused.value.changed
