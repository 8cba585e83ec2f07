"""tables.py: the records, and read plans at every alignment."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import plans_one_by_one
import pytest

from smoe_mp import tables
from smoe_mp._native import lib
from smoe_mp.sources.base import Expert, ExpertTable, Extent, ModelFacts, PlainSource, SourceFile, Tensor

PAGE = 4096


def u8(part: int, length: int) -> Tensor:
    return Tensor(f"p{part}", "U8", (length,), part, 0, length)


def play(plan: tables.Plan, extents: list[Extent], files: list[bytes]) -> list[bytes]:
    """Do what a worker does with a plan, and return the parts.  Foreign bytes are 0xAA."""
    slot = bytearray(b"\xaa" * plan.bytes)
    for w in plan.windows:
        data = files[w.file][w.offset : w.offset + w.length]
        assert len(data) >= w.need
        slot[w.place : w.place + len(data)] = data
    for start, to, length in plan.moves:
        slot[to : to + length] = slot[start : start + length]
    return [bytes(slot[p : p + x.length]) for p, x in zip(plan.places, extents, strict=True)]


def check(plan: tables.Plan, extents: list[Extent], files: list[bytes], align: int = PAGE) -> None:
    """A plan's windows are aligned, apart, and give every part its bytes."""
    for w in plan.windows:
        assert (w.offset | w.length | w.place) % align == 0
        assert 0 < w.need <= w.length
    spans = sorted((w.place, w.place + w.length) for w in plan.windows)
    spans += sorted((to, to + length) for _, to, length in plan.moves)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= plan.bytes
    assert play(plan, extents, files) == [files[x.file][x.offset : x.offset + x.length] for x in extents]


@pytest.mark.parametrize("number", range(len(tables.RECORDS)))
def test_records_have_the_sizes_of_the_c_structs(number: int) -> None:
    assert tables.RECORDS[number].itemsize == lib.smoe_sizeof(number)


def test_there_are_no_more_records_than_these() -> None:
    header_and_slot = [lib.smoe_sizeof(7), lib.smoe_sizeof(8)]
    assert all(header_and_slot)
    assert lib.smoe_sizeof(9) == 0


@pytest.mark.parametrize("record", tables.RECORDS)
def test_fields_lie_naturally_aligned_and_without_gaps(record: np.dtype) -> None:
    """As C lays them out: in order, each at a multiple of its item's size, nothing hidden in between."""
    at = 0
    for name in record.names or ():
        kind, offset = record.fields[name][:2]  # type: ignore[index]
        assert offset == at
        assert offset % kind.base.itemsize == 0
        at += kind.itemsize
    assert at == record.itemsize
    assert record.itemsize % 8 == 0


def test_one_extent_in_the_middle_of_its_window() -> None:
    p = tables.plan([Extent(0, 5000, 100)], [u8(0, 100)], PAGE)
    assert p.windows == (tables.Window(0, 4096, 4096, 1004, 0),)
    assert p.places == (904,)
    assert p.moves == ()
    assert p.bytes == 4096


