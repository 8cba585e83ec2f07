"""The prewarm process of a real system: what it loads and in which order, what makes it rest, and the file of
the popularity, whoever dies.  Field report 45."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, StampedSource, serve, stop, until
from systems import (
    System,
    Up,
    assert_nothing_left,
    bytes_of,
    make_vault,
    pids_of,
    wait_prewarmed,
    write_config,
)
from systems import smoe_mp as run

import smoe_mp
from smoe_mp import histogram, models, prewarm
from smoe_mp.control.commands import Prewarm, PrewarmStatus
from smoe_mp.engine import Engine
from smoe_mp.sources import open_source

HERE = Path(__file__).resolve().parents[1]

EXPERTS = 320  # of one layer
SLOTS = 176
BUDGET = 48  # slots less a headroom of max(128, 44)
COUNT = "<4sII65536I"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vault(tmp_path_factory.mktemp("vault") / "many.smoe", experts=EXPERTS)


@pytest.fixture
def many(made: Path, tmp_path: Path) -> Path:
    """A vault of 320 tiny experts."""
    return Path(shutil.copy(made, tmp_path / "many.smoe"))


def file_of(vault: Path) -> Path:
    return vault.with_name(vault.name + ".expert_freq.bin")


def write_counts(vault: Path, counts: dict[int, int], path: Path | None = None) -> Path:
    """The original's file."""
    cells = np.zeros(65536, "<u4")
    for expert, count in counts.items():
        cells[expert] = count
    path = path or file_of(vault)
    path.write_bytes(struct.pack("<4sII", b"SFRQ", 1, 65536) + cells.tobytes())
    return path


def read_counts(path: Path) -> dict[int, int]:
    """As the original reads it: the first 12 + 4 x 65536 bytes."""
    magic, version, n, *counts = struct.unpack_from(COUNT, path.read_bytes())
    assert (magic, version, n) == (b"SFRQ", 1, 65536)
    return {cell: count for cell, count in enumerate(counts) if count}


def residents(name: str) -> list[int]:
    with smoe_mp.attach(name) as ring:
        return [e for e in range(EXPERTS) if ring.resident(0, e)]


def prewarm_of(system: System) -> PrewarmStatus:
    found: PrewarmStatus = system.look().prewarm
    return found


def wait_state(system: System, state: str) -> PrewarmStatus:
    """Wait until prewarm is in that state."""
    until(lambda: prewarm_of(system).state == state, f"prewarm {state}")
    return prewarm_of(system)


def wait_done(system: System, done: int = BUDGET) -> PrewarmStatus:
    """Wait until a pass over so many experts is over, and all of them have been read."""
    until(lambda: wait_prewarmed(system).prewarm.done == done, f"a pass over {done} experts")
    return prewarm_of(system)


def down(name: str) -> None:
    done = run("down", name)
    assert (done.returncode, done.stderr) == (0, "")


# --- what is loaded ----------------------------------------------------------------------------------------


def test_the_next_start_loads_what_was_popular(up: Up, ring_name: str, many: Path) -> None:
    """The whole circle: claims are counted, saved at the end, and what was asked for most is there before the
    first token."""
    hot = [311, 7, 160, 42]
    system = up(vault=many, slots=SLOTS)
    wait_done(system)
    assert residents(ring_name) == list(range(BUDGET))  # the first boot: table order
    with smoe_mp.attach(ring_name) as ring:
        for times, expert in enumerate(hot, 1):
            for _ in range(times):
                ring.fetch(0, [expert]).release()
    down(ring_name)
    assert read_counts(file_of(many)) == {311: 1, 7: 2, 160: 3, 42: 4}

    system = up(vault=many, slots=SLOTS)
    assert f"popularity: {file_of(many)}" in system.lines
    status = wait_done(system)
    assert (status.done, status.goal) == (BUDGET, BUDGET)
    assert status.histogram == str(file_of(many))
    assert residents(ring_name) == sorted(set(range(BUDGET - 2)) | set(hot))
    counters = system.look().counters
    assert counters["guesses"] == BUDGET
    assert counters["pops_demand"] == 0  # by the speculative queue alone
    before = counters["reads"]
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, hot, timeout=0) as batch:
        assert batch.hits == len(hot)
        assert [x.raw.tobytes() for x in batch] == [bytes_of(many)[0, e] for e in hot]
        assert ring.stats()["reads"] == before
        assert ring.stats()["guess_hits"] == len(hot)
    assert system.look().ring.census["empty"] == SLOTS - BUDGET


