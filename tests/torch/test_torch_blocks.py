"""Block types by torch operations against the C decoders, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smoe_mp import dequant
from smoe_mp.torch_blocks import TYPES, dequantize_blocks

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def blocks_of(
    key: tuple[str, bool], shape: tuple[int, ...], seed: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Random bytes, whose scales are numbers."""
    rng = np.random.default_rng(seed)
    kind = dequant.TYPES[key]
    data = rng.integers(0, 256, kind.data_nbytes(shape), np.uint8)
    if not key[1]:
        blocks = data.reshape(-1, kind.nbytes)
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}.get(key[0], (0,))
        for at in places:
            halves = rng.standard_normal(len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
        if key[0] == "MXFP4":
            blocks[:, 0] %= 255
        return data, None
    count = kind.scales_nbytes(shape) // kind.scale_nbytes
    scales = {
        1: lambda: rng.integers(0, 256, count, np.uint8),
        2: lambda: rng.standard_normal(count).astype(np.float16).view(np.uint8),
        4: lambda: rng.standard_normal(count).astype(np.float32).view(np.uint8),
    }[kind.scale_nbytes]()
    return data, scales


def equal(a: torch.Tensor, b: np.ndarray) -> None:
    """The same numbers to the bit, zeros with their signs; a NaN is a NaN."""
    ours = a.cpu().float().numpy()
    theirs = b.astype(np.float32)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    bits = np.where(nan, np.uint32(0), ours.view(np.uint32))
    assert np.array_equal(bits, np.where(nan, np.uint32(0), theirs.view(np.uint32)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", sorted(TYPES))
@pytest.mark.parametrize("shape", [(256,), (5, 512), (3, 130, 256)])
def test_float32_equals_the_c_decoder(key: tuple[str, bool], shape: tuple[int, ...], device: str) -> None:
    data, scales = blocks_of(key, shape, seed=len(shape))
    theirs = dequant.dequantize(key[0], data, shape, scales=scales)
    on = None if scales is None else torch.from_numpy(scales).to(device)
    ours = dequantize_blocks(key[0], torch.from_numpy(data).to(device), shape, scales=on)
    assert (ours.dtype, ours.device.type, tuple(ours.shape)) == (torch.float32, device, shape)
    equal(ours, theirs)


@pytest.mark.parametrize("key", sorted(TYPES))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_that_rounded_once(key: tuple[str, bool], dtype: dequant.Dtype) -> None:
    shape = (4, 256)
    data, scales = blocks_of(key, shape, seed=9)
    theirs = dequant.dequantize(key[0], data, shape, scales=scales, dtype=dtype)
    on = None if scales is None else torch.from_numpy(scales)
    ours = dequantize_blocks(key[0], torch.from_numpy(data), shape, getattr(torch, dtype), scales=on)
    assert ours.dtype == getattr(torch, dtype)
    equal(ours, theirs)


def test_a_last_group_that_is_not_whole() -> None:
    for name in ("SMOE_Q4", "SMOE_Q2"):
        data, scales = blocks_of((name, True), (3, 36), seed=2)
        assert scales is not None
        theirs = dequant.dequantize(name, data, (3, 36), scales=scales)
        ours = dequantize_blocks(name, torch.from_numpy(data), (3, 36), scales=torch.from_numpy(scales))
        equal(ours, theirs)


def test_tiles_that_are_not_whole() -> None:
    data, scales = blocks_of(("F8_E4M3", True), (130, 200), seed=2)
    assert scales is not None
    theirs = dequant.dequantize("F8_E4M3", data, (130, 200), scales=scales)
    equal(
        dequantize_blocks("F8_E4M3", torch.from_numpy(data), (130, 200), scales=torch.from_numpy(scales)),
        theirs,
    )


def test_what_does_not_fit_together_is_refused() -> None:
    block = torch.zeros(144, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"are 144 of torch\.uint8, and must be 288"):
        dequantize_blocks("Q4_K", block, (2, 256))
    with pytest.raises(ValueError, match=r"of torch\.int8"):
        dequantize_blocks("Q4_K", block.to(torch.int8), (256,))
    with pytest.raises(ValueError, match="no torch operations for it"):
        dequantize_blocks("IQ1_S", block, (256,))
    with pytest.raises(ValueError, match="no torch operations for it with scales"):
        dequantize_blocks("Q4_K", block, (256,), scales=block)
    codes, scales = torch.zeros(32, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales are 3"):
        dequantize_blocks("SMOE_Q4", codes, (64,), scales=scales)
