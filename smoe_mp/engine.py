"""A whole Qwen3-MoE in numpy, its experts from a ring: the example for authors of engines.

    with smoe_mp.attach("tiny") as ring:
        engine = Engine.open(models.TINY, ring)
        for token in engine.generate(b"import os\n", 100):
            print(chr(token.byte), end="", flush=True)

What is no expert (the scout file) is in memory as float32.  The experts come from whatever has the two calls
of `Experts`: a `Ring`, or `ResidentExperts`, which holds the whole vault.  Of all the code only these lines
know of streaming:

- one token:  `with experts.route(layer, ranked, top_k) as batch` demands what the router wants, and lets
              the ring guess what comes next in its ranking;
- several:    `for expert in experts.as_ready(layer, union)` computes on each expert as it lands, with all
              the tokens that want it.

Experts land in any order, but sums of floating-point numbers depend on theirs.  So what an expert gives is
put in the place of its rank, and the ranks are added up in order: the logits are the same bits wherever the
experts come from.  An expert's weights are made float32 when it is used and then forgotten.

The architecture is Qwen3-MoE's as published (Qwen3 Technical Report, arXiv:2505.09388, and the model's code
in transformers): RMS norms, rotary positions by halves, norms on queries and keys, grouped-query attention,
softmax over all experts before the top-k, which are renormalised, SwiGLU.  Shapes: n tokens, d hidden,
h heads, g key-value heads, c head dimension, t tokens seen so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from smoe_mp import dequant
from smoe_mp.errors import SmoeError, VaultError
from smoe_mp.sources import open_source
from smoe_mp.sources.base import SCOUT_SUFFIX, Source, Tensor
from smoe_mp.sources.checkpoint import read_header
from smoe_mp.sources.dtypes import NUMPY

__all__ = ["Cache", "Config", "Engine", "ExpertTensors", "Experts", "ResidentExperts", "Token"]

F32 = npt.NDArray[np.float32]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class ExpertTensors(Protocol):
    """One expert that is there."""

    @property
    def expert(self) -> int: ...
    def dequantize(self, name: str, /) -> F32:
        """Its tensor "gate" or "up" [width, d], or "down" [d, width], as a new float32 array."""
        ...


class Experts(Protocol):
    """Where experts come from; `smoe_mp.Ring` is one."""

    def route(
        self, layer: int, ranked: Sequence[int], top_k: int, /
    ) -> AbstractContextManager[Sequence[ExpertTensors]]:
        """The first `top_k` of a ranked list, there inside the block; the rest may be guessed."""
        ...

    def as_ready(self, layer: int, experts: Sequence[int], /) -> Iterator[ExpertTensors]:
        """Each of `experts` once, in any order, there until the next is asked for."""
        ...

    def phase(self, name: str, /) -> AbstractContextManager[None]:
        """What is asked for inside the block is for "prefill" or "decode"."""
        ...


# --- the model's files -----------------------------------------------------------------------------------


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What of config.json decides the computation, by its own names."""

    model_type: str
    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    head_dim: _Size
    num_experts: _Size
    num_experts_per_tok: _Size
    moe_intermediate_size: _Size
    rms_norm_eps: float
    max_position_embeddings: _Size
    rope_theta: float = 10000.0
    rope_scaling: object = None
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    hidden_act: str = "silu"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of the file at `path`; VaultError with the key for what is missing or is not computed here."""
        try:
            config = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise VaultError(f"{path}: no configuration of a Qwen3-MoE model: {error}") from error
        as_it_must_be = {
            "model_type": "qwen3_moe",
            "rope_scaling": None,
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
            "hidden_act": "silu",
        }
        for key, value in as_it_must_be.items():
            if getattr(config, key) != value:
                raise VaultError(
                    f"{path}: {key} is {getattr(config, key)!r}; this engine computes {value!r} alone"
                )
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        if heads % groups or config.num_experts_per_tok > config.num_experts or config.head_dim % 2:
            raise VaultError(
                f"{path}: {heads} heads share {groups} key-value heads of dimension {config.head_dim},"
                f" top-{config.num_experts_per_tok} of {config.num_experts} experts: that does not add up"
            )
        return config


class _Scout:
    """The tensors of a scout file by name, each held against the shape that the configuration gives it."""

    def __init__(self, path: Path) -> None:
        self._tensors = read_header(path)
        self._path = path

    def __call__(self, name: str, *shape: int) -> F32:
        t = self._tensors.get(name)
        if t is None or t.shape != shape or t.dtype not in ("BF16", "F16", "F32"):
            found = "it is not there" if t is None else f"it is {t.dtype} {list(t.shape)}"
            raise VaultError(f"{self._path}: {name} should be BF16, F16 or F32 {list(shape)}: {found}")
        raw = np.fromfile(self._path, np.uint8, t.nbytes, offset=t.offset)
        return raw.view(NUMPY[t.dtype]).reshape(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's dense weights; matrices are [out, in]."""

    attention_norm: F32
    experts_norm: F32
    q: F32
    k: F32
    v: F32
    o: F32
    q_norm: F32
    k_norm: F32
    router: F32

    @classmethod
    def read(cls, scout: _Scout, number: int, config: Config) -> Self:
        c, d, p = config, config.hidden_size, f"model.layers.{number}."
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return cls(
            attention_norm=scout(p + "input_layernorm.weight", d),
            experts_norm=scout(p + "post_attention_layernorm.weight", d),
            q=scout(p + "self_attn.q_proj.weight", queries, d),
            k=scout(p + "self_attn.k_proj.weight", keys, d),
            v=scout(p + "self_attn.v_proj.weight", keys, d),
            o=scout(p + "self_attn.o_proj.weight", d, queries),
            q_norm=scout(p + "self_attn.q_norm.weight", c.head_dim),
            k_norm=scout(p + "self_attn.k_norm.weight", c.head_dim),
            router=scout(p + "mlp.gate.weight", c.num_experts, d),
        )


