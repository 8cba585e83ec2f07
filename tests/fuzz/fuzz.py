"""Fuzz one target after the other, FUZZ_SECONDS each: what `make fuzz` does.

    python tests/fuzz/fuzz.py [--keep] [TARGET ...]

The C targets (tests/fuzz/c) are libFuzzer's, with AddressSanitizer and UndefinedBehaviorSanitizer, and need
clang; they begin with the inputs in corpus/ and found/, and what they come upon is gathered in build/fuzz.
The Python ones are the tests beside this file, by time.  A find of a C target lies in found/TARGET from then
on, where `make asan` runs it; of a Python one the output says seed or file.  --keep: put what the C targets
came upon into corpus/, as few inputs as have its coverage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build/fuzz"
SHM = Path("/dev/shm")
C_TARGETS = ("ring", "attach", "trace", "dequant", "bytes")
#: Tests by time, in each file: they share the file's time.
PYTHON_TARGETS = {"control": 1, "gguf": 2, "smoe": 1, "sources": 8}
INPUT_BYTES = {"ring": 768, "attach": 768, "trace": 768, "dequant": 2048, "bytes": 4096}


def clang() -> str | None:
    """The newest clang there is that has libFuzzer and the sanitizers beside it."""
    program = "int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }"
    flags = ["-fsanitize=fuzzer,address,undefined", "-x", "c", "-", "-o", os.devnull]
    for name in (*(f"clang-{n}" for n in range(30, 13, -1)), "clang"):
        if path := shutil.which(name):
            done = subprocess.run([path, *flags], input=program, text=True, capture_output=True, check=False)
            if done.returncode == 0:
                return path
    return None


def build(compiler: str) -> None:
    """The C targets, into build/fuzz."""
    flags = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_C_COMPILER={compiler}", "-DSMOE_FUZZ=ON"]
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(BUILD), *flags],
        ["cmake", "--build", str(BUILD), "-j2", "--target", *(f"fuzz_{name}" for name in C_TARGETS)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def folders(name: str) -> tuple[Path, list[Path]]:
    """What a C target gathers, and what it begins with."""
    kept = [HERE / "corpus" / name, HERE / "found" / name]
    gathered = BUILD / "gathered" / name
    for folder in (gathered, *kept):
        folder.mkdir(parents=True, exist_ok=True)
    return gathered, kept


def libfuzzer(name: str, flags: list[str], inputs: list[Path], say: bool = True) -> int:
    """Run a C target in a folder of its own; its exit status."""
    program = [str(BUILD / "fuzz" / f"fuzz_{name}"), *flags, *map(str, inputs)]
    with tempfile.TemporaryDirectory(prefix="smoe-fuzz-") as folder:
        running = subprocess.Popen(
            program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert running.stdout is not None
        spoken = time.monotonic()
        for line in running.stdout:
            progress = re.match(r"#\d+\t(NEW|REDUCE|pulse|RELOAD)|\s*(NEW_FUNC|\"|#####)", line)
            if say and (not progress or time.monotonic() - spoken > 15):
                spoken = time.monotonic()
                print(f"  {line.rstrip()}", flush=True)
        status = running.wait()
    for left in SHM.glob(f"smoe.ct-{running.pid}-*"):  # of one that crashed
        left.unlink()
    return status


def fuzz_c(name: str, seconds: float) -> bool:
    """Whether nothing was found."""
    gathered, kept = folders(name)
    found = HERE / "found" / name
    before = set(found.iterdir())
    flags = [f"-max_total_time={max(1, int(seconds))}", f"-artifact_prefix={found}/", "-len_control=0"]
    flags += [f"-max_len={INPUT_BYTES[name]}", "-timeout=25", "-print_final_stats=1"]
    status = libfuzzer(name, flags, [gathered, *kept])
    for path in sorted(set(found.iterdir()) - before):
        print(f"fuzz_{name}: FOUND {path}\n  once more: {BUILD / 'fuzz' / f'fuzz_{name}'} {path}", flush=True)
    return status == 0


def keep(name: str) -> None:
    """Put the fewest inputs that have all coverage into corpus/."""
    gathered, (corpus, _) = folders(name)
    with tempfile.TemporaryDirectory(prefix="smoe-fuzz-") as folder:
        libfuzzer(
            name, ["-merge=1", f"-max_len={INPUT_BYTES[name]}"], [Path(folder), corpus, gathered], False
        )
        merged = list(Path(folder).iterdir())
        for old in corpus.iterdir():
            old.unlink()
        for path in merged:
            shutil.copy(path, corpus / path.name[:16])
    total = sum(path.stat().st_size for path in corpus.iterdir())
    print(f"fuzz_{name}: {len(merged)} inputs kept, {total} bytes", flush=True)


def fuzz_python(name: str, seconds: float) -> bool:
    """Whether nothing was found."""
    environment = {**os.environ, "FUZZ_SECONDS": f"{seconds / PYTHON_TARGETS[name]:g}"}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", str(HERE / f"test_fuzz_{name}.py")]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join((*C_TARGETS, *PYTHON_TARGETS)))
    given = parser.parse_args()
    seconds, failed = float(os.environ.get("FUZZ_SECONDS") or 600), []
    targets = given.targets or [*C_TARGETS, *PYTHON_TARGETS]
    if unknown := set(targets) - {*C_TARGETS, *PYTHON_TARGETS}:
        parser.error(f"no target {', '.join(sorted(unknown))}")
    if any(name in C_TARGETS for name in targets):
        compiler = clang()
        if compiler is None:
            print(
                "note: no clang with libFuzzer here (apt-get install clang-19 libclang-rt-19-dev):"
                " the C targets are not fuzzed",
                flush=True,
            )
            targets = [name for name in targets if name not in C_TARGETS]
        else:
            build(compiler)
    for name in targets:
        print(f"{name}: {seconds:g} s", flush=True)
        if not (fuzz_c if name in C_TARGETS else fuzz_python)(name, seconds):
            failed.append(name)
    for name in targets if given.keep else ():
        if name in C_TARGETS:
            keep(name)
    if failed:
        print(f"found something: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
