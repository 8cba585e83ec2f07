"""`smoe-mp up`, `status` and `down` as real processes: each way to end leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import LIMIT_S, until
from systems import (
    Up,
    assert_nothing_left,
    processes_of,
    segments_of,
    wait_ended,
    watched,
    write_config,
)
from systems import smoe_mp_process as smoe_mp

from smoe_mp import runtime
from smoe_mp.sources import open_source


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, less its prefix."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("smoe-mp: error: "), line
    return line.removeprefix("smoe-mp: error: ")


def test_one_line_a_step(up: Up, vault: Path, ring_name: str) -> None:
    system = up()
    starts = [line.split(": ", 1)[0] for line in system.lines]
    assert [start for start in starts if start != "warning"] == [
        "vault",
        "reads",
        "size",
        "ring",
        "workers",
        "control",
        "ready",
    ] or "reads" not in starts  # no direct reads here: a warning stands in its place
    assert f"{vault}: smoe, 24 experts in 3 layers" in system.lines[0]
    assert any(line.startswith("size: 16 slots x ") for line in system.lines)
    assert any(line.startswith("ring: 16 slots x ") for line in system.lines)
    assert "workers: 2 ready" in system.lines
    assert system.lines[-1] == f'ready: attach with smoe_mp.attach("{ring_name}")'
    assert len(segments_of(ring_name)) == 2
    if sys.platform == "linux":
        until(lambda: len(processes_of(ring_name)) == 3, "2 workers and the prewarm process")


def test_status_json(up: Up, vault: Path, ring_name: str) -> None:
    system = up(flags=("--workers", "3", "--ring", "12"))
    status = system.status()
    assert (status["name"], status["pid"], status["state"]) == (ring_name, system.process.pid, "live")
    assert status["vault"] == {
        "path": str(vault),
        "format": "smoe",
        "experts": 24,
        "bytes": vault.stat().st_size,
        "verify": False,
        "checksums": 0,
    }
    assert [file["path"] for file in status["files"]] == [str(vault)]
    assert status["files"][0]["mode"] in ("direct", "buffered", "bounce", "memory")
    ring = status["ring"]
    assert ring["slots"] == 12
    assert ring["slot_bytes"] * 12 == ring["data_bytes"]
    assert ring["pages"]
    assert status["hit_rate"] is None
    workers = status["workers"]
    assert [(w["id"], w["alive"], w["slot"]) for w in workers] == [(i, True, None) for i in range(3)]
    assert len({w["pid"] for w in workers} | {system.process.pid}) == 4
    assert status["clients"] == []
    origins = {row["key"]: (row["value"], row["origin"]) for row in status["config"]}
    assert origins["workers.count"] == (3, "--workers")
    assert origins["ring.slots"] == (12, "--ring")
    assert origins["vault.path"] == (str(vault), "file")
    assert origins["vault.direct"] == ("auto", "default")


def test_status_for_people(up: Up, ring_name: str) -> None:
    up()
    done = smoe_mp("status", ring_name)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert f"{ring_name}: live" in done.stdout
    assert "no demand yet" in done.stdout


def test_socket_and_folder_are_private(up: Up, ring_name: str, runtime_dir: Path) -> None:
    up()
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(runtime.socket_path(ring_name).stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_in_order(up: Up, number: signal.Signals, ring_name: str) -> None:
    system = up()
    system.signal(number)
    assert system.wait() == 0
    assert f"stopping: {number.name}" in system.lines
    assert system.lines[-1] == f"stopped: ring {ring_name} removed"
    assert system.errors() == ""
    assert_nothing_left(ring_name)


def test_a_second_signal_does_no_harm(up: Up, ring_name: str) -> None:
    system = up()
    while system.process.poll() is None:  # many more than two, at any moment of the stop
        system.signal(signal.SIGTERM)
    assert system.wait() == 0
    assert system.errors() == ""
    assert_nothing_left(ring_name)


def test_workers_told_to_end_together_with_the_supervisor(up: Up, ring_name: str) -> None:
    """A service manager signals every process at once; that is a stop, not a dead worker."""
    system = up()
    workers = [row["pid"] for row in system.status()["workers"]]
    for pid in (*workers, system.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert system.wait() == 0
    assert_nothing_left(ring_name)


def test_down(up: Up, ring_name: str) -> None:
    system = up()
    done = smoe_mp("down", ring_name)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{ring_name}: stopped after ")
    assert_nothing_left(ring_name)
    assert system.wait() == 0
    assert "stopping: asked to by the control plane" in system.lines
    again = smoe_mp("down", ring_name)
    assert again.returncode == 4
    assert f"no system serves the ring {ring_name!r}" in error_of(again)


def test_a_second_up_is_refused_and_the_first_unharmed(up: Up, ring_name: str) -> None:
    first = up()
    second = smoe_mp("up", first.config)
    assert second.returncode == 4
    assert ring_name in error_of(second)
    assert first.status()["pid"] == first.process.pid
    assert len(segments_of(ring_name)) == 2


def test_two_systems_side_by_side(up: Up, ring_name: str) -> None:
    first, second = up(), up(name=ring_name + "b")
    assert smoe_mp("down", ring_name).returncode == 0
    assert second.status()["state"] == "live"
    assert first.wait() == 0


def test_two_signals_to_the_process_group(vault: Path, ring_name: str, tmp_path: Path) -> None:
    """Field report 26: the second signal cut the clean-up."""
    config = write_config(tmp_path / "c.toml", ring_name, vault, 16, 2)
    command = [sys.executable, "-m", "smoe_mp", "up", str(config)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready: "):
                break
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == f"stopped: ring {ring_name} removed"
    assert_nothing_left(ring_name)


def test_workers_that_cannot_open_the_vault_end_it(vault: Path, ring_name: str, tmp_path: Path) -> None:
    """A death at the start is no reason to try again for ever."""
    config = write_config(tmp_path / "c.toml", ring_name, vault, 16, 2)
    command = [sys.executable, "-m", "smoe_mp", "up", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = False
        for line in process.stdout:
            if line.startswith("size: "):
                vault.rename(tmp_path / "away.smoe")
            elif line.startswith("ready: "):  # the workers were quicker
                ready = True
                process.terminate()
        err = process.stderr.read()
    if not ready:
        assert process.returncode == 1
        assert err.startswith("smoe-mp: error: worker ")
        assert "No such file" in err
    assert_nothing_left(ring_name)


def test_workers_end_when_the_supervisor_is_killed(up: Up, ring_name: str) -> None:
    system = up()
    children = watched(row.pid for row in system.look().workers)
    system.signal(signal.SIGKILL)
    assert system.wait() == -signal.SIGKILL
    wait_ended(children)
    status = smoe_mp("status", ring_name)
    assert status.returncode == 4
    assert "no system serves" in error_of(status)
    next_one = up()  # takes over the name, the socket file and the segments that were left
    assert next_one.look().pid == next_one.process.pid


def test_a_stop_during_the_start(vault: Path, ring_name: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.toml", ring_name, vault, 16, 64)
    command = [sys.executable, "-m", "smoe_mp", "up", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("ring: "):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=LIMIT_S)
    if "ready" not in out:  # else it was quicker than the signal
        assert err == "smoe-mp: error: stopped before it was ready: SIGTERM\n"
        assert process.returncode == 1
    assert_nothing_left(ring_name)


def test_a_reader_of_the_lines_that_goes_away(up: Up, ring_name: str) -> None:
    system = up()
    assert system.process.stdout is not None
    system.process.stdout.close()
    assert smoe_mp("down", ring_name).returncode == 0
    assert system.process.wait(LIMIT_S) == 0
    assert system.errors() == ""


def refused(config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    done = smoe_mp("up", config, *flags)
    assert done.returncode != 0
    assert "ready: attach" not in done.stdout
    return done


def test_misspelt_key(vault: Path, ring_name: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.toml", ring_name, vault, 16, 2)
    config.write_text(config.read_text().replace("workers.count", "workers.cuont"))
    done = refused(config)
    assert (done.returncode, done.stdout) == (2, "")
    assert error_of(done) == f"{config}: unknown key workers.cuont; the nearest known one is workers.count"


def test_a_name_of_31_characters(vault: Path, runtime_dir: Path, tmp_path: Path) -> None:
    name = "n" * 31
    done = refused(write_config(tmp_path / "c.toml", name, vault, 16, 2))
    assert (done.returncode, done.stdout) == (2, "")
    assert "31" in error_of(done)
    assert "22" in error_of(done)
    assert not list(runtime_dir.iterdir())


def test_no_vault_and_a_damaged_one(vault: Path, ring_name: str, tmp_path: Path) -> None:
    missing = write_config(tmp_path / "missing.toml", ring_name, tmp_path / "none.smoe", 16, 2)
    done = refused(missing)
    assert done.returncode == 3
    assert "none.smoe" in error_of(done)
    bad = tmp_path / "bad.smoe"
    bad.write_bytes(vault.read_bytes()[:5000])
    done = refused(write_config(tmp_path / "bad.toml", ring_name, bad, 16, 2))
    assert done.returncode == 3
    assert "bad.smoe" in error_of(done)


def test_the_least_ring(up: Up, vault: Path, ring_name: str, tmp_path: Path) -> None:
    top_k = open_source(vault).model.top_k
    config = write_config(tmp_path / "c.toml", ring_name, vault, top_k, 2)
    if top_k:
        done = refused(config)
        assert done.returncode == 2
        assert f"needs {top_k + 1} slots" in error_of(done)
        system = up(slots=top_k + 1)
        (warning,) = [line for line in system.lines if "MoE layers" in line]
        assert f"3 MoE layers x top-k {top_k} = {3 * top_k}" in warning
        assert warning.removeprefix("warning: ") in system.status()["warnings"]


def test_direct_required_where_it_is_refused(vault: Path, ring_name: str, tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("/dev/shm: no memory-backed file system here")
    copy = memory / f"{ring_name}.smoe"
    copy.write_bytes(vault.read_bytes())
    try:
        config = write_config(tmp_path / "c.toml", ring_name, copy, 16, 2)
        config.write_text(config.read_text() + 'vault.direct = "require"\n')
        done = refused(config)
    finally:
        copy.unlink()
    assert done.returncode == 2
    assert str(copy) in error_of(done)
    assert "tmpfs" in error_of(done)


def test_an_open_runtime_folder(vault: Path, ring_name: str, runtime_dir: Path, tmp_path: Path) -> None:
    runtime_dir.chmod(0o755)
    done = refused(write_config(tmp_path / "c.toml", ring_name, vault, 16, 2))
    runtime_dir.chmod(0o700)
    assert done.returncode == 2
    assert "mode 0755" in error_of(done)


def test_a_control_socket_served_by_another(vault: Path, ring_name: str, up: Up, tmp_path: Path) -> None:
    """The segments were removed by hand, their supervisor lives: its socket is not taken from it."""
    first = up()
    for segment in segments_of(ring_name):
        (Path("/dev/shm") / segment.lstrip("/")).unlink()
    done = refused(first.config)
    assert done.returncode == 7
    assert "another process serves it" in error_of(done)
    assert smoe_mp("status", ring_name).returncode == 0


# --- sizing ----------------------------------------------------------------------------------------------


def test_automatic_slots_are_what_size_says(up: Up, vault: Path, ring_name: str, tmp_path: Path) -> None:
    system = up(slots=0)
    done = smoe_mp("size", system.config, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    size = json.loads(done.stdout)
    ring = system.look().ring
    assert (ring.slots, ring.slot_bytes, ring.data_bytes) == (
        size["slots"],
        size["slot_bytes"],
        size["data_bytes"],
    )
    assert ring.slots == 24  # no more than the vault has
    assert not size["given"]
    (line,) = [line for line in system.lines if line.startswith("size: ")]
    assert line.startswith("size: 24 slots x ")
    assert "no more than the vault's 24 experts" in line
    people = smoe_mp("size", system.config, "--ring", "12")
    assert people.returncode == 0
    assert people.stdout.startswith("12 slots x ")


def test_a_ring_that_does_not_fit_is_refused_with_figures(
    vault: Path, ring_name: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.toml", ring_name, vault, 65535, 2)
    done = refused(config, "--slot-mb", "1024")
    assert done.returncode == 5
    text = error_of(done)
    assert "ring of 65535 slots (as given): 65535 x 1 GiB" in text
    assert "give at most slots = " in text
    assert_nothing_left(ring_name)
    again = smoe_mp("size", config, "--slot-mb", "1024")
    assert (again.returncode, again.stdout) == (5, "")
    assert error_of(again).startswith("ring of 65535 slots (as given): 65535 x 1 GiB")


def test_many_commands_at_once(up: Up, ring_name: str) -> None:
    up()
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(smoe_mp("status", ring_name, "--json").returncode))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 6