def test_what_a_trained_model_learned_makes_the_next_runs_first_token_cheaper(
    up: Up, ring_name: str, tmp_path: Path
) -> None:
    """With routing that is real: half the experts fit, a quarter is loaded before the first token in either
    run; in the first boot in table order, then by what was learned, from another text for the most part."""
    vault = Path(shutil.copy(models.TINY / "tiny.smoe", tmp_path / "tiny.smoe"))
    costs = []
    for _ in range(2):
        system = up(vault=vault, slots=256)
        wait_done(system, 128)
        with smoe_mp.attach(ring_name) as ring, ring.busy():
            engine, before = Engine.open(models.TINY, ring), ring.stats()
            next(engine.generate(b"class ", 1))
            after = ring.stats()
            list(engine.generate(b"import unittest\n\n\ndef ", 60))
        costs.append(
            {
                "misses": after["client"]["misses"] - before["client"]["misses"],
                "reads": after["reads"] - before["reads"],
                "of what was loaded": after["client"]["guess_hits"] - before["client"]["guess_hits"],
            }
        )
        down(ring_name)
    cold, warm = costs
    assert warm["misses"] == warm["reads"] < cold["misses"] == cold["reads"]
    assert warm["of what was loaded"] - cold["of what was loaded"] == cold["misses"] - warm["misses"]


def test_the_most_popular_come_first(up: Up, ring_name: str, many: Path) -> None:
    """A minute a read: what is there when it is stopped early is the top of the list."""
    order = [300, 5, 299, 6]
    write_counts(many, {expert: 100 - at for at, expert in enumerate(order)})
    system = up(vault=many, slots=SLOTS, more="prewarm.trickle_ms = 60000\n")
    for at in range(1, len(order) + 1):
        until(lambda: len(residents(ring_name)) == at, f"{at} experts")  # noqa: B023
        assert residents(ring_name) == sorted(order[:at])
        system.ask(Prewarm(action="resume"))  # rings the bell: the next one without the minute's wait
    assert prewarm_of(system).trickle_ms == 60000


def test_what_is_resident_is_not_read_again(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS)
    wait_done(system)
    reads = system.look().counters["reads"]
    system.ask(Prewarm(action="run"))
    wait_done(system)
    with smoe_mp.attach(ring_name) as ring, ring.busy():
        wait_state(system, "resting: a client is busy")
    wait_done(system)
    assert system.look().counters["reads"] == reads == BUDGET


@pytest.mark.parametrize(("slots", "budget"), [(129, 1), (128, 0)])
def test_the_headroom(up: Up, ring_name: str, many: Path, slots: int, budget: int) -> None:
    system = up(vault=many, slots=slots)
    if budget:
        wait_done(system, budget)
    else:
        wait_state(system, "ring too small")
        assert "prewarm ring too small, 0 of 0" in " ".join(run("status", ring_name).stdout.split())
    assert residents(ring_name) == list(range(budget))
    assert system.look().counters["guesses"] == budget


def test_it_can_be_switched_off(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, more="prewarm.enabled = false\n")
    assert prewarm_of(system).state == "not running"
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, [9]).release()
        assert ring.stats()["census"]["ready"] + ring.stats()["census"]["consumed"] == 1
    down(ring_name)
    assert read_counts(file_of(many)) == {9: 1}  # the popularity is kept all the same


# --- what makes it rest ------------------------------------------------------------------------------------


