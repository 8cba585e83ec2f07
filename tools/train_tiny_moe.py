#!/usr/bin/env python3
"""Train the small Mixture-of-Experts model that ships with smoe-mp, from nothing, reproducibly.

    python tools/train_tiny_moe.py data   --out corpus                   anywhere with a full standard library
    python tools/train_tiny_moe.py train  --corpus corpus --out run      one NVIDIA GPU; again with --resume
    python tools/train_tiny_moe.py join   --run run --out model          the checkpoint's parts to one folder

What it makes is a checkpoint of architecture Qwen3-MoE, which `transformers` loads as it is: bytes for
tokens (0 separates documents, so no tokenizer is needed), 8 layers of 64 experts of which 4 serve a token.
An expert has 3 x 40 x 256 weights, 16,320 bytes in SMOE-Q4: one block of 16 KiB.

Data: the Python standard library's own sources and texts (PSF licence, which allows it), from the
interpreter that runs `data`: library, tests, documentation (the topics of `help()`), C headers.  Whole
files are held out, chosen by a hash of their names.  Tables that a program wrote (encodings) are left out.

The last part of the training sees its experts' weights as Q4 will give them back (straight-through), so
that packing costs next to nothing.  Needs torch and numpy; `train` also checks the export against
transformers, if that is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEED = 20261130
DOMAINS = ("library", "tests", "documentation", "headers")
HELD_OUT = 0.05
FILE_MOST = 300_000  # bytes: longer ones are tables
PART_BYTES = 15 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, by the names of Qwen3-MoE's configuration."""

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 64
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 40
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class Recipe:
    """How it is trained."""

    steps: int = 4000
    batch: int = 64  # sequences
    length: int = 1024  # bytes
    lr: float = 2.5e-3
    lr_end: float = 0.04  # of lr
    warmup: int = 200
    weight_decay: float = 0.1
    aux: float = 0.001  # of the load-balancing loss: as published for Qwen3-MoE
    q4_from: float = 0.8  # of the steps: from there on the experts' weights are seen through Q4


# --- data ------------------------------------------------------------------------------------------------


def _domain(path: Path, stdlib: Path) -> str | None:
    parts = path.relative_to(stdlib).parts
    if "site-packages" in parts or parts[0] in ("encodings", "pydoc_data", "__pycache__"):
        return None
    return "tests" if any(p in ("test", "tests", "idle_test") for p in parts) else "library"


def _documents() -> list[tuple[str, str, bytes]]:
    """(domain, name, text) of every document, by name."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(stdlib.rglob("*.py")):
        domain = _domain(path, stdlib)
        if domain and 200 <= path.stat().st_size <= FILE_MOST:
            found.append((domain, str(path.relative_to(stdlib)), path.read_bytes()))
    headers = Path(sysconfig.get_path("include"))
    found += [
        ("headers", f"include/{p.relative_to(headers)}", p.read_bytes()) for p in sorted(headers.rglob("*.h"))
    ]
    from pydoc_data.topics import topics  # noqa: PLC0415

    found += [("documentation", f"topic/{name}", text.encode()) for name, text in sorted(topics.items())]
    return [(d, n, t) for d, n, t in found if b"\0" not in t and _is_text(t)]


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def make_data(out: Path) -> None:
    """Write train.bin, held-DOMAIN.bin and corpus.json to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    train, held, counts = bytearray(), {d: bytearray() for d in DOMAINS}, {}
    seen: set[bytes] = set()
    for domain, name, text in _documents():
        digest = hashlib.sha256(text).digest()
        if digest in seen:
            continue
        seen.add(digest)
        is_held = _is_held_out(name)
        (held[domain] if is_held else train).extend(b"\0" + text)
        row = counts.setdefault(domain, {"files": 0, "bytes": 0, "held_out_files": 0, "held_out_bytes": 0})
        row["held_out_files" if is_held else "files"] += 1
        row["held_out_bytes" if is_held else "bytes"] += len(text)
    (out / "train.bin").write_bytes(train)
    for domain, text in held.items():
        (out / f"held-{domain}.bin").write_bytes(text)
    whole = b"".join(held[d] for d in DOMAINS)
    about = {
        "python": sys.version.split()[0],
        "seed": SEED,
        "domains": counts,
        "train_bytes": len(train),
        "train_sha256": hashlib.sha256(train).hexdigest(),
        "held_out_bytes": len(whole),
        "xz_bits_per_byte": 8 * len(lzma.compress(whole, preset=9)) / len(whole),
        "xz_bits_per_byte_by_domain": {
            d: 8 * len(lzma.compress(held[d], preset=9)) / len(held[d]) for d in DOMAINS
        },
    }
    (out / "corpus.json").write_text(json.dumps(about, indent=1))
    print(json.dumps(about, indent=1))


