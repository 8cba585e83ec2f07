"""What `load` does beside computing: who may use the model how, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tinymodels  # noqa: E402
from support import serve  # noqa: E402
from systems import assert_nothing_left, segments_of  # noqa: E402
from test_families import assert_alike, prompt, resident  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import smoe_mp.transformers  # noqa: E402
from smoe_mp.errors import ConfigError, ModelError, NoSuchRing, SmoeError, VaultError  # noqa: E402
from smoe_mp.sources import open_source  # noqa: E402

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.write("qwen3_moe", tmp_path_factory.mktemp("m") / "model", torch.bfloat16)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return resident(path)


# --- ways of generating ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.9, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"cache_implementation": "static", "do_sample": False},
        {"prompt_lookup_num_tokens": 2, "do_sample": False},
    ],
    ids=["sampling", "beams", "static cache", "prompt lookup"],
)
def test_every_way_of_generating(
    path: Path, reference: Any, streamed: Load, settings: dict[str, Any]
) -> None:
    model, ids = streamed(path), prompt(1)
    tokens = []
    for one in (model, reference):
        torch.manual_seed(7)
        tokens.append(one.generate(ids, max_new_tokens=6, pad_token_id=0, **settings))
    assert torch.equal(*tokens)


def test_demands_are_counted_as_prefill_and_decode(path: Path, streamed: Load) -> None:
    """By how many tokens of a sequence a forward has, however it is called."""
    model, ids = streamed(path), prompt(1)
    ring, config = smoe_mp.transformers.ring_of(model), model.config
    model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    phases = ring.stats()["client"]["phases"]
    assert list(phases) == ["prefill", "decode"]
    of_a_token = config.num_hidden_layers * config.num_experts_per_tok
    assert phases["decode"]["demanded"] == 5 * of_a_token
    assert phases["prefill"]["demanded"] > of_a_token
    with torch.no_grad():
        model(ids[:, :1])
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :1]))
    after = ring.stats()["client"]["phases"]
    assert after["decode"]["demanded"] == 7 * of_a_token
    assert after["prefill"] == phases["prefill"]


@pytest.mark.parametrize("slots", [4, 5, 16, 32])
def test_a_prompt_may_want_more_experts_than_the_ring_has(
    path: Path, reference: Any, streamed: Load, slots: int
) -> None:
    """Field report 43: 60 tokens want all 16 experts of each layer."""
    model = streamed(path, slots=slots)
    ids = prompt(2, 30)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
    stats = smoe_mp.transformers.ring_of(model).stats()
    assert stats["census"]["held"] == stats["census"]["reserved"] == 0


def test_two_threads_on_one_model(path: Path, reference: Any, streamed: Load) -> None:
    model = streamed(path, slots=16)
    prompts = [prompt(1, 9, seed) for seed in (3, 4)]
    wanted = [reference.generate(ids, **GREEDY) for ids in prompts]
    seen: dict[int, Any] = {}

    def generate(number: int) -> None:
        for _ in range(3):
            seen[number] = model.generate(prompts[number], **GREEDY)

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(seen[number], wanted[number]) for number in range(2))


def test_two_models_and_a_resident_one_in_one_process(
    path: Path, reference: Any, streamed: Load, tmp_path: Path
) -> None:
    """Field report 56: nobody else's settings are touched."""
    other = tinymodels.write("mixtral", tmp_path / "mixtral", torch.bfloat16)
    plain = transformers.AutoModelForCausalLM.from_pretrained(other)
    before, kernels = plain.config._experts_implementation, dict(ALL_EXPERTS_FUNCTIONS)
    one, two = streamed(path), streamed(other)
    assert plain.config._experts_implementation == before != "smoe"
    assert reference.config._experts_implementation == "eager"
    assert dict(ALL_EXPERTS_FUNCTIONS) == kernels
    assert_alike(one, reference)
    assert_alike(two, resident(other))
    assert_alike(plain, transformers.AutoModelForCausalLM.from_pretrained(other))
    plain.set_experts_implementation("smoe")
    with pytest.raises(ModelError, match=r"is for models that smoe_mp.transformers.load gave"):
        plain(prompt())