def test_it_rests_while_a_client_is_busy(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, more="prewarm.trickle_ms = 60000\n")
    until(lambda: len(residents(ring_name)) == 1, "the first expert")
    with smoe_mp.attach(ring_name) as one, smoe_mp.attach(ring_name) as two:
        with one.busy():
            assert wait_state(system, "resting: a client is busy").busy_clients == [one.client_id]
            assert system.ask(Prewarm(action="trickle", trickle_ms=0)).trickle_ms == 0
            with two.busy(), two.busy():
                pass
            with one.busy():
                pass
            assert wait_state(system, "resting: a client is busy").busy_clients == [one.client_id]
            system.ask(Prewarm(action="run"))
            wait_state(system, "resting: a client is busy")
            assert residents(ring_name) == [0]
        assert wait_done(system).busy_clients == []
    assert residents(ring_name) == list(range(BUDGET))


def test_after_a_request_it_begins_anew(up: Up, ring_name: str, many: Path) -> None:
    """What the request made popular is loaded, and saved."""
    system = up(vault=many, slots=SLOTS)
    wait_done(system)
    with smoe_mp.attach(ring_name) as ring:
        with ring.busy():
            ring.fetch(0, [200]).release()
            for expert in range(100, 200):  # one by one: of a batch, what lands last is newest
                ring.fetch(0, [expert]).release()
            for start in (210, 260):  # 200 is the least recently used of these, and goes
                ring.fetch(0, range(start, start + 50)).release()
            wait_state(system, "resting: a client is busy")
            counts = dict.fromkeys((*range(100, 201), *range(210, 310)), 1)
        until(lambda: file_of(many).exists(), "the file")
        until(lambda: read_counts(file_of(many)) == counts, "the counts saved")
        wait_done(system)
        assert residents(ring_name)[:BUDGET] != list(range(BUDGET))
        assert set(range(100, 100 + BUDGET)) <= set(residents(ring_name))


BUSY = """
import sys, smoe_mp
ring = smoe_mp.attach(sys.argv[1])
with ring.busy():
    print("busy", flush=True)
    sys.stdin.read()
"""


def test_a_busy_client_that_is_killed_does_not_stop_it_for_ever(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, more="prewarm.trickle_ms = 60000\n")
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, ring_name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "busy\n"
        wait_state(system, "resting: a client is busy")
        system.ask(Prewarm(action="trickle", trickle_ms=0))
        client.kill()
    wait_done(system)
    assert prewarm_of(system).busy_clients == []


