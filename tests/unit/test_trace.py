"""Traces: the file and what of it is refused, foreign formats, and the figures."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from smoe_mp import models, trace_view
from smoe_mp.distances import hit_rates
from smoe_mp.errors import SmoeError, VaultError
from smoe_mp.trace import (
    ASKED,
    BUSY,
    DEMAND,
    DROPPED,
    GUESS,
    IDLE,
    RANKS,
    THERE,
    Trace,
    TraceBuilder,
    read_trace,
    write_trace,
)
from smoe_mp.trace_cli import app


def small() -> Trace:
    """Two tokens of one client in two layers, with ranks and guesses, and a poll of another."""
    b = TraceBuilder()
    b.add(BUSY, 0, 0, 1000)
    for token, chosen in enumerate(([3, 1], [1, 2])):
        for layer in (0, 1):
            b.add(DEMAND, 0, layer, 1010 + token, experts=chosen, outcomes=[THERE, ASKED])
            b.add(RANKS, 0, layer, 1010 + token, experts=[2, 5])
    b.add(GUESS, 161, 1, 1020, experts=[5, 6], outcomes=[ASKED, DROPPED])
    b.add(IDLE, 0, 0, 1030)
    return b.build(layers=2, experts=8, top_k=2, note="by hand")


def same(one: Trace, other: Trace) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Trace))


# --- the file ---------------------------------------------------------------------------------------------


def test_a_trace_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(small(), path)
    back = read_trace(path)
    assert same(back, small())
    assert [back.kind.dtype, back.layer.dtype, back.time_us.dtype] == [np.uint8, np.uint32, np.uint64]
    assert back.entries(1).tolist() == [3, 1]


def test_no_layers_of_no_experts_have_no_records(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    b = TraceBuilder()
    b.add(DEMAND, 0, 0, 0, experts=[0])
    for field in ("layer", "expert"):
        write_trace(b.build(), path)
        rewrite(path, lambda header, field=field: header.update({f"{field}s": 0}))
        with pytest.raises(VaultError, match=f"{field} 0 is out of range, there are 0"):
            read_trace(path)


def test_a_trace_of_nothing(tmp_path: Path) -> None:
    write_trace(TraceBuilder().build(layers=4, experts=4), tmp_path / "a.trace")
    back = read_trace(tmp_path / "a.trace")
    assert len(back) == 0
    about = trace_view.summary(back)
    assert (about.demanded, about.hit_rate, about.overlap, about.turns) == (0, None, None, [])
    trace_view.draw(back, about, Console(file=io.StringIO()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """One byte changed, or the file cut: a VaultError with the file, or a trace that is in range."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.trace"
        write_trace(small(), path)
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[at] ^= data.draw(st.integers(1, 255))
        else:
            del raw[at:]
        path.write_bytes(raw)
        try:
            back = read_trace(path)
        except VaultError as error:
            said = str(error)
        else:
            said = f"{path}"
            assert len(back.expert) == back.first[-1]
            trace_view.summary(back)
        assert str(path) in said


