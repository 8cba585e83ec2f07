"""The demo's engine: its vault, its model over the file, and the start and stop of a system.

The system itself is a stand-in here, a few lines of Python; the whole demo runs in the process tests.
"""

from __future__ import annotations

import io
import sys
import tomllib
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from smoe_mp import config, demo
from smoe_mp.demo import ExpertBatch, FileExperts, MoeStack, StackShape, System, make_vault
from smoe_mp.errors import SmoeError
from smoe_mp.quant import F32
from smoe_mp.sources.smoe import open_smoe

SHAPE = StackShape(hidden=64, width=32, layers=3, experts=16, top_k=2, vocab=200)


def no_progress(done: int, total: int) -> None:
    del done, total


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.smoe"
    make_vault(path, no_progress, SHAPE)
    return path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ----------------------------------------------------------------------------------------------- the vault


def test_the_vault_is_made_once_and_then_kept(tmp_path: Path) -> None:
    path, calls = tmp_path / "v.smoe", list[tuple[int, int]]()
    assert make_vault(path, lambda *call: calls.append(call), SHAPE) is False
    assert calls == [(i, 48) for i in range(1, 49)]
    inode = path.stat().st_ino
    assert make_vault(path, no_progress, SHAPE) is True
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("what", ["cut", "other shape", "no vault"])
def test_a_vault_that_is_not_the_demos_is_made_anew(what: str, vault: Path, tmp_path: Path) -> None:
    path = tmp_path / "v.smoe"
    if what == "cut":
        path.write_bytes(vault.read_bytes()[:-1])
    elif what == "no vault":
        path.write_bytes(b"?")
    else:
        make_vault(path, no_progress, StackShape(64, 32, 3, 15, 2, 200))
    assert make_vault(path, no_progress, SHAPE) is False
    assert path.read_bytes() == vault.read_bytes()


def test_experts_differ_and_have_the_scale_of_their_fan_in(vault: Path) -> None:
    file = FileExperts(vault)
    with file(0, [0, 1]) as batch:
        one, other, down = (
            batch[0].dequantize("gate"),
            batch[1].dequantize("gate"),
            batch[0].dequantize("down"),
        )
    assert (one.shape, down.shape) == ((32, 64), (64, 32))
    assert not np.array_equal(one, other)
    assert np.isclose(one.std(), 64**-0.5, rtol=0.1)
    assert np.isclose(down.std(), 32**-0.5, rtol=0.1)


def test_the_demos_own_shape_is_a_few_hundred_megabytes_of_qwen3_experts() -> None:
    shape = demo.DEMO_SHAPE
    assert (shape.hidden, shape.width) == (2048, 768)
    expert_bytes = 3 * 2048 * 768 // 2 + 3 * 2048 * 768 // 64 * 2
    assert expert_bytes % 16384 == 0
    assert 200e6 < shape.layers * shape.experts * expert_bytes < 400e6


# ----------------------------------------------------------------------------------------------- the model


class Counting:
    """The file's experts, with one number of one expert changed where asked."""

    def __init__(self, file: FileExperts, wrong: tuple[int, int] | None = None) -> None:
        self.file = file
        self.wrong = wrong
        self.open = 0
        self.asked: list[tuple[int, int]] = []

    @contextmanager
    def __call__(self, layer: int, experts: Sequence[int]) -> Generator[ExpertBatch]:
        self.asked += [(layer, expert) for expert in experts]
        self.open += 1
        with self.file(layer, experts) as batch:
            yield [Altered(batch[i], (layer, e) == self.wrong) for i, e in enumerate(experts)]
        self.open -= 1


class Altered:
    def __init__(self, expert: demo.ExpertTensors, wrong: bool) -> None:
        self.expert = expert
        self.wrong = wrong

    def dequantize(self, name: str, /) -> F32:
        weights = self.expert.dequantize(name)
        if self.wrong:
            weights[0, 0] += np.float32(0.01)
        return weights


def test_two_runs_are_identical_and_ask_for_top_k_of_each_layer(vault: Path) -> None:
    one, other = Counting(FileExperts(vault)), Counting(FileExperts(vault))
    first, second = MoeStack(SHAPE).decode(40, one), MoeStack(SHAPE).decode(40, other)
    assert first.same_as(second)
    assert len(first.tokens) == 40
    assert one.asked == list(first.routes)
    assert one.open == 0
    assert [layer for layer, _ in one.asked] == [0, 0, 1, 1, 2, 2] * 40
    assert np.isfinite(first.state).all()


def test_one_wrong_weight_is_seen(vault: Path) -> None:
    right = MoeStack(SHAPE).decode(40, FileExperts(vault))
    popular = Counter(right.routes).most_common(1)[0][0]
    wrong = MoeStack(SHAPE).decode(40, Counting(FileExperts(vault), wrong=popular))
    assert not right.same_as(wrong)