@pytest.mark.parametrize(
    ("second", "windows"),
    [
        (Extent(0, 4000, 50), 1),  # the same page
        (Extent(0, 4096, 50), 1),  # the next page: windows touch
        (Extent(0, 8191, 50), 1),  # from the next page's last byte
        (Extent(0, 8192, 50), 2),  # one page between them
        (Extent(1, 200, 50), 2),  # the same place of another file
        (Extent(0, 150, 20), 1),  # inside the first
        (Extent(0, 100, 100), 1),  # the same bytes again
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_windows_of_one_file_that_touch_are_merged(second: Extent, windows: int, turned: bool) -> None:
    extents = [Extent(0, 100, 100), second]
    if turned:
        extents.reverse()
    rng = np.random.default_rng(0)
    files = [rng.bytes(20000), rng.bytes(20000)]
    p = tables.plan(extents, [u8(i, x.length) for i, x in enumerate(extents)], PAGE)
    assert len(p.windows) == windows
    check(p, extents, files)


def test_parts_keep_the_order_of_the_extents_and_not_of_the_file() -> None:
    extents = [Extent(0, 30001, 7), Extent(0, 5, 9), Extent(0, 12000, 1)]
    p = tables.plan(extents, [], PAGE)
    assert [w.offset for w in p.windows] == [0, 8192, 28672]
    check(p, extents, [np.random.default_rng(1).bytes(40000)])


REMAINDERS = sorted(
    {*range(0, 20), 63, 64, 65, *range(97, 4096, 397), 511, 512, 513, 2047, 2048, *range(4090, 4096)}
)


@pytest.mark.parametrize("align", [512, 4096, 16384])
def test_every_remainder_and_odd_lengths(align: int) -> None:
    """Two extents of one file and one of another at every remainder: each part is where its bytes are."""
    rng = np.random.default_rng(2)
    files = [rng.bytes(200_000), rng.bytes(60_000)]
    for r, length in itertools.product(REMAINDERS, (1, 4095, 4097, 12289)):
        extents = [Extent(0, r, length), Extent(0, 81920 + 4095 - r, length + 2), Extent(1, 20480 + r, 33)]
        p = tables.plan(extents, [u8(i, x.length) for i, x in enumerate(extents)], align)
        assert p.moves == ()
        for x, place in zip(extents, p.places, strict=True):
            assert place % align == x.offset % align
        check(p, extents, files, align)


def test_the_end_of_the_file_may_cut_a_window_short() -> None:
    data = np.random.default_rng(3).bytes(5001)
    p = tables.plan([Extent(0, 4097, 904)], [u8(0, 904)], PAGE)
    assert p.windows[0].length == 4096
    assert p.windows[0].need == 905
    check(p, [Extent(0, 4097, 904)], [data])


def test_a_large_read_alignment_widens_the_windows() -> None:
    p = tables.plan([Extent(0, 70_000, 10)], [u8(0, 10)], 65536)
    assert p.windows == (tables.Window(0, 65536, 65536, 4474, 0),)


@pytest.mark.parametrize("offset", range(4096, 4096 + 33))
@pytest.mark.parametrize(
    ("dtype", "align"), [("F32", 16), ("F64", 8), ("I32", 4), ("BF16", 2), ("F16", 2), ("U8", 1), ("Q4_K", 1)]
)
def test_parts_move_only_where_a_view_would_not_be_aligned(offset: int, dtype: str, align: int) -> None:
    extents = [Extent(0, offset, 160)]
    p = tables.plan(extents, [Tensor("t", dtype, (1,), 0, 0, 160)], PAGE)
    assert (p.moves == ()) == (offset % align == 0)
    assert p.places[0] % align == 0
    assert p.bytes == 4096 + (160 if p.moves else 0)
    check(p, extents, [np.random.default_rng(4).bytes(9000)])


def test_float32_moves_at_addresses_that_are_not_multiples_of_16_and_bfloat16_does_not() -> None:
    for offset in (4, 8, 12, 20):
        assert tables.plan([Extent(0, offset, 64)], [Tensor("t", "F32", (16,), 0, 0, 64)], PAGE).moves
        assert not tables.plan([Extent(0, offset, 64)], [Tensor("t", "BF16", (32,), 0, 0, 64)], PAGE).moves


def test_a_tensor_inside_its_part_is_aligned_with_its_own_offset() -> None:
    """A float32 tensor at 12 of a part at 4 lies well; at 12 of a part at 0 it does not, and the place that
    the part is moved to must make it so."""
    tensor = Tensor("t", "F32", (16,), 0, 12, 64)
    assert not tables.plan([Extent(0, 4, 76)], [tensor], PAGE).moves
    p = tables.plan([Extent(0, 0, 76)], [tensor], PAGE)
    assert p.moves
    assert (p.places[0] + 12) % 16 == 0


def test_several_moves_do_not_overlap() -> None:
    extents = [Extent(0, 4097, 333), Extent(0, 9001, 4444), Extent(1, 3, 77)]
    tensors = [Tensor(f"t{i}", "F32", (1,), i, 0, 4) for i in range(3)]
    p = tables.plan(extents, tensors, PAGE)
    assert len(p.moves) == 3
    assert all(place % 64 == 0 for place in p.places)
    rng = np.random.default_rng(5)
    check(p, extents, [rng.bytes(20000), rng.bytes(8192)])


def test_the_design_s_example_of_a_qwen3_30b_expert() -> None:
    """Section 8: an expert of exactly 162 x 16 KiB; three windows at unaligned offsets are 12288 more."""
    part = 162 * 16384 // 3
    aligned = [Extent(0, i * part, part) for i in range(3)]
    apart = [Extent(0, 10**9 * i + 4096 * i + 1234, part) for i in range(3)]
    assert tables.plan(aligned, [], PAGE).bytes == 162 * 16384
    assert tables.plan(apart, [], PAGE).bytes == 162 * 16384 + 12288


def test_tables_of_a_source(source) -> None:  # type: ignore[no-untyped-def]
    t = tables.build(source)
    assert t.slot_bytes % 16384 == 0
    largest = max(tables.plan(x.extents, source.layouts[x.layout], PAGE).bytes for x in source.experts)
    assert 0 <= t.slot_bytes - largest < 16384
    assert (t.grid_layers, t.grid_experts) == (2, 8)
    assert len(t.experts) == 16
    assert t.experts["bytes"].tolist() == [sum(e.length for e in x.extents) for x in source.experts]
    for record, x in zip(t.experts, source.experts, strict=True):
        parts = t.parts[record["first_part"] : record["first_part"] + record["n_parts"]]
        assert parts["bytes"].tolist() == [e.length for e in x.extents]
        assert parts["file_offset"].tolist() == [e.offset for e in x.extents]
    strings = t.strings.removesuffix(b"\0").split(b"\0")
    assert len(strings) == len(set(strings))
    assert t.strings[t.files["path"][1] :].split(b"\0")[0].decode() == str(source.files[1].path)


def scattered(rng: random.Random) -> PlainSource:
    """Experts of three layouts, of one to five extents at any places of two files, in any order."""
    layouts, parts = [], []
    for _ in range(3):
        parts.append(rng.randint(1, 5))
        tensors = [
            Tensor(
                f"{part} {i}",
                rng.choice(("F32", "F64", "BF16", "U8")),
                (1,),
                part,
                rng.choice((0, 1, 2, 4, 12)),
                8,
            )
            for part in range(parts[-1])
            for i in range(rng.randint(0, 2))
        ]
        layouts.append(tuple(tensors))
    experts = []
    for i in range(rng.randint(1, 20)):
        layout, room = rng.randrange(3), rng.choice((20_000, 100_000))
        extents = tuple(
            Extent(rng.randrange(2), rng.randrange(room), rng.choice((20, 400, 4096, 9000)))
            for _ in range(parts[layout])
        )
        experts.append(Expert(i % 4, i // 4, extents, layout, rng.randrange(5)))
    files = tuple(SourceFile(Path(f"/{i}"), 1, 2, 10**6, 3, bytes(16)) for i in range(2))
    return PlainSource("test", Path("/"), files, ExpertTable.of(experts), tuple(layouts), ModelFacts())


@pytest.mark.parametrize("align", [512, 4096, 16384])
def test_tables_made_by_columns_are_those_made_one_by_one(align: int) -> None:
    """Bit by bit, whatever the order and places of the extents."""
    for seed in range(100):
        source = scattered(random.Random(seed))
        made = tables.build(source, align)
        wanted, most = plans_one_by_one.build(source, align)
        for name, rows in wanted.items():
            assert getattr(made, name).tobytes() == rows.tobytes(), (seed, name)
        assert 0 <= made.slot_bytes - most < 16384
        for x in source.experts:
            layout = source.layouts[x.layout]
            assert tables.plan(x.extents, layout, align) == plans_one_by_one.plan(x.extents, layout, align)


def test_experts_as_columns_are_the_same_experts() -> None:
    source = scattered(random.Random(1))
    experts = tuple(source.experts)
    again = ExpertTable.of(experts)
    assert tuple(again) == experts == tuple(again[i] for i in range(len(experts)))
    assert ExpertTable.of(again) is again
    assert (again[-1], again[1:3]) == (experts[-1], experts[1:3])
    assert again.bytes.tolist() == [sum(e.length for e in x.extents) for x in experts]
    with pytest.raises(IndexError):
        _ = again[len(experts)]
