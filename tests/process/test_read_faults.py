"""Reads that fail, come short, are interrupted or refused, and files that change under the ring.

Every waiter gets its error, hits and other experts go on, nothing is served that was not read from the file
that the ring was made for, and nobody tries again unasked.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from faultkit import (
    KIB,
    MIB,
    FaultyWorker,
    KnownSource,
    Serving,
    Shimlog,
    Together,
    assert_right,
    cached_pages,
    direct_error,
    even_source,
    fetched,
    known_source,
    loop_device,
    make_image,
    many_files,
    mounted,
    needs,
    needs_direct,
    refused,
    serving,
    shimmed,
)
from support import LIMIT_S, in_futex_sleep, state_of, stop, until
from systems import Up, status_of

import smoe_mp as smoe
from smoe_mp import segments
from smoe_mp._native import lib
from smoe_mp.errors import ExpertReadError

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="Linux alone")

CHANGED, SHORT = lib.SMOE_READ_CHANGED, lib.SMOE_READ_SHORT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose files are read directly."""
    needs_direct(tmp_path)
    return tmp_path


# --- the file changes ---------------------------------------------------------------------------------


def test_a_truncated_file(folder: Path) -> None:
    """Experts behind its new end come short; of the rest nothing is published either, for it is another file
    now.  What is resident is served on."""
    source = even_source(folder / "v", 8)
    with serving(source, slots=6) as s, s.attach() as ring, s.attach() as other:
        assert_right(ring, source, [0, 1])
        os.truncate(source.path, 5 * 32 * KIB + 100)
        error = refused(ring, 7)
        assert (error.path, error.offset, error.wanted) == (str(source.path), 7 * 32 * KIB, 32 * KIB)
        assert (error.got, error.os_error) == (0, SHORT)
        error = refused(ring, 5)
        assert (error.offset, error.wanted, error.got) == (5 * 32 * KIB, 32 * KIB, 100)
        error = refused(other, 2)
        assert (error.path, error.os_error) == (str(source.path), CHANGED)
        assert "replaced or changed" in str(error)
        assert str(source.path) in str(error)
        assert_right(other, source, [0, 1])
        counters = s.counters()
        assert (counters["reads"], counters["failed_reads"], counters["read_errors"]) == (2, 3, 3)
        assert s.census()["empty"] == 4


def test_the_error_of_a_changed_file_says_what_was_read(folder: Path) -> None:
    source = even_source(folder / "v", 3)
    with serving(source, slots=2) as s, s.attach() as ring:
        os.utime(source.path)
        error = refused(ring, 1)
        assert error.os_error == CHANGED
        assert (error.offset, error.wanted) == (32 * KIB, 32 * KIB)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_overwritten_in_place(folder: Path, direct: bool) -> None:
    """Its new bytes are never served, also where the mtime is all that tells."""
    source = even_source(folder / "v", 4)
    env = {} if direct else shimmed(refuse_open=errno.EINVAL)
    with serving(source, slots=4, workers=2, env=env) as s, s.attach() as ring:
        assert_right(ring, source, [0])
        with source.path.open("r+b") as f:
            f.seek(2 * 32 * KIB)
            f.write(bytes(32 * KIB))
        for expert in (1, 2, 3, 2):
            assert refused(ring, expert).os_error == CHANGED
        assert_right(ring, source, [0])
        assert s.file()["mode"] == ("direct" if direct else "buffered")


def test_a_file_replaced_by_another(folder: Path) -> None:
    """Workers that have it open go on with the old one; one that opens anew finds that it is another."""
    source = even_source(folder / "v", 6)
    with serving(source, slots=2, workers=2) as s, s.attach() as ring:
        assert_right(ring, source, [0])
        impostor = folder / "w"
        impostor.write_bytes(bytes(source.files[0].size))
        os.utime(impostor, ns=(source.files[0].mtime_ns, source.files[0].mtime_ns))
        impostor.rename(source.path)
        assert_right(ring, source, [0, 1, 2, 3, 4, 5, 0])
        said = s.start(2).wait_refused()
        assert str(source.path) in said
        assert "not the one that the ring was made for" in said
        assert s.counters()["failed_reads"] == 0


