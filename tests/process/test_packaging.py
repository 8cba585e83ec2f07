"""The sdist and the wheel made from it: what an installed smoe-mp consists of, and that it streams.

The environment it is installed into is new; what smoe-mp depends on is lent from this one by a path file,
which does not bring this one's editable smoe-mp along.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
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
    (found,) = out.glob("*.whl")
    return found


def test_the_sdist_has_what_building_and_testing_needs_and_no_more(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "LICENSE",
        "Makefile",
        ".ci/torch.txt",
        "csrc/CMakeLists.txt",
        "csrc/install/smoe.pc.in",
        "configs/reference.toml",
        "docs/release.md",
        "smoe_mp/tiny/tiny.smoe",
        "tests/c/testring.c",
        "tests/support.py",
    ):
        assert name in names
    allowed = {".ci", ".clang-format", "configs", "csrc", "docs", "smoe_mp", "tests", "tools"}
    files = {"LICENSE", "Makefile", "PKG-INFO", "README.md", "pyproject.toml"}
    assert {name.partition("/")[0] for name in names} <= allowed | files
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o", ".a"))]


def test_the_wheel_is_abi3_and_holds_all_parts(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    members = {member.filename: member for member in zipfile.ZipFile(wheel).infolist()}
    names = set(members)
    for name in (
        "_smoe.abi3.so",
        "_held.abi3.so",
        "smoe-worker",
        "smoe-bench",
        "capi/include/smoe.h",
        "capi/lib/libsmoe.so",
        "capi/lib/pkgconfig/smoe.pc",
        "capi/lib/cmake/smoe/smoe-config.cmake",
        "py.typed",
        "configs/demo.toml",
        "configs/reference.toml",
        "tiny/tiny.smoe",
        "tiny/tiny.scout.safetensors",
        "tiny/config.json",
        "tiny/NOTICE",
        "tiny/traces/library.trace",
    ):
        assert f"smoe_mp/{name}" in names
    for program in ("smoe-worker", "smoe-bench"):
        assert members[f"smoe_mp/{program}"].external_attr >> 16 & 0o111 == 0o111
    licences = {name.partition(".dist-info/licenses/")[2] for name in names}
    assert {"LICENSE", "smoe_mp/tiny/NOTICE", "smoe_mp/tiny/PSF-LICENSE.txt"} <= licences
    assert not [n for n in names if n.startswith(("tests/", "csrc/"))]


def test_every_program_says_what_it_is_for(wheel: Path, tmp_path: Path) -> None:
    """Each needs libc, also a module that calls nothing of it: the tag of a release is found by that."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf here")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    binaries = [p for p in tmp_path.rglob("*") if p.is_file() and p.open("rb").read(4) == b"\x7fELF"]
    assert len(binaries) == 5
    for path in binaries:
        assert "Shared library: [libc.so" in run("readelf", "-d", path), path.name


def test_an_installed_wheel_streams(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lent = [place for place in sys.path if place.endswith("site-packages")]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
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
