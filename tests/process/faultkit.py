"""What the tests of faulty reading share: sources whose bytes are remembered, workers under a shim or a
tracer, what the page cache has of a file, file systems of all kinds, and a FUSE server to be stopped.

Whatever is mounted, attached or started here is undone at the end of its block, also after a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, StampedSource, ring_name, shm_of, source_file, stop, until

import smoe_mp
from smoe_mp import runtime, segments
from smoe_mp.errors import ExpertReadError
from smoe_mp.sources.base import Expert, Extent, Tensor

SHIM_SOURCES = Path(__file__).resolve().parents[1] / "c"
FUSE_SERVER = Path(__file__).resolve().parent / "fuse_slow.py"
KIB, MIB = 1 << 10, 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def needs(*tools: str, root: bool = False) -> None:
    """Skip the test, by name of what is missing."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux alone")
    if root and os.geteuid() != 0:
        pytest.skip("needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def needs_direct(folder: Path) -> None:
    """Skip the test where files of the folder are not read directly."""
    path = folder / "probe.bin"
    path.write_bytes(bytes(4096))
    forget(path)
    found = segments.probe(path)
    path.unlink()
    if found.mode != "direct":
        pytest.skip(f"{folder}: {found.reason}")


# --- sources ------------------------------------------------------------------------------------------


@dataclass
class KnownSource(StampedSource):
    """A source that remembers its bytes, whatever becomes of its files."""

    blobs: Sequence[bytes] = ()

    def bytes_of(self, expert: int) -> bytes:
        """The only bytes that may ever be served for an expert of layer 0."""
        return b"".join(
            self.blobs[x.file][x.offset : x.offset + x.length] for x in self.experts[expert].extents
        )

    def extent(self, expert: int) -> Extent:
        return self.experts[expert].extents[0]


def _layout_of(length: int) -> tuple[Tensor, ...]:
    return (Tensor("t", "U8", (length,), 0, 0, length),)


def make_old(path: Path) -> None:
    """Have the file last changed long ago: a change soon after a change may leave the time as it was."""
    os.utime(path, ns=(10**18, 10**18))


def known_source(
    path: Path, spans: Sequence[tuple[int, int]], *, size: int = 0, seed: int = 0
) -> KnownSource:
    """One file of random bytes, `size` long or as long as needed; layer 0's experts lie at `spans`
    (offset, length)."""
    size = size or max(offset + length for offset, length in spans)
    blob = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    path.write_bytes(blob)
    make_old(path)
    forget(path)
    lengths = sorted({length for _, length in spans})
    experts = [
        Expert(0, i, (Extent(0, offset, length),), lengths.index(length))
        for i, (offset, length) in enumerate(spans)
    ]
    layouts = [_layout_of(length) for length in lengths]
    return KnownSource(path, [source_file(path)], experts, layouts, blobs=[blob])


def even_source(path: Path, experts: int, length: int = 32 * KIB, *, seed: int = 0) -> KnownSource:
    """Experts of one length behind each other, each at a page."""
    step = -(-length // 4096) * 4096
    return known_source(path, [(i * step, length) for i in range(experts)], size=experts * step, seed=seed)


def many_files(folder: Path, count: int, length: int = 5000) -> KnownSource:
    """One expert a file, at offset 100."""
    rng = np.random.default_rng(count)
    folder.mkdir()
    files, blobs = [], []
    for i in range(count):
        path = folder / f"{i:03}.bin"
        blobs.append(rng.integers(0, 256, 100 + length, np.uint8).tobytes())
        path.write_bytes(blobs[-1])
        make_old(path)
        files.append(source_file(path))
    experts = [Expert(0, i, (Extent(i, 100, length),), 0) for i in range(count)]
    return KnownSource(folder, files, experts, [_layout_of(length)], blobs=blobs)


# --- workers ------------------------------------------------------------------------------------------


@functools.cache
def _shim_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="smoe-shim-")  # removed at the interpreter's end


@functools.cache
def shim(what: str = "pread") -> str:
    """A shim library, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is not installed")
    library = Path(_shim_folder().name) / f"shim_{what}.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SHIM_SOURCES / f"shim_{what}.c")], check=True)
    return str(library)


def shimmed(**faults: object) -> dict[str, str]:
    """The environment of a worker under the shim: `halves=1` is SHIM_HALVES=1, and so on."""
    return {"LD_PRELOAD": shim(), **{f"SHIM_{name.upper()}": str(value) for name, value in faults.items()}}


class FaultyWorker:
    """A real `smoe-worker`, in an environment or under another program (`under`)."""

    def __init__(
        self,
        ring: segments.Segments,
        number: int,
        watch_fd: int,
        env: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        self._ready_fd, ready_write = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        program = [str(segments.worker_program()), "--name", ring.name, "--id", str(number)]
        fds = ["--watch-fd", str(watch_fd), "--ready-fd", str(ready_write)]
        self.process = subprocess.Popen(
            [*under, *program, "--creation", ring.creation_hex, *fds],
            stdin=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=(watch_fd, ready_write),
            env={**os.environ, **(env or {})},
            process_group=0,
        )
        os.close(ready_write)

    def started(self) -> bool:
        """Wait until its files are open (True) or it has ended."""
        return os.read(self._ready_fd, 1) == b"r"

    def wait_ready(self) -> None:
        """Wait until its files are open."""
        assert self.started(), f"worker ended: {self.process.wait(LIMIT_S)}: {self.said()}"

    def wait_refused(self) -> str:
        """Wait for the end of one that cannot start; what it said."""
        assert not self.started()
        assert self.process.wait(LIMIT_S) == 1
        return self.said()

    def said(self) -> str:
        """What is on its stderr."""
        return os.pread(self._said.fileno(), 1 << 16, 0).decode()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        """Let go of it; it must have ended."""
        os.close(self._ready_fd)
        self._said.close()


class Serving:
    """A ring with its workers."""

    def __init__(self, made: segments.Segments) -> None:
        self.segments = made
        self.name = made.name
        self.workers: list[FaultyWorker] = []
        self._watch_read, self._watch_write = os.pipe()

    def start(
        self, number: int, env: Mapping[str, str] | None = None, under: Sequence[str] = ()
    ) -> FaultyWorker:
        """Start the worker `number`, without waiting for it."""
        self.workers.append(FaultyWorker(self.segments, number, self._watch_read, env, under))
        return self.workers[-1]

    def attach(self) -> smoe_mp.Ring:
        return smoe_mp.attach(self.name)

    def census(self) -> dict[str, int]:
        return self.segments.census()

    def counters(self) -> dict[str, int]:
        return self.segments.counters()

    def file(self) -> dict[str, Any]:
        """What status says of the source's first file."""
        return self.segments.files()[0]

    def wait_reading(self, slots: int = 1) -> None:
        """Wait until that many slots are in the hands of workers."""
        until(lambda: self.census()["reading"] == slots, "a read that has begun")

    def assert_quiet(self) -> None:
        """Nobody holds anything, nothing is under way, every slot has a state."""
        until(lambda: not (self.census()["queued"] or self.census()["reading"]), "an end of all reads")
        census = self.census()
        assert census["held"] == census["reserved"] == census["guesses"] == census["failed"] == 0, census
        assert sum(census[k] for k in ("empty", "ready", "consumed")) == self.segments.n_slots, census

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.close()
        os.close(self._watch_read)
        os.close(self._watch_write)
        self.segments.remove()


@contextlib.contextmanager
def serving(
    source: StampedSource,
    *,
    slots: int,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    under: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Serving]:
    """A ring of `source`, its files probed as the supervisor does, with real workers.  At the end it must
    be quiet, the workers end in order, and nothing may be left."""
    settings.setdefault("read_deadline_ms", LIMIT_S * 1000)
    probes = [segments.probe(file.path) for file in source.files]
    align = max(4096, *(found.offset_align for found in probes))
    served = Serving(segments.create(ring_name(), source, slots=slots, read_align=align, **settings))
    try:
        for number, found in enumerate(probes):
            served.segments.set_mode(number, found)
        for number in range(workers):
            served.start(number, env, under)
        for worker in served.workers:
            worker.wait_ready()
        yield served
        served.assert_quiet()
        served.segments.set_state("stopping")
        for worker in served.workers:
            assert worker.process.wait(LIMIT_S) in (0, 1, 3), worker.said()  # 1, 3: a test's own doing
    finally:
        served.close()
    assert shm_of(served.name) == []


def bury(name: str) -> None:
    """Remove what a killed supervisor left of a ring."""
    for segment in segments.segment_names(name):
        Path("/dev/shm", segment.lstrip("/")).unlink(missing_ok=True)
    runtime.socket_path(name).unlink(missing_ok=True)


# --- asking -------------------------------------------------------------------------------------------


def fetched(ring: smoe_mp.Ring, expert: int, timeout: float | None = None) -> bytes:
    """The bytes that are served for an expert of layer 0."""
    with ring.fetch(0, [expert], timeout) as batch:
        return b"".join(part.tobytes() for part in batch[0].parts)


def assert_right(ring: smoe_mp.Ring, source: KnownSource, experts: Sequence[int]) -> None:
    """Fetch the experts in turn; each has its own bytes."""
    for expert in experts:
        assert fetched(ring, expert) == source.bytes_of(expert), f"foreign bytes in expert {expert}"


def refused(ring: smoe_mp.Ring, expert: int) -> ExpertReadError:
    """The error that a fetch of the expert ends with."""
    with pytest.raises(ExpertReadError) as caught:
        fetched(ring, expert)
    assert (caught.value.layer, caught.value.expert) == (0, expert)
    return caught.value


class Shimlog:
    """The lines that SHIM_LOG wrote: (direct, offset, asked, result)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reads(self) -> list[tuple[bool, int, int, int]]:
        if not self._path.exists():
            return []
        rows = [line.split() for line in self._path.read_text().splitlines()]
        return [(kind == "d", int(offset), int(asked), int(result)) for kind, offset, asked, result in rows]


# --- the page cache -----------------------------------------------------------------------------------


def cached_pages(path: Path) -> int:
    """How many of a file's pages the page cache has (what fincore says)."""
    pages = ctypes.create_string_buffer(-(-path.stat().st_size // mmap.PAGESIZE))
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
        at = np.frombuffer(m, np.uint8)
        address = at.ctypes.data
        del at
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(m)), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(flag & 1 for flag in pages.raw)


def forget(path: Path) -> None:
    """Write a file's pages back and have the page cache forget them."""
    with path.open("rb") as f:
        with contextlib.suppress(OSError):  # EINVAL: a read-only file system
            os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def direct_error(path: Path, offset: int, length: int) -> int:
    """0, or the errno of a direct read of the pages around a range: what the storage itself says."""
    start = offset // 4096 * 4096
    buffer = mmap.mmap(-1, -(-(offset + length - start) // 4096) * 4096)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(fd, [buffer], start)
    except OSError as e:
        return e.errno or errno.EIO
    finally:
        os.close(fd)
        buffer.close()
    return 0


# --- file systems -------------------------------------------------------------------------------------


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def mounted(at: Path, *arguments: str | Path) -> Iterator[Path]:
    """`mount ARGUMENTS AT`, undone at the end."""
    at.mkdir(exist_ok=True)
    _run("mount", *arguments, at)
    try:
        yield at
    finally:
        if subprocess.run(["umount", str(at)], capture_output=True, check=False).returncode != 0:
            subprocess.run(["umount", "-l", str(at)], capture_output=True, check=False)


@contextlib.contextmanager
def loop_device(image: Path, *options: str) -> Iterator[Path]:
    """A loop device over an image.  It goes with its last user, so a mount of it may outlive the block."""
    device = Path(_run("losetup", *options, "--find", "--show", image).strip())
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], capture_output=True, check=False)


def make_image(path: Path, size: int) -> Path:
    """An empty sparse image."""
    with path.open("wb") as f:
        f.truncate(size)
    return path


# --- FUSE ---------------------------------------------------------------------------------------------


class Fuse:
    """A mounted FUSE file system with one file, `path`, and its server, a process that can be stopped."""

    def __init__(self, folder: Path, behind: Path) -> None:
        self.mount = folder
        self.path = folder / "file"
        fd = os.open("/dev/fuse", os.O_RDWR)
        try:
            options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
            if _libc.mount(b"smoe-test", os.fsencode(folder), b"fuse", 0, options) != 0:
                raise OSError(ctypes.get_errno(), f"mount {folder}")
            self.process = subprocess.Popen(
                [sys.executable, str(FUSE_SERVER), str(fd), str(behind)], pass_fds=(fd,)
            )
        finally:
            os.close(fd)

    def stop(self) -> None:
        """Stop the server: every read of the file that is not cached hangs."""
        stop(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        subprocess.run(["umount", "-l", str(self.mount)], capture_output=True, check=False)
        self.process.kill()  # ends what still hangs in it
        self.process.wait()


@contextlib.contextmanager
def fuse(folder: Path, behind: Path) -> Iterator[Fuse]:
    """A FUSE file system on `folder` that shows the file `behind`."""
    needs("umount", root=True)
    if not Path("/dev/fuse").exists():
        pytest.skip("/dev/fuse is not here")
    folder.mkdir()
    made = Fuse(folder, behind)
    try:
        yield made
    finally:
        made.close()


# --- threads ------------------------------------------------------------------------------------------


class Together:
    """Threads that are started together, joined at the end, and whose exceptions are raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, call: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                call(*arguments)
            except BaseException as e:
                self._errors.append(e)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a thread never ended"
        if self._errors:
            raise self._errors[0]