def test_a_file_replaced_that_had_been_closed(folder: Path) -> None:
    """With few descriptors files are closed and opened again: the new file is then told from the old."""
    source = many_files(folder / "v", 24)
    with serving(source, slots=2, under=["prlimit", "--nofile=64:64"]) as s, s.attach() as ring:
        assert_right(ring, source, range(24))
        for file in source.files:
            fresh = folder / "fresh"
            fresh.write_bytes(bytes(file.size))
            os.utime(fresh, ns=(file.mtime_ns, file.mtime_ns))
            fresh.rename(file.path)
        for expert in range(24 - 8):  # eight at most are open still; these were closed
            error = refused(ring, expert)
            assert (error.os_error, error.path) == (CHANGED, str(source.files[expert].path))


def test_every_waiter_of_a_file_that_changes(folder: Path) -> None:
    """The file is truncated while the read is under way and four clients wait for it."""
    source = even_source(folder / "v", 4)
    gate = folder / "gate"
    gate.touch()
    hang = shimmed(hang=f"{32 * KIB}:{gate}")
    with ExitStack() as stack:
        s = stack.enter_context(serving(source, slots=4, env=hang))
        rings = [stack.enter_context(s.attach()) for _ in range(4)]
        batches = [ring.acquire(0, [1]) for ring in rings]
        s.wait_reading()
        os.truncate(source.path, 32 * KIB + 5000)
        gate.unlink()
        for batch in batches:
            with pytest.raises(ExpertReadError) as caught:
                batch.wait()
            error = caught.value
            assert (error.path, error.offset) == (str(source.path), 32 * KIB)
            assert (error.wanted, error.got) == (32 * KIB, 5000)
            assert error.os_error in (SHORT, CHANGED)  # whichever is seen first
        assert s.counters()["failed_reads"] == 1
        s.assert_quiet()


# --- EIO ----------------------------------------------------------------------------------------------


