"""Two processes that generate from one ring at once, and one of them that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tinymodels  # noqa: E402
from support import LIMIT_S, serve  # noqa: E402
from test_families import prompt, resident  # noqa: E402

from smoe_mp.sources import open_source  # noqa: E402

SETTINGS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

CHILD = """
import json, sys
import torch
import smoe_mp.transformers
torch.set_num_threads(1)
model = smoe_mp.transformers.load(sys.argv[1], ring=sys.argv[2])
ring = smoe_mp.transformers.ring_of(model)
start = ring.stats()["client"]  # a row that the dead one had before
print("ready", flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    for _ in range(ask["times"]):
        tokens = model.generate(torch.tensor(ask["ids"]), **ask["settings"]).tolist()
        if ask["each"]:
            print(json.dumps([tokens, {}]), flush=True)
    now = ring.stats()["client"]
    counted = {key: value - start[key] for key, value in now.items() if isinstance(value, int)}
    print(json.dumps([tokens, counted]), flush=True)
"""


class Engine:
    """Another process with the model on the ring."""

    def __init__(self, path: Path, ring: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), ring],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.line() == "ready\n"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, ids: Any, times: int = 1, each: bool = False) -> None:
        assert self.process.stdin is not None
        ask = {"ids": ids.tolist(), "times": times, "each": each, "settings": SETTINGS}
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


def test_each_is_right_and_who_comes_back_finds_its_experts(tmp_path: Path) -> None:
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    reference = resident(path)
    prompts = [prompt(1, 9, seed) for seed in (5, 6)]
    wanted = [reference.generate(ids, **SETTINGS).tolist() for ids in prompts]
    with serve(open_source(path), slots=32, workers=2) as served:
        engines = [Engine(path, served.name) for _ in range(2)]
        try:
            for engine in engines:
                engine.wait_ready()
            for engine, ids in zip(engines, prompts, strict=True):
                engine.ask(ids, times=5)
            assert [engine.answer()[0] for engine in engines] == wanted

            engines[0].ask(prompts[0], times=10_000, each=True)
            assert engines[0].answer()[0] == wanted[0]  # so it is in the midst of them
            engines[0].end()
            served.segments.recover()
            served.assert_quiet()
            engines[1].ask(prompts[1])
            assert engines[1].answer()[0] == wanted[1]

            engines[0] = Engine(path, served.name)
            engines[0].wait_ready()
            engines[0].ask(prompts[0])
            tokens, counters = engines[0].answer()
            assert tokens == wanted[0]
            assert counters["hits"] > 0
            assert counters["misses"] == counters["joins"] == 0
        finally:
            for engine in engines:
                engine.end()