def test_nothing_warns(path: Path, streamed: Load) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed(path).generate(prompt(), **GREEDY)


def test_a_wanted_dtype_is_that_of_the_resident_model(path: Path, streamed: Load) -> None:
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    model = streamed(path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, wanted(prompt()).logits)


# --- the ring ----------------------------------------------------------------------------------------------


def test_the_busy_flag_is_up_for_the_time_of_a_request(path: Path) -> None:
    with serve(open_source(path), slots=12) as served:
        model = smoe_mp.transformers.load(path, ring=served.name)
        client = smoe_mp.transformers.ring_of(model).client_id
        seen = []

        class Look(transformers.StoppingCriteria):
            def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
                seen.append(client in served.segments.busy_clients())
                return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(prompt(), stopping_criteria=[Look()], **GREEDY)
        assert seen == [True] * 4
        with torch.no_grad():
            model.model.register_forward_hook(
                lambda *_: seen.append(client in served.segments.busy_clients())
            )
            model(prompt())
        assert seen == [True] * 5
        assert served.segments.busy_clients() == []
        del model
        gc.collect()


def test_the_next_ranks_of_the_router_are_guessed(path: Path, reference: Any, streamed: Load) -> None:
    model = streamed(path, slots=32, speculation_ranks=2)
    ring = smoe_mp.transformers.ring_of(model)
    asked: list[tuple[int, list[int]]] = []
    speculate = ring.speculate
    ring.speculate = lambda layer, experts: asked.append((layer, list(experts))) or speculate(layer, experts)
    routed = []
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda _m, _a, out: routed.append(out))
    assert torch.equal(model.generate(prompt(1), **GREEDY), reference.generate(prompt(1), **GREEDY))
    wanted = []
    for number, (logits, _, index) in enumerate(routed):
        ranked = logits[-1].topk(6).indices.tolist()
        guesses = [e for e in ranked[4:] if e not in set(index.flatten().tolist())]
        wanted += [(number % 2, guesses)] if guesses else []
    assert asked == wanted
    assert any(len(guesses) == 2 for _, guesses in asked)


def test_the_next_layers_router_is_asked_ahead(path: Path, reference: Any, streamed: Load) -> None:
    """What is guessed of layer 1 is what its router makes of layer 0's hidden states, told behind layer 0's
    last expert; of a prompt nothing is, and behind the last layer nothing."""
    model = streamed(path, slots=32, look_ahead=3)
    ring = smoe_mp.transformers.ring_of(model)
    asked: list[tuple[int, list[int]]] = []
    speculate = ring.speculate
    ring.speculate = lambda layer, experts: asked.append((layer, list(experts))) or speculate(layer, experts)
    states = []
    gates = [block.mlp.gate for block in model.model.layers]
    gates[0].register_forward_hook(lambda _m, args, _out: states.append(args[0]))
    ids = prompt(1)
    assert torch.equal(model.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))
    decoded = [s.reshape(-1, s.shape[-1]) for s in states if s.numel() == s.shape[-1]]
    assert len(decoded) == len(states) - 1 > 1
    wanted = [(s @ gates[1].weight.T)[0].topk(3).indices.tolist() for s in decoded]
    assert asked == [(1, named) for named in wanted]
    assert ring.stats()["guess_hits"] + ring.stats()["promoted"] > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_looking_further_than_the_router_chooses(path: Path, streamed: Load, rows: int) -> None:
    model = streamed(path, slots=32, look_ahead=6)
    ring = smoe_mp.transformers.ring_of(model)
    asked: list[list[int]] = []
    ring.speculate = lambda layer, experts: asked.append(list(experts))
    model.generate(prompt(rows), **GREEDY)
    assert asked
    for named in asked:
        assert len(set(named)) == len(named) <= 6 * rows
        assert len(named) >= 6


def test_no_negative_number_of_guesses(path: Path) -> None:
    with pytest.raises(ModelError, match="look_ahead=-1"):
        smoe_mp.transformers.load(path, look_ahead=-1)


