"""Sizing: the sum and its clamps, refusals with figures, and made-up /proc and cgroup trees, v1 and v2."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SHARED, stamped_source

from smoe_mp import runtime, sizing
from smoe_mp.errors import ConfigError, SegmentSpaceError
from smoe_mp.sizing import GIB, MIB, Group, Memory, Reserve, Sizing
from smoe_mp.sources import open_source

KIB = 1024
# Qwen3-235B-A22B: 94 MoE layers of 128 experts, top-k 8, three 4096 x 1536 matrices an expert.
WEIGHTS = 3 * 4096 * 1536
Q4_SLOT = WEIGHTS // 2 + WEIGHTS // 64 * 2  # two codes a byte, a float16 scale for each group of 64
Q2_SLOT = WEIGHTS // 4 + WEIGHTS // 64 * 2
QWEN = {"n_experts": 94 * 128, "layers": 94, "top_k": 8}
SMALL = {"slot_bytes": MIB, "n_experts": 48 * 128, "layers": 48, "top_k": 8}
NONE = Reserve()


def host(
    available: int, total: int = 64 * GIB, free: int | None = None, shm: int | None = None, **more: Any
) -> Memory:
    return Memory(total, available, available if free is None else free, shm_free_bytes=shm, **more)


def size(memory: Memory, reserve: Reserve = NONE, **ask: int) -> Sizing:
    return sizing.size(memory, reserve, **{**SMALL, **ask})


def refusal(memory: Memory, reserve: Reserve = NONE, **ask: int) -> str:
    with pytest.raises((ConfigError, SegmentSpaceError)) as caught:
        size(memory, reserve, **ask)
    return str(caught.value)


# --- the sum -----------------------------------------------------------------------------------------------


def test_the_originals_example() -> None:
    """48 GB machine, Q4: about 15 GB of ring, of slots of about 10 MB; Q2 gives about twice the slots.

    The inputs: RAM 48 GiB, kern.memorystatus_level 79 (a desktop with a fifth of its memory in use), and
    the dense part of Qwen3-235B in bfloat16, 14.9 GiB: attention 94 x 2 x (4096 x 8192 + 4096 x 512),
    router 94 x 4096 x 128, embedding and head 2 x 151936 x 4096 weights.
    """
    assert Q4_SLOT == 612 * 16384  # no padding: 10.03 MB
    dense = 2 * (94 * 2 * (4096 * 8192 + 4096 * 512) + 94 * 4096 * 128 + 2 * 151936 * 4096)
    available = 48 * GIB * 79 // 100
    mac = Memory(48 * GIB, available, available, available_name="kern.memorystatus_level 79%")
    q4 = sizing.size(mac, Reserve(dense), slot_bytes=Q4_SLOT, **QWEN)
    assert q4.budget_bytes == available - dense - 2 * GIB - 6 * GIB
    assert 14.5 * GIB < q4.data_bytes < 15.5 * GIB
    assert q4.slots == q4.budget_bytes // Q4_SLOT == 1609
    assert not q4.warnings  # 752 slots are a token's cycle
    q2 = sizing.size(mac, Reserve(dense), slot_bytes=Q2_SLOT, **QWEN)
    assert 1.85 < q2.slots / q4.slots < 2.0  # the scales are not halved
    assert q4.line == (
        "1609 slots x 9.6 MiB = 15.0 GiB: 37.9 GiB available (kern.memorystatus_level 79%) - 14.9 GiB dense"
        " part - 2 GiB engine - 6 GiB system (RAM 48 GiB) = 15.0 GiB; 32 clients fit"
    )


def test_small_machines_keep_4_gib_for_the_system() -> None:
    assert size(host(15 * GIB, total=16 * GIB)).budget_bytes == 8 * GIB  # half of RAM, not 15 - 2 - 4
    assert size(host(13 * GIB, total=16 * GIB)).budget_bytes == 7 * GIB
    assert size(host(40 * GIB, total=64 * GIB)).budget_bytes == 30 * GIB  # 64 / 8 = 8


def test_not_below_a_quarter_of_free_memory() -> None:
    made = size(host(6 * GIB, total=8 * GIB, free=5 * GIB), Reserve(3 * GIB))
    assert made.budget_bytes == 5 * GIB // 4
    assert "= -3 GiB, raised to a quarter of free memory, 1.2 GiB" in made.line
    # The host's free memory is not this cgroup's.
    limited = host(60 * GIB, groups=(Group("/c", "memory.max", 2 * GIB, 512 * MIB, 256 * MIB),))
    assert size(limited).budget_bytes == (2 * GIB - 256 * MIB) // 4


def test_clamped_from_below() -> None:
    made = size(host(GIB, total=2 * GIB, free=8 * MIB))
    assert made.slots == 64
    assert "raised to 64, the least" in made.line
    assert any("one token's cycle of 48 MoE layers x top-k 8 = 384" in text for text in made.warnings)
    assert (
        size(host(GIB, total=2 * GIB, free=8 * MIB), top_k=100, n_experts=9999).slots == 101
    )  # field report 37


def test_clamped_from_above_says_what_memory_would_allow() -> None:
    memory = host(50 * GIB)
    made = size(memory)
    assert made.slots == 4096
    assert made.allowed_slots == 6144  # all experts, which 32 GiB would hold
    assert "cut to 4096" in made.line
    assert "memory would allow slots = 6144" in made.line
    assert size(memory, slots_given=made.allowed_slots).slots == 6144


def test_clamped_to_the_vault() -> None:
    made = size(host(50 * GIB), n_experts=24, layers=3)
    assert (made.slots, made.clients, made.warnings) == (24, 32, ())
    assert "no more than the vault's 24 experts" in made.line
    assert size(host(50 * GIB), n_experts=8, layers=1).slots == 8  # top-k + 1 = 9, but these are all


def test_a_vault_of_as_many_experts_as_the_clamp_is_not_cut() -> None:
    assert "cut to 4096" not in size(host(50 * GIB), n_experts=4096, layers=32).line


def test_a_control_segment_larger_than_the_ring_is_counted() -> None:
    memory = host(100 * MIB, total=GIB)
    assert size(memory, slot_bytes=16 * KIB).budget_bytes == 25 * MIB
    made = size(memory, slot_bytes=16 * KIB, control_bytes=80 * MIB)
    assert made.budget_bytes == 20 * MIB
    assert "cut to what fits beside the control segment, 20 MiB" in made.line


def test_clamped_to_dev_shm_last() -> None:
    control = 3 * MIB
    made = size(host(50 * GIB, shm=GIB), control_bytes=control)
    assert made.slots == (GIB - control - 64 * MIB) // MIB == 957
    assert "cut to 957 by /dev/shm (1 GiB free - 3 MiB control - 64 MiB)" in made.line
    assert "memory would allow slots = 6144" in made.line
    assert "--shm-size" in made.line
    # Also below 64: that clamp comes first.
    assert size(host(50 * GIB, shm=64 * MIB + 30 * MIB)).slots == 30


def test_the_line_is_one_line() -> None:
    odd = Group(runtime.printable("/a\nb"), "memory.max", 40 * GIB, 0)
    for slots in (0, 77):
        assert "\n" not in size(host(50 * GIB, groups=(odd,)), slots_given=slots).line


# --- refusals ----------------------------------------------------------------------------------------------


def test_given_slots_are_exact_and_need_no_sum() -> None:
    """Field report 39: with a fixed option the ring is the same under any load."""
    for available in range(2, 60, 7):
        assert size(host(available * GIB), slots_given=777).slots == 777


@pytest.mark.parametrize("slots", [7, 8, 9])
def test_least_ring(slots: int) -> None:
    """Field report 37: top-k minus 1, top-k, top-k plus 1."""
    if slots == 9:
        made = size(host(50 * GIB), slots_given=slots)
        assert made.clients == 1
        assert any("one token's cycle" in text for text in made.warnings)
        return
    text = refusal(host(50 * GIB), slots_given=slots)
    assert f"ring.slots = {slots}" in text
    assert "9 slots (top-k 8 + 1)" in text
    assert "slots = 9, which take 9 MiB" in text


def test_given_ring_beyond_memory() -> None:
    text = refusal(host(6 * GIB), slots_given=6200, control_bytes=2 * MIB)
    assert "6200 x 1 MiB + 2 MiB control = 6.1 GiB, but 6 GiB can be had (MemAvailable)" in text
    assert "at most slots = 6142 (32 clients fit)" in text
    assert size(host(6 * GIB), slots_given=6142, control_bytes=2 * MIB).slots == 6142


def test_given_ring_beyond_the_sum_is_taken_with_a_warning() -> None:
    made = size(host(6 * GIB), slots_given=5000)
    assert any("the sum would allow" in text for text in made.warnings)
    assert not size(host(50 * GIB), slots_given=5000).warnings


def test_given_ring_beyond_a_cgroup() -> None:
    """Field report 25: MemAvailable says 21 GB, the limit 64 MB."""
    memory = host(21 * GIB, groups=(Group("/docker/c", "memory.max", 64 * MIB, 20 * MIB, 4 * MIB),))
    text = refusal(memory, slots_given=256)
    assert "= 256 MiB, but 48 MiB can be had (cgroup /docker/c: memory.max 64 MiB - use 20 MiB" in text
    assert "+ inactive file pages 4 MiB" in text
    assert "at most slots = 48 (5 clients fit)" in text
    assert "--memory" in text


def test_given_ring_beyond_dev_shm() -> None:
    """Field report 24."""
    text = refusal(host(21 * GIB, shm=64 * MIB), slots_given=1024)
    assert "= 1 GiB, but the shared-memory file system (/dev/shm) has 64 MiB free" in text
    assert "at most slots = 64 (7 clients fit)" in text
    assert "--shm-size" in text


def test_least_automatic_ring_must_fit_too() -> None:
    memory = host(21 * GIB, groups=(Group("/c", "memory.high", 60 * MIB, 0),))
    assert "ring of 64 slots (the least that is taken)" in refusal(memory)
    assert "not even 9 slots (top-k 8 + 1), 90 MiB, fit" in refusal(memory, slot_bytes=10 * MIB)
    text = refusal(host(21 * GIB, shm=64 * MIB))  # a container's default
    assert "ring of 9 slots (what one layer of one client needs)" in text
    assert "64 MiB free, and automatic sizing leaves 64 MiB of it to others" in text


def test_remedies_hold() -> None:
    """What a refusal proposes is accepted."""
    for memory in (host(GIB), host(21 * GIB, shm=64 * MIB), host(GIB, shm=100 * MIB)):
        for slots in (0, 5000):
            try:
                size(memory, slots_given=slots, control_bytes=MIB)
            except SegmentSpaceError as error:
                proposed = int(re.findall(r"slots = (\d+)", str(error))[-1])
                assert size(memory, slots_given=proposed, control_bytes=MIB).slots == proposed
                with pytest.raises(SegmentSpaceError):
                    size(memory, slots_given=proposed + 1, control_bytes=MIB)


def test_unknown_top_k() -> None:
    made = size(host(50 * GIB), top_k=0, slots_given=2)
    assert (made.clients, made.warnings) == (None, ())


# --- properties --------------------------------------------------------------------------------------------

sizes = st.integers(0, 80 * GIB)
groups = st.lists(
    st.builds(Group, st.just("/g"), st.just("memory.max"), sizes, st.none() | sizes, st.integers(0, 2 * GIB)),
    max_size=3,
).map(tuple)
memories = st.builds(
    Memory,
    total_bytes=st.none() | st.integers(1, 80 * GIB),
    available_bytes=st.none() | sizes,
    free_bytes=st.none() | sizes,
    groups=groups,
    shm_free_bytes=st.none() | sizes,
    certain=st.booleans(),
)
asks = st.fixed_dictionaries(
    {
        "slot_bytes": st.integers(1, 4096).map(lambda n: n * 16384),
        "n_experts": st.integers(1, 20000),
        "layers": st.integers(1, 100),
        "top_k": st.integers(0, 100),
        "control_bytes": st.integers(0, 200 * MIB),
    }
)
reserves = st.builds(Reserve, scout_bytes=st.integers(0, 50 * GIB))
slots_given = st.just(0) | st.integers(1, 65535)


def attempt(memory: Memory, reserve: Reserve, **ask: int) -> Sizing | None:
    """None: refused."""
    try:
        return sizing.size(memory, reserve, **ask)
    except (ConfigError, SegmentSpaceError):
        return None


@settings(deadline=None)
@given(memories, reserves, asks, slots_given)
def test_never_above_what_is_there_nor_below_the_least(
    memory: Memory, reserve: Reserve, ask: dict[str, int], slots: int
) -> None:
    made = attempt(memory, reserve, **ask, slots_given=slots)
    if made is None:
        return
    need = made.data_bytes + made.control_bytes
    assert memory.room_bytes is None or need <= memory.room_bytes
    assert memory.shm_free_bytes is None or need <= memory.shm_free_bytes
    assert memory.ram_bytes is None or need <= memory.ram_bytes
    assert made.slots >= min(ask["top_k"] + 1, ask["n_experts"])
    assert "\n" not in made.line
    assert made.allowed_slots >= made.slots
    if slots:
        assert made.slots == slots
        return
    assert made.slots <= min(4096, ask["n_experts"])
    if memory.shm_free_bytes is not None:
        assert need + sizing.SHM_SPARE_BYTES <= memory.shm_free_bytes
    if made.slots > max(64, ask["top_k"] + 1):
        assert made.budget_bytes is not None
        assert made.data_bytes <= made.budget_bytes
        assert memory.ram_bytes is None or made.data_bytes <= memory.ram_bytes // 2


@settings(deadline=None)
@given(memories, reserves, asks, sizes, slots_given)
def test_more_memory_never_gives_a_smaller_ring(
    memory: Memory, reserve: Reserve, ask: dict[str, int], more: int, slots: int
) -> None:
    richer = [dataclasses.replace(memory, available_bytes=(memory.available_bytes or 0) + more)]
    if memory.available_bytes is None:
        richer.clear()  # unknown is not less
    if memory.free_bytes is not None:
        richer.append(dataclasses.replace(memory, free_bytes=memory.free_bytes + more))
    if memory.shm_free_bytes is not None:
        richer.append(dataclasses.replace(memory, shm_free_bytes=memory.shm_free_bytes + more))
    if memory.groups:
        first, *rest = memory.groups
        used = dataclasses.replace(first, inactive_file_bytes=first.inactive_file_bytes + more)
        raised = dataclasses.replace(first, limit_bytes=first.limit_bytes + more)
        richer += [dataclasses.replace(memory, groups=(group, *rest)) for group in (used, raised)]
    before = attempt(memory, reserve, **ask, slots_given=slots)
    for memory_after in richer:
        after = attempt(memory_after, reserve, **ask, slots_given=slots)
        if before is not None:
            assert after is not None
            assert after.slots >= before.slots


@settings(deadline=None)
@given(memories, reserves, asks)
def test_a_larger_reserve_never_gives_a_larger_ring(
    memory: Memory, reserve: Reserve, ask: dict[str, int]
) -> None:
    less = attempt(memory, dataclasses.replace(reserve, scout_bytes=0), **ask)
    more = attempt(memory, reserve, **ask)
    assert more is None or (less is not None and less.slots >= more.slots)


@settings(deadline=None)
@given(reserves, asks, st.tuples(st.integers(1, 80 * GIB), sizes, sizes, sizes))
def test_order_of_the_clamps(
    reserve: Reserve, ask: dict[str, int], figures: tuple[int, int, int, int]
) -> None:
    """Section 10 once more, a line a step."""
    total, available, free, shm = figures
    available = min(available, total)
    budget = available - reserve.scout_bytes - 2 * GIB - max(total // 8, 4 * GIB)
    budget = max(budget, min(free, available) // 4)
    budget = min(budget, total // 2, max(0, available - ask["control_bytes"]))
    least = min(ask["top_k"] + 1, ask["n_experts"])
    slots = min(max(budget // ask["slot_bytes"], 64, least), 4096)
    slots = min(slots, ask["n_experts"])
    slots = min(slots, max(0, shm - ask["control_bytes"] - 64 * MIB) // ask["slot_bytes"])
    made = attempt(Memory(total, available, free, shm_free_bytes=shm), reserve, **ask)
    if slots < least or slots * ask["slot_bytes"] + ask["control_bytes"] > available:
        assert made is None
    else:
        assert made is not None
        assert made.slots == slots


# --- trees -------------------------------------------------------------------------------------------------

MEMINFO = (
    "MemTotal:       67108864 kB\nMemFree:        20971520 kB\nMemAvailable:   41943040 kB\nBuffers: 1 kB\n"
)
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "34 31 0:31 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V1_OTHERS = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V1_OWN = "9:name=systemd:/\n4:memory:/docker/c1\n1:cpu:/elsewhere\n0::/\n"
UNLIMITED = "9223372036854771712\n"
CGROUP = "sys/fs/cgroup"
V1_FOLDER = "sys/fs/cgroup/memory"


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def read(root: Path, shm: int | None = None) -> Memory:
    return sizing.read_memory(root, shm_free=lambda _: shm)


def v2(root: Path, files: Mapping[str, str], own: str = "0::/pod/c1\n", mount: str = V2_MOUNT) -> Memory:
    """A tree with the cgroup files `files` (beneath the mount point)."""
    base = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own, "proc/self/mountinfo": V1_OTHERS[:57] + mount}
    (root / CGROUP / "pod/c1").mkdir(parents=True, exist_ok=True)
    return read(plant(root, {**base, **{f"{CGROUP}/{name}": text for name, text in files.items()}}))


def v1(root: Path, files: Mapping[str, str], own: str = V1_OWN, mount: str = V1_MOUNT) -> Memory:
    base = {"proc/meminfo": MEMINFO, "proc/self/cgroup": own, "proc/self/mountinfo": V1_OTHERS + mount}
    (root / V1_FOLDER / "docker/c1").mkdir(parents=True, exist_ok=True)
    return read(plant(root, {**base, **{f"{V1_FOLDER}/{name}": text for name, text in files.items()}}))


def limited(folder: str, limit: str, current: int = 100 * MIB, inactive: int = 30 * MIB) -> dict[str, str]:
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": f"{current}\n",
        f"{folder}memory.stat": f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file 1\n",
    }


def test_host_alone(tmp_path: Path) -> None:
    memory = read(plant(tmp_path, {"proc/meminfo": MEMINFO}), shm=5)
    assert memory == Memory(64 * GIB, 40 * GIB, 20 * GIB, shm_free_bytes=5)
    assert (memory.ram_bytes, memory.room_bytes, memory.room_name) == (64 * GIB, 40 * GIB, "MemAvailable")


def test_v2_own_limit_less_inactive_file_pages(tmp_path: Path) -> None:
    memory = v2(tmp_path, limited("pod/c1/", f"{GIB}\n"))
    assert memory.certain
    assert memory.notes == ()
    assert memory.groups == (Group("/sys/fs/cgroup/pod/c1", "memory.max", GIB, 100 * MIB, 30 * MIB),)
    assert memory.ram_bytes == GIB
    assert memory.room_bytes == GIB - 70 * MIB


def test_v2_limit_on_the_parent_only(tmp_path: Path) -> None:
    memory = v2(tmp_path, {**limited("pod/c1/", "max\n"), **limited("pod/", f"{2 * GIB}\n", GIB, 0)})
    assert memory.certain
    assert [g.name for g in memory.groups] == ["/sys/fs/cgroup/pod"]
    assert memory.room_bytes == GIB


def test_v2_limit_on_the_mount_point_only(tmp_path: Path) -> None:
    """A container with a cgroup namespace: its own folder is the mount's top, and shown as "/"."""
    memory = v2(tmp_path, limited("", f"{GIB}\n"), own="0::/\n")
    assert [(g.name, g.headroom_bytes) for g in memory.groups] == [("/sys/fs/cgroup", GIB - 70 * MIB)]


