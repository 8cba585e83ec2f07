"""The C API as an engine without Python has it: flags, headers, symbols, and the examples on a live ring."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from systems import Up, bytes_of

from smoe_mp.segments import installed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"
HEADER = ROOT / "csrc/smoe.h"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
COMPILERS = {"c": ["cc", "-std=c11"], "cpp": ["c++", "-std=c++17"]}


def run(*argv: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def cflags(*which: str) -> list[str]:
    return shlex.split(run(sys.executable, "-m", "smoe_mp.cflags", *which).stdout)


def compiler(language: str) -> list[str]:
    if shutil.which(COMPILERS[language][0]) is None:
        pytest.skip(f"no compiler {COMPILERS[language][0]} here")
    return COMPILERS[language]


@pytest.fixture(scope="module", params=["c", "cpp"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled with warnings as errors."""
    language = request.param
    out: Path = tmp_path_factory.mktemp(language) / "engine"
    run(*compiler(language), *STRICT, EXAMPLES / f"engine.{language}", "-o", out, *cflags())
    return out


def test_the_examples_are_short() -> None:
    for name in ("engine.c", "engine.cpp"):
        assert (EXAMPLES / name).read_text().count("\n") < 100


def test_an_engine_on_a_live_ring(engine: Path, up: Up, ring_name: str, vault: Path) -> None:
    system = up(slots=24, more="prewarm.enabled = false\n")
    wanted = {pair: sum(raw) for pair, raw in bytes_of(vault).items()}
    for hits in (0, 3):
        out = run(engine, ring_name, "1", "2", "7", "5").stdout
        assert f"{hits} of 3 were there" in out
        seen = dict(re.findall(r"expert (\d+): (\d+)", out))
        assert {int(e): int(n) for e, n in seen.items()} == {e: wanted[1, e] for e in (2, 7, 5)}
    look = system.look()
    assert (look.counters["misses"], look.counters["hits"], look.ring.census["held"]) == (3, 3, 0)


def test_errors_are_codes_with_texts(engine: Path, up: Up, ring_name: str) -> None:
    assert "no such" in run(engine, "nobody-has-this", "0", "1", code=1).stderr.lower()
    up(slots=4)
    said = run(engine, ring_name, "9", "1", code=1).stderr
    assert "no such layer or expert" in said
    assert "layer 9, expert 1" in said
    assert (
        "more experts than the ring has slots: wanted 5, there is 4"
        in run(engine, ring_name, "0", "0", "1", "2", "3", "4", code=1).stderr
    )


def test_a_read_error_names_the_file_and_the_figures(
    engine: Path, up: Up, ring_name: str, vault: Path
) -> None:
    up(slots=4, more="vault.check_s = 3600\nprewarm.enabled = false\n")
    with vault.open("r+b") as file:
        file.truncate(vault.stat().st_size - 4096)
    said = run(engine, ring_name, "2", "7", code=1).stderr
    assert str(vault) in said or "file of the model" in said
    assert "changed under the ring" in said or "layer 2, expert 7" in said


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_the_header_alone_compiles(language: str, tmp_path: Path) -> None:
    source = tmp_path / f"x.{language}"
    source.write_text("#include <smoe.h>\nint main(void) { return SMOE_API_VERSION - 1; }\n")
    run(*compiler(language), *STRICT, *cflags("--cflags"), "-c", source, "-o", tmp_path / "x.o")
    assert installed("capi/include/smoe.h").read_bytes() == HEADER.read_bytes()


def declared() -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    return set(re.findall(r"\b(smoe_\w+)\(", text))


def test_the_library_shows_what_the_header_declares_and_nothing_else() -> None:
    library = next(installed("capi/lib").glob("libsmoe.*"))
    lines = run("nm", "-D", "--defined-only", library).stdout.splitlines()
    assert {line.split()[-1] for line in lines} == declared()


#: What is promised: a name that goes from here, or a number that changes, is another SMOE_API_VERSION.
PROMISED = """
attach detach expert_index acquire acquire_nowait wait wait_any fetch claim_specific speculate release
hold_again slot_data get_info expert_pair expert_layout expert_parts expert_tensors file_path file_mode
file_refusal
get_tally counter_value counter_name census ring_state queue_length participants now_ns busy busy_clients
histogram_read histogram_add set_interruptible set_spin_us strerror error_text api_version layout_version
block_type_at dequantize
"""
SIZES = {
    "smoe_hold": 16,
    "smoe_error": 72,
    "smoe_tensor": 80,
    "smoe_part": 32,
    "smoe_tally": 2304,
    "smoe_block_type": 24,
    "smoe_dequant_job": 80,
}


def test_what_is_promised_is_there(tmp_path: Path) -> None:
    assert {f"smoe_{name}" for name in PROMISED.split()} <= declared()
    checks = [f'_Static_assert(sizeof({name}) == {size}, "{name}");' for name, size in SIZES.items()]
    numbers = {"SMOE_API_VERSION": 1, "SMOE_EGONE": -1001, "SMOE_ECHANGED": -1019, "SMOE_HOLD_RESIDENT": 2}
    checks += [f'_Static_assert({name} == {number}, "{name}");' for name, number in numbers.items()]
    source = tmp_path / "sizes.c"
    source.write_text("#include <smoe.h>\n" + "\n".join(checks) + "\n")
    run(*compiler("c"), *cflags("--cflags"), "-c", source, "-o", tmp_path / "sizes.o")


def test_pkg_config(tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config here")
    folder = cflags("--pkgconfig")[0]
    found = run("env", f"PKG_CONFIG_PATH={folder}", "pkg-config", "--cflags", "--libs", "smoe").stdout
    out = tmp_path / "engine"
    run(*compiler("c"), EXAMPLES / "engine.c", "-o", out, *shlex.split(found))
    run(out, code=2)


def test_cmake(tmp_path: Path) -> None:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        pytest.skip("no cmake here")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(engine LANGUAGES C)\nfind_package(smoe 1 REQUIRED)\n"
        f"add_executable(engine {EXAMPLES / 'engine.c'})\ntarget_link_libraries(engine smoe::smoe)\n"
    )
    folder = cflags("--cmake")[0]
    run(cmake, "-S", tmp_path, "-B", tmp_path / "b", f"-Dsmoe_DIR={folder}")
    run(cmake, "--build", tmp_path / "b")
    run(tmp_path / "b/engine", code=2)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(engine LANGUAGES C)\nfind_package(smoe 2 REQUIRED)\n"
    )
    refused = subprocess.run(
        [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "c"), f"-Dsmoe_DIR={folder}"],
        capture_output=True,
        check=False,
    )
    assert refused.returncode != 0
