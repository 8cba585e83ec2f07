"""`smoe-mp demo` from its start to its end."""

from __future__ import annotations

import re

import pytest
from systems import smoe_mp

from smoe_mp import models


@pytest.mark.usefixtures("runtime_dir")
def test_streamed_and_resident_agree_and_everything_is_stopped() -> None:
    before = sorted(path.name for path in models.TINY.rglob("*"))
    done = smoe_mp("demo", "--prompt", "import os\n", "--tokens", "20", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    said = re.sub(r"\s+", " ", done.stdout)
    assert "256 slots of 16 KiB, 50% of 512 experts" in said
    assert "identical: the text, and all 5120 logits bit for bit" in said
    assert "NOT identical" not in said
    assert said.count("import os import") == 1
    rates = re.search(r"first 8 tokens: ([\d.]+)% in turn 1, ([\d.]+)% in turn 2", said)
    assert rates
    assert float(rates[2]) > float(rates[1])
    assert re.search(r"read from the device: [\d.]+ MiB in \d+ reads", said)
    assert said.endswith("the system is stopped ")
    assert sorted(path.name for path in models.TINY.rglob("*")) == before  # nothing is left beside the model
