"""GGUF models through a ring: every expert's bytes are the file's, and its weights those of gguf-py."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguffiles import write_model
from support import serve
from systems import Up, smoe_mp

import smoe_mp as smoe
from smoe_mp import tables
from smoe_mp.errors import RingError
from smoe_mp.sources import open_source

MIXED = (
    {"gate": "Q4_0", "up": "Q4_0", "down": "Q8_0"},
    {"gate": "Q8_0", "up": "Q5_1", "down": "F16"},
    {"gate": "BF16", "up": "F32", "down": "MXFP4"},
)
WIDE = ({"gate": "Q4_K", "up": "IQ4_XS", "down": "Q6_K"}, {"gate": "Q2_K", "up": "Q8_K", "down": "IQ1_S"})


def expected(files: list[Path]) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for file in files for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(
    "shape",
    [
        {"types": MIXED},
        {"types": MIXED, "version": 2, "alignment": 8, "biases": True, "scales": True},
        {"types": MIXED, "tensors_a_part": 3, "dense_layers": 1, "biases": True},
        {"types": WIDE, "d_model": 512, "d_ffn": 256, "alignment": 4096},
        {"types": [{"gate_up": "Q4_0", "down": "Q4_1"}] * 2, "experts": 7},
    ],
    ids=["mixed", "version 2", "split", "k-quants", "gate_up"],
)
def test_bytes_and_weights(tmp_path: Path, shape: dict[str, object]) -> None:
    files = write_model(tmp_path / "m.gguf", **shape)  # type: ignore[arg-type]
    read = expected(files)
    source = open_source(files[-1])
    with serve(source, slots=5, workers=2) as served, served.attach() as ring:
        for index, row in enumerate(source.experts):
            with ring.fetch(row.layer, [row.expert]) as batch:
                expert = batch[0]
                names = [tensor.name for tensor in source.layouts[row.layout]]
                assert list(expert.tensors) == names
                for part, name in zip(expert.parts, names, strict=True):
                    role, _, suffix = name.partition(".")
                    tensor = read[f"blk.{row.layer}.ffn_{role}_exps.{suffix or 'weight'}"]
                    share = np.asarray(tensor.data[row.expert])
                    assert part.tobytes() == share.tobytes(), (index, name)
                    if suffix or tensor.tensor_type.name == "Q8_K":
                        continue  # no matrix, or a type that gguf-py cannot dequantise
                    with np.errstate(all="ignore"):  # of any bytes scales may be infinite
                        weights = gguf.quants.dequantize(share, tensor.tensor_type)
                        assert expert.dequantize(name).tobytes() == weights.astype(np.float32).tobytes()


def test_what_cannot_be_dequantised(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", WIDE, d_model=512, d_ffn=256)
    with (
        serve(open_source(files[0]), slots=2) as served,
        served.attach() as ring,
        ring.fetch(1, [0]) as batch,
        pytest.raises(RingError, match="'up' cannot be made float32: Q8_K: the installed package gguf"),
    ):
        batch[0].dequantize("up")


def test_up_serves_a_split_model(up: Up, tmp_path: Path) -> None:
    """A folder and `smoe-mp up`; what mixed block types waste of the ring is in the status."""
    (tmp_path / "model").mkdir()
    files = write_model(tmp_path / "model/m.gguf", MIXED, d_model=256, d_ffn=128, tensors_a_part=5)
    system = up(vault=tmp_path / "model", slots=8)
    with smoe.attach(system.name) as ring, ring.fetch(2, [1, 3]) as batch:
        up_weights = expected(files)["blk.2.ffn_up_exps.weight"].data
        assert np.array_equal(batch[1]["up"], up_weights[3])
    status = system.look()
    assert (status.vault.format, status.vault.experts) == ("gguf", 12)
    assert [file.path for file in status.files] == [str(file) for file in files]
    assert status.ring.slot_bytes * 8 == status.ring.data_bytes
    source = open_source(files[0])
    needs = [tables.plan(x.extents, source.layouts[x.layout], 4096).bytes for x in source.experts]
    steps = [-(-need // 16384) for need in needs]
    assert status.ring.slot_bytes == max(steps) * 16384
    assert status.ring.wasted_bytes == 8 * (max(steps) - sum(steps) / 12) * 16384 > 0
    assert "of the ring: experts differ in size" in smoe_mp("status", system.name).stdout
    size = json.loads(smoe_mp("size", system.config, "--json").stdout)
    assert size["wasted_bytes"] == status.ring.wasted_bytes
    assert "of the ring stay empty with the mean expert in each slot" in smoe_mp("size", system.config).stdout