# --- the model -------------------------------------------------------------------------------------------
# Qwen3-MoE as published (rotary positions by halves, RMS norms on queries and keys, softmax before top-k,
# renormalised), written for training: all experts of a layer in one grouped product.


def _import_torch() -> Any:
    import torch  # noqa: PLC0415

    return torch


def make_model(shape: Shape) -> Any:
    torch = _import_torch()
    nn, functional = torch.nn, torch.nn.functional
    grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    heads, kv, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    d, f, n_experts, top_k = (
        shape.hidden_size,
        shape.moe_intermediate_size,
        shape.num_experts,
        shape.num_experts_per_tok,
    )

    def norm(x: Any, weight: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + shape.rms_norm_eps)
        return (wide * weight).to(x.dtype)

    def through_q4(w: Any) -> Any:
        """The weights as SMOE-Q4 gives them back (groups of 64), the gradient as if untouched."""
        groups = w.detach().float().reshape(-1, 64)
        scale = groups.abs().amax(1, keepdim=True)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = torch.clamp(torch.round(groups / scale * 7.5 + 7.5), 0, 15)
        back = ((codes - 7.5) / 7.5 * scale.half().float()).reshape(w.shape)
        return w + (back - w).detach()

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.input_norm, self.post_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
            self.q_norm, self.k_norm = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
            self.q, self.k = nn.Linear(d, heads * dim, bias=False), nn.Linear(d, kv * dim, bias=False)
            self.v, self.o = nn.Linear(d, kv * dim, bias=False), nn.Linear(heads * dim, d, bias=False)
            self.router = nn.Linear(d, n_experts, bias=False)
            self.gate_up = nn.Parameter(torch.randn(n_experts, 2 * f, d) * 0.02)
            self.down = nn.Parameter(
                torch.randn(n_experts, d, f) * 0.02 / math.sqrt(2 * shape.num_hidden_layers)
            )
            for linear in (self.q, self.k, self.v, self.router):
                nn.init.normal_(linear.weight, std=0.02)
            nn.init.normal_(self.o.weight, std=0.02 / math.sqrt(2 * shape.num_hidden_layers))

        def attend(self, x: Any, cos: Any, sin: Any) -> Any:
            b, t, _ = x.shape

            def rotate(y: Any) -> Any:
                a, c = y[..., : dim // 2], y[..., dim // 2 :]
                return (y.float() * cos + torch.cat((-c, a), -1).float() * sin).to(y.dtype)

            q = rotate(norm(self.q(x).view(b, t, heads, dim), self.q_norm).transpose(1, 2))
            k = rotate(norm(self.k(x).view(b, t, kv, dim), self.k_norm).transpose(1, 2))
            v = self.v(x).view(b, t, kv, dim).transpose(1, 2)
            k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).reshape(b, t, heads * dim))

        def experts(self, x: Any, q4: bool) -> tuple[Any, Any, Any]:
            """Output, load-balancing loss, and the experts chosen [tokens, top_k], best first."""
            flat = x.reshape(-1, d)
            probabilities = functional.linear(flat, self.router.weight.to(flat.dtype)).float().softmax(-1)
            weights, chosen = probabilities.topk(top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=n_experts)
            ends = counts.cumsum(0).to(torch.int32)
            gate_up, down = (through_q4(w) if q4 else w for w in (self.gate_up, self.down))
            rows = order // top_k
            h = grouped_mm(flat[rows], gate_up.to(flat.dtype).transpose(1, 2), offs=ends)
            h = functional.silu(h[:, :f]) * h[:, f:]
            y = grouped_mm(h, down.to(flat.dtype).transpose(1, 2), offs=ends)
            y = y * weights.flatten()[order, None].to(y.dtype)
            out = torch.zeros_like(flat).index_add(0, rows, y)
            share = counts.float() / chosen.numel()
            return out.view_as(x), n_experts * (share * probabilities.mean(0)).sum(), chosen

        def forward(self, x: Any, cos: Any, sin: Any, q4: bool) -> tuple[Any, Any, Any]:
            x = x + self.attend(norm(x, self.input_norm), cos, sin)
            y, aux, chosen = self.experts(norm(x, self.post_norm), q4)
            return x + y, aux, chosen

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab_size, d)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.layers = nn.ModuleList(Layer() for _ in range(shape.num_hidden_layers))
            self.norm = nn.Parameter(torch.ones(d))

        def forward(self, tokens: Any, q4: bool = False) -> tuple[Any, Any, list[Any]]:
            """Logits [batch, time, vocab], load-balancing loss, chosen experts by layer."""
            with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
                return self.run(tokens, q4)

        def run(self, tokens: Any, q4: bool) -> tuple[Any, Any, list[Any]]:
            t = tokens.shape[1]
            at = torch.arange(t, device=tokens.device).float()
            rates = shape.rope_theta ** -(torch.arange(0, dim, 2, device=tokens.device).float() / dim)
            angles = torch.outer(at, rates).repeat(1, 2)
            cos, sin = angles.cos(), angles.sin()
            x, aux, all_chosen = self.embed(tokens), 0.0, []
            if x.is_cuda:
                x = x.to(torch.bfloat16)
            for layer in self.layers:
                x, layer_aux, chosen = layer(x, cos, sin, q4)
                aux = aux + layer_aux / shape.num_hidden_layers
                all_chosen.append(chosen)
            return functional.linear(norm(x, self.norm), self.embed.weight.to(x.dtype)), aux, all_chosen

    return Model()


