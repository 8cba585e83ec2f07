"""expert_freq.bin: round trips, the original's reader and files, damage, foreign models, and killed saves."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import stamped_source

from smoe_mp import histogram
from smoe_mp.histogram import COUNT_MAX, ORIGINAL_BYTES, Histogram, HistogramError, Loaded

MODEL, OTHER = bytes(range(16)), b"another model..."
GRID = [(layer, expert) for layer in range(3) for expert in range(8)]
#: With experts that the original's counts have no cell for.
WIDE = [*GRID, (127, 511), (128, 0), (0, 512), (4_000_000_000, 7), (200, 2047)]


def load(path: Path, known: Sequence[tuple[int, int]] = GRID, model: bytes = MODEL) -> Loaded:
    return histogram.load(path, model, known)


def counts_of(loaded: Loaded) -> list[int]:
    assert loaded.histogram is not None, loaded.notes
    return loaded.histogram.counts.tolist()


def set_aside_note(path: Path, known: Sequence[tuple[int, int]] = GRID, bad: str = ".bad") -> str:
    """Load a file that is no good: a note, the file moved, nothing raised."""
    before = path.read_bytes()
    loaded = load(path, known)
    assert loaded.histogram is None
    assert loaded.found
    assert not path.exists()
    assert path.with_name(path.name + bad).read_bytes() == before
    (note,) = loaded.notes
    assert f"set aside as {path.name}{bad}; starting cold" in note
    assert str(path) in note
    return note


def original_reads(path: Path) -> list[int]:
    """The original's reader: it never looks behind the counts."""
    with path.open("rb") as file:
        magic, version, n = struct.unpack("<III", file.read(12))
        assert (magic, version) == (0x51524653, 1)
        assert n <= 65536
        counts = struct.unpack(f"<{n}I", file.read(4 * n))
    return list(counts)


def original_file(counts: dict[tuple[int, int], int]) -> bytes:
    """As the original writes it."""
    cells = [0] * 65536
    for (layer, expert), count in counts.items():
        cells[layer * 512 + expert] = count
    return struct.pack("<III65536I", 0x51524653, 1, 65536, *cells)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.smoe.expert_freq.bin"


# --- round trips -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, COUNT_MAX), min_size=len(WIDE), max_size=len(WIDE)))
def test_round_trip_in_memory(counts: list[int]) -> None:
    raw = histogram.encode(MODEL, WIDE, counts)
    got, ignored = histogram._decode(raw, MODEL, np.array(WIDE))
    assert (got.tolist(), ignored) == (counts, 0)


def test_round_trip(path: Path) -> None:
    counts = list(range(1, len(WIDE) + 1))
    histogram.save(path, MODEL, WIDE, counts)
    loaded = load(path, WIDE)
    assert counts_of(loaded) == counts
    assert (loaded.notes, loaded.found, loaded.path) == ((), True, path)
    histogram.save(path, MODEL, np.array(WIDE), np.array(counts, np.uint32))  # as it lies in shared memory
    assert counts_of(load(path, WIDE)) == counts
    assert os.listdir(path.parent) == [path.name]


def test_the_original_reads_ours(path: Path) -> None:
    histogram.save(path, MODEL, WIDE, [10 + i for i in range(len(WIDE))])
    cells = original_reads(path)
    assert len(cells) == 65536
    assert [cells[layer * 512 + expert] for layer, expert in GRID] == [10 + i for i in range(24)]
    assert cells[65535] == 34  # (127, 511)
    assert sum(cells) == sum(10 + i for i in range(25))  # and no other: 512 is not (1, 0)


def test_we_read_the_originals(path: Path) -> None:
    path.write_bytes(original_file({(0, 3): 7, (2, 7): COUNT_MAX}))
    assert path.stat().st_size == ORIGINAL_BYTES
    loaded = load(path, WIDE)
    assert loaded.histogram is not None
    assert loaded.histogram.original
    assert loaded.notes == ()
    counts = counts_of(loaded)
    assert (counts[3], counts[23], sum(counts)) == (7, COUNT_MAX, 7 + COUNT_MAX)
    histogram.save(path, MODEL, WIDE, counts)
    again = load(path, WIDE)
    assert counts_of(again) == counts
    assert again.histogram is not None
    assert not again.histogram.original


