"""The Python parts that differ between systems; macOS's against fakes that refuse what a Mac refuses.

The fakes keep to what the calls' documentation says: kqueue(2), unix(4), shm_open(2), fcntl(2).  What they
do not model is not tested: `docs/platforms.md`.
"""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import posix_ipc
import pytest
from support import StampedSource, ring_name, shm_of, state_of, until

import smoe_mp
from smoe_mp import completion, config, listener, partial, process, reader, runtime, segments
from smoe_mp.errors import ConfigError, SegmentError

if sys.platform != "linux":
    pytest.skip("fakes stand on Linux's own calls", allow_module_level=True)

from smoe_mp import platform_linux, platform_macos

LIMIT_S = 150


class FakeKqueue:
    """kqueue(2) with the one filter that is used: the end of processes."""

    def __init__(self) -> None:
        self._end = -1
        self._nothing, self._write = os.pipe()

    def control(self, changes: list[Any], most: int) -> list[Any]:
        for event in changes:
            assert (event.filter, event.flags, event.fflags) == (-5, 1, 0x80000000)
            assert most == 0  # so an error of a change is the call's
            if state_of(event.ident) in "XZ":
                raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
            self._end = os.pidfd_open(event.ident)
        return []

    def fileno(self) -> int:
        return self._nothing if self._end < 0 else self._end

    def close(self) -> None:
        for fd in (self._end, self._nothing, self._write):
            if fd >= 0:
                os.close(fd)
        self._end = self._nothing = self._write = -1


def fake_kevent(ident: int, filter: int, flags: int, fflags: int) -> SimpleNamespace:
    return SimpleNamespace(ident=ident, filter=filter, flags=flags, fflags=fflags)


class MacSocket(socket.socket):
    """One that knows unix(4)'s LOCAL_PEERPID, and nothing of Linux's options."""

    def getsockopt(self, level: int, option: int, *buffer: Any) -> Any:
        if (level, option) != (0, 2):
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        return int.from_bytes(
            super().getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder
        )


class MacMemory:
    """Shared memory that is in no file system: what shm_open(2) says, on Linux's segments."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._sized: set[int] = set()
        self._fstat, self._stat, self._ftruncate = os.fstat, os.stat, os.ftruncate
        self._open = posix_ipc.SharedMemory
        for name in ("fchmod", "fchown", "fstatvfs"):
            patch.setattr(os, name, self._refusing(getattr(os, name)))
        patch.setattr(os, "fstat", self.fstat)
        patch.setattr(os, "stat", self.stat)
        patch.setattr(os, "ftruncate", self.ftruncate)
        patch.setattr(posix_ipc, "SharedMemory", self.open)

    @staticmethod
    def _is_shared(fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/")

    def _refusing(self, call: Any) -> Any:
        def refuse(fd: int, *rest: Any) -> Any:
            if self._is_shared(fd):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return call(fd, *rest)

        return refuse

    def fstat(self, fd: int) -> os.stat_result:
        found = self._fstat(fd)
        return os.stat_result((found[0], 0, 0, *found[3:])) if self._is_shared(fd) else found

    def stat(self, path: Any, **how: Any) -> os.stat_result:
        if isinstance(path, str | Path) and str(path).startswith("/dev/shm"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._stat(path, **how)

    def ftruncate(self, fd: int, size: int) -> None:
        if self._is_shared(fd):
            inode = self._fstat(fd).st_ino
            if inode in self._sized:  # the size of a segment is given once
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._sized.add(inode)
        self._ftruncate(fd, size)

    def open(self, name: str, *arguments: Any, **named: Any) -> Any:
        if len(name.encode()) > 31:
            raise ValueError(f"{name}: {os.strerror(errno.ENAMETOOLONG)}")
        return self._open(name, *arguments, **named)


USERS = (config, listener, partial, process, reader, runtime, segments)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Any:
    """macOS's side in all that has one, and no call that a Mac lacks."""
    monkeypatch.setattr(select, "kqueue", FakeKqueue, raising=False)
    monkeypatch.setattr(select, "kevent", fake_kevent, raising=False)
    monkeypatch.setattr(select, "KQ_FILTER_PROC", -5, raising=False)
    monkeypatch.setattr(select, "KQ_EV_ADD", 1, raising=False)
    monkeypatch.setattr(select, "KQ_NOTE_EXIT", 0x80000000, raising=False)
    for user in USERS:
        if hasattr(user, "system"):
            monkeypatch.setattr(user, "system", platform_macos)
    for name in ("posix_fadvise", "sched_getaffinity", "waitid", "O_DIRECT"):
        monkeypatch.delattr(os, name)
    return platform_macos