def test_a_private_system_ends_with_the_model(path: Path, reference: Any) -> None:
    model = smoe_mp.transformers.load(path, system={"slots": 10, "workers": 2})
    name = smoe_mp.transformers.ring_of(model).name
    assert segments_of(name)
    assert_alike(model, reference)
    del model
    gc.collect()
    assert_nothing_left(name)


def test_no_private_system_is_left_by_a_load_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def fails(ring: Any, checkpoint: Any) -> None:
        names.append(ring.name)
        raise ModelError("on purpose")

    monkeypatch.setattr(smoe_mp.transformers, "_check_ring", fails)
    with pytest.raises(ModelError, match="on purpose"):
        smoe_mp.transformers.load(path, system={"slots": 10, "workers": 2})
    gc.collect()
    assert_nothing_left(names[0])


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m(prompt()), r"under torch.no_grad\(\)"),
        (lambda m: m.train(), r"cannot be trained"),
        (lambda m: m.save_pretrained("x"), r"cannot be saved"),
        (lambda m: m.push_to_hub("x"), r"cannot be saved"),
        (lambda m: m.to(torch.float16), r"load it with dtype=torch.float16"),
        (lambda m: m.float(), r"load it with dtype=torch.float32"),
        (lambda m: m.half(), r"load it with dtype=torch.float16"),
        (lambda m: m.to("cuda"), r"load the model with device=.cuda"),
        (lambda m: m.cuda(), r"load the model with device=.cuda"),
        (lambda m: m.to("meta"), r"load the model with device=.meta"),
        (lambda m: m.model.layers[0].mlp.experts.gate_up_proj[0], r"outside of a pass"),
        (lambda m: m.model.layers[0].mlp.experts.down_proj.transpose(1, 2), r"these experts are streamed"),
    ],
)
def test_misuse_is_refused(path: Path, streamed: Load, use: Callable[[Any], Any], message: str) -> None:
    model = streamed(path)
    with pytest.raises(ModelError, match=message):
        use(model)
    model.generate(prompt(), **GREEDY)  # and does no harm
    assert model.to("cpu") is model
    assert model.bfloat16() is model


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "batched_mm"])
def test_another_experts_implementation_computes_nothing_wrong(path: Path, streamed: Load, name: str) -> None:
    model = streamed(path)
    with pytest.raises(ModelError, match=r"streamed experts run with 'smoe' alone"):
        model.set_experts_implementation(name)
    model.config._experts_implementation = name
    with pytest.raises(ModelError, match=r"streamed"), torch.no_grad():
        model(prompt())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"device_map": "auto"}, r"give device=.auto. instead"),
        ({"device_map": {"": "cuda:0"}}, r"give device=.cuda:0. instead"),
        ({"experts_implementation": "eager"}, r"experts_implementation='eager' cannot be used"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"experts come as they are stored"),
        ({"gguf_file": "x.gguf"}, r"give the file as the path"),
        ({"output_loading_info": True}, r"what is missing is an error"),
    ],
)
def test_arguments_that_cannot_be_are_refused(path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        smoe_mp.transformers.load(path, ring="none", **kwargs)


def test_what_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSuchRing):
        smoe_mp.transformers.load(path, ring="none-of-that-name")
    with pytest.raises(SmoeError, match=r"no such file or folder"):
        smoe_mp.transformers.load(tmp_path / "nothing")
    with pytest.raises(SmoeError, match=r"hf download someone/something"):
        smoe_mp.transformers.load("someone/something")
    with pytest.raises(ConfigError):
        smoe_mp.transformers.load(path, ring="no/name")


