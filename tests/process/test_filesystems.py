"""Each kind of file system: experts stream right, and the mode in status is the one that was achieved.

What was achieved is looked up in the page cache.  Where the mode says "direct", streaming leaves no page of
the file there.  "buffered" and "bounce" pass through it and drop what they brought.

| file system                     | mode     | because                                                      |
|---------------------------------|----------|--------------------------------------------------------------|
| ext4, xfs                       | direct   | a local block file system, and the probe's read passed       |
| ext4 on 4096-byte sectors       | direct   | the same; windows are multiples of 4096 everywhere           |
| btrfs, with checksums or +C     | direct   | reads pass the cache (writes of checksummed files do not)    |
| btrfs, compressed               | buffered | direct reads are accepted, and fill the cache all the same   |
| squashfs                        | buffered | O_DIRECT is refused at open, EINVAL                          |
| overlay, whatever lies below    | bounce   | what lies below is not known                                 |
| tmpfs, ramfs                    | memory   | no disk is read; its pages are the file                      |
| FUSE (test_hung_reads)          | bounce   | a killed reader's transfer may still be under way            |

Field reports 14, 15, 17, 18.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from faultkit import (
    MIB,
    KnownSource,
    assert_right,
    cached_pages,
    forget,
    known_source,
    loop_device,
    make_image,
    mounted,
    needs,
    serving,
)
from support import source_file
from systems import System, assert_nothing_left, smoe_mp, write_config

import smoe_mp as smoe
from smoe_mp import segments

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="Linux alone")

#: Odd places: at a page, inside pages, longer than a read-ahead, at the end of the file.
SPANS = [(0, 40_000), (40_001, 4097), (65_536, 300_001), (400_000, 131_072), (600_007, 70_000), (670_006, 1)]
SIZE = 670_007
#: Longer than the blocks of squashfs and compressed extents of btrfs.
LONG_SPANS = [(i * 2_200_077, 2_100_001) for i in range(4)]

Place = Callable[[ExitStack, Path], Path]


def run(*command: str | Path) -> None:
    """Run a tool; skip the test where the kernel or the tool cannot do it."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{command[0]}: {done.stderr.strip()}")


def supported(kind: str) -> None:
    """Skip the test where this kernel has no such file system."""
    known = [line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()]
    if kind not in known:
        pytest.skip(f"this kernel has no {kind}")


def on_image(
    kind: str, mib: int, *mkfs: str, options: tuple[str, ...] = (), sector: tuple[str, ...] = ()
) -> Place:
    """A file system of that kind on a loop device."""

    def place(stack: ExitStack, folder: Path) -> Path:
        needs(f"mkfs.{kind}", "losetup", "mount", root=True)
        supported(kind)
        image = make_image(folder / f"{kind}.image", mib * MIB)
        with loop_device(image, *sector) as device:
            run(f"mkfs.{kind}", *mkfs, device)
            return stack.enter_context(mounted(folder / kind, "-t", kind, *options, device))

    return place


ext4 = on_image("ext4", 32, "-q", "-F")
xfs = on_image("xfs", 320, "-q", "-f")
btrfs = on_image("btrfs", 120, "-q", "-f")
ext4_on_4k = on_image("ext4", 32, "-q", "-F", sector=("--sector-size", "4096"))
btrfs_compressed = on_image("btrfs", 120, "-q", "-f", options=("-o", "compress-force=zlib"))


def btrfs_without_checksums(stack: ExitStack, folder: Path) -> Path:
    """New files in it have no checksums (chattr +C)."""
    needs("chattr")
    at = btrfs(stack, folder) / "plain"
    at.mkdir()
    run("chattr", "+C", at)
    return at


def in_memory(kind: str) -> Place:
    def place(stack: ExitStack, folder: Path) -> Path:
        needs("mount", root=True)
        supported(kind)
        return stack.enter_context(mounted(folder / kind, "-t", kind, kind))

    return place


def overlay(lower: Place) -> Place:
    """An overlay whose files lie in its upper folder."""

    def place(stack: ExitStack, folder: Path) -> Path:
        supported("overlay")
        base = lower(stack, folder)
        for name in ("lower", "upper", "work"):
            (base / name).mkdir()
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        return stack.enter_context(mounted(folder / "overlay", "-t", "overlay", "overlay", "-o", options))

    return place