@pytest.fixture(params=["linux", "macos"])
def system(request: pytest.FixtureRequest) -> Any:
    """Each system's module."""
    return request.getfixturevalue("mac") if request.param == "macos" else platform_linux


def public(module: Any) -> dict[str, Any]:
    own = {n: v for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)}
    del own["annotations"]
    return {n: v for n, v in own.items() if getattr(v, "__module__", module.__name__) == module.__name__}


def test_both_have_the_same_names_with_the_same_arguments() -> None:
    linux, macos = public(platform_linux), public(platform_macos)
    assert linux.keys() == macos.keys()
    for name, value in linux.items():
        if inspect.isfunction(value):
            assert inspect.signature(value) == inspect.signature(macos[name]), name
        elif inspect.isclass(value):
            assert public_methods(value) == public_methods(macos[name])
        else:
            assert type(value) is type(macos[name]), name


def public_methods(kind: type) -> dict[str, inspect.Signature]:
    return {n: inspect.signature(v) for n, v in vars(kind).items() if inspect.isfunction(v)}


# --- the end of processes -----------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


def test_a_watch_sees_the_end_and_not_before(system: Any, sleeper: subprocess.Popen[bytes]) -> None:
    watch = system.ExitWatch(sleeper.pid)
    assert not watch.wait(0)
    assert not watch.wait(-1.0)
    assert not select.select([watch.fd], [], [], 0)[0]
    sleeper.send_signal(signal.SIGKILL)
    assert watch.wait(LIMIT_S)
    assert watch.wait(0), "once ended, always ended"
    watch.close()


def test_a_watch_on_nobody(system: Any, sleeper: subprocess.Popen[bytes]) -> None:
    """And nothing stays open of it."""
    sleeper.kill()
    sleeper.wait()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProcessLookupError):
        system.ExitWatch(sleeper.pid)
    assert os.listdir("/proc/self/fd") == before


def test_macos_has_no_watch_on_who_ended_and_is_not_reaped(mac: Any) -> None:
    child = subprocess.Popen(["true"])
    until(lambda: state_of(child.pid) == "Z", "its end")
    with pytest.raises(ProcessLookupError):
        mac.ExitWatch(child.pid)
    child.wait()


def test_a_watch_with_a_large_descriptor(sleeper: subprocess.Popen[bytes]) -> None:
    """select takes none from 1024 on, and an engine may have many files open."""
    reader._allow_files()
    watch = platform_linux.ExitWatch(sleeper.pid)
    high = fcntl.fcntl(watch.fd, fcntl.F_DUPFD_CLOEXEC, 1500)
    os.close(watch.fd)
    watch.fd = high
    assert not watch.wait(0)
    sleeper.kill()
    assert watch.wait(LIMIT_S)
    watch.close()


def test_children_that_nobody_reaped(system: Any) -> None:
    """Linux tells of them; on macOS nobody asks, since nobody is pid 1."""
    child = subprocess.Popen(["true"])
    until(lambda: state_of(child.pid) == "Z", "its end")
    if system is platform_linux:
        assert system.ended_child() != 0
    else:
        assert system.ended_child() == 0
    process.reap_orphans([child.pid])
    assert child.wait() == 0, "a child of one's own is left to whoever waits for it"


# --- sockets and the run-time folder ------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path("/tmp") / f"smoe-{os.getpid()}-{os.urandom(3).hex()}"  # short, wherever pytest keeps its own
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return path


