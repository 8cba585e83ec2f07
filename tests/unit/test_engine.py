"""The numpy engine: against transformers, its cache, its sampling, and models that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trained import VAULT, write_trained

from smoe_mp import models
from smoe_mp.engine import Cache, Config, Engine, ResidentExperts
from smoe_mp.errors import SmoeError, VaultError
from smoe_mp.sources.checkpoint import read_header

PROMPT = b'import os\n\n\ndef read_lines(path):\n    """'


@pytest.fixture(scope="module")
def experts() -> ResidentExperts:
    return ResidentExperts(VAULT)


@pytest.fixture(scope="module")
def engine(experts: ResidentExperts) -> Engine:
    return Engine.open(models.TINY, experts)


# --- against transformers --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same weights as transformers' own model in float32."""
    torch = pytest.importorskip("torch", reason="torch is not here")
    transformers = pytest.importorskip("transformers", reason="transformers is not here")
    folder = write_trained(tmp_path_factory.mktemp("reference"))
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_are_those_of_transformers(engine: Engine, reference: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not here")
    tokens = [0, *PROMPT]
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0].numpy()
    ours = engine.forward(tokens, Cache(engine.config))
    assert ours.shape == theirs.shape == (len(tokens), 256)
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.abs(theirs).max() > 5  # it knows something


def test_greedy_text_is_that_of_transformers(engine: Engine, reference: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not here")
    with torch.no_grad():
        theirs = reference.generate(
            torch.tensor([[0, *PROMPT]]), max_new_tokens=24, do_sample=False, eos_token_id=0, pad_token_id=0
        )
    ours = [token.byte for token in engine.generate(PROMPT, 24)]
    assert ours == theirs[0, 1 + len(PROMPT) :].tolist()


# --- by itself -------------------------------------------------------------------------------------------


def test_it_has_learned_python(engine: Engine) -> None:
    """Bits per byte of a text that it has not seen, against the 8 of guessing."""
    text = (
        b"def sum_of_squares(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
    )
    logits = engine.forward([0, *text], Cache(engine.config))[:-1].astype(np.float64)
    chance = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    bits = -chance[np.arange(len(text)), list(text)].mean() / np.log(2)
    assert bits < 1.5


def test_a_text_at_once_and_token_by_token(engine: Engine) -> None:
    tokens = [0, *PROMPT]
    cache = Cache(engine.config)
    at_once = engine.forward(tokens, Cache(engine.config))
    one_by_one = np.concatenate([engine.forward([t], cache) for t in tokens])
    assert cache.length == len(tokens)
    assert np.abs(at_once - one_by_one).max() < 1e-4


def test_a_cache_is_taken_up_again(engine: Engine) -> None:
    cache = Cache(engine.config)
    list(engine.generate(PROMPT, 1, cache=cache))
    assert cache.length == 1 + len(PROMPT)
    first = next(iter(engine.generate(b"Return", 1, cache=cache)))
    whole = engine.forward([0, *PROMPT, *b"Return"], Cache(engine.config))[-1]
    assert np.abs(first.logits - whole).max() < 1e-4


def test_room_grows_and_what_was_seen_stays(engine: Engine) -> None:
    cache = Cache(engine.config)
    engine.forward(list(b"x" * 200), cache)
    before = cache.keys[:, :, :200].copy()
    engine.forward(list(b"y" * 200), cache)
    assert cache.keys.shape[2] >= 400
    assert np.array_equal(cache.keys[:, :, :200], before)


def test_no_position_beyond_the_models(engine: Engine) -> None:
    cache = Cache(engine.config)
    cache.length = engine.config.max_position_embeddings
    with pytest.raises(SmoeError, match="4097 tokens are more than the model's 4096 positions"):
        engine.forward([1], cache)


def test_sampling_follows_the_seed(engine: Engine) -> None:
    def text(seed: int) -> bytes:
        return bytes(t.byte for t in engine.generate(b"def ", 24, temperature=1.0, seed=seed))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_the_end_of_a_document_is_the_last_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 made the likeliest from the third token on."""
    calls = []

    def forward(tokens: list[int], cache: Cache) -> Any:
        calls.append(tokens)
        cache.length += len(tokens)
        logits = np.zeros((len(tokens), 256), np.float32)
        logits[:, 0 if len(calls) == 3 else 65] = 1
        return logits

    monkeypatch.setattr(engine, "forward", forward)
    assert [t.byte for t in engine.generate(b"a", 10)] == [65, 65, 0]
    assert calls == [[0, 97], [65], [65]]


def test_an_empty_prompt_behind_a_text_is_refused(engine: Engine) -> None:
    cache = Cache(engine.config)
    list(engine.generate(b"a", 1, cache=cache))
    with pytest.raises(SmoeError, match="empty prompt"):
        next(iter(engine.generate(b"", 1, cache=cache)))


def test_a_temperature_that_is_none_is_refused(engine: Engine) -> None:
    for temperature in (-1.0, float("nan")):
        with pytest.raises(SmoeError, match="temperature"):
            next(engine.generate(b"a", 1, temperature))


# --- refusals --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tiny.scout.safetensors"):
        shutil.copy(models.TINY / name, tmp_path / name)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is (0,)"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 128}, "model.embed_tokens.weight should be BF16, F16 or F32 [256, 128]"),
        ({"num_key_value_heads": 3}, "8 heads share 3 key-value heads"),
        ({"num_experts_per_tok": 65}, "top-65 of 64 experts"),
        ({"num_hidden_layers": 9}, "model.layers.8.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "lm_head.weight should be"),
    ],
)
def test_a_model_that_it_does_not_compute_is_refused(
    folder: Path, experts: ResidentExperts, fields: dict[str, Any], words: str
) -> None:
    change(folder, **fields)
    with pytest.raises(VaultError) as refused:
        Engine.open(folder, experts)
    assert words in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_folder_without_a_scout_is_refused(folder: Path, experts: ResidentExperts) -> None:
    (folder / "tiny.scout.safetensors").unlink()
    with pytest.raises(VaultError, match="0 files"):
        Engine.open(folder, experts)


def test_a_configuration_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(VaultError, match=r"config\.json: no configuration"):
        Config.read(folder / "config.json")


# --- experts without a ring ------------------------------------------------------------------------------


def test_experts_of_a_safetensors_folder_are_resident_too(shared: Path) -> None:
    """bfloat16 experts, each with its parts at their own places."""
    checkpoint = shared / "vaults/qwen3-tiny"
    header = read_header(next(iter(sorted(checkpoint.glob("*.safetensors")))))
    name = next(n for n in header if n.endswith("experts.1.down_proj.weight") and ".layers.1." in n)
    t = header[name]
    raw = np.fromfile(header.path, "<u2", t.nbytes // 2, offset=t.offset).astype(np.uint32) << 16
    with ResidentExperts(checkpoint).route(1, [1, 2], 1) as batch:
        assert len(batch) == 1
        assert np.array_equal(batch[0].dequantize("down"), raw.view(np.float32).reshape(t.shape))
