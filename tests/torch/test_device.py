"""Experts in GPU memory: the cache before the ring, and whole models on it.

Everything runs on the CPU too, where a copy has ended when it returns; with CUDA it runs there as well.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tinymodels  # noqa: E402
from support import Served, serve  # noqa: E402
from systems import make_vault  # noqa: E402
from test_families import prompt  # noqa: E402
from test_gguf_and_vault import decoded, write_vault  # noqa: E402
from test_mxfp4 import write_mxfp4  # noqa: E402

import smoe_mp  # noqa: E402
import smoe_mp.transformers  # noqa: E402
from smoe_mp.bench import cuda  # noqa: E402
from smoe_mp.cuda import PADDING, ExpertCache, Pinned, _copy_runs, _CopyStream, packed, pin  # noqa: E402
from smoe_mp.errors import ConfigError, ModelError, RingError, SmoeError  # noqa: E402
from smoe_mp.ring import TensorInfo  # noqa: E402
from smoe_mp.sources import open_source  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
Streamed = Callable[..., Any]


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vault(tmp_path_factory.mktemp("v") / "v.smoe", layers=2, experts=12)


@pytest.fixture
def served(vault: Path) -> Iterator[Served]:
    with serve(open_source(vault), slots=6, workers=2) as served:
        yield served


def size_of_slot(ring: smoe_mp.Ring) -> int:
    """Of one in GPU memory."""
    return ring.slot_bytes + PADDING


def bytes_of(expert: smoe_mp.Expert) -> dict[str, bytes]:
    """What its tensors have, by name."""
    return {name: bytes(expert._view(t.offset, (t.nbytes,), "|u1")) for name, t in expert.tensors.items()}


def bytes_there(expert: Any) -> dict[str, bytes]:
    """The same, of one in GPU memory."""
    return {name: bytes(expert.bytes_of(name).cpu().numpy()) for name in expert.tensors}


@pytest.mark.parametrize("device", DEVICES)
def test_the_cache_is_an_exact_lru_of_the_ring_s_bytes(served: Served, device: str) -> None:
    with served.attach() as ring:
        wanted = {}
        for layer in range(2):
            for expert in ring.as_ready(layer, range(12)):
                wanted[layer, expert.expert] = bytes_of(expert)
        cache = ExpertCache(ring, 5 * size_of_slot(ring) + 7, device)
        assert cache.slots == 5
        lru: OrderedDict[tuple[int, int], None] = OrderedDict()
        hits = misses = 0
        rng = np.random.default_rng(1)
        for _ in range(200):
            layer = int(rng.integers(2))
            experts = [int(e) for e in rng.choice(12, size=int(rng.integers(1, 6)), replace=False)]
            for e in (e for e in experts if (layer, e) in lru):
                lru.move_to_end((layer, e))
                hits += 1
            missing = [e for e in experts if (layer, e) not in lru]
            misses += len(missing)
            with cache.hold(layer, experts) as held:
                for e, there in zip(experts, held, strict=True):
                    found = {name: bytes(there.bytes_of(name).cpu().numpy()) for name in there.tensors}
                    assert found == wanted[layer, e]
            # What was missing came in the order in which it landed: only as a set is it known here.
            held_now = {(layer, e) for e in experts}
            while len(lru) + len(missing) > 5:
                lru.pop(next(key for key in lru if key not in held_now))
            for e in missing:
                lru[layer, e] = None
            assert set(cache._used) == set(lru)
            lru = OrderedDict.fromkeys(cache._used)
        assert (cache.stats.hits, cache.stats.misses) == (hits, misses)
        assert cache.stats.evictions == misses - 5
        cache.close()
    served.assert_quiet()


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_in_gpu_memory_are_those_of_the_ring(served: Served, device: str) -> None:
    with served.attach() as ring:
        cache = ExpertCache(ring, 4 * size_of_slot(ring), device)
        with cache.hold(1, [7, 2]) as held, ring.fetch(1, [7, 2]) as batch:
            for there, expert in zip(held, batch, strict=True):
                for name in ("gate", "up", "down"):
                    wanted = torch.from_numpy(expert.dequantize(name))
                    assert torch.equal(there.tensor(name, torch.float32).cpu(), wanted)
                    made = there.tensor(name, torch.bfloat16).cpu()
                    assert torch.equal(made, wanted.to(torch.bfloat16))
            held[0].tensors["odd"] = TensorInfo("odd", "U8", (3,), 0, 3)
            with pytest.raises(RingError, match="no torch operations"):
                held[0].tensor("odd", torch.float32)
        cache.close()


def test_tensors_of_experts_that_lie_otherwise_in_the_ring_are_at_the_same_places() -> None:
    def table(*offsets: int) -> dict[str, TensorInfo]:
        names, sizes = ("down", "gate", "up", "scales"), (100, 64, 64, 7)
        made = zip(names, offsets, sizes, strict=True)
        return {name: TensorInfo(name, "U8", (size,), offset, size) for name, offset, size in made}

    one = packed(table(512, 624, 688, 752))
    other = packed(table(40, 624, 688, 300))
    assert {n: t.offset for n, t in one[0].items()} == {"down": 0, "gate": 112, "up": 176, "scales": 240}
    assert one[0] == other[0]
    assert one[1] == [(512, 0, 247)]
    assert other[1] == [(40, 0, 100), (624, 112, 128), (300, 240, 7)]


def test_what_does_not_fit_is_refused(served: Served) -> None:
    with served.attach() as ring:
        with pytest.raises(ConfigError, match="no room for an expert"):
            ExpertCache(ring, size_of_slot(ring) - 1, "cpu")
        cache = ExpertCache(ring, 2 * size_of_slot(ring), "cpu")
        with pytest.raises(RingError, match=r"3 experts at once: .* has 2 slots"), cache.hold(0, [1, 2, 3]):
            pass
        with cache.hold(0, [1, 2]), pytest.raises(RingError, match="are held"), cache.hold(0, [3]):
            pass
        with cache.hold(0, [3]):  # they were given back
            pass
        assert served.census()["held"] == 0


class Copy:
    """A copy and its event at once."""

    def __init__(self, stream: SlowStream, *copied: Any) -> None:
        self.stream, self.copied, self.ran, self.seen = stream, copied, False, False

    def query(self) -> bool:
        return self.seen

    def synchronize(self) -> None:
        if self.stream.interrupted:
            self.stream.interrupted = False
            raise KeyboardInterrupt
        self.stream.follow(self)
        self.seen = True


class SlowStream(_CopyStream):
    """Copies, in order, when somebody needs their bytes; they are seen to have ended only by who waits."""

    def __init__(self) -> None:
        self.queue: deque[Copy] = deque()
        self.interrupted = False

    def copy(self, *copied: Any) -> Copy:
        self.queue.append(Copy(self, *copied))
        return self.queue[-1]

    def mark(self) -> None:
        return None

    def follow(self, event: Copy) -> None:
        while not event.ran:
            one = self.queue.popleft()
            source, slot, runs = one.copied
            _copy_runs(source, slot.memory, runs)
            one.copied, one.ran = (), True


def slow(ring: smoe_mp.Ring, slots: int) -> tuple[ExpertCache, SlowStream]:
    """A cache as of a GPU whose copies lag behind."""
    cache = ExpertCache(ring, slots * size_of_slot(ring), "cpu", Pinned(ring, lambda *_: 0, lambda _: 0))
    cache._stream = stream = SlowStream()
    return cache, stream


@pytest.mark.parametrize("others", [0, 5])
def test_a_layer_of_more_experts_than_the_ring_has_slots_while_no_copy_ends(
    served: Served, others: int
) -> None:
    with served.attach() as ring, served.attach() as other:
        wanted = {(n, e.expert): bytes_of(e) for n in range(2) for e in ring.as_ready(n, range(12))}
        cache, _ = slow(ring, 13)
        with other.fetch(0, range(others)):
            for layer in (0, 1, 0):
                with cache.hold(layer, range(12)) as held:
                    assert [bytes_there(x) for x in held] == [wanted[layer, e] for e in range(12)]
        assert cache.stats.misses == 12 + 12 + 11
        assert served.census()["held"] == len(cache._copying) > 0
        cache.synchronize()
        assert served.census()["held"] == 0
        cache.close()


def test_an_interrupted_wait_keeps_the_slots_whose_copies_have_not_ended(served: Served) -> None:
    with served.attach() as ring:
        cache, stream = slow(ring, 3)
        with cache.hold(0, [1, 2, 3]):
            pass
        assert served.census()["held"] == 3
        stream.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            cache.synchronize()
        assert served.census()["held"] == 3
        cache.close()
        assert served.census()["held"] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_expert_whose_copy_failed_is_not_there(
    served: Served, device: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.attach() as ring:
        wanted = {e: bytes_of(ring.fetch(0, [e])[0]) for e in range(6)}
        cache = ExpertCache(ring, 3 * size_of_slot(ring), device)
        with cache.hold(0, [3, 4, 5]):
            pass
        with monkeypatch.context() as patch:
            left = [2]

            def fails(*copied: Any) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise error
                _copy_runs(*copied)

            patch.setattr("smoe_mp.cuda._copy_runs", fails)
            with pytest.raises(error), cache.hold(0, [0, 1, 2]):
                pass
        assert sum((0, e) in cache for e in (0, 1, 2)) == 1
        with cache.hold(0, [0, 1, 2]) as held:  # three slots are there, and nothing holds one
            assert [bytes_there(x) for x in held] == [wanted[e] for e in (0, 1, 2)]
        cache.close()


def test_a_mapping_is_registered_in_chunks_and_let_go_before_it_goes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = served.attach()
    monkeypatch.setattr("smoe_mp.cuda.CHUNK_BYTES", 2 * ring.slot_bytes + 4096)
    registered: dict[int, int] = {}

    def register(pointer: int, size: int) -> int:
        registered[pointer] = size
        return 0

    pinned = Pinned(ring, register, registered.pop)
    assert sum(registered.values()) == pinned.nbytes == ring.slots * ring.slot_bytes
    assert len(registered) == ring.slots // 2
    assert all(size % ring.slot_bytes == 0 for size in registered.values())  # no copy is of two of them
    places = sorted(registered)
    assert all(a + registered[a] == b for a, b in itertools.pairwise(places))
    ring.close()
    assert registered  # the mapping is there for as long as it is registered
    del pinned
    gc.collect()
    assert not registered


def test_a_refusal_leaves_nothing_registered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe_mp.cuda.CHUNK_BYTES", 2 * 16384)
    registered: dict[int, int] = {}

    def register(pointer: int, size: int) -> int:
        if len(registered) == 2:
            return 801
        registered[pointer] = size
        return 0

    with (
        served.attach() as ring,
        pytest.raises(RingError, match=r"cudaHostRegister of \d+ bytes.*: error 801"),
    ):
        Pinned(ring, register, registered.pop)
    assert not registered


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_it_says_so(served: Served, tmp_path: Path) -> None:
    with served.attach() as ring, pytest.raises(ConfigError, match="no CUDA device"):
        ring.pin_cuda()
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    for device, said in (
        ("cuda", "no CUDA device"),
        ("xpu", "on the CPU and with CUDA"),
        ("x", "device='x'"),
    ):
        with pytest.raises(ModelError, match=said):
            smoe_mp.transformers.load(path, device=device)
    with pytest.raises(ModelError, match="gpu_cache_gb=1"):
        smoe_mp.transformers.load(path, gpu_cache_gb=1)


def test_a_device_and_a_cache_that_cannot_be_are_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ModelError, match="device='cuda:2': the last CUDA device here is 'cuda:1'"):
        smoe_mp.transformers.load(path, device="cuda:2", ring="nobody")
    for size in (float("inf"), float("nan"), 0, -1):
        with pytest.raises(ModelError, match=rf"gpu_cache_gb={size!r}: a finite size above 0"):
            smoe_mp.transformers.load(path, device="cuda", gpu_cache_gb=size, ring="nobody")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_the_benchmark_is_skipped_by_name_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(SmoeError, match=r"bench cuda: there is no CUDA device here.*skipped"):
        cuda.run(lambda *_: None, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_registered_ring_is_pinned_to_torch(served: Served) -> None:
    with served.attach() as ring:
        pinned = pin(ring)
        assert pinned is not None
        with ring.fetch(0, [1]) as batch:
            assert torch.from_numpy(batch[0].raw).is_pinned()
        pinned.close()
        with ring.fetch(0, [1]) as batch:
            assert not torch.from_numpy(batch[0].raw).is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_where_the_driver_refuses_copies_go_through_buffers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smoe_mp.cuda.READ_ONLY", 0)  # without it a mapping that is read-only is refused
    with served.attach() as ring:
        with pytest.warns(UserWarning, match="cudaHostRegister .* slower") as said:
            pinned = pin(ring)
        assert pinned is None
        assert len(said) == 1
        cache = ExpertCache(ring, 3 * size_of_slot(ring), "cuda", pinned)
        for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 5, 8]):
            with cache.hold(1, ids) as held, ring.fetch(1, ids) as batch:
                for there, expert in zip(held, batch, strict=True):
                    found = {name: bytes(there.bytes_of(name).cpu().numpy()) for name in there.tensors}
                    assert found == bytes_of(expert)
        cache.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_slot_of_the_ring_is_held_until_its_copy_has_ended(served: Served) -> None:
    with served.attach() as ring:
        wanted = {e: bytes_of(ring.fetch(0, [e])[0]) for e in range(12)}
        pinned = pin(ring)
        cache = ExpertCache(ring, 3 * size_of_slot(ring), "cuda", pinned)
        assert cache._stream is not None
        with torch.cuda.stream(cache._stream.cuda):
            torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
        with cache.hold(0, [1, 2, 3]):
            assert served.census()["held"] == len(cache._copying)
        for e in range(4, 12):  # the other slots are used again and again meanwhile
            ring.fetch(0, [e]).release()
        with cache.hold(0, [1, 2, 3]) as there:
            assert [bytes_there(x) for x in there] == [wanted[e] for e in (1, 2, 3)]
        cache.close()
        assert served.census()["held"] == 0
        del pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_layer_of_more_experts_than_a_registered_ring_has_slots(served: Served) -> None:
    with served.attach() as ring:
        wanted = {e.expert: bytes_of(e) for e in ring.as_ready(0, range(12))}
        pinned = pin(ring)
        cache = ExpertCache(ring, 20 * size_of_slot(ring), "cuda", pinned)
        assert cache._stream is not None
        with torch.cuda.stream(cache._stream.cuda):
            torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
        with cache.hold(0, range(12)) as there:
            assert [bytes_there(x) for x in there] == [wanted[e] for e in range(12)]
        assert served.census()["held"] == len(cache._copying)
        cache.synchronize()
        assert served.census()["held"] == 0
        cache.close()
        del pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_slot_in_gpu_memory_is_written_when_all_have_read_it(served: Served) -> None:
    with served.attach() as ring:
        pinned = pin(ring)
        cache = ExpertCache(ring, 3 * size_of_slot(ring), "cuda", pinned)
        with cache.hold(0, [1, 2, 3]) as there:
            before = [x.memory.clone() for x in there]
        with cache.hold(0, [1, 2, 3]) as there:
            torch.cuda._sleep(4_000_000_000)  # of the stream that reads
            read = [x.memory.clone() for x in there]
        with cache.hold(0, [4, 5, 6]):  # takes their slots
            pass
        assert all(torch.equal(a, b) for a, b in zip(before, read, strict=True))
        cache.close()
        del pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_two_clients_register_one_ring(served: Served) -> None:
    with served.attach() as first, served.attach() as second:
        pinned = [pin(first), pin(second)]
        assert None not in pinned
        code = (
            "import sys, smoe_mp; ring = smoe_mp.attach(sys.argv[1]); pinned = ring.pin_cuda();"
            "assert pinned is not None; expert = ring.fetch(0, [1])[0]; gate = expert.tensors['gate'];"
            "print(bytes(expert._view(gate.offset, (gate.nbytes,), '|u1')).hex())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, served.name], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        for ring in (first, second):
            cache = ExpertCache(ring, 2 * size_of_slot(ring), "cuda", pinned[0])
            with cache.hold(0, [1]) as held:
                assert bytes(held[0].bytes_of("gate").cpu().numpy()).hex() == done.stdout.strip()
            cache.close()


FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe")


def grouped(path: Path, device: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="grouped_mm")
    return model.to(device)


def with_cache(model: Any, slots: int, device: str) -> ExpertCache:
    """Have the model compute on `device`, with a cache of experts there."""
    torch.nn.Module.to(model, device)
    ring = smoe_mp.transformers.ring_of(model)
    cache = model._smoe_stream.cache = ExpertCache(ring, slots * size_of_slot(ring), device)
    assert smoe_mp.transformers.cache_of(model) is cache
    return cache


@torch.no_grad()
def assert_same(model: Any, reference: Any, device: str) -> None:
    """Logits twice, tokens by `generate`, and logits by the kernel of its decoding stage."""
    ids = prompt().to(device)
    for _ in range(2):
        assert torch.equal(model(ids).logits, reference(ids).logits)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), reference.generate(ids, **settings))
    model._smoe_stream.decoding = True
    reference.set_experts_implementation("batched_mm")
    for row in range(4):
        one = ids[:1, row : row + 1]
        assert torch.equal(model(one).logits, reference(one).logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [3, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_a_cache_is_the_resident_one(
    family: str, slots: int, device: str, tmp_path: Path, streamed: Streamed
) -> None:
    path = tinymodels.write(family, tmp_path / "m", torch.bfloat16)
    model = streamed(path)
    cache = with_cache(model, slots, device)
    assert_same(model, grouped(path, device), device)
    asked = cache.stats.hits + cache.stats.misses
    assert asked > 0
    if slots == 100:
        assert cache.stats.evictions == 0
        assert cache.stats.hits > 0


@pytest.mark.parametrize("device", DEVICES)
def test_experts_whose_parts_lie_as_the_model_wants_them_are_not_copied(
    device: str, tmp_path: Path, streamed: Streamed
) -> None:
    model = streamed(tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16, fused=True))
    cache = with_cache(model, 100, device)
    with torch.no_grad():
        model(prompt().to(device))
    stacks = [stack for of_layer in cache.stacks.values() for stack in of_layer.values()]
    assert stacks
    assert all(s is not None and s.untyped_storage().data_ptr() == cache.memory.data_ptr() for s in stacks)
    cache.close()
    assert cache.stacks == {}


@pytest.mark.parametrize("device", DEVICES)
def test_experts_that_differ_within_a_layer_are_taken_one_by_one(
    device: str, tmp_path: Path, streamed: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(tensors: Any) -> Any:
        there, runs = packed(tensors)
        if next(iter(tensors.values())).offset % 8192 < 4096:  # some of them lie 64 bytes further on
            there = {n: replace(t, offset=t.offset + 64) for n, t in there.items()}
            runs = [(start, to + 64, size) for start, to, size in runs]
        return there, runs

    monkeypatch.setattr("smoe_mp.cuda.packed", odd)
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16, fused=True)
    model = streamed(path)
    cache = with_cache(model, 100, device)
    assert_same(model, grouped(path, device), device)
    assert cache.mixed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [3, 100])
def test_experts_in_blocks_become_numbers_on_the_device(
    slots: int, device: str, tmp_path: Path, streamed: Streamed
) -> None:
    path, original = write_vault(tmp_path, torch.bfloat16)
    reference = decoded(original, path).to(device)
    reference.set_experts_implementation("grouped_mm")
    model = streamed(path)
    cache = with_cache(model, slots, device)
    assert_same(model, reference, device)
    assert set(cache.stacks[0].values()) == {None}


@pytest.mark.parametrize("device", DEVICES)
def test_mxfp4_becomes_numbers_on_the_device(device: str, tmp_path: Path, streamed: Streamed) -> None:
    pytest.importorskip("accelerate")
    path = write_mxfp4(tmp_path / "m")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
    ).to(device)
    model = streamed(path, dtype=torch.bfloat16)
    with_cache(model, 100, device)
    assert_same(model, reference, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_cache_has_is_not_guessed(device: str, tmp_path: Path, streamed: Streamed) -> None:
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    model = streamed(path, dtype=torch.bfloat16, look_ahead=3)
    with_cache(model, 6, device)
    ring, cache = smoe_mp.transformers.ring_of(model), smoe_mp.transformers.cache_of(model)
    told: list[tuple[int, int]] = []
    speculate = ring.speculate

    def guess(layer: int, experts: list[int]) -> int:
        assert not any((layer, e) in cache for e in experts)
        told.extend((layer, e) for e in experts)
        return int(speculate(layer, experts))

    ring.speculate = guess
    assert_same(model, grouped(path, device), device)
    assert {layer for layer, _ in told} == {1}


def test_an_idle_model_holds_nothing_of_the_ring(tmp_path: Path, streamed: Streamed) -> None:
    model = streamed(tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16))
    ring = smoe_mp.transformers.ring_of(model)
    cache, _ = slow(ring, 100)
    model._smoe_stream.cache = cache
    with torch.no_grad():
        model(prompt())
    assert cache.stats.misses > ring.slots
    assert ring.stats()["census"]["held"] == 0
    cache.close()


def test_another_device_than_the_experts_is_refused(tmp_path: Path, streamed: Streamed) -> None:
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    model = streamed(path)
    experts = model.model.layers[1].mlp.experts
    hidden = torch.zeros(2, model.config.hidden_size, dtype=torch.bfloat16, device="meta")
    index = torch.zeros(2, 2, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ModelError, match="load it with device='meta'"):
        experts(hidden, index, torch.ones(2, 2, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_load_onto_cuda(tmp_path: Path) -> None:
    path = tinymodels.write("qwen3_moe", tmp_path / "m", torch.bfloat16)
    model = smoe_mp.transformers.load(path, device="cuda", dtype=torch.bfloat16)
    assert model.device.type == "cuda"
    reference = grouped(path, "cuda")
    ids = prompt().to("cuda")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), reference.generate(ids, **settings))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)