@pytest.fixture
def dying_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB whose second half will be lost: `tmp_path/image` is its storage."""
    needs("mkfs.ext4", "mount", "losetup", root=True)
    image = make_image(tmp_path / "image", 64 * MIB)
    flags = ["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard"]
    subprocess.run(["mkfs.ext4", *flags, str(image)], check=True, capture_output=True)
    with ExitStack() as stack:
        with loop_device(image) as device:
            at = stack.enter_context(mounted(tmp_path / "disk", "-o", "noatime", device))
        yield at


def test_a_disk_that_loses_its_second_half(dying_disk: Path) -> None:
    """Field report 20: some experts are gone with EIO, the others go on; each error names its place."""
    needs_direct(dying_disk)
    length = 1 * MIB
    source = even_source(dying_disk / "v", 44, length)
    os.sync()
    with serving(source, slots=8, workers=2) as s, s.attach() as ring:
        os.truncate(dying_disk.parent / "image", 32 * MIB)
        storage = [direct_error(source.path, i * length, length) for i in range(44)]
        assert set(storage) == {0, errno.EIO}
        for expert in range(44):
            if storage[expert] == 0:
                assert fetched(ring, expert) == source.bytes_of(expert)
                continue
            error = refused(ring, expert)
            assert (error.path, error.offset, error.wanted) == (str(source.path), expert * length, length)
            assert error.os_error == errno.EIO
            for part in (str(source.path), "EIO", f"expert {expert} of layer 0", "mount"):
                assert part in str(error)
        counters = s.counters()
        assert counters["reads"] == storage.count(0)
        assert counters["failed_reads"] == counters["read_errors"] == storage.count(errno.EIO)
        assert counters["fallbacks"] == 0
        assert s.file()["mode"] == "direct"
        s.assert_quiet()
        good = storage.index(0)
        assert_right(ring, source, [good])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENODATA, errno.ENXIO])
def test_a_fault_of_the_storage_is_no_refusal_of_direct_reads(folder: Path, number: int) -> None:
    """One read of one expert fails once: an error, no second try unasked, and the next demand is served."""
    source = even_source(folder / "v", 4)
    log = Shimlog(folder / "log")
    env = shimmed(at=f"{2 * 32 * KIB}:{number}:1", log=folder / "log")
    with serving(source, slots=3, env=env) as s, s.attach() as ring:
        assert_right(ring, source, [0, 1])
        error = refused(ring, 2)
        assert (error.os_error, error.offset, error.got) == (number, 2 * 32 * KIB, 0)
        assert os.strerror(number) in str(error)
        assert s.census()["empty"] == 1, "the slot is free at once"
        assert_right(ring, source, [0, 1, 3, 2])
        counters = s.counters()
        assert (counters["reads"], counters["failed_reads"], counters["fallbacks"]) == (4, 1, 0)
        assert s.file()["mode"] == "direct"
        assert len([read for read in log.reads() if read[1] == 2 * 32 * KIB]) == 2


def test_sixteen_clients_and_one_failing_expert(folder: Path) -> None:
    """One read, sixteen errors, and the slot is free after the last."""
    source = even_source(folder / "v", 4)
    gate = folder / "gate"
    gate.touch()
    env = shimmed(at=f"0:{errno.EIO}:0", hang=f"0:{gate}", log=folder / "log")
    with ExitStack() as stack:
        s = stack.enter_context(serving(source, slots=17, workers=2, env=env))
        rings = [stack.enter_context(s.attach()) for _ in range(16)]
        batches = [ring.acquire(0, [0]) for ring in rings]
        s.wait_reading()
        threads, caught = Together(), []

        def wait(batch: smoe.Batch) -> None:
            try:
                batch.wait()
            except ExpertReadError as e:
                caught.append((e.path, e.offset, e.wanted, e.got, e.os_error))

        for batch in batches:
            threads.start(wait, batch)
        assert_right(rings[0], source, [1, 2])  # the others go on while this one hangs
        gate.unlink()
        threads.join()
        assert caught == [(str(source.path), 0, 32 * KIB, 0, errno.EIO)] * 16
        counters = s.counters()
        assert (counters["failed_reads"], counters["read_errors"], counters["reads"]) == (1, 16, 2)
        assert [read for read in Shimlog(folder / "log").reads() if read[1] == 0] == [
            (True, 0, 32 * KIB, -errno.EIO)
        ]
        assert s.census()["empty"] == 15
        s.assert_quiet()


def test_one_expert_of_a_batch_fails(folder: Path) -> None:
    """The batch is released as a whole; its other experts stay."""
    source = even_source(folder / "v", 4)
    with serving(source, slots=4, env=shimmed(at=f"{32 * KIB}:{errno.EIO}:0")) as s, s.attach() as ring:
        with pytest.raises(ExpertReadError) as caught:
            ring.fetch(0, [0, 1, 2])
        assert caught.value.expert == 1
        s.assert_quiet()
        assert_right(ring, source, [0, 2])
        served = []
        with pytest.raises(ExpertReadError):
            served += [x.expert for x in ring.as_ready(0, [3, 2, 1])]
        s.assert_quiet()


def test_a_guess_that_fails_is_nobodys_error(folder: Path) -> None:
    source = even_source(folder / "v", 8)
    with serving(source, slots=8, env=shimmed(at=f"0:{errno.EIO}:1")) as s, s.attach() as ring:
        assert ring.speculate(0, [0]) == 1
        until(lambda: s.counters()["failed_reads"] == 1)
        until(lambda: s.census()["empty"] == 8)
        assert s.census()["guesses"] == 0
        assert_right(ring, source, [0])


# --- the slot is taken again --------------------------------------------------------------------------


def test_a_slot_taken_again_at_once_after_a_failure(folder: Path) -> None:
    """Two wait for a failing expert.  When the first has its error, the slot is still the second's; when
    both have, it goes to another expert."""
    source = even_source(folder / "v", 6)
    gate = folder / "gate"
    gate.touch()
    env = shimmed(at=f"0:{errno.EIO}:0", hang=f"0:{gate}")
    with (
        serving(source, slots=3, env=env) as s,
        s.attach() as a,
        s.attach() as b,
        s.attach() as c,
    ):
        first, second = a.acquire(0, [0]), b.acquire(0, [0])
        s.wait_reading()
        gate.unlink()
        until(lambda: s.census()["failed"] == 1)
        with pytest.raises(ExpertReadError):
            first.wait()
        held = c.fetch(0, [1, 2])  # the two slots that are left
        assert [x.raw.tobytes() for x in held] == [source.bytes_of(1), source.bytes_of(2)]
        with pytest.raises(smoe.errors.Busy):
            a.fetch(0, [3], timeout=0.01)
        with pytest.raises(ExpertReadError) as caught:
            second.wait()
        assert (caught.value.expert, caught.value.os_error) == (0, errno.EIO)
        assert_right(a, source, [3])  # in that slot
        held.release()
        assert_right(b, source, [4, 5])


def test_a_new_demand_of_a_failed_expert(folder: Path) -> None:
    """Whoever has not looked yet gets the answer of the new read: here the bytes."""
    source = even_source(folder / "v", 3)
    env = shimmed(at=f"0:{errno.EIO}:1")
    with serving(source, slots=2, env=env) as s, s.attach() as a, s.attach() as b:
        late = a.acquire(0, [0])
        until(lambda: s.census()["failed"] == 1)
        assert_right(b, source, [0])
        with late.wait() as batch:
            assert batch[0].raw.tobytes() == source.bytes_of(0)
        counters = s.counters()
        assert (counters["reads"], counters["failed_reads"], counters["read_errors"]) == (1, 1, 0)


def test_a_client_that_dies_with_a_failed_slot(folder: Path) -> None:
    source = even_source(folder / "v", 3)
    with serving(source, slots=1, env=shimmed(at=f"0:{errno.EIO}:0")) as s:
        ring = s.attach()
        batch = ring.acquire(0, [0])
        until(lambda: s.census()["failed"] == 1)
        del batch
        ring.close()
        s.assert_quiet()
        with s.attach() as other:
            assert_right(other, source, [1])


def test_failures_and_successes_in_few_slots(folder: Path) -> None:
    """Six threads take good and failing experts through four slots: each fetch of a failing one raises its
    own error, each fetch of a good one has its own bytes."""
    source = even_source(folder / "v", 8, 20_000)
    bad = {1: errno.EIO, 4: errno.ENODATA, 6: errno.EIO}
    places = {expert: source.extent(expert).offset for expert in range(8)}
    at = ",".join(f"{places[expert]}:{number}:0" for expert, number in bad.items())
    with serving(source, slots=4, workers=3, env=shimmed(at=at)) as s:

        def client(start: int) -> None:
            with s.attach() as ring:
                for turn in range(150):
                    expert = (start + turn * (1 + start % 3)) % 8
                    if expert not in bad:
                        assert fetched(ring, expert) == source.bytes_of(expert)
                        continue
                    error = refused(ring, expert)
                    assert (error.os_error, error.offset) == (bad[expert], places[expert])

        threads = Together()
        for start in range(6):
            threads.start(client, start)
        threads.join()
        s.assert_quiet()
        counters = s.counters()
        assert 0 < counters["failed_reads"] <= counters["read_errors"]
        assert counters["timeouts"] == 0


# --- short, interrupted, refused ----------------------------------------------------------------------


SPANS = [(0, 32 * KIB), (36 * KIB + 1, 4097), (48 * KIB + 77, 100_001), (200_000, 4096), (210_001, 1)]


@pytest.mark.parametrize(
    "faults",
    [{"halves": 1}, {"halves": 3}, {"eintr": 1}, {"halves": 2, "eintr": 1}],
    ids=["halves", "halves-from-the-third", "interrupted", "both"],
)
def test_reads_that_come_in_pieces(folder: Path, faults: dict[str, int]) -> None:
    """A short read is continued and an interrupted one tried again; only a full slot is published."""
    source = known_source(folder / "v", SPANS, size=215_003)
    with serving(source, slots=2, workers=2, env=shimmed(**faults)) as s, s.attach() as ring:
        assert_right(ring, source, [*range(5), *range(5)])
        counters = s.counters()
        assert (counters["reads"], counters["failed_reads"], counters["fallbacks"]) == (10, 0, 0)
        assert (counters["short_reads"] > 0) == ("halves" in faults)
        assert s.file()["mode"] == "direct"


def test_reads_that_come_in_pieces_leave_no_page_behind(folder: Path) -> None:
    """Also the tail that is read through the cache, because aligned pieces would not end."""
    source = known_source(folder / "v", SPANS, size=215_003)
    with serving(source, slots=2, env=shimmed(halves=1)) as s, s.attach() as ring:
        assert_right(ring, source, range(5))
        assert s.file()["mode"] == "direct"
        assert cached_pages(source.path) == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_reads_refused_from_the_third_on(folder: Path, number: int) -> None:
    """Field report 14: the file is read through the cache from then on, said once, pages dropped."""
    source = even_source(folder / "v", 12, 30_001)
    env = shimmed(refuse=f"3:{number}", log=folder / "log")
    with serving(source, slots=2, env=env) as s, s.attach() as ring:
        assert_right(ring, source, [0, 1])
        assert s.file() | {"size": 0} == {
            "path": str(source.path), "size": 0, "mode": "direct", "refusal": ""
        }  # fmt: skip
        assert_right(ring, source, range(2, 12))
        assert s.file()["mode"] == "buffered"
        assert errno.errorcode[number] in s.file()["refusal"]
        assert ring.stats()["files"] == {str(source.path): "buffered"}
        counters = s.counters()
        assert (counters["fallbacks"], counters["reads"], counters["failed_reads"]) == (1, 12, 0)
        assert cached_pages(source.path) == 0
        log = Shimlog(folder / "log").reads()
        assert [direct for direct, *_ in log] == [True] * 3 + [False] * 10


def test_all_workers_switch(folder: Path) -> None:
    """Four workers meet the refusal in whatever order; whoever reads afterwards reads buffered."""
    source = even_source(folder / "v", 16, 30_001)
    env = shimmed(refuse=f"2:{errno.EINVAL}")
    with serving(source, slots=8, workers=4, env=env) as s, s.attach() as ring:
        for _ in range(5):
            for expert in ring.as_ready(0, range(16)):
                assert expert.raw.tobytes() == source.bytes_of(expert.expert)
        assert s.file()["mode"] == "buffered"
        counters = s.counters()
        assert 1 <= counters["fallbacks"] <= 4
        assert counters["failed_reads"] == 0
        assert cached_pages(source.path) == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_refused_at_open(folder: Path, number: int) -> None:
    source = even_source(folder / "v", 4)
    with serving(source, slots=2, workers=2, env=shimmed(refuse_open=number)) as s, s.attach() as ring:
        assert_right(ring, source, range(4))
        assert s.file()["mode"] == "buffered"
        assert errno.errorcode[number] in s.file()["refusal"]
        assert cached_pages(source.path) == 0


def test_direct_required_and_refused_while_running(folder: Path) -> None:
    """An error then, and never a page in the cache."""
    source = even_source(folder / "v", 4)
    env = shimmed(refuse=f"2:{errno.EINVAL}")
    with serving(source, slots=2, env=env, direct="require") as s, s.attach() as ring:
        assert_right(ring, source, [0])
        error = refused(ring, 1)
        assert (error.os_error, error.path) == (errno.EINVAL, str(source.path))
        assert_right(ring, source, [0])
        assert s.file()["mode"] == "direct"
        assert s.counters()["fallbacks"] == 0
        assert cached_pages(source.path) == 0


def test_direct_required_and_refused_at_open(folder: Path) -> None:
    source = even_source(folder / "v", 4)
    with serving(source, slots=2, direct="require") as s, s.attach() as ring:
        said = s.start(1, shimmed(refuse_open=errno.EOPNOTSUPP)).wait_refused()
        assert str(source.path) in said
        assert os.strerror(errno.EOPNOTSUPP) in said
        assert_right(ring, source, [0])
        assert s.file()["mode"] == "direct"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOENT])
def test_an_open_that_fails_otherwise_is_no_refusal(folder: Path, number: int) -> None:
    source = even_source(folder / "v", 4)
    with serving(source, slots=2) as s, s.attach() as ring:
        said = s.start(1, shimmed(refuse_open=number)).wait_refused()
        assert os.strerror(number) in said
        assert_right(ring, source, [0])
        assert (s.file()["mode"], s.counters()["fallbacks"]) == ("direct", 0)


def test_the_supervisor_says_once_that_it_switched(
    up: Up, vault: Path, ring_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, file system, errno: in one warning, and in status."""
    if segments.probe(vault).mode != "direct":
        pytest.skip(f"{vault}: no direct reads here")
    for name, value in shimmed(refuse=f"12:{errno.EINVAL}").items():  # behind what the probe reads
        monkeypatch.setenv(name, value)
    system = up(slots=16, workers=1)
    with smoe.attach(ring_name) as ring:
        for layer in range(3):
            with ring.fetch(layer, range(8)):
                pass

    def warnings() -> list[str]:
        return [line for line in system.look().warnings if "refused while running" in line]

    until(lambda: warnings() != [], "a warning")
    (said,) = warnings()
    for part in (str(vault), segments.probe(vault).fs, "EINVAL"):
        assert part in said
    (file,) = system.look().files
    assert file.mode == "buffered"
    assert "EINVAL" in file.refusal