def test_the_bytes_are_those_of_the_map(path: Path) -> None:
    """The map at the top of histogram.py, by numbers."""
    histogram.save(path, MODEL, WIDE, [0] * 28 + [9])
    raw = path.read_bytes()
    assert raw[:12] == b"SFRQ" + struct.pack("<II", 1, 65536)
    assert raw[262156:262164] == b"SMOEFQ\0\x01"
    assert struct.unpack_from("<II16sI", raw, 262164) == (1, 29, MODEL, 4)
    assert struct.unpack_from("<III", raw, 262192 + 36) == (200, 2047, 9)
    assert raw[262192 + 48 :] == zlib.crc32(raw[:-4]).to_bytes(4, "little")


def test_counts_saturate(path: Path) -> None:
    """2^63 among them."""
    huge = [2**63, 2**32, 2**32 - 1, 2**100, *[1] * 20]
    histogram.save(path, MODEL, GRID, huge)
    assert counts_of(load(path))[:5] == [COUNT_MAX] * 4 + [1]
    histogram.save(path, MODEL, GRID, np.full(24, 2**63, np.uint64))
    assert counts_of(load(path)) == [COUNT_MAX] * 24


def test_order_is_by_popularity_then_table() -> None:
    counts = np.array([0, 5, COUNT_MAX, 5, 0, 2**31], np.uint32)
    assert Histogram(counts).order().tolist() == [2, 5, 1, 3, 0, 4]
    assert Histogram(np.zeros(4, np.uint32)).order().tolist() == [0, 1, 2, 3]


def test_wrong_calls_are_faults() -> None:
    with pytest.raises(ValueError, match="23 counts for 24 experts"):
        histogram.encode(MODEL, GRID, [0] * 23)
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        histogram.encode(b"abc", GRID, [0] * 24)


# --- no good (field report 45) -----------------------------------------------------------------------------


