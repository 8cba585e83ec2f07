"""`bench transformers` on a tiny model: its sides run, add up, agree and leave nothing; never how fast."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support import SHM

from smoe_mp import segments
from smoe_mp.bench import randommoe
from smoe_mp.bench import transformers as bench
from smoe_mp.bench.cgroup import memory_group
from smoe_mp.bench.randommoe import Shape
from smoe_mp.errors import ConfigError, SmoeError

SHAPE = Shape(layers=2, experts=8, top_k=2, hidden=64, width=32, vocabulary=128)
SETTINGS = bench.Settings(
    shape=SHAPE, rounds=1, limits=(1.0,), rings=(0.5,), prompt=12, tokens=6, threads=1, pause_s=0.0
)
GIB = 1 << 30


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where direct reads work, with the model."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "probe").write_bytes(bytes(1 << 16))
    mode = segments.probe(folder / "probe").mode
    if mode != "direct":
        pytest.skip(f"{folder}: reads are {mode}, not direct")
    made = bench.model_folder(folder, SHAPE)
    made.mkdir()
    randommoe.write(made, SHAPE)
    return folder


def grouped() -> bool:
    try:
        with memory_group(GIB):
            return True
    except SmoeError:
        return False


def test_all_sides_answer_alike(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "drop_caches", lambda folder: "")  # not the whole machine's
    model_bytes = SHAPE.experts_bytes + SHAPE.dense_bytes
    roomy = replace(SETTINGS, limits=(2 * GIB / model_bytes,))
    seen: list[tuple[float, float]] = []
    report = bench.run(lambda what, done, total: seen.append((done, total)), scratch, roomy)
    assert seen[-1][0] == seen[-1][1]
    assert all(done <= total for done, total in seen)
    names = ["transformers, resident", "transformers, mapped", "smoe-mp, ring 50%"]
    ((where, rows),) = report.sheets.items()
    assert [name for name in rows if name != "llama.cpp, mapped"] == names
    assert not [note for note in report.notes if note.startswith(where)]  # no side failed
    runs = {one["side"]: one for one in report.extra["runs"]}
    for one in runs.values():
        assert [mark["phase"] for mark in one["marks"]] == list(bench.PHASES)
        assert [len(one["marks"][decode]["tokens"]) for decode in bench.DECODES] == [6, 6]
        assert one["kills"] == 0
    tokens = {tuple(runs[name]["marks"][3]["tokens"]) for name in names}
    assert len(tokens) == 1  # said by the check too: it took runs of three sides
    ours = runs["smoe-mp, ring 50%"]
    decoded, before = ours["marks"][3], ours["marks"][2]
    # Every decoded token demands top-k experts of each layer, of the tokens that came after the first.
    assert sum(decoded[key] - before[key] for key in bench.side_program.DEMANDS) == 5 * 2 * 2
    if grouped():
        assert where.endswith("%)")
        for one in runs.values():
            assert one["peak_bytes"] >= one["held_bytes"] > 0
    assert {share.name.rpartition(", ")[2] for share in report.shares} == set(bench.ANSWERS)
    left = {path.name for path in bench.model_folder(scratch, SHAPE).iterdir()}
    assert left - {"model.gguf"} == {"apart", "complete", "fused"}
    assert not list(SHM.glob(f"smoe.bench-{os.getpid()}-*"))


@pytest.mark.root
def test_a_side_without_room_is_a_result(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grouped():
        pytest.skip("no memory cgroup can be made here")
    monkeypatch.setattr(bench, "drop_caches", lambda folder: "")
    folder = bench.model_folder(scratch, SHAPE)
    # Less than the interpreter with torch needs.
    (side, *_) = (made := bench._Bench(folder, replace(SETTINGS, limits=(1.0,)), "")).sides
    made.runs[side].append(made.one(replace(side, limit=48 << 20)))
    assert made.runs[side][0].failed == "killed by the kernel while starting: its cgroup was full"
    made.runs = {side: made.runs[side]}
    report = made.report()
    assert report.figures == []
    assert report.notes[0] == (
        f"{side}: in 1 of 1 rounds killed by the kernel while starting: its cgroup was full."
    )


def test_other_tokens_are_no_figures() -> None:
    def said(*tokens: int) -> bench._Run:
        marks = [{"tokens": list(tokens)}] * len(bench.PHASES)
        return bench._Run(marks)

    one, other, llama = (
        bench._Side("here", None, name, Path(name)) for name in ("one", "other", "model.gguf")
    )
    bench.check_tokens({one: [said(1, 2), said(1, 2, 3)], other: [said(1), bench._Run()], llama: [said(7)]})
    with pytest.raises(SmoeError, match=r"here: other says other tokens, \[1, 2, 4\]"):
        bench.check_tokens({one: [said(1, 2, 3)], other: [said(1, 2, 4)]})


def test_an_interpreter_without_llama_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        bench._llama(str(tmp_path / "python"))
    python = tmp_path / "fails"
    python.write_text("#!/bin/sh\necho no llama >&2\nexit 3\n")
    python.chmod(0o700)
    with pytest.raises(ConfigError, match="no llama: give an interpreter"):
        bench._llama(str(python))