# --- ESTALE -------------------------------------------------------------------------------------------


def test_a_stale_handle_is_opened_once_more(folder: Path) -> None:
    source = even_source(folder / "v", 6)
    with serving(source, slots=2, env=shimmed(nth=f"3:{errno.ESTALE}")) as s, s.attach() as ring:
        assert_right(ring, source, range(6))
        counters = s.counters()
        assert (counters["reads"], counters["failed_reads"], counters["fallbacks"]) == (6, 0, 0)


def test_a_stale_handle_of_a_file_that_is_another_now(folder: Path) -> None:
    source = even_source(folder / "v", 6)
    with serving(source, slots=2, env=shimmed(nth=f"2:{errno.ESTALE}")) as s, s.attach() as ring:
        assert_right(ring, source, [0])
        shutil.copy2(source.path, folder / "w")
        (folder / "w").rename(source.path)
        assert refused(ring, 1).os_error == CHANGED


def test_a_handle_that_stays_stale(folder: Path) -> None:
    """An error after a bounded number of tries."""
    source = even_source(folder / "v", 3)
    env = shimmed(at=f"0:{errno.ESTALE}:0", log=folder / "log")
    with serving(source, slots=2, env=env) as s, s.attach() as ring:
        assert refused(ring, 0).os_error == errno.ESTALE
        assert_right(ring, source, [1, 2])
        assert 2 <= len([read for read in Shimlog(folder / "log").reads() if read[1] == 0]) <= 3
        assert s.counters()["failed_reads"] == 1