# --- checkpoints -----------------------------------------------------------------------------------------


def to_huggingface(model: Any, shape: Shape) -> dict[str, Any]:
    """The weights under the names of a Qwen3-MoE checkpoint, bfloat16."""
    torch = _import_torch()
    f, out = (
        shape.moe_intermediate_size,
        {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm},
    )
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        out |= {
            p + "input_layernorm.weight": layer.input_norm,
            p + "post_attention_layernorm.weight": layer.post_norm,
            p + "self_attn.q_norm.weight": layer.q_norm,
            p + "self_attn.k_norm.weight": layer.k_norm,
            p + "mlp.gate.weight": layer.router.weight,
        }
        out |= {p + f"self_attn.{n}_proj.weight": getattr(layer, n).weight for n in "qkvo"}
        for e in range(shape.num_experts):
            out[p + f"mlp.experts.{e}.gate_proj.weight"] = layer.gate_up[e, :f]
            out[p + f"mlp.experts.{e}.up_proj.weight"] = layer.gate_up[e, f:]
            out[p + f"mlp.experts.{e}.down_proj.weight"] = layer.down[e]
    return {name: w.detach().to(torch.bfloat16).cpu().contiguous() for name, w in out.items()}


def from_huggingface(model: Any, weights: dict[str, Any], shape: Shape) -> None:
    torch = _import_torch()
    f = shape.moe_intermediate_size
    with torch.no_grad():
        model.embed.weight.copy_(weights["model.embed_tokens.weight"])
        model.norm.copy_(weights["model.norm.weight"])
        for i, layer in enumerate(model.layers):
            p = f"model.layers.{i}."
            layer.input_norm.copy_(weights[p + "input_layernorm.weight"])
            layer.post_norm.copy_(weights[p + "post_attention_layernorm.weight"])
            layer.q_norm.copy_(weights[p + "self_attn.q_norm.weight"])
            layer.k_norm.copy_(weights[p + "self_attn.k_norm.weight"])
            layer.router.weight.copy_(weights[p + "mlp.gate.weight"])
            for n in "qkvo":
                getattr(layer, n).weight.copy_(weights[p + f"self_attn.{n}_proj.weight"])
            for e in range(shape.num_experts):
                layer.gate_up[e, :f].copy_(weights[p + f"mlp.experts.{e}.gate_proj.weight"])
                layer.gate_up[e, f:].copy_(weights[p + f"mlp.experts.{e}.up_proj.weight"])
                layer.down[e].copy_(weights[p + f"mlp.experts.{e}.down_proj.weight"])


