"""A small engine without torch, to be read: Qwen3-MoE in numpy (float32), its experts from a ring.  What an
engine has to do with a ring is in `experts` alone.

    python numpy_engine.py Qwen3-30B-A3B/ 785 3974 13      # token ids; prints the greedy ones that follow
"""

import sys
from pathlib import Path

import numpy as np

import smoe_mp
from smoe_mp.launch import private_system
from smoe_mp.sources.checkpoint import open_folder
from smoe_mp.sources.dtypes import NUMPY


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Engine:
    """One sequence of tokens, with its keys and values."""

    def __init__(self, folder: Path, ring: smoe_mp.Ring) -> None:
        model = open_folder(folder)
        self.config, self.ring = model.config, ring
        self.theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        self.w: dict[str, np.ndarray] = {}  # all that belongs to no expert
        for name, (file, tensor) in model.items():
            if ".experts." not in name:
                raw = np.fromfile(file.source.path, np.uint8, tensor.nbytes, offset=tensor.offset)
                self.w[name] = raw.view(NUMPY[tensor.dtype]).reshape(tensor.shape).astype(np.float32)
        nothing = np.empty((self.config["num_key_value_heads"], 0, self.config["head_dim"]), np.float32)
        self.cache = [(nothing, nothing)] * self.config["num_hidden_layers"]

    def forward(self, ids: list[int]) -> np.ndarray:
        """Take `ids` in behind what was there; returns the logits of the next token."""
        embedding, past = self.w["model.embed_tokens.weight"], self.cache[0][0].shape[1]
        x = embedding[ids]
        for n in range(len(self.cache)):
            x = x + self.attention(n, self.norm(x, f"model.layers.{n}.input_layernorm"), past)
            x = x + self.experts(n, self.norm(x, f"model.layers.{n}.post_attention_layernorm"))
        return self.norm(x[-1], "model.norm") @ self.w.get("lm_head.weight", embedding).T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def attention(self, n: int, x: np.ndarray, past: int) -> np.ndarray:
        name, size = f"model.layers.{n}.self_attn", self.config["head_dim"]
        w = [self.w[f"{name}.{what}_proj.weight"].T for what in "qkvo"]
        q, k, v = ((x @ w[i]).reshape(len(x), -1, size).swapaxes(0, 1) for i in range(3))
        q = self.rotate(self.norm(q, f"{name}.q_norm"), past)
        k = self.rotate(self.norm(k, f"{name}.k_norm"), past)
        k, v = (np.concatenate(pair, 1) for pair in zip(self.cache[n], (k, v), strict=True))
        self.cache[n] = k, v
        k, v = (np.repeat(each, len(q) // len(each), 0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(size))
        scores += np.triu(np.full(scores.shape[1:], -np.inf, np.float32), past + 1)
        return (softmax(scores) @ v).swapaxes(0, 1).reshape(len(x), -1) @ w[3]

    def rotate(self, x: np.ndarray, past: int) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(past, past + x.shape[1]), self.theta ** (-np.arange(half) / half))
        a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(np.float32)

    def experts(self, n: int, x: np.ndarray) -> np.ndarray:
        """The router's choice, and the sum of what the chosen experts say, each taken as it lands."""
        shares = softmax(x @ self.w[f"model.layers.{n}.mlp.gate.weight"].T)
        least = np.sort(shares)[:, -self.config["num_experts_per_tok"], None]
        shares[shares < least] = 0
        if self.config["norm_topk_prob"]:
            shares /= shares.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for expert in self.ring.as_ready(n, np.flatnonzero(shares.any(0))):
            rows = np.flatnonzero(shares[:, expert.expert])
            gate, up = (x[rows] @ expert.dequantize(what).T for what in ("gate", "up"))
            y = (gate / (1 + np.exp(-gate)) * up) @ expert.dequantize("down").T
            out[rows] += y * shares[rows, expert.expert, None]
        return out


def main(folder: Path, ids: list[int], tokens: int = 16, slots: int = 0) -> list[int]:
    """Print the tokens that follow `ids`, and return them.  `slots`: of the ring, 0: as memory allows."""
    made: list[int] = []
    with private_system(folder, slots=slots) as system, smoe_mp.attach(system.name) as ring:
        engine = Engine(folder, ring)
        while len(made) < tokens:
            made.append(int(engine.forward(made[-1:] or ids).argmax()))
            print(made[-1], end=" ", flush=True)
        print(f"\nhit rate {ring.stats()['hit_rate']:.1%}")
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