# --- ends and odd places ------------------------------------------------------------------------------


def test_an_expert_that_ends_with_the_file(folder: Path) -> None:
    """Field report 19: a file of 10,000 bytes; the last aligned read is cut by its end, and that is right."""
    source = known_source(folder / "v", [(0, 4000), (4000, 6000), (9999, 1), (0, 10_000)], size=10_000)
    with serving(source, slots=2) as s, s.attach() as ring:
        assert_right(ring, source, [0, 1, 2, 3])
        counters = s.counters()
        assert (counters["short_reads"], counters["failed_reads"]) == (0, 0)
        assert cached_pages(source.path) == 0


def test_an_expert_of_4097_bytes_at_offset_1(folder: Path) -> None:
    source = known_source(folder / "v", [(1, 4097), (4098, 4097), (8195, 1)], size=8196)
    with serving(source, slots=1) as s, s.attach() as ring:
        assert_right(ring, source, [0, 1, 2, 0])
        assert s.file()["mode"] == "direct"
        assert cached_pages(source.path) == 0


def test_pages_that_others_cached_are_read_right(folder: Path) -> None:
    """Field report 17: what somebody else has in the page cache changes nothing, and stays theirs."""
    source = even_source(folder / "v", 6)
    source.path.read_bytes()
    before = cached_pages(source.path)
    assert before == source.files[0].size // 4096
    with serving(source, slots=2, workers=2) as s, s.attach() as ring:
        assert_right(ring, source, range(6))
        assert s.file()["mode"] == "direct"