def test_v2_no_limit_anywhere(tmp_path: Path) -> None:
    memory = v2(tmp_path, {**limited("pod/c1/", "max\n"), **limited("pod/", "max")})
    assert (memory.groups, memory.certain, memory.notes) == ((), True, ())


def test_v2_memory_high_is_a_limit(tmp_path: Path) -> None:
    memory = v2(tmp_path, {**limited("pod/c1/", f"{4 * GIB}\n"), "pod/c1/memory.high": f"{GIB}\n"})
    assert [(g.file, g.limit_bytes) for g in memory.groups] == [("memory.high", GIB)]
    memory = v2(tmp_path, {"pod/c1/memory.high": "max\n"})
    assert [g.file for g in memory.groups] == ["memory.max"]


def test_the_tightest_group_counts_not_the_smallest_limit(tmp_path: Path) -> None:
    files = {**limited("pod/c1/", f"{GIB}\n", 0, 0), **limited("pod/", f"{4 * GIB}\n", 4 * GIB - 5 * MIB, 0)}
    memory = v2(tmp_path, files)
    assert (memory.ram_bytes, memory.room_bytes) == (GIB, 5 * MIB)
    assert "/sys/fs/cgroup/pod:" in memory.room_name


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
@pytest.mark.parametrize("text", ["", "\n", "many", "-1", "1e9", "9" * 21, "1_000", "\0\0", "12 34"])
def test_v2_limit_that_makes_no_sense(tmp_path: Path, name: str, text: str) -> None:
    """Field report 35: said, and the safe floor is used."""
    memory = v2(tmp_path, {**limited("pod/c1/", "max\n"), f"pod/c1/{name}": text})
    assert not memory.certain
    assert any(f"/sys/fs/cgroup/pod/c1/{name}" in note for note in memory.notes)
    made = size(memory)
    assert made.budget_bytes == 5 * GIB  # a quarter of the free 20
    assert made.notes == memory.notes