def squashed(stack: ExitStack, folder: Path, source: KnownSource, *, overlaid: bool) -> KnownSource:
    """The same source on squashfs, or on an overlay over it."""
    needs("mksquashfs", "mount", root=True)
    supported("squashfs")
    image = folder / "squash.image"
    run("mksquashfs", source.path, image, "-quiet", "-no-progress", "-no-xattrs")
    with loop_device(image, "--read-only") as device:
        at = stack.enter_context(mounted(folder / "squash", "-t", "squashfs", "-o", "ro", device))
    if overlaid:
        supported("overlay")
        (folder / "second").mkdir()
        options = f"lowerdir={at}:{folder / 'second'}"
        at = stack.enter_context(mounted(folder / "overlay", "-t", "overlay", "overlay", "-o", options))
    return moved(source, at / source.path.name)


def moved(source: KnownSource, path: Path) -> KnownSource:
    """The source, of a copy of its file."""
    return KnownSource(path, [source_file(path)], source.experts, source.layouts, blobs=source.blobs)


def compressible(path: Path, spans: Sequence[tuple[int, int]], *, random: int = 0) -> KnownSource:
    """Experts that any compression makes smaller, all different, behind `random` bytes that it does not."""
    source = known_source(path, spans)
    size = source.files[0].size
    runs = np.repeat(np.random.default_rng(2).integers(0, 256, size // 64 + 1, np.uint8), 64)
    blob = source.blobs[0][:random] + runs[random:size].tobytes()
    path.write_bytes(blob)
    forget(path)
    return KnownSource(path, [source_file(path)], source.experts, source.layouts, blobs=[blob])


def check(source: KnownSource, mode: str, fs: str, refusal: str = "") -> None:
    """Stream everything twice through few slots by two workers; mode, reason, page cache as they should.

    Where the mode says direct, no page stays.  Where it does not, those at the edges may: a file system that
    has blocks of its own (128 KiB and more) brings all of a block in, and only what was asked for is dropped.
    """
    path = source.files[0].path
    pages = -(-source.files[0].size // 4096)
    may_stay = {"direct": 0, "memory": pages}.get(mode, pages // 4)
    n = len(source.experts)
    forget(path)
    found = segments.probe(path)
    assert (found.mode, found.fs) == (mode, fs), found
    assert refusal in found.reason
    assert (found.reason == "") == (mode == "direct")
    assert cached_pages(path) <= may_stay, "the probe left pages"
    with serving(source, slots=3, workers=2) as s, s.attach() as ring:
        assert_right(ring, source, [*range(n), *range(n)])
        for expert in ring.as_ready(0, range(n)):
            assert expert.raw.tobytes() == source.bytes_of(expert.expert)
        file = s.file()
        assert (file["path"], file["mode"]) == (str(path), mode)
        assert file["refusal"] == (refusal if "EINVAL" in refusal else "")
        assert ring.stats()["files"] == {str(path): mode}
        assert s.counters()["fallbacks"] == 0, "the probe had found it out"
        assert cached_pages(path) <= may_stay, "streaming left pages"


@contextmanager
def placed(place: Place, folder: Path) -> Iterator[Path]:
    with ExitStack() as stack:
        yield place(stack, folder)


@pytest.mark.parametrize(
    ("place", "mode", "fs"),
    [
        pytest.param(ext4, "direct", "ext4", id="ext4"),
        pytest.param(ext4_on_4k, "direct", "ext4", id="ext4-4096-byte-sectors"),
        pytest.param(xfs, "direct", "xfs", id="xfs"),
        pytest.param(btrfs, "direct", "btrfs", id="btrfs"),
        pytest.param(btrfs_without_checksums, "direct", "btrfs", id="btrfs-without-checksums"),
        pytest.param(btrfs_compressed, "direct", "btrfs", id="btrfs-incompressible-bytes"),
        pytest.param(in_memory("tmpfs"), "memory", "tmpfs", id="tmpfs"),
        pytest.param(in_memory("ramfs"), "memory", "ramfs", id="ramfs"),
        pytest.param(overlay(ext4), "bounce", "overlay", id="overlay-over-ext4"),
    ],
)
def test_random_bytes_on(place: Place, mode: str, fs: str, tmp_path: Path) -> None:
    with placed(place, tmp_path) as at:
        check(known_source(at / "v", SPANS, size=SIZE), mode, fs)


def test_compressible_bytes_on_compressing_btrfs(tmp_path: Path) -> None:
    """Direct reads are accepted, and done through the cache: status must not say direct."""
    with placed(btrfs_compressed, tmp_path) as at:
        source = compressible(at / "v", LONG_SPANS)
        check(source, "buffered", "btrfs", "caches what they read all the same")


def test_the_probe_of_a_compressed_file_leaves_no_page(tmp_path: Path) -> None:
    with placed(btrfs_compressed, tmp_path) as at:
        source = compressible(at / "v", SPANS)
        assert segments.probe(source.path).mode == "buffered"
        assert cached_pages(source.path) == 0


def test_a_file_of_which_only_the_rest_is_compressed(tmp_path: Path) -> None:
    """The first block is read directly, what follows is not."""
    with placed(btrfs_compressed, tmp_path) as at:
        source = compressible(at / "v", LONG_SPANS, random=MIB)
        with serving(source, slots=3) as s, s.attach() as ring:
            assert_right(ring, source, range(4))
            assert s.file()["mode"] == "buffered" or cached_pages(source.path) == 0


def test_squashfs(tmp_path: Path) -> None:
    source = known_source(tmp_path / "v", LONG_SPANS)
    refusal = f"{os.strerror(errno.EINVAL)} (EINVAL)"
    with ExitStack() as stack:
        check(squashed(stack, tmp_path, source, overlaid=False), "buffered", "squashfs", refusal)


def test_overlay_over_squashfs(tmp_path: Path) -> None:
    """Seastar's case (field report 14): nothing there can be read directly, and nobody is asked to."""
    source = known_source(tmp_path / "v", LONG_SPANS)
    with ExitStack() as stack:
        check(squashed(stack, tmp_path, source, overlaid=True), "bounce", "overlay")


def test_squashfs_leaves_no_page_at_the_edges(tmp_path: Path) -> None:
    """It brings all of a block of 128 KiB into the cache, whatever part of it was asked for."""
    source = known_source(tmp_path / "v", SPANS, size=SIZE)
    with ExitStack() as stack:
        source = squashed(stack, tmp_path, source, overlaid=False)
        with serving(source, slots=3) as s, s.attach() as ring:
            assert_right(ring, source, range(6))
            assert s.file()["mode"] == "buffered"
            assert cached_pages(source.files[0].path) == 0


def test_4096_byte_sectors_are_asked_of_statx(tmp_path: Path) -> None:
    """Field report 15: a direct read of 512 bytes is refused there, and no window is that small."""
    with placed(ext4_on_4k, tmp_path) as at:
        source = known_source(at / "v", [(1, 4097), (5000, 1), (9000, 1000)], size=10_000)
        assert segments.probe(source.path).offset_align == 4096
        with serving(source, slots=1) as s, s.attach() as ring:
            assert_right(ring, source, [0, 1, 2])
            assert (s.file()["mode"], s.counters()["fallbacks"]) == ("direct", 0)
            assert cached_pages(source.path) == 0


def test_a_tail_of_btrfs_that_lies_in_its_tree(tmp_path: Path) -> None:
    """A file of 2000 bytes has no block of its own."""
    with placed(btrfs, tmp_path) as at:
        source = known_source(at / "v", [(0, 2000), (100, 1900), (1999, 1)], size=2000)
        with serving(source, slots=2) as s, s.attach() as ring:
            assert_right(ring, source, [0, 1, 2])
            assert s.file()["mode"] == "buffered" or cached_pages(source.path) == 0


# --- the probe as others see it -----------------------------------------------------------------------


def test_the_probe_of_a_file_that_is_cached_already(tmp_path: Path) -> None:
    """Pages that somebody else brought say nothing of direct reads."""
    source = known_source(tmp_path / "v", SPANS, size=SIZE)
    if segments.probe(source.path).mode != "direct":
        pytest.skip(f"{tmp_path}: no direct reads here")
    with source.path.open("r+b") as f:
        f.write(source.blobs[0][:8192])  # dirty: they cannot be dropped
        f.flush()
        assert cached_pages(source.path) > 0
        assert segments.probe(source.path).mode == "direct"
    source.path.read_bytes()
    assert segments.probe(source.path).mode == "direct"


def test_a_clean_file_of_a_local_disk_is_probed_direct(tmp_path: Path) -> None:
    """Nobody has it cached; the look into the cache must not bring it there itself (RWF_NOWAIT did)."""
    with placed(ext4, tmp_path) as at:
        source = known_source(at / "v", SPANS, size=SIZE)
        for _ in range(20):
            forget(source.path)
            assert segments.probe(source.path).mode == "direct"
            assert cached_pages(source.path) == 0


def test_a_probe_by_another_user(tmp_path: Path) -> None:
    """Of a file that is neither its own nor writable nobody may look into the cache: direct is believed."""
    needs(root=True)
    with placed(ext4, tmp_path) as at:
        source = known_source(at / "v", SPANS, size=SIZE)
        source.path.chmod(0o444)
        assert _probed_as(source.path, 65534) == "direct"


def _probed_as(path: Path, uid: int) -> str:
    """The mode that a process of another user finds; the folders above are not its business."""
    read, write = os.pipe()
    fd = os.open(path, os.O_RDONLY)
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.write(write, segments.probe(f"/proc/self/fd/{fd}").mode.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.close(fd)
    os.waitpid(child, 0)
    with os.fdopen(read) as f:
        return f.read()


# --- a whole system -----------------------------------------------------------------------------------


@contextmanager
def system_of(vault: Path, name: str, folder: Path) -> Iterator[System]:
    # No look at the file beside the workers': it would bring the header into the page cache.
    config = write_config(folder / "c.toml", name, vault, 16, 2, more="vault.check_s = 86400\n")
    system = System(name, config, (), folder / "stderr")
    try:
        yield system
    finally:
        system.end()
    assert_nothing_left(name)


def stream(name: str) -> None:
    with smoe.attach(name) as ring:
        for layer in range(3):
            with ring.fetch(layer, range(8)):
                pass


def test_status_on_squashfs(vault: Path, ring_name: str, tmp_path: Path) -> None:
    """One warning with path, file system and reason; the mode of the file; no page left."""
    needs("mksquashfs", "mount", root=True)
    supported("squashfs")
    image = tmp_path / "squash.image"
    run("mksquashfs", vault, image, "-quiet", "-no-progress", "-no-xattrs")
    with ExitStack() as stack:
        with loop_device(image, "--read-only") as device:
            at = stack.enter_context(mounted(tmp_path / "squash", "-t", "squashfs", "-o", "ro", device))
        with system_of(at / vault.name, ring_name, tmp_path) as system:
            forget(at / vault.name)
            stream(ring_name)
            status = system.status()
            assert cached_pages(at / vault.name) <= vault.stat().st_size // 4096 // 4
            assert status["files"][0]["mode"] == "buffered"
            assert "EINVAL" in status["files"][0]["refusal"]
            (warning,) = [line for line in status["warnings"] if "not direct" in line]
            for part in (str(at / vault.name), "buffered", "squashfs", "EINVAL"):
                assert part in warning
            assert "buffered" in smoe_mp("status", ring_name).stdout


def test_status_on_a_local_disk(vault: Path, ring_name: str, tmp_path: Path) -> None:
    """Direct, said so, and the page cache stays empty."""
    with placed(ext4, tmp_path) as at:
        copy = at / vault.name
        copy.write_bytes(vault.read_bytes())
        forget(copy)
        with system_of(copy, ring_name, tmp_path) as system:
            assert "reads: ext4: direct, past the page cache" in system.lines
            forget(copy)
            stream(ring_name)
            assert cached_pages(copy) == 0
            status = system.status()
            assert (status["files"][0]["mode"], status["files"][0]["refusal"]) == ("direct", "")