def test_absent(path: Path) -> None:
    assert load(path) == Loaded(None, (), False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty (0 bytes)"),
        (b'{"0.1": 12, "0.2', "no histogram: begins with 7b 22 30 2e"),
        (b"NaN\n", "no histogram"),
        (b"9223372036854775808", "no histogram"),
        (b"SF", "cut: 2 bytes of at least 262156"),
        (b"SFRQ", "cut: 4 bytes"),
        (b"SFRQ" + struct.pack("<II", 2, 65536), "version 2, and only 1 is known"),
        (b"SFRQ" + struct.pack("<II", 1, 2**31), "2147483648 counts, and there are always 65536"),
        (b"SFRQ" + struct.pack("<II", 1, 64), "64 counts"),
        (b"QRFS" + struct.pack(">II", 1, 65536), "no histogram: begins with 51 52 46 53"),
        (original_file({})[:-1], "cut: 262155 bytes of at least 262156"),
        (original_file({}) + b"\0", "cut: 262157 bytes end inside the trailer"),
        (original_file({}) + bytes(200), "200 bytes behind the counts that are not ours"),
        (b"\0" * ORIGINAL_BYTES, "no histogram"),
    ],
)
def test_damaged_or_absurd(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    assert said in set_aside_note(path)
    assert load(path) == Loaded(None)  # the next start finds nothing
    histogram.save(path, MODEL, GRID, [1] * 24)
    assert counts_of(load(path)) == [1] * 24


def test_any_cut_and_any_changed_byte_is_seen(path: Path) -> None:
    raw = histogram.encode(MODEL, WIDE, range(29))
    step = 20011  # some places in the counts, all behind them
    for at in [*range(0, ORIGINAL_BYTES, step), *range(ORIGINAL_BYTES + 1, len(raw))]:
        with pytest.raises(histogram._Bad):
            histogram._decode(raw[:at], MODEL, np.array(WIDE))
    for at in [*range(0, ORIGINAL_BYTES, step), *range(ORIGINAL_BYTES, len(raw))]:
        changed = bytearray(raw)
        changed[at] ^= 0x40
        with pytest.raises(histogram._Bad):
            histogram._decode(bytes(changed), MODEL, np.array(WIDE))


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_nothing_else_is_raised_for_a_damaged_trailer(junk: bytes, at: int) -> None:
    raw = bytearray(histogram.encode(MODEL, WIDE, range(29)))
    raw[ORIGINAL_BYTES + at : ORIGINAL_BYTES + at + len(junk)] = junk
    with contextlib.suppress(histogram._Bad):
        histogram._decode(bytes(raw), MODEL, np.array(WIDE))


def test_absurd_number_of_entries_allocates_nothing(path: Path) -> None:
    raw = bytearray(histogram.encode(MODEL, GRID, [0] * 24))
    raw[262188:262192] = b"\xff" * 4
    path.write_bytes(raw)
    assert "with 4294967295 experts in the trailer it must be" in set_aside_note(path)


def test_absurdly_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    loaded = load(path)
    assert "1099511627776 bytes, and no histogram has more" in loaded.notes[0]
    assert not path.exists()


def test_trailer_of_a_later_version(path: Path) -> None:
    raw = bytearray(histogram.encode(MODEL, GRID, [0] * 24))
    raw[262164] = 2
    path.write_bytes(raw)
    assert "trailer of version 2" in set_aside_note(path)


def test_of_another_model(path: Path) -> None:
    histogram.save(path, OTHER, GRID, [5] * 24)
    note = set_aside_note(path)
    assert f"of another model: fingerprint {OTHER.hex()}, this model's is {MODEL.hex()}" in note


def test_of_another_number_of_experts(path: Path) -> None:
    histogram.save(path, MODEL, GRID, [5] * 24)
    assert "of 24 experts, and the model has 12" in set_aside_note(path, GRID[:12])


def test_256_expert_file_for_a_64_expert_model(path: Path) -> None:
    """The original's names no model: counts of experts that are not there are ignored, which is said."""
    path.write_bytes(original_file({(layer, e): 1 + e for layer in range(2) for e in range(256)}))
    loaded = load(path, [(layer, e) for layer in range(2) for e in range(64)])
    assert counts_of(loaded) == [1 + e for e in range(64)] * 2
    assert "384 counts of experts that the model has not, ignored" in loaded.notes[0]
    assert path.exists()


def test_earlier_bad_files_are_kept(path: Path) -> None:
    for number in range(histogram.BAD_KEPT):
        path.write_bytes(b"bad %d" % number)
        set_aside_note(path, bad=f".bad.{number}" if number else ".bad")
    path.write_bytes(b"one more")
    loaded = load(path)
    assert "not set aside, since 10 such files are kept already" in loaded.notes[0]
    assert path.read_bytes() == b"one more"
    kept = {p.read_bytes() for p in path.parent.glob("*.bad*")}
    assert kept == {b"bad %d" % number for number in range(10)}
    histogram.save(path, MODEL, GRID, [1] * 24)
    assert counts_of(load(path)) == [1] * 24


def test_things_that_are_no_file(path: Path) -> None:
    path.mkdir()
    assert "not a regular file" in load(path).notes[0]
    assert path.is_dir()
    with pytest.raises(HistogramError):
        histogram.save(path, MODEL, GRID, [0] * 24)
    assert os.listdir(path.parent) == [path.name]
    path.rmdir()
    os.mkfifo(path)
    assert "not a regular file" in load(path).notes[0]  # and it does not wait for a writer
    path.unlink()
    path.symlink_to(path.name)
    assert "symbolic links" in load(path).notes[0]


def test_through_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    """The link stays one, and what is made lies beside the file itself."""
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere/h.bin"
    path.symlink_to(target)
    assert load(path) == Loaded(None)
    histogram.save(path, MODEL, GRID, [3] * 24)
    assert path.is_symlink()
    assert counts_of(load(path)) == [3] * 24
    target.write_bytes(b"")
    load(path)
    assert os.listdir(target.parent) == ["h.bin.bad"]


def test_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in reading is no proof of damage: the file stays."""
    histogram.save(path, MODEL, GRID, [3] * 24)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        loaded = load(path)
    assert "Input/output error; starting cold" in loaded.notes[0]
    assert counts_of(load(path)) == [3] * 24


# --- places ------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders named "ro" cannot be written, whoever runs the test."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p).name != "ro" and access(p, mode))


def test_beside_the_vault(tmp_path: Path) -> None:
    vault = tmp_path / "m.q4.smoe"
    where = histogram.places(vault, MODEL, environ={})
    assert where.path == tmp_path / "m.q4.smoe.expert_freq.bin"
    assert where.imports == (tmp_path / "expert_freq.bin",)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    where = histogram.places(folder, MODEL, environ={})
    assert where.path == tmp_path / "checkpoint.expert_freq.bin"
    assert where.imports == (folder / "expert_freq.bin",)


def test_configured(tmp_path: Path) -> None:
    where = histogram.places(tmp_path / "m.smoe", MODEL, tmp_path / "h")
    assert where.path == tmp_path / "h"
    assert where.imports == (tmp_path / "m.smoe.expert_freq.bin", tmp_path / "expert_freq.bin")


@pytest.mark.usefixtures("read_only")
def test_state_folder_where_the_vaults_cannot_be_written(tmp_path: Path) -> None:
    vault = tmp_path / "ro/m.smoe"
    vault.parent.mkdir()
    state = tmp_path / "state"
    where = histogram.places(vault, MODEL, environ={"XDG_STATE_HOME": str(state), "HOME": "/nowhere"})
    assert where.path == state / f"smoe-mp/{MODEL.hex()}.expert_freq.bin"
    assert where.imports == (tmp_path / "ro/m.smoe.expert_freq.bin", tmp_path / "ro/expert_freq.bin")
    assert (state / "smoe-mp").stat().st_mode & 0o777 == 0o700
    for environ in ({"HOME": str(tmp_path)}, {"XDG_STATE_HOME": "relative", "HOME": str(tmp_path)}):
        where = histogram.places(vault, MODEL, environ=environ)
        assert where.path.parent == tmp_path / ".local/state/smoe-mp"
    assert histogram.places(vault, MODEL, environ={}).path.parent == vault.parent  # a save will say why

    # What came with the read-only vault is used, and written to the state folder from then on.
    histogram.save(vault.parent / "m.smoe.expert_freq.bin", MODEL, GRID, [4] * 24)
    loaded = histogram.recall(where, MODEL, GRID)
    assert counts_of(loaded) == [4] * 24
    histogram.save(where.path, MODEL, GRID, [5] * 24)
    assert counts_of(histogram.recall(where, MODEL, GRID)) == [5] * 24


def test_the_originals_file_is_imported_once(tmp_path: Path) -> None:
    where = histogram.places(tmp_path / "m.smoe", MODEL, environ={})
    original = tmp_path / "expert_freq.bin"
    original.write_bytes(original_file({(0, 1): 6}))
    loaded = histogram.recall(where, MODEL, GRID)
    assert counts_of(loaded)[1] == 6
    assert loaded.notes == (f"histogram: imported from {original}",)
    histogram.save(where.path, MODEL, GRID, [9] * 24)
    assert counts_of(histogram.recall(where, MODEL, GRID)) == [9] * 24
    assert original.read_bytes() == original_file({(0, 1): 6})


def test_a_bad_original_is_left_to_its_owner(tmp_path: Path) -> None:
    where = histogram.places(tmp_path / "m.smoe", MODEL, environ={})
    (tmp_path / "expert_freq.bin").write_bytes(b"SFRQ")
    loaded = histogram.recall(where, MODEL, GRID)
    assert loaded.histogram is None
    assert "not imported" in loaded.notes[0]
    assert os.listdir(tmp_path) == ["expert_freq.bin"]


def test_damage_means_a_cold_start_not_an_old_import(tmp_path: Path) -> None:
    where = histogram.places(tmp_path / "m.smoe", MODEL, environ={})
    (tmp_path / "expert_freq.bin").write_bytes(original_file({(0, 1): 6}))
    where.path.write_bytes(b"")
    assert histogram.recall(where, MODEL, GRID).histogram is None


def test_two_models_are_not_mixed(tmp_path: Path) -> None:
    a, b = (histogram.places(tmp_path / f"{name}.smoe", MODEL, environ={}).path for name in "ab")
    assert a != b
    histogram.save(a, MODEL, GRID, [1] * 24)
    histogram.save(b, OTHER, GRID, [2] * 24)
    assert counts_of(load(a)) == [1] * 24
    assert counts_of(load(b, model=OTHER)) == [2] * 24
    shutil.copy(b, a)
    assert "of another model" in set_aside_note(a)


# --- fingerprints ------------------------------------------------------------------------------------------


def test_a_copied_vault_keeps_its_fingerprint(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s")
    mark = histogram.fingerprint(source)
    assert len(mark) == 16
    moved = [
        dataclasses.replace(f, path=Path("/else") / f.path.name, dev=9, ino=f.ino + 1, mtime_ns=0)
        for f in source.files
    ]
    assert histogram.fingerprint(dataclasses.replace(source, files=moved, path=Path("/x"))) == mark


def test_other_content_has_another_fingerprint(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s")
    first, *rest = source.files
    others = [
        dataclasses.replace(source, format="other"),
        dataclasses.replace(source, files=[dataclasses.replace(first, size=first.size + 1), *rest]),
        dataclasses.replace(source, files=[dataclasses.replace(first, digest=b"x" * 16), *rest]),
        dataclasses.replace(source, files=rest),
        dataclasses.replace(source, files=[*source.files, first]),
    ]
    marks = {histogram.fingerprint(s) for s in [source, *others]}
    assert len(marks) == 6


# --- saves that fail ---------------------------------------------------------------------------------------

SAVE_LIMITED = """
import resource, sys
from pathlib import Path
from smoe_mp import histogram
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    histogram.save(Path(sys.argv[1]), bytes(range(16)), [(0, 0)], [1])
except histogram.HistogramError as error:
    print(error.os_error, error)
"""


def test_a_save_that_fails_half_way(path: Path) -> None:
    histogram.save(path, MODEL, GRID, [3] * 24)
    before = path.read_bytes()
    ran = subprocess.run(
        [sys.executable, "-c", SAVE_LIMITED, path], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith(f"{errno.EFBIG} histogram {path}: not saved: File too large")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 300 KiB, where one histogram fits and no second."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    return folder


@pytest.mark.root
def test_full_and_read_only_disks(small_disk: Path) -> None:
    try:
        path = small_disk / "h.bin"
        histogram.save(path, MODEL, GRID, [3] * 24)
        with pytest.raises(HistogramError, match="No space left") as full:
            histogram.save(path, MODEL, GRID, [4] * 24)
        assert full.value.os_error == errno.ENOSPC
        assert counts_of(load(path)) == [3] * 24
        assert os.listdir(small_disk) == ["h.bin"]

        path.write_bytes(b"bad")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(HistogramError, match="Read-only file system") as read_only:
            histogram.save(path, MODEL, GRID, [4] * 24)
        assert read_only.value.os_error == errno.EROFS
        assert "it cannot be set aside: Read-only file system; starting cold" in load(path).notes[0]
        assert path.read_bytes() == b"bad"
        environ = {"XDG_STATE_HOME": str(small_disk.parent)}
        where = histogram.places(small_disk / "m.smoe", MODEL, environ=environ)
        assert where.path.parent == small_disk.parent / "smoe-mp"
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(HistogramError) as caught:
        histogram.save(tmp_path / "gone/h.bin", MODEL, GRID, [1] * 24)
    assert caught.value.os_error == errno.ENOENT
    assert not (tmp_path / "gone").exists()


def test_another_saver_is_waited_for_and_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    held = os.open(temporary, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    naps = []
    monkeypatch.setattr("time.sleep", naps.append)
    with pytest.raises(HistogramError, match="another process is saving it") as caught:
        histogram.save(path, MODEL, GRID, [1] * 24)
    assert caught.value.os_error == errno.EAGAIN
    assert len(naps) == histogram._LOCK_TRIES
    assert temporary.exists()  # the other's
    os.close(held)
    histogram.save(path, MODEL, GRID, [1] * 24)
    assert os.listdir(path.parent) == [path.name]


def test_a_waiter_does_not_write_into_the_finished_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened the temporary before the rename made it the real file; the lock on that is worth nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    flock, once = fcntl.flock, [True]

    def renamed_meanwhile(fd: int, how: int) -> None:
        if once.pop() if once else False:
            os.write(fd, b"another's")
            os.rename(temporary, path)
            os.link(path, path.with_name("witness"))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", renamed_meanwhile)
    histogram.save(path, MODEL, GRID, [1] * 24)
    assert path.with_name("witness").read_bytes() == b"another's"
    assert counts_of(load(path)) == [1] * 24


def test_a_link_in_the_temporarys_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.with_name(f".{path.name}.tmp").symlink_to(victim)
    with pytest.raises(HistogramError):
        histogram.save(path, MODEL, GRID, [1] * 24)
    assert victim.read_text() == "precious"


# --- saves that are killed ---------------------------------------------------------------------------------

#: Forks a saver, kills it, and says what the file is then: `steps` at each system call of a save, before and
#: after it; `random N` N times at a random moment.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from smoe_mp import histogram

path, how = Path(sys.argv[1]), sys.argv[2:]
model, known = bytes(range(16)), [(layer, e) for layer in range(3) for e in range(8)]
temporary = path.with_name(f".{path.name}.tmp")

def save(value):
    histogram.save(path, model, known, np.full(24, value, np.uint32))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def found():
    loaded = histogram.load(path, model, known)
    assert loaded.histogram is not None and not loaded.notes, loaded.notes
    (value,) = set(loaded.histogram.counts.tolist())
    return {"value": value, "left": temporary.exists()}

def killed(child):
    pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(3)
    return pid

def at_step(call, number, after):
    real = getattr(os, call)
    seen = []
    def step(*args, **kw):
        seen.append(1)
        if len(seen) != number:
            return real(*args, **kw)
        if call == "write" and after:
            real(args[0], args[1][:100_000])
        elif after:
            real(*args, **kw)
        die()
    setattr(os, call, step)
    save(2)

out = []
if how[0] == "steps":
    for call, number in (
        ("open", 1), ("ftruncate", 1), ("write", 1), ("fsync", 1), ("rename", 1), ("open", 2), ("fsync", 2),
    ):
        for after in (False, True):
            save(1)
            _, status = os.waitpid(killed(lambda: at_step(call, number, after)), 0)
            assert os.WIFSIGNALED(status), (call, number, status)
            out.append({"step": [call, number, after], **found()})
    save(3)
    out.append({"step": ["end", 0, False], **found()})
else:
    rng = random.Random(45)
    value = 1
    save(value)
    for _ in range(int(how[1])):
        def child(first=value):
            for i in range(1, 100_000):
                save(first + i)
        pid = killed(child)
        time.sleep(rng.uniform(0.001, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen = found()
        assert value <= seen["value"], (value, seen)
        value = seen["value"]
        out.append(seen)
    save(value + 1)
    out.append(found())
print(json.dumps(out))
"""


def killer(path: Path, *how: str) -> list[dict[str, object]]:
    ran = subprocess.run(
        [sys.executable, "-c", KILLER, path, *how], capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    out: list[dict[str, object]] = json.loads(ran.stdout)
    return out


def test_killed_at_every_step_of_a_save(path: Path) -> None:
    *steps, end = killer(path, "steps")
    for found in steps:
        call, number, after = found["step"]  # type: ignore[misc]
        renamed = (call, after) == ("rename", True) or number == 2
        assert found["value"] == (2 if renamed else 1), found
        assert found["left"] == (not renamed and (call, after) != ("open", False)), found
    assert (end["value"], end["left"]) == (3, False)
    assert os.listdir(path.parent) == [path.name]


def test_killed_at_random_moments(path: Path) -> None:
    *rounds, end = killer(path, "random", "100")
    assert len(rounds) == 100
    assert any(found["left"] for found in rounds)  # some kills did meet a save
    assert not end["left"]
    assert os.listdir(path.parent) == [path.name]