# --- the engine ------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of the tokens seen so far, [layer, g, room, c] each; `length` of them count."""

    def __init__(self, config: Config) -> None:
        self._most = config.max_position_embeddings
        size = (config.num_hidden_layers, config.num_key_value_heads, 0, config.head_dim)
        self.keys: F32 = np.empty(size, np.float32)
        self.values: F32 = np.empty(size, np.float32)
        self.length = 0

    def make_room(self, tokens: int) -> None:
        """For `tokens` more; SmoeError where the model knows no such position."""
        wanted, room = self.length + tokens, self.keys.shape[2]
        if wanted > self._most:
            raise SmoeError(f"{wanted} tokens are more than the model's {self._most} positions")
        if wanted > room:
            more = ((0, 0), (0, 0), (0, max(wanted, 2 * room, 256) - room), (0, 0))
            self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was written: a byte, and the logits [vocabulary] that it was chosen from."""

    byte: int
    logits: F32


class Engine:
    """A model: dense weights in memory, experts from `experts`.  Not for several threads at a time."""

    def __init__(self, config: Config, scout: Path, experts: Experts) -> None:
        """`scout`: the file with all tensors that are no routed expert.  VaultError where one is missing or
        has another shape than the configuration says."""
        read = _Scout(scout)
        self.config, self.experts = config, experts
        self._embedding = read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._norm = read("model.norm.weight", config.hidden_size)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = read("lm_head.weight", config.vocab_size, config.hidden_size)
        self._layers = [_Layer.read(read, i, config) for i in range(config.num_hidden_layers)]
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        self._frequencies: F32 = (1 / np.float32(config.rope_theta) ** exponents).astype(np.float32)

    @classmethod
    def open(cls, folder: Path, experts: Experts) -> Self:
        """The model of a folder with config.json and one NAME.scout.safetensors."""
        scouts = sorted(folder.glob("*" + SCOUT_SUFFIX))
        if len(scouts) != 1:
            raise VaultError(f"{folder}: {len(scouts)} files *{SCOUT_SUFFIX}, wanted is one")
        return cls(Config.read(folder / "config.json"), scouts[0], experts)

    def forward(self, tokens: Sequence[int], cache: Cache) -> F32:
        """Logits [n, vocabulary] of `tokens` behind those of the cache, which they are added to."""
        cache.make_room(len(tokens))
        x: F32 = self._embedding[list(tokens)]
        turn = self._rotation(cache.length, len(tokens))
        with self.experts.phase("prefill" if len(tokens) > 1 else "decode"):
            for number, layer in enumerate(self._layers):
                x = x + self._attend(layer, self._rms(x, layer.attention_norm), number, cache, turn)
                x = x + self._mix(number, layer, self._rms(x, layer.experts_norm))
        cache.length += len(tokens)
        logits: F32 = self._rms(x, self._norm) @ self._head.T
        return logits

    def generate(
        self, prompt: bytes, count: int, temperature: float = 0.0, seed: int = 0, cache: Cache | None = None
    ) -> Iterator[Token]:
        """Write `count` tokens behind `prompt`, or fewer: token 0 ends the document and is the last.

        `temperature` 0: always the likeliest; else drawn by softmax(logits / temperature) with a generator of
        that seed.  The prompt begins a document (token 0 before it), unless `cache` has text already.
        """
        cache, draw = cache or Cache(self.config), np.random.default_rng(seed)
        tokens = [*([] if cache.length else [0]), *prompt]
        if not tokens:
            raise SmoeError("nothing to begin with: an empty prompt behind a text")
        if not temperature >= 0:
            raise SmoeError(f"temperature {temperature}: wanted is 0 or more")
        for _ in range(count):
            logits = self.forward(tokens, cache)[-1]
            tokens = [_choose(logits, temperature, draw)]
            yield Token(tokens[0], logits)
            if tokens[0] == 0:
                return

    # --- a layer -----------------------------------------------------------------------------------------

    def _rms(self, x: F32, weight: F32) -> F32:
        """x [..., k] by its root mean square over k, times weight [k]."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        out: F32 = x / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps)) * weight
        return out

    def _rotation(self, first: int, n: int) -> tuple[F32, F32]:
        """Cosines and sines [n, 1, c/2] of the positions from `first` on."""
        positions = np.arange(first, first + n, dtype=np.float32)
        angles = np.outer(positions, self._frequencies)[:, None]
        return np.cos(angles), np.sin(angles)

    def _attend(self, layer: _Layer, x: F32, number: int, cache: Cache, turn: tuple[F32, F32]) -> F32:
        n, first = len(x), cache.length
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        q = _rotate(self._rms((x @ layer.q.T).reshape(n, heads, -1), layer.q_norm), turn)
        k = _rotate(self._rms((x @ layer.k.T).reshape(n, groups, -1), layer.k_norm), turn)
        v = (x @ layer.v.T).reshape(n, groups, -1)
        cache.keys[number, :, first : first + n] = k.transpose(1, 0, 2)
        cache.values[number, :, first : first + n] = v.transpose(1, 0, 2)
        keys, values = cache.keys[number, :, : first + n], cache.values[number, :, : first + n]
        # Heads that share a key-value head are rows of one product: [g, h/g * n, c] with [g, c, t].
        q = q.reshape(n, groups, heads // groups, -1).transpose(1, 2, 0, 3)
        scores = q.reshape(groups, -1, q.shape[-1]) @ keys.transpose(0, 2, 1)
        scores = scores.reshape(groups, -1, n, first + n) / np.sqrt(np.float32(self.config.head_dim))
        unseen = np.arange(first + n) > np.arange(first, first + n)[:, None]
        weights = _softmax(np.where(unseen, np.float32(-np.inf), scores))
        y: F32 = weights.reshape(groups, -1, first + n) @ values
        y = y.reshape(groups, heads // groups, n, -1).transpose(2, 0, 1, 3)
        out: F32 = y.reshape(n, -1) @ layer.o.T
        return out

    def _mix(self, number: int, layer: _Layer, x: F32) -> F32:
        """What the experts of a layer give for x [n, d]."""
        top_k = self.config.num_experts_per_tok
        probabilities = _softmax(x @ layer.router.T)
        ranked = np.argsort(-probabilities, axis=-1, kind="stable")
        chosen = ranked[:, :top_k]
        weights: F32 = np.take_along_axis(probabilities, chosen, axis=-1)
        if self.config.norm_topk_prob:
            weights /= weights.sum(axis=-1, keepdims=True)
        by_rank = np.empty((len(x), top_k, x.shape[-1]), np.float32)
        if len(x) == 1:
            with self.experts.route(number, ranked[0].tolist(), top_k) as batch:
                for rank in range(top_k):
                    by_rank[0, rank] = _swiglu(batch[rank], x)[0]
        else:
            for expert in self.experts.as_ready(number, np.unique(chosen).tolist()):
                rows, ranks = np.nonzero(chosen == expert.expert)
                by_rank[rows, ranks] = _swiglu(expert, x[rows])
        by_rank *= weights[:, :, None]
        out: F32 = np.zeros_like(x)
        for rank in range(top_k):
            out += by_rank[:, rank]
        return out


def _rotate(x: F32, turn: tuple[F32, F32]) -> F32:
    """Turn each pair (i, i + c/2) of x [n, heads, c] by its position's angle."""
    cos, sin = turn
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: F32 = e / e.sum(axis=-1, keepdims=True)
    return out


def _swiglu(expert: ExpertTensors, x: F32) -> F32:
    gate, up = x @ expert.dequantize("gate").T, x @ expert.dequantize("up").T
    out: F32 = (gate / (1 + np.exp(-gate)) * up) @ expert.dequantize("down").T
    return out


def _choose(logits: F32, temperature: float, draw: np.random.Generator) -> int:
    if temperature <= 0:
        return int(np.argmax(logits))
    p = _softmax(logits.astype(np.float64) / temperature)  # type: ignore[arg-type]
    return int(draw.choice(len(p), p=p))


# --- experts without a ring ------------------------------------------------------------------------------


class _ResidentExpert:
    """One expert of a vault that is in memory as a whole."""

    def __init__(
        self, expert: int, parts: Sequence[npt.NDArray[np.uint8]], layout: dict[str, Tensor]
    ) -> None:
        self.expert = expert
        self._parts, self._layout = parts, layout

    def _bytes(self, t: Tensor) -> npt.NDArray[np.uint8]:
        return self._parts[t.part][t.offset : t.offset + t.nbytes]

    def dequantize(self, name: str, /) -> F32:
        t, scales = self._layout[name], self._layout.get(f"{name}.scales")
        if t.dtype in NUMPY:
            return self._bytes(t).view(NUMPY[t.dtype]).reshape(t.shape).astype(np.float32)
        return dequant.dequantize(
            t.dtype, self._bytes(t), t.shape, scales=self._bytes(scales) if scales else None
        )


class ResidentExperts:
    """All experts of a vault in plain memory, with nothing between the file and the computation.

    Takes as much memory as the experts have bytes.  VaultError where the vault is not good, or of a type that
    is neither floating-point nor of blocks that `smoe_mp.dequant` knows.
    """

    def __init__(self, vault: Path) -> None:
        source: Source = open_source(vault)
        layouts = [{t.name: t for t in layout} for layout in source.layouts]
        for layout in layouts:
            for t in layout.values():
                if t.dtype not in NUMPY and not {(t.dtype, True), (t.dtype, False)} & dequant.TYPES.keys():
                    raise VaultError(f"{vault}: {t.name} is {t.dtype}, which cannot be made float32 here")
        self._experts = {
            (x.layer, x.expert): _ResidentExpert(
                x.expert,
                [
                    np.fromfile(source.files[e.file].path, np.uint8, e.length, offset=e.offset)
                    for e in x.extents
                ],
                layouts[x.layout],
            )
            for x in source.experts
        }

    @contextmanager
    def fetch(self, layer: int, experts: Sequence[int], /) -> Iterator[Sequence[ExpertTensors]]:
        """All of `experts`, in that order."""
        yield [self._experts[layer, expert] for expert in experts]

    def route(
        self, layer: int, ranked: Sequence[int], top_k: int, /
    ) -> AbstractContextManager[Sequence[ExpertTensors]]:
        return self.fetch(layer, ranked[:top_k])

    def as_ready(self, layer: int, experts: Sequence[int], /) -> Iterator[ExpertTensors]:
        return iter([self._experts[layer, expert] for expert in experts])

    def phase(self, name: str, /) -> AbstractContextManager[None]:
        return nullcontext()
