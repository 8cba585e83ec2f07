"""`smoe-mp pack` and `verify` as processes: killed, interrupted, out of space, and in how much memory."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from faultkit import MIB, direct_error, loop_device, make_image, mounted, needs, needs_direct
from models import Model, write_safetensors
from systems import LIMIT_S, smoe_mp

from smoe_mp.sources import open_source
from smoe_mp.verify import verify

SCOUT = "v.scout.safetensors"
PARTIAL = ["v.scout.safetensors.partial", "v.smoe.partial"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 64 experts, 24 MB."""
    folder = tmp_path_factory.mktemp("model") / "m"
    return Model(layers=4, experts=16, hidden=512, width=128).per_expert(folder)


@contextmanager
def stopped_pack(model: Path, out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A pack that waits in the middle of its experts, until it is signalled or its stdin ends."""
    program = """
        import sys
        from smoe_mp import pack, cli
        from smoe_mp.raw_writer import RawWriter
        from smoe_mp.vault_writer import VaultWriter
        for writer in (VaultWriter, RawWriter):
            def wait(self, index, blob, write=writer.write_blob):
                write(self, index, blob)
                if index == 20:
                    print("there", flush=True)
                    sys.stdin.read()
            writer.write_blob = wait
        cli.main()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), "pack", str(model), str(out), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_good(vault: Path) -> None:
    assert verify(open_source(vault), shown=False).bad == []