def test_v2_use_that_makes_no_sense(tmp_path: Path) -> None:
    memory = v2(tmp_path, {**limited("pod/c1/", f"{GIB}\n"), "pod/c1/memory.current": ""})
    assert not memory.certain
    assert (memory.ram_bytes, memory.groups[0].use_bytes) == (GIB, None)
    assert size(memory).budget_bytes == 256 * MIB
    assert "use unknown" in refusal(memory, slots_given=2000)


def test_v2_statistics_that_make_no_sense(tmp_path: Path) -> None:
    memory = v2(tmp_path, {**limited("pod/c1/", f"{GIB}\n"), "pod/c1/memory.stat": "inactive_file x\n"})
    assert memory.certain  # the page cache counts as use: nothing can go wrong
    assert memory.room_bytes == GIB - 100 * MIB
    assert any("memory.stat" in note for note in memory.notes)


def test_more_inactive_pages_than_use(tmp_path: Path) -> None:
    assert v2(tmp_path, limited("pod/c1/", f"{GIB}\n", 5, 10)).room_bytes == GIB


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / CGROUP / "pod/c1/memory.max").mkdir(parents=True)
    memory = v2(tmp_path, {})
    assert not memory.certain
    assert "Is a directory" in memory.notes[0]


def v1_limited(
    folder: str, limit: str, usage: int, inactive: int, hierarchical: str = UNLIMITED
) -> dict[str, str]:
    return {
        f"{folder}memory.limit_in_bytes": limit,
        f"{folder}memory.usage_in_bytes": f"{usage}\n",
        f"{folder}memory.use_hierarchy": "1\n",
        f"{folder}memory.stat": f"inactive_file 1\nhierarchical_memory_limit {hierarchical}"
        f"total_inactive_file {inactive}\n",
    }