def test_one_layer_is_the_textbooks_formula(vault: Path) -> None:
    shape = StackShape(64, 32, 1, 16, 2, 200)
    stack, file = MoeStack(shape), FileExperts(vault)
    x = np.random.default_rng(5).standard_normal(64, dtype=np.float32)
    h = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-6)
    (best, second), weights = stack.route(0, h.astype(np.float32))
    assert np.isclose(weights.sum(), 1)
    assert weights[0] >= weights[1]
    expected = x.astype(np.float64)
    with file(0, [best, second]) as batch:
        for i in range(2):
            gate, up, down = (batch[i].dequantize(n).astype(np.float64) for n in ("gate", "up", "down"))
            a = gate @ h
            expected = expected + weights[i] * (down @ (a / (1 + np.exp(-a)) * (up @ h)))
    assert np.allclose(stack.forward(x, file), expected, atol=1e-5)


def test_routing_is_skewed_and_neighbours_share_experts(vault: Path) -> None:
    run = MoeStack(SHAPE).decode(100, FileExperts(vault))
    uses = Counter(run.routes)
    hottest = sum(count for _, count in uses.most_common(12))  # a quarter of the 48 experts
    assert hottest / len(run.routes) > 0.4
    tokens = [set(run.routes[i : i + 6]) for i in range(0, len(run.routes), 6)]
    shared = np.mean([len(a & b) / 6 for a, b in pairwise(tokens)])
    assert shared > 0.25  # 2 of 16 by chance alone
    assert len(set(run.tokens)) > 50


def test_the_first_difference_is_named(vault: Path) -> None:
    right = MoeStack(SHAPE).decode(5, FileExperts(vault))
    other = demo.Run((*right.tokens[:3], -1, right.tokens[4]), right.state, right.routes)
    assert demo._difference(other, right) == f"token 3 is -1, should be {right.tokens[3]}"
    state = right.state.copy()
    state[7] = -state[7]
    assert "1 of 64 numbers" in demo._difference(demo.Run(right.tokens, state, right.routes), right)


# ---------------------------------------------------------------------------------------------- the system

SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("[bold]stopping", flush=True), sys.exit(3)))
print("starting", flush=True)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_the_system_is_ready_inside_and_stopped_behind(console: Console) -> None:
    with System([sys.executable, "-c", SERVES], console) as system:
        assert system._process.poll() is None
        assert "ready" in printed(console)
    assert system._process.returncode == 3
    assert "starting" in printed(console)
    assert "[bold]stopping" in printed(console)


def test_the_system_is_stopped_when_the_block_fails(console: Console) -> None:
    system = System([sys.executable, "-c", SERVES], console)
    with pytest.raises(ZeroDivisionError), system:
        raise ZeroDivisionError
    assert system._process.returncode == 3


def test_a_system_that_ends_before_it_is_ready_is_an_error(console: Console) -> None:
    command = [sys.executable, "-c", "import sys; print('no space'); sys.exit(5)"]
    with pytest.raises(SmoeError, match="ended with status 5"), System(command, console):
        pass
    assert "no space" in printed(console)


def test_a_system_that_never_gets_ready_is_stopped(console: Console) -> None:
    silent = System([sys.executable, "-c", "import signal; signal.pause()"], console, ready_timeout_s=0.1)
    with pytest.raises(SmoeError, match="was not ready within"), silent:
        pass
    assert silent._process.returncode == -15


def test_a_line_that_only_contains_the_word_is_not_taken_for_ready(console: Console) -> None:
    command = [sys.executable, "-c", "print('workers: 8 ready')"]
    with pytest.raises(SmoeError, match="before it was ready"), System(command, console):
        pass


# ------------------------------------------------------------------------------------------------ the demo


def test_the_demos_configuration_keeps_what_was_given_and_no_more() -> None:
    text = 'name = "x"\n[vault]\npath = "/else/where.smoe"\n[ring]\nslots = 48\n[workers]\ncount = 3\n'
    own = demo._own_config(config.parse(text, Path("demo.toml")), "demo-1")
    assert tomllib.loads(own) == {
        "name": "demo-1",
        "vault": {"path": "demo.smoe"},
        "ring": {"slots": 48},
        "workers": {"count": 3},
    }
    config.parse(own, Path("scratch/demo-1.toml"))


def test_the_figures_are_differences(console: Console) -> None:
    before = dict.fromkeys(("hits", "joins", "promoted", "misses"), 100) | {
        "wanted_bytes": 10**9,
        "device_bytes": 10**9,
        "wait_ns": 10**9,
    }
    after = before | {
        "hits": 175,
        "misses": 125,
        "wanted_bytes": 10**9 + 5_000_000,
        "device_bytes": 10**9 + 6_000_000,
        "wait_ns": 10**9 + 50_000_000,
        "files": {"a.smoe": "buffered"},
    }
    demo._print_figures(before, after, tokens=10, seconds=2.0, console=console)
    said = printed(console)
    assert "5.0 tokens/s" in said
    assert "75.0% (75 of 100 experts)" in said
    assert "6 MB from the device for 5 MB" in said
    assert "5.00 ms a token" in said
    assert "not direct" in said


def test_the_reference_reads_the_vault_as_it_is(vault: Path) -> None:
    assert len(open_smoe(vault).experts) == 48
    with FileExperts(vault)(2, [15]) as batch, pytest.raises(KeyError):
        batch[0].dequantize("nothing")
