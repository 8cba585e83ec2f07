"""Shared memory that is in the way, too small, foreign, damaged or somebody else's: one clear error each,
and nothing left behind.  Field reports 24, 29, 33."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, SHM, StampedSource, ring_name, serve, shm_of

import smoe_mp
from smoe_mp import errors, segments
from smoe_mp._native import lib

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm to look into")
HERE = Path(__file__).resolve().parents[1]


@pytest.fixture
def name() -> Iterator[str]:
    name = ring_name()
    yield name
    for left in SHM.glob(f"smoe.{name}*"):
        left.unlink()


@contextlib.contextmanager
def made(name: str, source: StampedSource, slots: int = 2) -> Iterator[segments.Segments]:
    ring = segments.create(name, source, slots=slots)
    try:
        yield ring
    finally:
        ring.remove()


def python(
    program: str, *arguments: str, before: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program that may import `support`."""
    return subprocess.run(
        [
            *before,
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + program,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **options,
    )


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [23, 31, 40, 255])
def test_long_names_are_refused_with_their_length(source: StampedSource, length: int) -> None:
    name = "x" * length
    for call in (lambda: segments.create(name, source, slots=2), lambda: smoe_mp.attach(name)):
        with pytest.raises(errors.ConfigError, match=rf"{length} characters.* at most 22 "):
            call()
    assert shm_of(name) == []


def test_the_longest_name_works(source: StampedSource) -> None:
    name = f"{ring_name()}-".ljust(22, "x")
    assert len(f"/smoe.{name}.d") == 30
    with serve(source, slots=2, name=name) as served, served.attach() as ring, ring.fetch(0, [1]) as batch:
        assert batch[0].parts[0].tobytes() == source.expected(1)[0]


@pytest.mark.parametrize(
    "name", ["", "ä", "名前", "a/b", "/a", "a b", "a\n", "\0", "a\0", "a*", "\N{FULLWIDTH DIGIT ONE}"]
)
def test_impossible_names_are_refused(source: StampedSource, name: str) -> None:
    for call in (lambda: segments.create(name, source, slots=2), lambda: smoe_mp.attach(name)):
        with pytest.raises(errors.ConfigError, match=r"only letters, digits, '\.', '_' and '-'"):
            call()


def test_no_ring_s_control_segment_has_the_name_of_another_s_data(source: StampedSource, name: str) -> None:
    """Ring "x" has the segments smoe.x and smoe.x.d; a ring "x.d" would have smoe.x.d as well."""
    with made(name, source) as ring:
        with pytest.raises(errors.ConfigError):
            segments.create(f"{name}.d", source, slots=2)
        assert shm_of(name) == [f"smoe.{name}", f"smoe.{name}.d"]
        assert ring.state == "live"
        smoe_mp.attach(name).close()


# --- a name that is taken ----------------------------------------------------------------------------------


def test_a_second_ring_beside_a_living_supervisor(source: StampedSource) -> None:
    with serve(source, slots=2) as served, served.attach() as ring:
        inodes = [(SHM / n).stat().st_ino for n in shm_of(served.name)]
        with pytest.raises(
            errors.RingExists, match=f"ring {served.name} .*a living supervisor serves it"
        ) as raised:
            segments.create(served.name, source, slots=4)
        assert isinstance(raised.value, FileExistsError)
        assert [(SHM / n).stat().st_ino for n in shm_of(served.name)] == inodes
        assert served.segments.state == "live"
        with ring.fetch(0, [1]) as batch:
            assert batch[0].parts[0].tobytes() == source.expected(1)[0]


def test_another_process_beside_a_living_supervisor(source: StampedSource, name: str, tmp_path: Path) -> None:
    with made(name, source) as ring:
        done = python(CREATE, name, str(tmp_path / "other"))
        assert "RingExists" in done.stderr
        assert ring.state == "live"


