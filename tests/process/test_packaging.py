"""The sdist and the wheel made from it: what an installed smoe-mp consists of, and that it streams.

The environment it is installed into is new; what smoe-mp depends on is lent from this one by a path file,
which does not bring this one's editable smoe-mp along.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import numpy as np, pathlib, smoe_mp
from smoe_mp import segments, vault_writer
assert smoe_mp.__file__.startswith({home!r}), smoe_mp.__file__
assert str(segments.worker_program()).startswith({home!r})
assert segments.installed("configs/demo.toml").exists()
"""


def run(*argv: object, **more: object) -> str:
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist built from this tree."""
    pytest.importorskip("build", reason="needs the package build")
    out = tmp_path_factory.mktemp("dist")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, ROOT, env={**os.environ, "PATH": path})
    assert len(list(out.glob("*.tar.gz"))) == 1
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_is_abi3_and_holds_module_worker_and_configs(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "_smoe.abi3.so",
        "_held.abi3.so",
        "smoe-worker",
        "py.typed",
        "configs/demo.toml",
        "configs/reference.toml",
        "tiny/tiny.smoe",
        "tiny/tiny.scout.safetensors",
        "tiny/config.json",
        "tiny/NOTICE",
    ):
        assert f"smoe_mp/{name}" in names
    assert not [n for n in names if n.startswith(("tests/", "csrc/"))]


def test_an_installed_wheel_streams(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    run(python, "-c", SCRIPT.format(home=str(home)), cwd=tmp_path)
    env = {**os.environ, "SMOE_RUNTIME_DIR": str(tmp_path / "run")}
    shown = run(
        home / "bin" / "smoe-mp",
        "demo",
        "--tokens",
        3,
        env=env,
        cwd=tmp_path,
    )
    assert "identical" in shown
    assert "NOT identical" not in shown