def test_pause_resume_run_and_trickle_by_command(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, more="prewarm.trickle_ms = 60000\n")
    until(lambda: len(residents(ring_name)) == 1, "the first expert")

    def prewarm(*words: str) -> str:
        done = run("prewarm", ring_name, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{ring_name}: prewarm is ")
        return done.stdout

    prewarm("pause")
    wait_state(system, "paused")
    prewarm("trickle", "--ms", "0")
    system.ask(Prewarm(action="run"))
    wait_state(system, "paused")
    assert residents(ring_name) == [0]
    prewarm("resume")
    wait_done(system)
    assert prewarm_of(system).trickle_ms == 0
    wrong = run("prewarm", ring_name, "trickle")
    assert wrong.returncode == 7
    assert "trickle takes trickle_ms" in wrong.stderr


def test_a_pause_does_not_outlive_the_system(up: Up, ring_name: str, many: Path) -> None:
    """The next supervisor begins as its configuration says, on an adopted ring too."""
    system = up(vault=many, slots=SLOTS)
    system.ask(Prewarm(action="pause"))
    wait_state(system, "paused")
    system.ask(Prewarm(action="trickle", trickle_ms=77))
    system.kill()
    system = up(vault=many, slots=SLOTS)
    assert any(line.startswith("ring: adopted") for line in system.lines)
    assert wait_done(system).trickle_ms == 4


# --- deaths ------------------------------------------------------------------------------------------------


def prewarm_pid(name: str, workers: list[int]) -> int:
    (pid,) = [pid for pid in pids_of(name) if pid not in workers]
    return pid


def test_it_is_started_again(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS)
    wait_done(system)
    workers = [row.pid for row in system.look().workers]
    first = prewarm_pid(ring_name, workers)
    os.kill(first, signal.SIGKILL)
    until(lambda: any(f"prewarm (pid {first}) was killed" in w for w in system.look().warnings), "the death")
    until(lambda: len(pids_of(ring_name)) == 3, "another")
    wait_done(system)
    assert prewarm_pid(ring_name, workers) != first
    assert [row.pid for row in system.look().workers] == workers
    assert system.look().health == "ok"
    down(ring_name)
    assert system.wait() == 0
    assert_nothing_left(ring_name)


def test_one_that_is_stopped_does_not_hinder_the_stop(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, workers=1)
    wait_done(system)
    pid = prewarm_pid(ring_name, [row.pid for row in system.look().workers])
    stop(pid)
    down(ring_name)
    assert system.wait() == 0
    assert_nothing_left(ring_name)


def test_a_pass_under_way_is_joined_at_the_stop(up: Up, ring_name: str, many: Path) -> None:
    """In the minute's sleep between two reads."""
    system = up(vault=many, slots=SLOTS, more="prewarm.trickle_ms = 60000\n")
    until(lambda: len(residents(ring_name)) == 1, "the first expert")
    assert prewarm_of(system).state == "running"
    down(ring_name)
    assert system.wait() == 0
    assert not [line for line in system.lines if "cannot be ended" in line]
    assert_nothing_left(ring_name)


def test_a_sigterm_after_its_end_touches_no_memory_of_the_ring(
    source: StampedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor stops the ring, at which prewarm ends by itself, and then sends the signal: a handler
    that came between detaching and the process's end wrote into memory that was somebody else's by then."""
    calls: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(prewarm_lib, name)

    prewarm_lib = prewarm.lib
    with serve(source, slots=4) as served:
        warmer = prewarm.Prewarmer(served.name, "", tmp_path / "h", bytes(16))
        served.segments.set_state("stopping")
        monkeypatch.setattr(prewarm, "lib", Watched())
        warmer.run()
        warmer.stop()
    assert "smoe_prewarm_set" in calls
    assert calls[-1] == "smoe_detach"


def test_the_supervisor_s_death_loses_nothing_that_was_saved(up: Up, ring_name: str, many: Path) -> None:
    """After a request prewarm saves; and an adopted ring has its counts still, which the next end saves."""
    system = up(vault=many, slots=SLOTS)
    with smoe_mp.attach(ring_name) as ring:
        with ring.busy():
            ring.fetch(0, [300]).release()
            wait_state(system, "resting: a client is busy")
        until(lambda: file_of(many).exists() and read_counts(file_of(many)) == {300: 1}, "the save")
        ring.fetch(0, [301]).release()  # no request: saved within a minute, or at the end
        system.kill(everything=True)
        assert read_counts(file_of(many))[300] == 1
        system = up(vault=many, slots=SLOTS)
        assert not [line for line in system.lines if line.startswith("popularity: ")]
        down(ring_name)
    assert read_counts(file_of(many)) == {300: 1, 301: 1}


def test_an_adopted_ring_s_counts_are_saved_after_the_next_request(
    up: Up, ring_name: str, many: Path
) -> None:
    """They changed before this prewarm process was there, and no more since."""
    system = up(vault=many, slots=SLOTS)
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, [301]).release()
        system.kill(everything=True)
        system = up(vault=many, slots=SLOTS)
        with ring.busy():
            wait_state(system, "resting: a client is busy")
        until(lambda: file_of(many).exists() and read_counts(file_of(many)) == {301: 1}, "the save")


# --- the file ----------------------------------------------------------------------------------------------


def test_the_original_s_own_file_is_imported(up: Up, ring_name: str, many: Path) -> None:
    theirs = write_counts(many, {250: 9}, many.parent / "expert_freq.bin")
    before = theirs.read_bytes()
    system = up(vault=many, slots=SLOTS)
    wait_done(system)
    assert residents(ring_name) == [*range(BUDGET - 1), 250]
    down(ring_name)
    assert theirs.read_bytes() == before
    assert read_counts(file_of(many)) == {250: 9}


def another_model(path: Path) -> bytes:
    histogram.save(path, b"x" * 16, [(0, 1)], [5])
    return path.read_bytes()


def test_a_file_that_is_damaged_or_foreign_is_set_aside(up: Up, ring_name: str, many: Path) -> None:
    path = file_of(many)
    good = write_counts(many, {1: 1}).read_bytes()
    for at, raw in enumerate((good[:100_000], another_model(path))):
        path.write_bytes(raw)
        system = up(vault=many, slots=SLOTS)
        (warning,) = [w for w in system.look().warnings if w.startswith(f"histogram {path}: ")]
        bad = path.name + ".bad" + (f".{at}" if at else "")
        assert f"set aside as {bad}; starting cold" in warning
        assert path.with_name(bad).read_bytes() == raw
        assert not path.exists()
        down(ring_name)
        assert read_counts(path) == {}


def test_a_configured_place(up: Up, ring_name: str, many: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    system = up(vault=many, slots=SLOTS, more='prewarm.histogram = "state/mine.bin"\n')
    assert prewarm_of(system).histogram == str(tmp_path / "state/mine.bin")
    with smoe_mp.attach(ring_name) as ring:
        ring.fetch(0, [3]).release()
    down(ring_name)
    assert read_counts(tmp_path / "state/mine.bin") == {3: 1}
    assert not file_of(many).exists()


def assert_unsaved_is_a_warning(system: System, name: str, reason: str) -> None:
    with smoe_mp.attach(name) as ring:
        for _ in range(2):
            with ring.busy():
                ring.fetch(0, [3]).release()
                wait_state(system, "resting: a client is busy")
            until(lambda: prewarm_of(system).state != "resting: a client is busy", "the end")
        until(lambda: any("not saved" in w for w in system.look().warnings), "the warning")
    warnings = [w for w in system.look().warnings if "not saved" in w]
    assert len(warnings) == 1  # once, not each time
    assert warnings[0].startswith("prewarm: histogram ")
    assert reason in warnings[0]
    assert system.look().health == "ok"
    down(name)
    assert system.wait() == 0
    assert any(reason in line for line in system.lines if line.startswith("warning: histogram "))


def test_a_folder_that_is_not_there_is_a_warning(up: Up, ring_name: str, many: Path) -> None:
    system = up(vault=many, slots=SLOTS, more='prewarm.histogram = "none/mine.bin"\n')
    assert_unsaved_is_a_warning(system, ring_name, "No such file or directory")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system without room for the file."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root and mount")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.root
def test_a_full_file_system_is_a_warning(up: Up, ring_name: str, many: Path, mounted: Path) -> None:
    system = up(vault=many, slots=SLOTS, more='prewarm.histogram = "small/mine.bin"\n')
    assert_unsaved_is_a_warning(system, ring_name, "No space left on device")
    assert list(mounted.iterdir()) == []


READ_ONLY = """
import os, signal, subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from systems import System, smoe_mp
import smoe_mp as package
folder = Path(sys.argv[3])
system = System(sys.argv[4], folder / "c.toml", (), folder / "stderr")
with package.attach(sys.argv[4]) as ring:
    ring.fetch(0, [3]).release()
print(system.look().prewarm.histogram)
assert smoe_mp("down", sys.argv[4]).returncode == 0
assert system.wait() == 0
assert not [line for line in system.lines if "not saved" in line], system.lines
"""


@pytest.mark.root
def test_a_read_only_vault_s_popularity_lies_in_the_state_folder(
    ring_name: str, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare, to mount a folder read-only")
    models = tmp_path / "models"
    models.mkdir()
    vault = many.rename(models / "many.smoe")
    write_config(tmp_path / "c.toml", ring_name, vault, SLOTS, 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    mount = f'mount --bind -o ro "{models}" "{models}" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", READ_ONLY]
    done = subprocess.run(
        [*command, HERE / "process", HERE, tmp_path, ring_name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"no read-only mount to be had: {done.stderr.strip()}")
    assert done.returncode == 0, (done.stdout, done.stderr)
    path = Path(done.stdout.strip())
    model = histogram.fingerprint(open_source(vault))
    assert path == tmp_path / "state/smoe-mp" / f"{model.hex()}.expert_freq.bin"
    assert read_counts(path) == {3: 1}
    assert not file_of(vault).exists()
