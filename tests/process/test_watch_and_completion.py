"""`status --watch` on a real system, and what shells complete where one runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from systems import LIMIT_S, Up, smoe_mp

SCRIPT = Path(sys.executable).parent / "smoe-mp"

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


def test_watch_until_the_system_ends(up: Up, ring_name: str) -> None:
    up()
    watching = subprocess.Popen(
        [sys.executable, "-m", "smoe_mp", "status", ring_name, "--json", "--watch", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
    assert first["name"] == second["name"] == ring_name
    assert second["uptime_s"] > first["uptime_s"]
    assert second["control"]["requests"] > first["control"]["requests"]
    assert smoe_mp("down", ring_name).returncode == 0
    _, error = watching.communicate(timeout=LIMIT_S)
    assert watching.returncode == 7
    (line,) = error.splitlines()
    assert line.startswith(f"smoe-mp: error: no system serves the ring {ring_name!r}")


def completed(shell: str, line: str) -> list[str]:
    """The words that `shell` is offered behind `line`."""
    words = line.split(" ")
    how = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [SCRIPT],
        env={**os.environ, **how, "_SMOE_MP_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.replace('"', " ").split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_of_running_systems(up: Up, ring_name: str, shell: str) -> None:
    up()
    assert ring_name in completed(shell, f"smoe-mp status {ring_name[:4]}")
    assert ring_name not in completed(shell, "smoe-mp status x")
    if shell == "bash":  # the others go the same way from here on
        for words in ("down", "workers", "prewarm", "trace record", "run --ring"):
            assert ring_name in completed(shell, f"smoe-mp {words} {ring_name[:4]}"), words
        assert completed(shell, "smoe-mp stat") == ["status"]
        assert completed(shell, f"smoe-mp prewarm {ring_name} pa") == ["pause"]


def test_a_system_of_another_folder_is_not_offered(
    up: Up, ring_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its ring lies in shared memory, but no command reaches it."""
    up()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SMOE_RUNTIME_DIR", str(tmp_path / "none"))
        assert ring_name not in completed("bash", "smoe-mp status t")
        elsewhere.setenv("SMOE_RUNTIME_DIR", "/tmp/" + "x" * 200)  # too deep for a socket
        assert ring_name not in completed("bash", "smoe-mp status t")