CREATE = """
from pathlib import Path
from support import stamped_source
from smoe_mp import segments
made = segments.create(sys.argv[1], stamped_source(Path(sys.argv[2])), slots=2)
print("made", flush=True)
sys.stdin.read()
"""


def test_a_ring_whose_supervisor_was_killed_is_replaced(
    source: StampedSource, name: str, tmp_path: Path
) -> None:
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + CREATE
    with subprocess.Popen(
        [sys.executable, "-c", program, name, str(tmp_path / "other")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "made\n"
        old = smoe_mp.attach(name)
        old_inode = (SHM / f"smoe.{name}").stat().st_ino
        supervisor.kill()
        supervisor.wait()
    assert len(shm_of(name)) == 2
    with serve(source, slots=2, name=name) as served:
        with pytest.raises(errors.RingReplaced, match="attach anew"):
            old.fetch(0, [1])
        with served.attach() as ring, ring.fetch(0, [1]) as batch:
            assert batch[0].parts[0].tobytes() == source.expected(1)[0]
        assert (SHM / f"smoe.{name}").stat().st_ino != old_inode
    old.close()


def test_hits_go_on_without_a_supervisor_and_reads_say_that_there_is_none(name: str, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + CREATE
    with subprocess.Popen(
        [sys.executable, "-c", program, name, str(tmp_path / "other")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        ring = smoe_mp.attach(name)
        supervisor.kill()
        supervisor.wait()
    with pytest.raises(errors.NoSupervisor, match="nobody serves the ring: start `smoe-mp up`"):
        ring.fetch(0, [1], timeout=0.05)
    assert ring.stats()["census"]["reserved"] == 0
    ring.close()


@pytest.mark.parametrize("size", [0, 64, 65536])
def test_a_half_made_ring_is_removed(
    source: StampedSource, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a creator leaves that was killed before it was done: no pages yet, or pages of zeros."""
    monkeypatch.setattr(segments, "_SETTLE_S", 0.1)
    (SHM / f"smoe.{name}").write_bytes(bytes(size))
    with pytest.raises(errors.SegmentError, match="not finished") as raised:
        smoe_mp.attach(name)
    assert not isinstance(raised.value, errors.NoSuchRing)
    with made(name, source) as ring:
        assert ring.state == "live"
        smoe_mp.attach(name).close()


class InBetween:
    """The C library, with something that happens while the supervisor's lock is being taken: after the
    segment has been opened by its name and before it is locked."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = [happens]

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def smoe_supervisor_lock(self, name: bytes, error: Any) -> int:
        if not self._happens:
            return int(lib.smoe_supervisor_lock(name, error))
        fd = os.open(SHM / f"smoe.{name.decode()}", os.O_RDWR)
        self._happens.pop()()
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, SUPERVISOR, 1, 0))
            named = (SHM / f"smoe.{name.decode()}").stat()
            ours = os.fstat(fd)
        except OSError:
            os.close(fd)
            return int(lib.SMOE_ETAKEN)
        if (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):  # as the real one does: c.test_segment
            os.close(fd)
            return int(lib.SMOE_ETAKEN)
        return fd


SUPERVISOR = 32 + 128  # the byte that a supervisor locks


def test_two_who_find_a_dead_ring_do_not_remove_each_other_s(
    source: StampedSource, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B has opened the dead ring; A removes it and makes a new one; B then gets the lock of what has no name
    any more, and must not take that for the right to remove A's."""
    (SHM / f"smoe.{name}").write_bytes(bytes(65536))
    monkeypatch.setattr(segments, "_SETTLE_S", 0.0)
    made_by_a: list[segments.Segments] = []

    def a() -> None:
        (SHM / f"smoe.{name}").unlink()
        made_by_a.append(segments.create(name, source, slots=2))

    monkeypatch.setattr(segments, "lib", InBetween(a))
    try:
        with pytest.raises(errors.RingExists):
            segments.create(name, source, slots=4)
        assert made_by_a[0].state == "live"
        assert len(shm_of(name)) == 2
        smoe_mp.attach(name).close()
    finally:
        made_by_a[0].remove()


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_who_make_a_ring_at_once_one_does(name: str, tmp_path: Path, dead: bool) -> None:
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\nsys.stdin.readline()\n" + CREATE
    if dead:
        done = python(CREATE + "import os\nos.kill(os.getpid(), 9)\n", name, str(tmp_path / "dead"), input="")
        assert done.returncode == -9
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", program, name, str(tmp_path / str(i))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("\n")
        maker.stdin.flush()
    winners = []
    for maker in makers:
        assert maker.stdout is not None
        if maker.stdout.readline() == "made\n":
            winners.append(maker)
    try:
        assert len(winners) == 1
        smoe_mp.attach(name).close()
        for maker in makers:
            if maker not in winners:
                assert "RingExists" in maker.communicate(timeout=LIMIT_S)[1]
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()


def test_a_data_segment_without_its_control_segment_is_replaced(source: StampedSource, name: str) -> None:
    (SHM / f"smoe.{name}.d").write_bytes(b"orphan")
    with made(name, source):
        smoe_mp.attach(name).close()


@pytest.mark.parametrize("content", [b"somebody else's " * 1024, b"short"], ids=["long", "short"])
def test_a_foreign_segment_is_refused_and_left_alone(
    source: StampedSource, name: str, content: bytes
) -> None:
    path = SHM / f"smoe.{name}"
    path.write_bytes(content)
    with pytest.raises(errors.RingExists, match="is not a ring of smoe-mp"):
        segments.create(name, source, slots=2)
    assert path.read_bytes() == content
    assert shm_of(name) == [path.name]


def test_nothing_of_that_name(name: str) -> None:
    with pytest.raises(errors.NoSuchRing, match=f"ring {name} .*there is none: start `smoe-mp up`") as raised:
        smoe_mp.attach(name)
    assert isinstance(raised.value, FileNotFoundError)


# --- a ring that is not what it should be -------------------------------------------------------------------


def patch(path: Path, offset: int, value: bytes) -> bytes:
    """Overwrite bytes of a segment; what was there."""
    with path.open("r+b") as f:
        f.seek(offset)
        old = f.read(len(value))
        f.seek(offset)
        f.write(value)
    return old


OTHER_BUILD = "was made by another version or build: "
MAGIC = r"magic is 0x4e494854454d4f53, this build's is 0x474e4952454f4d53:"
#: Offset in the header, bytes to put there, what is raised, and its message.
DAMAGE: list[tuple[int, bytes, type[Exception], str]] = [
    (0, b"SOMETHIN", errors.SegmentError, OTHER_BUILD + MAGIC),
    (0, bytes(8), errors.SegmentError, "not finished"),
    (8, struct.pack("<I", 77), errors.SegmentError, OTHER_BUILD + r"ABI is 0x4d, this build's is 0x[1-9]"),
    (32, struct.pack("<I", 0), errors.SegmentError, "not finished"),
    (32, struct.pack("<I", 2), errors.RingStopping, "being stopped"),
    (32, struct.pack("<I", 3), errors.RingReplaced, "removed or replaced"),
    (
        40,
        struct.pack("<Q", 1234),
        errors.SegmentError,
        OTHER_BUILD + r"layout fingerprint is 0x4d2, this build",
    ),
    (56, struct.pack("<Q", 1), errors.RingReplaced, "removed or replaced"),
    (64, struct.pack("<Q", 4096), errors.SegmentError, r"control segment size .*wanted 4096, got \d+"),
    (80, struct.pack("<Q", 1), errors.SegmentError, "slot_bytes does not add up"),
    (88, struct.pack("<I", 3), errors.SegmentError, "does not add up"),
    (88, struct.pack("<I", 2**32 - 1), errors.SegmentError, "n_slots .*wanted 65535, got 4294967295"),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: f"{d[0]}-{d[1].hex()}")
def test_a_damaged_header_is_refused_with_both_values(
    source: StampedSource, name: str, damage: tuple[int, bytes, type[Exception], str]
) -> None:
    offset, value, error, message = damage
    with made(name, source):
        old = patch(SHM / f"smoe.{name}", offset, value)
        try:
            with pytest.raises(error, match=message) as raised:
                smoe_mp.attach(name)
            assert name in str(raised.value)
        finally:
            patch(SHM / f"smoe.{name}", offset, old)
        smoe_mp.attach(name).close()


@pytest.mark.parametrize("which", ["", ".d"])
@pytest.mark.parametrize("by", [-65536, -1, 65536])
def test_segments_of_another_size_are_refused_before_they_are_mapped(
    source: StampedSource, name: str, which: str, by: int
) -> None:
    with made(name, source):
        path = SHM / f"smoe.{name}{which}"
        size, content = path.stat().st_size, path.read_bytes()
        os.truncate(path, max(size + by, 0))
        with pytest.raises(errors.SegmentError, match=r"segment size does not add up|not finished"):
            smoe_mp.attach(name)
        os.truncate(path, size)
        with path.open("r+b") as f:
            f.write(content)
        smoe_mp.attach(name).close()


def test_a_replaced_data_segment_is_noticed(source: StampedSource, name: str) -> None:
    with made(name, source):
        path = SHM / f"smoe.{name}.d"
        other = SHM / f"smoe.{name}.other"
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)
        with pytest.raises(errors.RingReplaced):
            smoe_mp.attach(name)


# --- room ------------------------------------------------------------------------------------------------

SPACE = """
import errno, os
from pathlib import Path
from support import stamped_source
from smoe_mp import errors, segments
import smoe_mp
source = stamped_source(Path(sys.argv[1]))
for slots in map(int, sys.argv[2:]):
    try:
        made = segments.create("space", source, slots=slots, slot_bytes=1 << 20)
    except errors.SegmentSpaceError as e:
        assert isinstance(e, MemoryError)
        print(slots, e)
    else:
        smoe_mp.attach("space").close()
        made.remove()
        print(slots, "made")
        print(made.pages, file=sys.stderr)
    assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
"""


def in_own_shm(size: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run SPACE with a /dev/shm of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a /dev/shm of its own")
    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    mount = f'mount -t tmpfs -o {size} tmpfs /dev/shm && exec "$@"'
    done = python(SPACE, *arguments, before=("unshare", "-m", "sh", "-c", mount, "sh"))
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespace to be had: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.root
def test_too_small_a_shared_memory(tmp_path: Path) -> None:
    """Field report 24: wanted, free, the remedy (the container's option included), and nothing left."""
    # Slots of 1 MiB, beside a control segment of between 1 and 2 MiB.
    lines = in_own_shm("size=6m", str(tmp_path / "s"), "64", "5", "4", "64", "1").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["ring", "ring", "made", "ring", "made"]
    for line, slots in ((lines[0], 64), (lines[1], 5), (lines[3], 64)):
        wanted, free = (int(w) for w in line.replace(",", "").split() if w.isdigit() and int(w) > 100_000)
        assert (slots + 1) << 20 < wanted < (slots + 2) << 20
        assert 0 < free <= 6 << 20
        for word in ("/dev/shm", "--shm-size", "shm_size", "remount"):
            assert word in line


@pytest.mark.root
def test_a_shared_memory_without_room_for_the_control_segment(tmp_path: Path) -> None:
    (line,) = in_own_shm("size=64k", str(tmp_path / "s"), "1").stdout.splitlines()
    assert "free" in line


@pytest.mark.root
def test_a_shared_memory_without_a_limit(tmp_path: Path) -> None:
    """tmpfs's size=0 means no limit; statvfs then says 0 blocks, 0 free."""
    lines = in_own_shm("size=0", str(tmp_path / "s"), "4").stdout.splitlines()
    assert lines == ["4 made"]


@pytest.mark.root
@pytest.mark.parametrize("huge", ["never", "advise"])
def test_which_pages_a_ring_gets(tmp_path: Path, huge: str) -> None:
    """They are the mount's to give; the remedy that the note names is the one that helps."""
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this kernel has no transparent huge pages")
    pages = in_own_shm(f"size=64m,huge={huge}", str(tmp_path / "s"), "8").stderr.strip()
    note = segments.small_pages_note(pages, 1 << 30)
    if huge == "advise":
        assert "2 MiB huge pages" in pages  # of so few some lie across a boundary
        assert note == ""
    else:
        assert pages.endswith("KiB pages")
        assert "mount -o remount,huge=advise /dev/shm" in note
    assert segments.small_pages_note(pages, (1 << 30) - 1) == ""


@pytest.mark.parametrize("slots", [0, 65536, 2**31])
def test_impossible_numbers_of_slots_leave_nothing(source: StampedSource, name: str, slots: int) -> None:
    with pytest.raises(errors.SmoeError, match=f"n_slots does not add up: wanted 65535, got {slots}"):
        segments.create(name, source, slots=slots)
    assert shm_of(name) == []


@pytest.mark.parametrize("slot_bytes", [16384, 65537, 16384 * 5 + 1])
def test_slot_sizes_that_do_not_fit_leave_nothing(source: StampedSource, name: str, slot_bytes: int) -> None:
    with pytest.raises(errors.ConfigError, match=f"slot size {slot_bytes}"):
        segments.create(name, source, slots=2, slot_bytes=slot_bytes)
    assert shm_of(name) == []


# --- whose it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_mode_0600_whatever_the_umask(source: StampedSource, name: str, umask: int) -> None:
    old = os.umask(umask)
    try:
        with made(name, source):
            found = shm_of(name)
            assert len(found) == 2
            assert [stat.S_IMODE((SHM / n).stat().st_mode) for n in found] == [0o600, 0o600]
            smoe_mp.attach(name).close()
    finally:
        os.umask(old)


AS_ANOTHER = """
import os, sys
import smoe_mp
from pathlib import Path
from support import stamped_source
from smoe_mp import errors, segments
source = stamped_source(Path(sys.argv[2])) if len(sys.argv) > 2 else None
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    smoe_mp.attach(sys.argv[1]) if source is None else segments.create(sys.argv[1], source, slots=2)
except errors.SmoeError as e:
    print(type(e).__name__, e)
"""


@pytest.fixture
def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")


@pytest.mark.root
@pytest.mark.usefixtures("need_root")
def test_another_user_cannot_attach(source: StampedSource, name: str) -> None:
    """Field report 33: the error names owner, mode and own uid."""
    with made(name, source) as ring:
        done = python(AS_ANOTHER, name)
        assert done.stderr == ""
        kind, text = done.stdout.split(maxsplit=1)
        assert kind == "SegmentError"
        assert f"shared memory /smoe.{name}" in text
        assert "permission denied for uid 65534" in text
        assert "belongs to uid 0, mode 0600" in text
        assert ring.state == "live"


@pytest.mark.root
@pytest.mark.usefixtures("need_root")
@pytest.mark.parametrize("what", ["live", "half-made"])
def test_another_user_cannot_take_the_name(
    source: StampedSource, name: str, tmp_path: Path, what: str
) -> None:
    with contextlib.ExitStack() as stack:
        if what == "live":
            stack.enter_context(made(name, source))
        else:
            path = SHM / f"smoe.{name}"
            path.touch(0o600)
        done = python(AS_ANOTHER, name, str(tmp_path / "other"))
        assert done.stderr == ""
        kind, text = done.stdout.split(maxsplit=1)
        assert kind in ("RingExists", "SegmentError")
        assert "uid 0" in text
        assert f"smoe.{name}" in shm_of(name)