def test_who_serves_a_socket(system: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.make_runtime_folder()
    path = runtime.socket_path("n")
    if system is platform_macos:
        monkeypatch.setattr(socket, "socket", MacSocket)
    assert runtime.serving_pid(path) == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as served:
        served.bind(str(path))
        served.listen()
        assert runtime.serving_pid(path) == os.getpid()
    path.unlink()
    folder.rmdir()


def test_how_long_a_socket_s_path_may_be(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {platform_linux: 107, platform_macos: 103}[system]
    file = len("/" + runtime.socket_path("n").name)
    for size in (most, most + 1):
        monkeypatch.setenv("SMOE_RUNTIME_DIR", "/" + "x" * (size - file - 1))
        if size == most:
            assert len(str(runtime.socket_path("n"))) == most
        else:
            with pytest.raises(ConfigError, match=f"{size} bytes, a socket's path may have {most};"):
                runtime.socket_path("n")


def test_the_usual_folder_of_a_mac(mac: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no XDG_RUNTIME_DIR, and /tmp is a link: what is below it is looked at, not the way there."""
    monkeypatch.delenv("SMOE_RUNTIME_DIR")
    assert runtime.runtime_folder() == Path(f"/tmp/smoe-mp-{os.getuid()}")
    real = folder.with_name(folder.name + ".real")
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(folder / "in"))
    assert runtime.make_runtime_folder() == folder / "in"
    runtime.check_reachable(runtime.socket_path("n"))
    (real / "in").rmdir()
    folder.unlink()
    real.rmdir()


def test_a_group_is_refused_on_macos(mac: Any) -> None:
    assert runtime.group_id("") is None
    with pytest.raises(ConfigError, match="shared memory has no group on macOS"):
        runtime.group_id(str(os.getgid()))


# --- shared memory ------------------------------------------------------------------------------------------


@pytest.fixture
def ring(mac: Any) -> Iterator[str]:
    name = ring_name().ljust(segments.NAME_MAX, "x")  # as long as may be
    yield name
    for left in Path("/dev/shm").glob(f"smoe.{name}*"):
        left.unlink()


def test_a_ring_in_a_mac_s_shared_memory(
    ring: str, source: StampedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made, attached, left and adopted, and removed, where its descriptors can nearly nothing."""
    with monkeypatch.context() as patch:
        MacMemory(patch)
        made = segments.create(ring, source, slots=4)
        assert made.named()
        with smoe_mp.attach(ring) as client:
            assert client.name == ring
        made.let_go()
        adopted = segments.create(ring, source, slots=4)
        assert adopted.adopted
        assert adopted.named()
        adopted.remove()
        with pytest.raises(SegmentError, match="there is none"):
            smoe_mp.attach(ring)
    assert shm_of(ring) == []


def test_names_fit_a_mac_s_limit() -> None:
    assert max(len(s.encode()) for s in segments.segment_names("x" * segments.NAME_MAX)) <= 31


def test_names_that_no_ring_can_have_are_left_out(tmp_path: Path) -> None:
    for name in (b"smoe.\xff", b"smoe.\xff.d", b"smoe." + b"x" * 60, "smoe.é".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert segments.find_rings(tmp_path) == []


def test_without_a_folder_of_shared_memory_nothing_is_listed(
    mac: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert segments.find_rings(tmp_path / "none") == []
    monkeypatch.setattr(completion, "Path", lambda path: tmp_path / "none")
    assert completion.running() == []


# --- files --------------------------------------------------------------------------------------------------


def test_a_file_past_the_cache(mac: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)

    def fake(fd: int, command: int, value: int = 0) -> int:
        if command != 48:
            return real(fd, command, value)
        asked.append((os.readlink(f"/proc/self/fd/{fd}"), value))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", fake)
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    for direct in (False, True):
        fd = mac.open_to_read(path, direct=direct)
        assert os.read(fd, 10) == b"abc"
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert asked == [(str(path), 1)]


def test_files_are_written_and_read_without_linux_s_calls(
    mac: Any, source: StampedSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = partial.PartialFile(tmp_path / "out", 4, "file")
    file.write(b"abcd", 0)
    file.publish()
    assert (tmp_path / "out").read_bytes() == b"abcd"
    modes = [reader._mode(file) for file in source.files]
    monkeypatch.setattr(reader, "_mode", lambda file: ("buffered", modes[0][1]))
    with reader.SourceReader(source) as opened:
        for index, expert in enumerate(source.experts):
            assert [bytes(view) for view in opened.read(expert.extents)] == source.expected(index)


def test_cores(system: Any) -> None:
    assert system.cores() >= 1