@pytest.mark.parametrize("arguments", [("--checksums",), ("--raw",)])
def test_killed_and_started_again(arguments: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    """What was there stays until the new one is whole; the partial files are taken over."""
    out = tmp_path / "v.smoe"
    assert smoe_mp("pack", model, out, *arguments).returncode == 0
    whole, scout = out.read_bytes(), (tmp_path / SCOUT).read_bytes()
    out.write_bytes(b"old")
    with stopped_pack(model, out, "--force", *arguments) as process:
        process.kill()
        process.wait(LIMIT_S)
    assert out.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == sorted([out.name, SCOUT, *PARTIAL])
    assert smoe_mp("pack", model, out, "--force", *arguments).returncode == 0
    assert (out.read_bytes(), (tmp_path / SCOUT).read_bytes()) == (whole, scout)
    assert sorted(os.listdir(tmp_path)) == sorted([out.name, SCOUT])
    assert_good(out)


def test_two_at_once(model: Path, tmp_path: Path) -> None:
    """The second is refused, and the first is not disturbed."""
    out = tmp_path / "v.smoe"
    with stopped_pack(model, out) as process:
        second = smoe_mp("pack", model, out)
        assert second.returncode == 3
        assert "another process is writing this" in second.stderr
        assert second.stderr.count("\n") == 1
        process.communicate("", LIMIT_S)
        assert process.returncode == 0
    assert_good(out)


def test_ctrl_c_is_clean(model: Path, tmp_path: Path) -> None:
    with stopped_pack(model, tmp_path / "v.smoe") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        process.stdin.close()  # the read under way ends: what is under way is finished
        process.stdin = None
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert errors == ""
    assert os.listdir(tmp_path) == []


def test_no_space_is_said_first(model: Path, tmp_path: Path) -> None:
    needs("mount", root=True)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as small:
        done = smoe_mp("pack", model, small / "v.smoe")
        assert done.returncode == 3
        assert "bytes too few" in done.stderr
        assert done.stderr.count("\n") == 1
        assert os.listdir(small) == []


def test_space_that_goes_meanwhile(model: Path, tmp_path: Path) -> None:
    """Somebody else fills the file system: the files are removed, and the space with them."""
    needs("mount", root=True)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as small:
        with stopped_pack(model, small / "v.smoe", "--raw") as process:
            with (small / "theirs").open("wb", buffering=0) as theirs:
                while (free := os.fstatvfs(theirs.fileno()).f_bavail) > 0:
                    theirs.write(bytes(min(free * 4096, MIB)))
            _, errors = process.communicate("", LIMIT_S)
            assert process.returncode == 3
        assert "No space left on device (errno 28)" in errors
        assert errors.count("\n") == 1
        assert os.listdir(small) == ["theirs"]


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of experts of 12 MB (source) a few are in memory at a time, and of the scout file a piece."""
    small = Model(layers=1, experts=2, hidden=2048, width=1024).per_expert(tmp_path / "small")
    large = tmp_path / "large"
    _grow(small, large, experts=24)
    peaks = {}
    for name, arguments in (("small", ()), ("large", ()), ("raw", ("--raw",))):
        source = small if name == "small" else large
        program = (
            "import sys\nfrom smoe_mp import pack\npack.cores = lambda: 4\n"
            "pack.pack(pack.Path(sys.argv[1]), pack.Path(sys.argv[2]), raw=len(sys.argv) > 3)\n"
            "(peak,) = (x for x in open('/proc/self/status') if x.startswith('VmHWM:'))\n"
            "print(peak.split()[1])"  # what getrusage says may be the parent's
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(source), str(tmp_path / f"{name}.smoe"), *arguments],
            capture_output=True, text=True, check=True, timeout=LIMIT_S,
        )  # fmt: skip
        peaks[name] = int(done.stdout) * 1024
    size = sum(e.length for x in open_source(large).experts for e in x.extents)
    assert size > 280 * MIB
    # Four threads: for each an expert as it is (12 MB), its blob and pieces of weights.
    for name in ("large", "raw"):
        assert peaks[name] - peaks["small"] < 100 * MIB, peaks
    assert_good(tmp_path / "raw.smoe")


def _grow(source: Path, to: Path, experts: int) -> None:
    """The checkpoint with as many experts in a sparse file: all but the first are zeros."""
    raw = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    end = len(raw) - 8 - length
    for expert in range(2, experts):
        for name in ("gate", "up", "down"):
            old = header[f"model.layers.0.mlp.experts.0.{name}_proj.weight"]
            nbytes = old["data_offsets"][1] - old["data_offsets"][0]
            header[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] = {
                **old,
                "data_offsets": [end, end + nbytes],
            }
            end += nbytes
    # A large dense tensor: the scout file is copied in pieces too.
    header["lm_head.weight"] = {"dtype": "U8", "shape": [200 * MIB], "data_offsets": [end, end + 200 * MIB]}
    end += 200 * MIB
    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    config |= {"num_experts": experts, "num_local_experts": experts}
    (to / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (to / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        out.truncate(8 + len(text) + end)


def test_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    """The soft limit is raised; 70 files, and 40 allowed."""
    model = Model(layers=1, experts=70)
    source = model.folder(tmp_path / "m", "qwen3_moe", {})
    (source / "model.safetensors").unlink()
    for (layer, expert), arrays in model.weights.items():
        stem = f"model.layers.{layer}.mlp.experts.{expert}"
        tensors = {f"{stem}.{name}_proj.weight": array for name, array in arrays.items()}
        write_safetensors(source / f"model-{expert + 1:05}-of-00070.safetensors", tensors)

    def limited(*arguments: str | Path) -> int:
        return subprocess.run(
            ["prlimit", "--nofile=40:4096", sys.executable, "-m", "smoe_mp", *map(str, arguments)],
            check=False, capture_output=True, timeout=LIMIT_S,
        ).returncode  # fmt: skip

    needs("prlimit")
    assert limited("pack", source, tmp_path / "v.smoe", "--raw") == 0
    assert limited("verify", source) == 0
    assert len(open_source(tmp_path / "v.smoe").experts) == 70


# --- verify ------------------------------------------------------------------------------------------------


def test_a_disk_that_loses_its_end(model: Path, tmp_path: Path) -> None:
    """Experts that are gone with EIO are named, each; the others are read."""
    needs("losetup", "mkfs.ext4", "mount", root=True)
    image = make_image(tmp_path / "image", 64 * MIB)
    flags = ["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard"]
    subprocess.run(["mkfs.ext4", *flags, str(image)], check=True, capture_output=True)
    with ExitStack() as stack:
        with loop_device(image) as device:
            disk = stack.enter_context(mounted(tmp_path / "disk", "-o", "noatime", device))
        needs_direct(disk)
        vault = disk / "v.smoe"
        assert smoe_mp("pack", model, vault, "--raw").returncode == 0
        os.sync()
        os.truncate(image, 16 * MIB)
        experts = open_source(vault).experts
        errors = [direct_error(vault, x.extents[0].offset, x.extents[0].length) for x in experts]
        assert set(errors) == {0, errno.EIO}
        done = smoe_mp("verify", vault, "--json")
        bad = json.loads(done.stdout)["bad"]
        assert done.returncode == 1
        assert [(b["layer"], b["expert"]) for b in bad] == [
            (x.layer, x.expert) for x, error in zip(experts, errors, strict=True) if error
        ]
        assert all("Input/output error (errno 5)" in b["fault"] for b in bad)


def test_verify_ends_by_ctrl_c(model: Path) -> None:
    program = """
        import os, sys
        from smoe_mp import reader, cli
        read = reader.SourceReader.read
        def wait(self, extents):
            os.write(1, b"there\\n")  # in one piece: several threads come here
            sys.stdin.read()
            return read(self, extents)
        reader.SourceReader.read = wait
        cli.main()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), "verify", str(model)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate("", LIMIT_S)
    assert (process.returncode, errors) == (130, "")
