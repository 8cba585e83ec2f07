"""Build the sdist and a wheel of it, and try both in a clean environment of every Python that is here.

    python tools/wheels.py [--out FOLDER] [--python PROGRAM]... [--made]

The sdist is built from this tree and the wheel from the sdist, each in isolation, so both fetch what they
need.  The wheel is held against the stable ABI (abi3audit) and given the manylinux tag that its symbols allow
(auditwheel): with this machine's compiler and C library, so the tag is for systems as new as this one;
`[tool.cibuildwheel]` makes the one for older ones.

Then, for each Python, the wheel and, apart from it, the sdist are installed into a new environment with all
that they depend on; the small model writes with each, and with the wheel tests are run from a copy of tests/
that lies outside of this tree.  --made: try what FOLDER holds already, as in a chroot of another system.

Pythons: --python, else each python3.N from 3.11 on that PATH or ~/.pyenv has.  Ends with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    f"tests/{name}.py" for name in ("process/test_typed_views", "unit/test_platforms", "unit/test_version")
]
NOT = "not of_this_tree"  # those look at files that are not installed
NEEDED = ["pytest>=8", "pytest-timeout", "hypothesis", "safetensors", "gguf"]


def run(*argv: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a program; SystemExit with what it said if it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words, env = list(map(str, argv)), clean | (env or {})
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def pip(python: Path, *argv: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *argv, cwd=cwd)


def environment(folder: Path, python: str | Path) -> Path:
    """A new virtual environment; its interpreter."""
    run(python, "-m", "venv", "--clear", folder, cwd=folder.parent)
    return folder / "bin/python"


def extra(name: str) -> list[str]:
    """What pyproject.toml says that the extra NAME needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"][name])


def clear(out: Path) -> None:
    """Remove what an earlier run made in `out`; SystemExit where anything else is in it."""
    made = list(out.iterdir()) if out.exists() else []
    if others := sorted(p.name for p in made if not re.fullmatch(r"dist|plain|tools|try-[0-9].*", p.name)):
        raise SystemExit(f"--out {out}: {others[0]} in it was not made here: name a new or an empty folder")
    for path in made:
        shutil.rmtree(path)


def build(out: Path) -> None:
    """sdist, wheel, and the wheel with its tag, into out/dist."""
    python = environment(out / "tools", sys.executable)
    pip(python, *extra("release"), cwd=out)
    run(python, "-m", "build", "-o", out / "plain", ROOT, cwd=out)
    (wheel,) = (out / "plain").glob("*.whl")
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    print(run(python.parent / "abi3audit", "--strict", "--summary", wheel, cwd=out).strip())
    run(python.parent / "auditwheel", "repair", "-w", out / "dist", wheel, cwd=out, env=path)
    (sdist,) = (out / "plain").glob("*.tar.gz")
    shutil.copy(sdist, out / "dist")


def pythons() -> list[str]:
    """One interpreter of each minor version from 3.11 on, the newest of it."""
    found: dict[tuple[int, ...], str] = {}
    places = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for place in places:
        for path in Path(place).glob("python3.[0-9][0-9]"):
            ask = [str(path), "-c", "import ensurepip, sys, venv; print(*sys.version_info[:3])"]
            done = subprocess.run(ask, capture_output=True, text=True, check=False)
            if done.returncode == 0 and (version := tuple(map(int, done.stdout.split()))) >= (3, 11):
                found.setdefault(version, str(path))
    return [found[v] for v in sorted({v[:2]: v for v in sorted(found)}.values())]


def attempt(out: Path, python: str) -> None:
    """Wheel and sdist in environments of this Python."""
    version = run(python, "-V", cwd=out).split()[1]
    home = out / f"try-{version}"
    shutil.rmtree(home, ignore_errors=True)
    (home / "tree").mkdir(parents=True)
    shutil.copytree(ROOT / "tests", home / "tree/tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", home / "tree")
    if (ROOT.parent / "shared").is_dir():
        (home / "shared").symlink_to((ROOT.parent / "shared").resolve())
    for kind, pattern in (("wheel", "*.whl"), ("sdist", "*.tar.gz")):
        (made,) = (out / "dist").glob(pattern)
        own = environment(home / kind, python)
        pip(own, made, cwd=home)
        said = run(own.parent / "smoe-mp", "--version", cwd=home).strip()
        run(own.parent / "smoe-mp", "demo", "--tokens", "3", cwd=home)  # fails where a logit differs
        print(f"Python {version}: {made.name}: {said}: the demo's logits are identical", flush=True)
    wheel = home / "wheel/bin/python"
    pip(wheel, *NEEDED, cwd=home)
    tail = run(wheel, "-m", "pytest", "-q", "-k", NOT, *TESTS, cwd=home / "tree").strip().splitlines()[-1]
    print(f"Python {version}: tests with the wheel: {tail.strip('= ')}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/wheels", help="folder for all that is made")
    parser.add_argument("--python", action="append", help="an interpreter to try; more than one may be given")
    parser.add_argument("--made", action="store_true", help="build nothing")
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    if not asked.made:
        clear(out)
        (out / "dist").mkdir(parents=True)
        build(out)
    failed = False
    for python in asked.python or pythons():
        began = time.monotonic()
        try:
            attempt(out, python)
        except SystemExit as error:
            failed = True
            print(f"{python}: {error}", file=sys.stderr)
        print(f"{python}: {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