def test_v1_own_limit(tmp_path: Path) -> None:
    memory = v1(tmp_path, v1_limited("docker/c1/", f"{64 * MIB}\n", 20 * MIB, 8 * MIB, f"{64 * MIB}\n"))
    folder = "/sys/fs/cgroup/memory/docker/c1"
    assert memory.groups == (Group(folder, "memory.limit_in_bytes", 64 * MIB, 20 * MIB, 8 * MIB),)
    assert (memory.certain, memory.ram_bytes, memory.room_bytes) == (True, 64 * MIB, 52 * MIB)


def test_v1_unlimited(tmp_path: Path) -> None:
    for unlimited in (UNLIMITED, "9223372036854710272\n", "9223372036854775807\n"):  # pages of 4 and 64 KiB
        memory = v1(tmp_path, v1_limited("docker/c1/", unlimited, 5, 0, unlimited))
        assert (memory.groups, memory.certain, memory.notes) == ((), True, ())


def test_v1_limit_on_an_ancestor_only(tmp_path: Path) -> None:
    own = v1_limited("docker/c1/", UNLIMITED, 5 * MIB, 0, f"{GIB}\n")
    memory = v1(tmp_path, {**own, **v1_limited("docker/", f"{GIB}\n", 900 * MIB, 100 * MIB)})
    assert memory.room_bytes == 224 * MIB
    assert [g.file for g in memory.groups] == ["hierarchical_memory_limit", "memory.limit_in_bytes"]