# --- open files ---------------------------------------------------------------------------------------


@contextmanager
def limited(source: KnownSource, limit: str, workers: int) -> Iterator[tuple[Serving, smoe.Ring]]:
    needs("prlimit")
    with (
        serving(source, slots=8, workers=workers, under=["prlimit", f"--nofile={limit}"]) as s,
        s.attach() as ring,
    ):
        yield s, ring


def descriptors(worker: FaultyWorker) -> int:
    """How many files of the source a worker has open."""
    folder = Path(f"/proc/{worker.process.pid}/fd")
    return sum(os.readlink(link).endswith(".bin") for link in folder.iterdir())


def test_more_files_than_descriptors(folder: Path) -> None:
    """Field report 23: 163 files of one expert, 64 descriptors, 4 workers."""
    source = many_files(folder / "v", 163)
    with limited(source, "64:64", 4) as (s, ring):
        for _ in range(2):
            for expert in ring.as_ready(0, range(163)):
                assert expert.raw.tobytes() == source.bytes_of(expert.expert)
        assert all(0 < descriptors(worker) < 64 for worker in s.workers)
        assert s.counters()["failed_reads"] == 0


def test_a_soft_limit_below_the_hard_one_is_raised(folder: Path) -> None:
    needs("prlimit")
    source = many_files(folder / "v", 163)
    with limited(source, "64:1024", 2) as (s, ring):
        assert_right(ring, source, range(0, 163, 9))
        assert [descriptors(worker) for worker in s.workers] == [163, 163]
        limits = Path(f"/proc/{s.workers[0].process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert line.split()[3:5] == ["1024", "1024"]


def test_fewer_descriptors_than_were_counted_on(folder: Path) -> None:
    """A limit of ten: open fails with EMFILE below our own bound, and another file is closed for it."""
    source = many_files(folder / "v", 30)
    with limited(source, "10:10", 1) as (s, ring):
        assert_right(ring, source, [*range(30), *range(30)])
        assert 0 < descriptors(s.workers[0]) < 8
        assert s.counters()["failed_reads"] == 0


def test_no_descriptor_to_spare(folder: Path) -> None:
    """The worker cannot start, and says what the limit is and what it is short of."""
    needs("prlimit")
    source = many_files(folder / "v", 3)
    with serving(source, slots=2) as s:
        limit = 16
        while (worker := s.start(limit, under=["prlimit", f"--nofile={limit}:{limit}"])).started():
            limit -= 1
        assert worker.process.wait(LIMIT_S) == 1
        path = str(source.files[0].path)
        assert path in worker.said()
        assert os.strerror(errno.EMFILE) in worker.said()
        assert f"limit is {limit} " in worker.said().replace(path, "")


# --- the supervisor's death ---------------------------------------------------------------------------


def test_started_from_a_thread_that_ends(up: Up, ring_name: str, vault: Path) -> None:
    """Field report 48: nothing hangs on the thread that started us."""
    threads = Together()
    threads.start(up)
    threads.join()
    pids = [row.pid for row in status_of(ring_name).workers]
    with smoe.attach(ring_name) as ring:
        for layer in range(3):
            with ring.fetch(layer, range(8)):
                pass
    after = status_of(ring_name).workers
    assert [row.pid for row in after] == pids
    assert all(row.alive for row in after)


@pytest.mark.parametrize("state", ["asleep", "stopped"])
def test_workers_end_with_a_killed_supervisor(up: Up, ring_name: str, state: str) -> None:
    """Asleep in their futex: by themselves.  Stopped: as soon as they go on (the kernel may see to that: it
    continues what is stopped in a process group that has lost its parent)."""
    system = up(workers=3)
    pids = [row.pid for row in system.look().workers]
    until(lambda: all(map(in_futex_sleep, pids)), "workers asleep")
    try:
        for pid in pids if state == "stopped" else ():
            stop(pid)
        system.signal(signal.SIGKILL)
        system.wait()
        for pid in pids:
            if state == "stopped":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        until(lambda: all(state_of(pid) in "ZX" for pid in pids), "an end of the workers")
        up(workers=2).end()  # takes over what was left, and removes it
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
