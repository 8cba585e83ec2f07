"""Experts stay out of memory: a model with 1.2 GB of experts, and what a process has of it (field report 56).

The experts are holes in a sparse file, so they are all zeros and take no disk.  What is measured is memory,
and zeros that are read take as much of it as other numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints import header_of
from support import LIMIT_S, serve

from smoe_mp.sources import open_source

LAYERS, EXPERTS, HIDDEN, WIDTH, VOCAB, HEADS, HEAD_DIM = 6, 64, 1024, 512, 8000, 16, 64
SLOTS = 40
MIB = 1 << 20
MARGIN_MIB = 150

CHILD = """
import json, sys
import torch, transformers
import smoe_mp.transformers

def memory():
    rows = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("Rss", "VmHWM")))
    return {key: int(value.split()[0]) >> 10 for key, value in rows.items()}

torch.set_num_threads(1)
torch.ones(4, 4, dtype=torch.bfloat16) @ torch.ones(4, 4, dtype=torch.bfloat16)
steps = {"imported": memory()}
model = smoe_mp.transformers.load(sys.argv[1], ring=sys.argv[2])
steps["loaded"] = memory()
ids = torch.randint(3, 7000, (1, 48), generator=torch.Generator().manual_seed(1))
model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
steps["ran"] = memory()
counted = smoe_mp.transformers.ring_of(model).stats()["client"]
steps["demanded"] = sum(counted[key] for key in ("hits", "joins", "promoted", "misses"))
print(json.dumps(steps))
"""


def write_big(folder: Path) -> tuple[int, int]:
    """A qwen3_moe checkpoint whose experts are holes; the bytes of its experts and of the rest."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": 4, "head_dim": HEAD_DIM, "num_experts": EXPERTS, "num_experts_per_tok": 4,
        "moe_intermediate_size": WIDTH, "intermediate_size": 2048, "vocab_size": VOCAB,
        "tie_word_embeddings": True, "max_position_embeddings": 512, "norm_topk_prob": True,
        "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
        }
        shapes |= {at + f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        shapes |= {at + f"self_attn.{x}_proj.weight": (4 * HEAD_DIM, HIDDEN) for x in "kv"}
        shapes |= {at + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN)}
        shapes |= {at + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM)}
        shapes |= {at + "mlp.gate.weight": (EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate", (WIDTH, HIDDEN)),
                ("up", (WIDTH, HIDDEN)),
                ("down", (HIDDEN, WIDTH)),
            ):
                shapes[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = shape
    return _write_holes(folder / "model.safetensors", dict(sorted(shapes.items())))


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    sizes = {name: 2 * int(shape[0] * (shape[1] if len(shape) > 1 else 1)) for name, shape in shapes.items()}
    header: dict[str, Any] = header_of({})
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, at + size]}
        at += size
    header["__metadata__"] = {"format": "pt"}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        start = file.tell()
        for name, size in sizes.items():
            if ".experts." not in name:
                file.seek(start + header[name]["data_offsets"][0])
                values = rng.standard_normal(size // 2, np.float32) / 32
                file.write(values.view(np.uint16)[1::2].tobytes())  # the upper halves: bfloat16
        file.truncate(start + at)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, at - experts


def test_resident_memory_is_the_dense_part_and_the_ring(tmp_path: Path) -> None:
    experts, dense = write_big(tmp_path / "big")
    assert experts > 1_200_000_000
    with serve(open_source(tmp_path / "big"), slots=SLOTS, workers=2) as served:
        ring = SLOTS * served.segments.slot_bytes
        command = [sys.executable, "-c", CHILD, str(tmp_path / "big"), served.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)
    before = sum(steps["imported"][key] for key in ("RssAnon", "RssFile", "RssShmem"))
    allowed = before + (dense + ring) // MIB + MARGIN_MIB
    assert steps.pop("demanded") > LAYERS * (SLOTS + 7 * 4)  # the prompt wants more than the ring has
    for step in ("loaded", "ran"):
        now = sum(steps[step][key] for key in ("RssAnon", "RssFile", "RssShmem"))
        assert now <= allowed, (step, steps, dense // MIB, ring // MIB)
    assert steps["ran"]["VmHWM"] <= allowed, (steps, dense // MIB, ring // MIB)
    assert allowed < before + experts // MIB  # so that a full load would have been seen