def test_v1_ancestor_that_counts_no_children(tmp_path: Path) -> None:
    files = v1_limited("docker/", f"{GIB}\n", 0, 0)
    assert v1(tmp_path, {**files, "docker/memory.use_hierarchy": "0\n"}).groups == ()


def test_v1_bind_mount_of_the_containers_folder(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the host's, and the mount's top is that folder."""
    files = v1_limited("", UNLIMITED, 50 * MIB, 10 * MIB, f"{512 * MIB}\n")  # the ancestor's, not to be seen
    memory = v1(tmp_path, files, mount=V1_MOUNT.replace(" / /sys", " /docker/c1 /sys"))
    assert memory.certain
    assert [(g.name, g.headroom_bytes) for g in memory.groups] == [("/sys/fs/cgroup/memory", 472 * MIB)]


def test_v1_counts_where_both_are_mounted(tmp_path: Path) -> None:
    """A hybrid machine: the unified hierarchy is there, without the memory controller."""
    memory = v1(tmp_path, v1_limited("docker/c1/", f"{GIB}\n", 0, 0))
    assert [g.file for g in memory.groups] == ["memory.limit_in_bytes"]


def test_v1_damage(tmp_path: Path) -> None:
    memory = v1(tmp_path, {**v1_limited("docker/c1/", "", 0, 0, f"{GIB}\n")})
    assert not memory.certain
    assert memory.ram_bytes == GIB  # the statistics say it too


def test_mount_points_with_blanks(tmp_path: Path) -> None:
    mount = r"30 23 0:26 / /sys/fs/cg\040\134x rw - cgroup2 cgroup2 rw" + "\n"
    base = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a:b c\n", "proc/self/mountinfo": mount}
    files = limited(r"sys/fs/cg \x/a:b c/", f"{GIB}\n")
    assert read(plant(tmp_path, {**base, **files})).ram_bytes == GIB


def test_a_cgroup_that_cannot_be_seen(tmp_path: Path) -> None:
    hidden = v2(tmp_path, limited("", f"{GIB}\n"), own="0::/else/where\n")
    assert not hidden.certain
    assert hidden.ram_bytes == GIB  # the mount point is an ancestor
    above = v2(tmp_path, {}, own="0::/\n", mount=V2_MOUNT.replace(" / /sys", " /../.. /sys"))
    assert not above.certain
    assert above.ram_bytes == GIB
    foreign = v2(tmp_path, {}, own="0::/else\n", mount=V2_MOUNT.replace(" / /sys", " /other /sys"))
    assert not foreign.certain
    assert foreign.groups == ()
    outside = v2(tmp_path, {}, own="0::/../sibling\n")
    assert not outside.certain
    unmounted = v2(tmp_path, {}, mount="")
    assert not unmounted.certain


def test_machines_without_cgroups(tmp_path: Path) -> None:
    base = {"proc/meminfo": MEMINFO, "proc/self/mountinfo": V1_OTHERS[:57]}
    assert read(plant(tmp_path, base)).certain
    assert read(plant(tmp_path, {"proc/self/cgroup": ""})).certain
    assert read(plant(tmp_path, {"proc/self/cgroup": "3:cpu:/x\n1:name=systemd:/\n"})).certain


def test_empty_cgroup_file_where_cgroups_are_mounted(tmp_path: Path) -> None:
    memory = v2(tmp_path, {}, own="")
    assert not memory.certain
    assert "/proc/self/cgroup" in memory.notes[0]


@pytest.mark.parametrize("text", [None, "", "MemTotal: lots\n", "MemTotal: 9999999 kB\nMemAvailable: x kB\n"])
def test_meminfo_that_makes_no_sense(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        plant(tmp_path, {"proc/meminfo": text})
    memory = read(tmp_path, shm=GIB)
    assert not memory.certain
    assert any("/proc/meminfo" in note for note in memory.notes)
    assert size(memory).slots == 64  # nothing is known but the shared memory
    assert size(memory, slots_given=500).slots == 500
    assert "/dev/shm" in refusal(memory, slots_given=2000)


def test_kernels_without_mem_available(tmp_path: Path) -> None:
    memory = read(plant(tmp_path, {"proc/meminfo": MEMINFO.replace("MemAvailable", "MemOther")}))
    assert (memory.available_bytes, memory.certain) == (20 * GIB, True)
    assert "MemFree is taken" in memory.notes[0]


def test_macos_level() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = sizing.read_memory(level=lambda: 50)
    assert memory.room_bytes == memory.free_room_bytes == total // 2
    assert memory.room_name == "kern.memorystatus_level 50%"
    for wrong in (-78, 101):
        memory = sizing.read_memory(level=lambda percent=wrong: percent)
        assert (memory.certain, memory.room_bytes, memory.room_name) == (False, total, "all memory")
        assert size(memory).slots == 64


def test_dev_shm(tmp_path: Path) -> None:
    free = sizing.shm_free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    assert sizing.shm_free_bytes(tmp_path / "nowhere") is None


def test_this_machine() -> None:
    memory = sizing.read_memory()
    assert memory.total_bytes
    assert memory.available_bytes
    assert memory.room_bytes is not None
    assert memory.room_bytes <= memory.available_bytes


junk = (
    st.binary(max_size=80)
    | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace"))
    | st.sampled_from([b"max\n", b"0\n", b"104857600\n", b"0::/pod/c1\n", b"0::/../x\n", b"4:memory:/pod\n"])
    | st.sampled_from([V2_MOUNT.encode(), V1_MOUNT.encode(), b"1 2 0:1 /\\000 /\\000 rw - cgroup2 x rw\n"])
)
damaged = [
    "proc/meminfo",
    "proc/self/cgroup",
    "proc/self/mountinfo",
    *(f"{CGROUP}/{f}memory.{n}" for f in ("", "pod/", "pod/c1/") for n in ("max", "high", "current", "stat")),
]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(damaged), st.lists(junk, max_size=3).map(b"".join)), asks, slots_given)
def test_damaged_trees_raise_nothing_else(files: dict[str, bytes], ask: dict[str, int], slots: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        v2(root, {**limited("pod/c1/", "max\n"), **limited("pod/", f"{GIB}\n")})
        memory = read(plant(root, files))
    for note in memory.notes:
        assert note.isprintable()
    made = attempt(memory, NONE, **ask, slots_given=slots)
    if made is not None:
        assert made.line.isprintable()
        assert memory.room_bytes is None or made.data_bytes <= memory.room_bytes


# --- the dense part ----------------------------------------------------------------------------------------


def test_dense_bytes_of_a_source(tmp_path: Path) -> None:
    source = stamped_source(tmp_path / "s")
    total = sum(f.path.stat().st_size for f in source.files)
    experts = sum(len(part) for i in range(len(source.experts)) for part in source.expected(i))
    assert sizing.dense_bytes(source) == total - experts > 0


def test_dense_bytes_count_the_scout_beside_a_vault() -> None:
    vault = SHARED / "vaults/qwen3-tiny.q4.smoe"
    if not vault.is_file():
        pytest.skip("../shared is not here")
    source = open_source(vault)
    scout = (SHARED / "vaults/qwen3-tiny.scout.safetensors").stat().st_size
    tables = sizing.dense_bytes(source) - scout
    assert 0 < tables < vault.stat().st_size