def config_of(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        **asdict(shape),
        "intermediate_size": shape.moe_intermediate_size * shape.num_experts_per_tok,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def save_parts(weights: dict[str, Any], folder: Path) -> None:
    """Safetensors files of at most PART_BYTES with an index, as transformers writes them."""
    from safetensors.torch import save_file  # noqa: PLC0415

    parts: list[dict[str, Any]] = [{}]
    size = 0
    for name, w in weights.items():
        if size + w.numel() * 2 > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = w
        size += w.numel() * 2
    where = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(w.numel() * 2 for w in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    )


def load_parts(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file  # noqa: PLC0415

    weights: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(path)
    return weights


# --- training --------------------------------------------------------------------------------------------


def rate(step: int, recipe: Recipe) -> float:
    """The learning rate: a linear warm-up, then a cosine."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (recipe.lr_end + (1 - recipe.lr_end) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def evaluate(model: Any, text: bytes, length: int, q4: bool, device: str) -> float:
    """Bits per byte of a text: windows of `length`, of which the second half counts (of the first, all)."""
    torch = _import_torch()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()
    bits, counted, half = 0.0, 0, length // 2
    starts = list(range(0, max(1, len(text) - 1 - half), half))
    with torch.no_grad():
        for at in range(0, len(starts), 32):
            group = [s for s in starts[at : at + 32] if s + length + 1 <= len(text)]
            if not group:
                continue
            rows = torch.stack([tokens[s : s + length + 1] for s in group])
            logits, _, _ = model(rows[:, :-1], q4)
            losses = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
            ).view(len(group), length)
            for i, s in enumerate(group):
                part = losses[i] if s == 0 else losses[i, half:]
                bits += float(part.sum()) / math.log(2)
                counted += part.numel()
    return bits / max(1, counted)


def routing(model: Any, text: bytes, length: int, shape: Shape, device: str) -> dict[str, Any]:
    """Popularity of experts and overlap between adjacent tokens' choices, layer by layer, on a text."""
    torch = _import_torch()
    n = len(text) // length
    rows = (
        torch.frombuffer(bytearray(text[: n * length]), dtype=torch.uint8).to(device).long().view(n, length)
    )
    counts = torch.zeros(shape.num_hidden_layers, shape.num_experts)
    overlap = torch.zeros(shape.num_hidden_layers)
    with torch.no_grad():
        for at in range(0, n, 32):
            _, _, chosen = model(rows[at : at + 32], True)
            for i, c in enumerate(chosen):
                by_token = c.view(-1, length, shape.num_experts_per_tok)
                counts[i] += torch.bincount(c.flatten(), minlength=shape.num_experts).cpu()
                same = (by_token[:, 1:, :, None] == by_token[:, :-1, None, :]).any(-1).float().mean(-1)
                overlap[i] += float(same.sum())
    share = counts / counts.sum(1, keepdim=True)
    ordered = share.sort(1, descending=True).values
    entropy = -(share.clamp_min(1e-12).log2() * share).sum(1)
    return {
        "tokens": n * length,
        "overlap_by_layer": [round(float(x) / (n * (length - 1)), 4) for x in overlap],
        "most_popular_share": [round(float(x), 4) for x in ordered[:, 0]],
        "top_quarter_share": [round(float(x), 4) for x in ordered[:, : shape.num_experts // 4].sum(1)],
        "unused": [int((c == 0).sum()) for c in counts],
        "effective_experts": [round(2 ** float(e), 1) for e in entropy],
    }


class Training:
    """One run: from the seed, or from where another was saved."""

    def __init__(self, corpus: Path, recipe: Recipe, resume: Path | None, device: str) -> None:
        torch = _import_torch()
        import numpy as np  # noqa: PLC0415

        torch.manual_seed(SEED)
        self.torch, self.recipe, self.device, self.shape = torch, recipe, device, Shape()
        self.model, self.step = make_model(self.shape), 0
        if resume:
            self.step = json.loads((resume / "training.json").read_text())["step"]
            from_huggingface(self.model, load_parts(resume), self.shape)
        self.model.to(device)
        self.optimizer = self._optimizer()
        self.cold_since: int | None = None  # resumed without its optimizer's state: it warms up anew
        if resume and (resume / "optimizer.pt").exists():
            self.optimizer.load_state_dict(torch.load(resume / "optimizer.pt"))
        elif resume:
            self.cold_since = self.step
        self.text = torch.from_numpy(np.fromfile(corpus / "train.bin", np.uint8)).to(device)
        self.held = {d: (corpus / f"held-{d}.bin").read_bytes() for d in DOMAINS}
        self.random = np.random.default_rng((SEED, self.step))
        self.log: list[dict[str, Any]] = []
        self.began = time.monotonic()

    def _optimizer(self) -> Any:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.recipe.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return self.torch.optim.AdamW(
            groups, lr=self.recipe.lr, betas=(0.9, 0.95), fused=self.device == "cuda"
        )

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self, stop_after_s: float) -> None:
        """Train to the last step or until the time is over."""
        while self.step < self.recipe.steps and self.seconds() < stop_after_s:
            loss, aux = self._one_step()
            self.step += 1
            if self.step % 100 == 0:
                self._say(loss.item() / math.log(2), aux.item())

    def _one_step(self) -> tuple[Any, Any]:
        torch, recipe = self.torch, self.recipe
        at = self.random.integers(0, len(self.text) - recipe.length - 1, recipe.batch)
        places = torch.from_numpy(at).to(self.device)[:, None]
        rows = self.text[places + torch.arange(recipe.length + 1, device=self.device)].long()
        warm = 1.0 if self.cold_since is None else min(1.0, (self.step - self.cold_since + 1) / 50)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.step, recipe) * warm
        logits, aux, _ = self.model(rows[:, :-1], self.step >= recipe.q4_from * recipe.steps)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        (loss + recipe.aux * aux).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss, aux

    def _bits(self, text: bytes, q4: bool) -> float:
        return evaluate(self.model, text, self.recipe.length, q4, self.device)

    def _say(self, bits: float, aux: float) -> None:
        line = {
            "step": self.step,
            "bits": round(bits, 4),
            "aux": round(aux, 3),
            "s": round(self.seconds(), 1),
        }
        if self.step % 1000 == 0:
            line["held_out"] = round(self._bits(self.held["library"][: 1 << 18], False), 4)
        self.log.append(line)
        print(json.dumps(line), flush=True)

    def figures(self) -> dict[str, Any]:
        whole, length = b"".join(self.held[d] for d in DOMAINS), self.recipe.length
        return {
            "step": self.step,
            "seconds": round(self.seconds(), 1),
            "tokens": self.step * self.recipe.batch * length,
            "held_out_bits_per_byte": self._bits(whole, False),
            "held_out_bits_per_byte_q4": self._bits(whole, True),
            "by_domain_q4": {d: self._bits(self.held[d], True) for d in DOMAINS},
            "routing": {
                d: routing(self.model, self.held[d][: 1 << 18], length, self.shape, self.device)
                for d in DOMAINS
            },
            "recipe": asdict(self.recipe),
            "shape": asdict(self.shape),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "torch": self.torch.__version__,
            "device": self.torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "log": self.log,
        }

    def save(self, out: Path) -> dict[str, Any]:
        """The checkpoint, its figures (of the weights as saved, rounded to bfloat16) and, where the run is
        not over, the optimizer's state."""
        out.mkdir(parents=True, exist_ok=True)
        self.model.eval()
        weights = to_huggingface(self.model, self.shape)
        if self.step < self.recipe.steps:
            self.torch.save(self.optimizer.state_dict(), out / "optimizer.pt")
        from_huggingface(self.model, weights, self.shape)
        save_parts(weights, out)
        (out / "config.json").write_text(json.dumps(config_of(self.shape), indent=1))
        figures = self.figures()
        sample = self.held[DOMAINS[0]][: self.recipe.length]
        figures["transformers"] = compare(self.model, out, sample, self.device)
        (out / "training.json").write_text(json.dumps(figures, indent=1))
        return figures


def compare(model: Any, folder: Path, text: bytes, device: str) -> dict[str, Any]:
    """The exported checkpoint as transformers runs it, against this file's model, on the same text."""
    torch = _import_torch()
    try:
        import transformers  # noqa: PLC0415
    except ImportError:
        return {"version": None}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).long()[None]
    with torch.no_grad():
        ours, _, _ = model(tokens, False)
        other = theirs(tokens).logits
    same = (ours.float().argmax(-1) == other.argmax(-1)).float().mean()
    bits = torch.nn.functional.cross_entropy(other[0, :-1], tokens[0, 1:]) / math.log(2)
    mine = torch.nn.functional.cross_entropy(ours[0, :-1].float(), tokens[0, 1:]) / math.log(2)
    return {
        "version": transformers.__version__,
        "same_argmax": float(same),
        "bits": float(bits),
        "bits_here": float(mine),
    }


def join(run: Path, out: Path) -> None:
    """One model.safetensors and its config.json from the parts of a run."""
    from safetensors.torch import save_file  # noqa: PLC0415

    out.mkdir(parents=True, exist_ok=True)
    save_file(load_parts(run), out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((run / "config.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the small model that ships with smoe-mp.")
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="gather the corpus")
    data.add_argument("--out", type=Path, required=True)
    learn = commands.add_parser("train", help="train, or go on")
    learn.add_argument("--corpus", type=Path, required=True)
    learn.add_argument("--out", type=Path, required=True)
    learn.add_argument("--resume", type=Path)
    learn.add_argument("--steps", type=int, default=Recipe.steps)
    learn.add_argument("--batch", type=int, default=Recipe.batch)
    learn.add_argument("--lr", type=float, default=Recipe.lr)
    learn.add_argument("--stop-after", type=float, default=540.0, metavar="SECONDS")
    learn.add_argument("--device", default="cuda")
    joined = commands.add_parser("join", help="make one folder of a run's parts")
    joined.add_argument("--run", type=Path, required=True)
    joined.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "data":
        make_data(args.out)
    elif args.command == "join":
        join(args.run, args.out)
    else:
        recipe = Recipe(steps=args.steps, batch=args.batch, lr=args.lr)
        training = Training(args.corpus, recipe, args.resume, args.device)
        training.run(args.stop_after)
        figures = training.save(args.out)
        print(json.dumps({k: v for k, v in figures.items() if k != "log"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