def test_a_hub_id_in_the_local_cache(
    path: Path, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that a ring which knows the files by another path, with links in it, is theirs."""
    commit = "0123456789" * 4
    repository = tmp_path / "hub/models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    for file in path.iterdir():
        (repository / "snapshots" / commit / file.name).symlink_to(file)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve(open_source(path), slots=12) as served:
        model = smoe_mp.transformers.load("me/tiny", ring=served.name)
        assert_alike(model, reference)
        del model
        gc.collect()


def test_a_ring_of_another_model_is_refused(path: Path, tmp_path: Path) -> None:
    others = {
        "another file of the same bytes": shutil.copytree(path, tmp_path / "copy"),
        "fewer experts": tinymodels.write("qwen3_moe", tmp_path / "few", torch.bfloat16, num_experts=8),
        "another shape": tinymodels.write(
            "qwen3_moe", tmp_path / "wide", torch.bfloat16, moe_intermediate_size=32
        ),
        "another type": tinymodels.write("qwen3_moe", tmp_path / "f32", torch.float32),
        "another order": tinymodels.write("qwen3_moe", tmp_path / "fused", torch.bfloat16, fused=True),
    }
    messages = {}
    for what, other in others.items():
        with serve(open_source(other), slots=12) as served:
            with pytest.raises(
                ModelError, match=r"of another model than .*: .* differ|has changed"
            ) as caught:
                smoe_mp.transformers.load(path, ring=served.name)
            messages[what] = str(caught.value)
            gc.collect()
    assert "a file's device or inode has changed" in messages["another file of the same bytes"]
    assert "experts differ: 16, now 32" in messages["fewer experts"]


def test_a_family_that_is_not_supported_is_named(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "flex_olmo", "architectures": ["FlexOlmoForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'flex_olmo' is not one of .*deepseek_v3.*qwen3_moe"):
        smoe_mp.transformers.load(copy, ring="none")


def test_quantised_folders_are_not_there_yet(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised \(fp8\), which is not supported yet"):
        smoe_mp.transformers.load(copy, ring="none")


def test_files_that_are_not_those_of_the_configuration(path: Path) -> None:
    with serve(open_source(path), slots=12) as served:
        for change, message in (
            ({"moe_intermediate_size": 32}, r"makes a slice of shape \[96, 64\].* has \[64, 64\]"),
            ({"num_experts": 8}, r"16 experts in layer 0, .* has 8"),
            ({"num_hidden_layers": 1}, r"has experts in layer 1, where"),
        ):
            config = transformers.AutoConfig.from_pretrained(path)
            for key, value in change.items():
                setattr(config, key, value)
            with pytest.raises(ModelError, match=message):
                smoe_mp.transformers.load(path, ring=served.name, config=config)
        gc.collect()


def test_weights_that_are_missing_are_not_made_up(path: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    copy = shutil.copytree(path, tmp_path / "copy")
    weights = safetensors.load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    safetensors.save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with serve(open_source(copy), slots=12) as served:
        with pytest.raises(VaultError, match=r"no model.norm.weight in its files"):
            smoe_mp.transformers.load(copy, ring=served.name)
        gc.collect()


@pytest.mark.parametrize("broken", ["implementation", "module", "parameters"])
def test_a_hook_that_does_not_take_is_an_error_and_never_a_full_load(
    path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Field report 56.  What a later transformers might change: how an implementation is chosen, what the
    experts' module is called, what its parameters are called."""
    cls = transformers.Qwen3MoeForCausalLM
    init = cls.__init__

    def changed(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, config, *args, **kwargs)
        for layer in self.model.layers:
            if broken == "implementation":
                layer.mlp.experts.config = transformers.Qwen3MoeConfig(experts_implementation="eager")
            elif broken == "module":
                layer.mlp.routed = layer.mlp.experts
                del layer.mlp.experts
            else:
                layer.mlp.experts.w13 = layer.mlp.experts.gate_up_proj
                del layer.mlp.experts.gate_up_proj

    monkeypatch.setattr(cls, "__init__", changed)
    loaded = []
    monkeypatch.setattr(cls, "_load_pretrained_model", lambda *a, **k: loaded.append(a))
    message = {
        "implementation": r"the hook did not take",
        "module": r"no module of routed experts was found",
        "parameters": r"w13.* would be allocated",
    }[broken]
    with serve(open_source(path), slots=12) as served:
        with pytest.raises(ModelError, match=message):
            smoe_mp.transformers.load(path, ring=served.name)
        gc.collect()
    assert loaded == []


def test_no_tokenizer_is_said(path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer with it: none of tokenizer.json"):
        smoe_mp.transformers.load_tokenizer(path)
    assert "tokenizer.json" not in os.listdir(path)