def rewrite(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:12], "little")
    header = json.loads(raw[12 : 12 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(raw[:8] + len(text).to_bytes(4, "little") + text + raw[12 + length :])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", 2, "trace version 2, this smoe-mp reads 1"),
        ("records", 8, "should have 8 rows"),
        ("records", 1 << 28, "should have"),
        ("records", -1, "out of range"),
        ("entries", 1 << 40, "out of range"),
        ("layers", 1 << 28, "268435456 layers of 8 experts: at most 16777216"),
        ("experts", 0, "expert 6 is out of range, there are 0"),
        ("layers", 1, "layer 1 is out of range, there are 1"),
        ("experts", 5, "expert 6 is out of range, there are 5"),
        ("stored", [1, 2, 3], "columns of"),
        ("more", 1, "damaged"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(
    tmp_path: Path, field: str, value: object, words: str
) -> None:
    path = tmp_path / "a.trace"
    write_trace(small(), path)
    rewrite(path, lambda header: header.update({field: value}))
    with pytest.raises(VaultError, match=words) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


def test_a_column_that_unpacks_to_more_is_refused_before_it_does(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(small(), path)
    bomb = zlib.compress(bytes(1 << 24), 9)
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:12], "little")
    sizes = json.loads(raw[12 : 12 + length])["stored"]
    body = raw[12 + length + sizes[0] :]
    path.write_bytes(raw[: 12 + length] + bomb + body)
    rewrite(path, lambda header: header.update(stored=[len(bomb), *sizes[1:]]))
    with pytest.raises(VaultError, match="the column kind should have 11 rows of 1 bytes"):
        read_trace(path)


# --- traces of others -------------------------------------------------------------------------------------

CSV = """# route_trace v1
# model=/m.gguf arch=x n_layer=2 n_expert=16 n_expert_used=2
turn,phase,step,layer,slot,expert,weight
0,0,0,0,0,9,0.5
0,0,0,0,1,3,0.5
0,0,0,1,0,4,0.5
0,0,0,1,1,5,0.5
0,1,1,0,0,3,0.5
0,1,1,0,1,1,0.5
1,0,0,0,0,7,0.5
"""


@pytest.mark.parametrize("zipped", [False, True])
def test_a_csv(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "route.csv"
    path.write_bytes(gzip.compress(CSV.encode()) if zipped else CSV.encode())
    trace = read_trace(path)
    rows = [(int(trace.kind[i]), int(trace.layer[i]), trace.entries(i).tolist()) for i in range(len(trace))]
    assert rows == [
        (BUSY, 0, []),
        (DEMAND, 0, [9, 3]),
        (DEMAND, 1, [4, 5]),
        (DEMAND, 0, [3, 1]),
        (IDLE, 0, []),
        (BUSY, 0, []),
        (DEMAND, 0, [7]),
        (IDLE, 0, []),
    ]
    assert (trace.layers, trace.experts, trace.top_k) == (2, 16, 2)
    assert [turn.union for turn in trace_view.turns(trace)] == [5, 1]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "route.jsonl"
    path.write_text('{"tok": 0, "layers": [[1, 2], [3]]}\n{"tok": 1, "layers": [[2, 4], [3]]}\n')
    trace = read_trace(path)
    assert [trace.entries(i).tolist() for i in range(len(trace))] == [[], [1, 2], [3], [2, 4], [3], []]
    assert trace_view.overlap(trace) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: no trace"),
        ("turn,phase\n", "no column step, layer, slot, expert"),
        (CSV + "0,0,0,0,x,1,1\n", "line 11: '0,0,0,0,x,1,1'"),
        (CSV + "0,0\n", "line 11"),
        (CSV + "0,0,0,-1,0,1,1\n", "line 11: a layer or expert out of range"),
        ('{"layers": [[1]]}\n{"layers": 3}\n', "line 2: no token"),
        ('{"layers": [[-1]]}\n', "line 1: layer 0 has an expert out of range"),
        ("\x1f", "no trace"),
        (CSV + "1,0,0,0," + "0" * 200_000 + ",7,0.5\n", "field larger than field limit"),
        (CSV + "1,0,0,268435456,0,7,0.5\n", "268435457 layers of 16 experts: at most 16777216"),
        (CSV + "1,0,0,0,0,16,0.5\n", "expert 16 is out of range, there are 16"),
        (CSV.replace("n_expert=16", "n_expert=99999999999999"), "2 layers of 9999999999 experts: at most"),
        (CSV.replace("n_expert=16", "n_expert=" + "9" * 5000), "2 layers of 9999999999 experts: at most"),
        ('{"layers": [[1], [16777216]]}\n', "2 layers of 16777217 experts: at most"),
        ('{"layers": [[' + "1" * 5000 + "]]}\n", "line 1:"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "route"
    path.write_text(text)
    with pytest.raises(VaultError) as refused:
        read_trace(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_gzip_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "route.csv.gz"
    path.write_bytes(gzip.compress(CSV.encode())[:-20])
    with pytest.raises(VaultError, match="no trace"):
        read_trace(path)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gemma4-26b-a4b"])
def test_lru_rates_of_shared_traces_are_those_of_their_readme(shared: Path, model: str) -> None:
    trace = read_trace(shared / f"traces/{model}.route.csv.gz")
    distances = trace_view.reuse_distances(trace)
    for slots, rate in zip(trace_view.SLOTS, hit_rates(distances, trace_view.SLOTS), strict=True):
        assert f"{rate:.3f}".removeprefix("0") == readme_rate(shared / "traces/README.md", model, slots)


def readme_rate(readme: Path, model: str, slots: int) -> str:
    """The LRU row of a model in the table of reference figures."""
    rows = [[c.strip() for c in x.split("|")[1:-1]] for x in readme.read_text().splitlines() if "|" in x]
    column = next(row for row in rows if row[0] == "slots").index(str(slots))
    return next(row for row in rows if row[0] == f"{model} LRU")[column]


def test_the_shared_json_lines(shared: Path) -> None:
    trace = read_trace(shared / "traces/kimi-linear.route.jsonl.gz")
    assert (trace.layers, trace.experts, int((trace.kind == DEMAND).sum())) == (26, 256, 26 * 300)


# --- figures ----------------------------------------------------------------------------------------------


def test_the_figures_of_a_small_trace() -> None:
    about = trace_view.summary(small(), slots=(1, 4))
    assert about.records == {"demand": 4, "ranks": 4, "guess": 1, "busy": 1, "idle": 1}
    assert (about.demanded, about.hit_rate, about.guesses) == (8, 0.5, 2)
    assert about.overlap_by_layer == [0.5, 0.5]  # of 1 and 2, expert 1 was there before
    assert about.ranks_of_next == 1.0  # expert 2 had been ranked next
    assert about.lru == {1: 0.0, 4: 0.25}
    assert [(t.who, t.demands, t.experts, t.union) for t in about.turns] == [(0, 4, 8, 6)]
    assert about.seconds == 30e-6
    assert trace_view.popularity(small()).tolist() == [[0, 2, 1, 1, 0, 0, 0, 0]] * 2


def test_a_prompt_has_no_part_in_the_overlap() -> None:
    b = TraceBuilder()
    for experts in ([0, 1, 2, 3], [0, 1], [1, 2]):
        b.add(DEMAND, 0, 0, 0, experts=experts)
    assert trace_view.overlap(b.build(experts=8, top_k=2)) == [0.5]


def test_two_requests_are_not_adjacent() -> None:
    b = TraceBuilder()
    for _ in range(2):
        b.add(BUSY, 0, 0, 0)
        b.add(DEMAND, 0, 0, 0, experts=[1, 2])
        b.add(IDLE, 0, 0, 0)
    assert trace_view.overlap(b.build(experts=8, top_k=2)) == [None]


def test_clients_are_apart() -> None:
    b = TraceBuilder()
    for who, experts in ((0, [1, 2]), (1, [3, 4]), (0, [1, 2]), (1, [4, 5])):
        b.add(DEMAND, who, 0, 0, experts=experts)
    trace = b.build(experts=8, top_k=2)
    assert trace_view.overlap(trace) == [0.75]
    assert [turn.union for turn in trace_view.turns(trace)] == [2, 3]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 10))
def test_reuse_distances_make_an_exact_lru(asked: list[int], slots: int) -> None:
    b = TraceBuilder()
    for expert in asked:
        b.add(DEMAND, 0, 0, 0, experts=[expert])
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in asked:
        hits += expert in cache
        cache[expert] = None
        cache.move_to_end(expert)
        if len(cache) > slots:
            cache.popitem(last=False)
    (rate,) = hit_rates(trace_view.reuse_distances(b.build(layers=1, experts=10)), [slots])
    assert round(rate * len(asked)) == hits


def test_a_heat_map_is_as_wide_as_there_is_room() -> None:
    counts = np.array([[0, 1, 2, 4], [0, 0, 0, 0]])
    assert trace_view.heat_map(counts, 4) == [" ░▒█", "    "]
    assert trace_view.heat_map(counts, 3) == ["░█", "  "]


# --- the command ------------------------------------------------------------------------------------------


def test_show_draws_and_prints_json(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(small(), path)
    drawn = CliRunner().invoke(app, ["show", str(path), "--slots", "4"])
    assert drawn.exit_code == 0
    assert "8 experts demanded, 50.0% were there; 2 guessed" in drawn.stdout
    assert "  0 │ █▒▒    │  50.0%" in drawn.stdout
    printed = CliRunner().invoke(app, ["show", str(path), "--slots", "4", "--json"])
    plain = json.loads(printed.stdout)
    assert plain["lru"] == {"4": 0.25}
    assert plain["popularity"] == trace_view.popularity(small()).tolist()


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not here")
    trace_view.plot(small(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SmoeError, match="cannot be written"):
        trace_view.plot(small(), tmp_path / "no/a.png")


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SmoeError, match="pip install"):
        trace_view.plot(small(), tmp_path / "a.png")


# --- traces that come along -------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["library", "tests", "documentation", "headers"])
def test_the_traces_of_the_small_model(domain: str) -> None:
    trace = read_trace(models.TINY / f"traces/{domain}.trace")
    about = trace_view.summary(trace)
    assert (about.layers, about.experts, about.top_k, about.lost) == (8, 64, 4, 0)
    assert about.records["demand"] == about.records["ranks"] == 2000 * 8
    assert set(np.diff(trace.first)[trace.kind == DEMAND].tolist()) == {4}
    assert set(np.diff(trace.first)[trace.kind == RANKS].tolist()) == {8}
    assert len(about.turns) == about.records["busy"] == 4
    assert about.overlap is not None
    assert 0.15 < about.overlap < 0.45  # chance is 4 of 64
