"""The demonstration: a made-up model streamed through a ring much smaller than itself.

    make_vault ──► start the system ──► decode through the ring ──► stop it ──► decode from the file, compare

The model is a stack of MoE layers and nothing else: the experts have Qwen3-30B-A3B's shape, there are few of
them, and their weights are random, so that the vault is made here in seconds.  What must be real about it
is how it asks for experts, because that decides what a cache can do:

- popularity is skewed: each layer's router has a fixed bias that falls off like Zipf's law over the experts,
  in an order of its own;
- neighbouring tokens repeat experts: the state of a token is the last token's, changed a little, so the
  routers see nearly the same input again.

Tokens are chosen greedily by a random unembedding with a penalty on the latest tokens, so the output is a
sequence that any wrong byte would soon change.  The reference run computes the same from the vault file
read whole; it has to agree in every token and in every bit of the last state.  Both runs call the same
code on arrays of the same alignment, one after the other: with two at once the BLAS library could split
its sums differently.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from smoe_mp import config
from smoe_mp.errors import SmoeError, VaultError
from smoe_mp.quant import F32, dequantize, quantize_q4
from smoe_mp.ring import attach
from smoe_mp.sources.smoe import ArchBlock, SmoeVault, open_smoe
from smoe_mp.vault_writer import Packed, VaultWriter

__all__ = ["DEMO_SHAPE", "FileExperts", "MoeStack", "Run", "StackShape", "System", "make_vault", "run_demo"]

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
VAULT_NAME = "demo.smoe"
# Part of the vault's model_type: a vault made by another recipe is not taken for this one.
RECIPE = "smoe-mp-demo-1"
SEED = 20240229


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes of the made-up model, in elements and counts."""

    hidden: int
    width: int
    layers: int
    experts: int
    top_k: int
    vocab: int

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        up = (self.width, self.hidden)
        return {"gate": up, "up": up, "down": (self.hidden, self.width)}


DEMO_SHAPE = StackShape(hidden=2048, width=768, layers=4, experts=32, top_k=2, vocab=4096)


class ExpertTensors(Protocol):
    """One expert that is there: its tensors "gate", "up" and "down" as new float32 arrays."""

    def dequantize(self, name: str, /) -> F32: ...


class ExpertBatch(Protocol):
    """The experts that were asked for, in that order."""

    def __getitem__(self, index: int, /) -> ExpertTensors: ...


# (layer, expert ids) -> a block inside which the experts are there.
ExpertsOf = Callable[[int, Sequence[int]], AbstractContextManager[ExpertBatch]]


# ---------------------------------------------------------------------------------------------- the vault


def make_vault(path: Path, progress: Callable[[int, int], None], shape: StackShape = DEMO_SHAPE) -> bool:
    """Make the demo's vault at `path`, or keep the one that is there if it is good; True where it was kept.

    `progress` is called with (experts done, experts in all).  The weights are drawn from a normal
    distribution of variance 1 / fan-in, by a generator seeded for each expert, so that the vault is the
    same wherever it is made.  Raises VaultError where it cannot be written.
    """
    experts = list(product(range(shape.layers), range(shape.experts)))
    if _is_good(path, shape):
        progress(len(experts), len(experts))
        return True
    arch = ArchBlock(
        flags=1,
        rope_theta=0.0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        moe_top_k=shape.top_k,
        moe_ffn_dim=shape.width,
        dense_ffn_dim=0,
        shared_expert_ffn_dim=0,
        activation=0,
        num_hidden_layers=shape.layers,
        rms_norm_eps=0.0,
        model_type=RECIPE,
    )
    # Both drawing and quantising let other threads run while they compute.
    threads = min(os.cpu_count() or 1, 4)
    with (
        ThreadPoolExecutor(threads) as pool,
        VaultWriter(
            path,
            experts,
            bits=4,
            shapes=shape.tensors,
            d_model=shape.hidden,
            vocab_size=shape.vocab,
            ffn_dim=shape.width,
            arch=arch,
        ) as writer,
    ):
        waiting: deque[Future[list[Packed]]] = deque()
        todo = iter(experts)
        for done, (layer, expert) in enumerate(experts):
            # A little ahead of the writer and no more: an expert is megabytes.
            while len(waiting) <= threads and (pair := next(todo, None)) is not None:
                waiting.append(pool.submit(_random_expert, shape, *pair))
            writer.add_packed(layer, expert, *waiting.popleft().result())
            progress(done + 1, len(experts))
    return False


def _is_good(path: Path, shape: StackShape) -> bool:
    """Whether a vault of this recipe and shape is there; having the name, it was completed."""
    try:
        vault = open_smoe(path)
    except VaultError:
        return False
    h, arch = vault.header, vault.arch
    found = {tensor.name: tensor.shape for tensor in vault.layouts[0]}
    return (
        arch is not None
        and (arch.model_type, arch.moe_top_k, h.bits) == (RECIPE, shape.top_k, 4)
        and (h.d_model, h.vocab_size, h.total_experts) == (shape.hidden, shape.vocab, len(vault.experts))
        and (h.num_moe_layers, h.max_experts_per_layer) == (shape.layers, shape.experts)
        and h.total_experts == shape.layers * shape.experts
        and all(found[name] == size for name, size in shape.tensors.items())
    )


def _random_expert(shape: StackShape, layer: int, expert: int) -> list[Packed]:
    rng = np.random.default_rng((SEED, layer, expert))
    packed: list[Packed] = []
    for size in shape.tensors.values():
        weights = rng.standard_normal(size, dtype=np.float32)
        weights *= np.float32(size[1] ** -0.5)
        packed.append(quantize_q4(weights))
    return packed


# ------------------------------------------------------------------------------------------- the reference


class _FileExpert:
    """One expert of a vault that is in memory as a whole."""

    def __init__(self, blob: npt.NDArray[np.uint8], layout: Mapping[str, Any], bits: int) -> None:
        self._blob = blob
        self._layout = layout
        self._bits = bits

    def dequantize(self, name: str, /) -> F32:
        codes, scales = self._layout[name], self._layout[f"{name}.scales"]
        return dequantize(
            self._blob[codes.offset : codes.offset + codes.nbytes],
            self._blob[scales.offset : scales.offset + scales.nbytes].view(np.float16),
            codes.shape,
            self._bits,
        )


class FileExperts:
    """The reference provider: the vault file read whole, with nothing between it and the computation.

    Takes as much memory as the file has bytes.  VaultError where the vault is not good.
    """

    def __init__(self, path: Path) -> None:
        vault: SmoeVault = open_smoe(path)
        whole = np.fromfile(path, np.uint8)
        layouts = [{tensor.name: tensor for tensor in layout} for layout in vault.layouts]
        self._experts = {
            (e.layer, e.expert): _FileExpert(
                whole[e.extents[0].offset : e.extents[0].offset + e.extents[0].length],
                layouts[e.layout],
                vault.header.bits,
            )
            for e in vault.experts
        }

    @contextmanager
    def __call__(self, layer: int, experts: Sequence[int]) -> Generator[ExpertBatch]:
        yield [self._experts[layer, expert] for expert in experts]


# ----------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Run:
    """What a decoding gave: the tokens, the last state (hidden,) and the experts asked for in order."""

    tokens: tuple[int, ...]
    state: F32
    routes: tuple[tuple[int, int], ...]

    def same_as(self, other: Run) -> bool:
        """Whether both runs agree in every token, every route and every bit of the last state."""
        return (
            self.tokens == other.tokens
            and self.routes == other.routes
            and self.state.tobytes() == other.state.tobytes()
        )


class MoeStack:
    """A stack of MoE layers with random routers, embedding and unembedding; the experts come from outside.

    All numbers are float32 and follow from `shape` and `seed`.
    """

    # Chosen so that neighbouring tokens share nearly half of their experts, as those of real models do.
    # The routers' bias falls by SKEW x log(rank) and their other input has standard deviation 1.
    SKEW = 0.5
    # How far a token moves the state, whose elements have a mean square of 1.
    EMBEDDING = 0.5
    # Tokens that the unembedding is penalised for, so that greedy choice does not repeat itself.
    MEMORY = 64

    def __init__(self, shape: StackShape = DEMO_SHAPE, seed: int = SEED) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        size = (shape.vocab, shape.hidden)
        self._embedding: F32 = rng.standard_normal(size, dtype=np.float32) * np.float32(self.EMBEDDING)
        self._unembedding: F32 = rng.standard_normal(size, dtype=np.float32)
        self._routers: F32 = rng.standard_normal(
            (shape.layers, shape.experts, shape.hidden), dtype=np.float32
        ) * np.float32(shape.hidden**-0.5)
        falling = -self.SKEW * np.log(np.arange(1, shape.experts + 1))
        self._bias: F32 = np.stack([rng.permutation(falling) for _ in range(shape.layers)]).astype(np.float32)
        self._start: F32 = rng.standard_normal(shape.hidden, dtype=np.float32)

    def route(self, layer: int, x: F32) -> tuple[list[int], F32]:
        """The top-k experts of `layer` for input `x` (hidden,), best first, and their weights (top_k,)."""
        logits: F32 = self._routers[layer] @ x + self._bias[layer]
        chosen = np.argsort(-logits, kind="stable")[: self.shape.top_k]
        weights: F32 = np.exp(logits[chosen] - logits[chosen[0]])
        return chosen.tolist(), weights / weights.sum()

    def forward(self, x: F32, experts_of: ExpertsOf, routes: list[tuple[int, int]] | None = None) -> F32:
        """The stack's output (hidden,) for `x` (hidden,); what it asked for is appended to `routes`."""
        for layer in range(self.shape.layers):
            normalised = _normalise(x)
            chosen, weights = self.route(layer, normalised)
            if routes is not None:
                routes += [(layer, expert) for expert in chosen]
            total = np.zeros_like(x)
            with experts_of(layer, chosen) as batch:
                for i, weight in enumerate(weights):
                    total += weight * _swiglu(batch[i], normalised)
            x = x + total
        return x

    def decode(
        self, tokens: int, experts_of: ExpertsOf, progress: Callable[[int, int], None] | None = None
    ) -> Run:
        """Decode `tokens` tokens; `progress` is called with (tokens done, tokens in all)."""
        state, out = _normalise(self._start), list[int]()
        routes: list[tuple[int, int]] = []
        for done in range(tokens):
            state = _normalise(self.forward(state, experts_of, routes))
            logits: F32 = self._unembedding @ state
            logits[out[-self.MEMORY :]] = -np.inf
            out.append(int(np.argmax(logits)))
            state = state + self._embedding[out[-1]]
            if progress:
                progress(done + 1, tokens)
        return Run(tuple(out), state, tuple(routes))


def _normalise(x: F32) -> F32:
    mean_square = np.float32(np.dot(x, x) / np.float32(x.size))
    out: F32 = x / np.sqrt(mean_square + np.float32(1e-6))
    return out


def _swiglu(expert: ExpertTensors, x: F32) -> F32:
    gate: F32 = expert.dequantize("gate") @ x
    up: F32 = expert.dequantize("up") @ x
    inner: F32 = gate / (1 + np.exp(-gate)) * up
    out: F32 = expert.dequantize("down") @ inner
    return out


# ---------------------------------------------------------------------------------------------- the system


class System:
    """A `smoe-mp up` in a process of its own, from its start to its end.

    `command`: program and arguments; it must print a line that begins with "ready" once it serves.  Its lines
    are shown dimmed.  A context manager: ready inside, stopped behind it.  SmoeError, with the exit status
    or the time waited, where it does not get ready.
    """

    def __init__(self, command: Sequence[str], console: Console, ready_timeout_s: float = READY_TIMEOUT_S):
        self._command = list(command)
        self._console = console
        self._ready_timeout_s = ready_timeout_s

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._is_ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # To the end, not only until it is ready: a full pipe would stop it.
        self._reader = threading.Thread(target=self._show_lines, name="demo-output", daemon=True)
        self._reader.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask the system to stop by SIGTERM and wait for its end; its exit status, negative for a signal."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._console.print(f"the system did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM: killed")
            self._process.kill()
            status = self._process.wait()
        # Not for ever: a child of the system that lives on would keep the pipe open.
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def _show_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for raw in lines:
                line = raw.decode("utf-8", "replace").rstrip()
                self._console.print(f"[dim]  {escape(line)}[/dim]", highlight=False)
                if line.lstrip().startswith("ready"):
                    self._is_ready.put(True)
        self._is_ready.put(False)

    def _wait_ready(self) -> None:
        try:
            ready = self._is_ready.get(timeout=self._ready_timeout_s)
        except queue.Empty:
            raise SmoeError(
                f"the system was not ready within {self._ready_timeout_s:.0f} s: {' '.join(self._command)}"
            ) from None
        if not ready:
            status = self._process.wait()
            raise SmoeError(
                f"the system ended with status {status} before it was ready: {' '.join(self._command)}"
            )


# ------------------------------------------------------------------------------------------------ the demo


def run_demo(config_path: Path, tokens: int, scratch: Path, console: Console) -> int:
    """Run the demonstration; 0 where the ring's result is the reference's, 1 where it is not.

    The configuration at `config_path` is used with the demo's own vault and a ring name of this process.
    The vault (some 320 MB) is made in the folder `scratch` and left there for the next run.  Raises
    ConfigError, VaultError or another SmoeError where something cannot be made or started.
    """
    loaded = config.load(config_path)
    scratch.mkdir(parents=True, exist_ok=True)
    vault_path = scratch / VAULT_NAME
    with _bar(console, "vault") as progress:
        kept = make_vault(vault_path, progress)
    vault = open_smoe(vault_path)
    slots = loaded.config.ring.slots
    console.print(
        f"vault: {'kept' if kept else 'made'} {escape(str(vault_path))}, {vault.files[0].size / 1e6:.0f} MB,"
        f" {len(vault.experts)} experts; ring: {slots} slots, {slots / len(vault.experts):.0%} of it"
    )
    name = f"demo-{os.getpid()}"
    own_config = scratch / f"{name}.toml"
    own_config.write_text(_own_config(loaded, name))
    stack = MoeStack()
    try:
        with System([sys.executable, "-m", "smoe_mp", "up", str(own_config)], console):
            through_ring = _decode_through_ring(stack, name, tokens, console)
    finally:
        own_config.unlink(missing_ok=True)
    console.print("the system is stopped")
    with _bar(console, "check") as progress:
        reference = stack.decode(tokens, FileExperts(vault_path), progress)
    if through_ring.same_as(reference):
        console.print(
            f"[green]identical[/green] to the vault file read whole: {tokens} tokens, last state bit for bit"
        )
        return 0
    console.print(
        f"[red]NOT identical[/red] to the vault file read whole: {_difference(through_ring, reference)}"
    )
    return 1


def _own_config(loaded: config.LoadedConfig, name: str) -> str:
    """The configuration as TOML, with this run's ring name and vault; other options as they were given."""
    own = {"name": name, "vault.path": VAULT_NAME}
    given = (option for option in loaded.effective() if option["origin"] != "default")
    values = {option["key"]: option["value"] for option in given} | own
    # Dotted keys need no sections, and JSON's strings and numbers are TOML's.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _decode_through_ring(stack: MoeStack, name: str, tokens: int, console: Console) -> Run:
    with attach(name) as ring:
        before = ring.stats()
        start = time.perf_counter()
        with _bar(console, "decode") as progress:
            run = stack.decode(tokens, ring.fetch, progress)
        seconds = time.perf_counter() - start
        after = ring.stats()
    _print_figures(before, after, tokens, seconds, console)
    return run


def _print_figures(
    before: Mapping[str, Any], after: Mapping[str, Any], tokens: int, seconds: float, console: Console
) -> None:
    change = {
        key: after[key] - before[key]
        for key in ("hits", "joins", "promoted", "misses", "wanted_bytes", "device_bytes", "wait_ns")
    }
    asked = sum(change[key] for key in ("hits", "joins", "promoted", "misses"))
    console.print(
        f"{tokens} tokens in {seconds:.1f} s: [bold]{tokens / seconds:.1f} tokens/s[/bold]\n"
        f"hit rate [bold]{change['hits'] / max(asked, 1):.1%}[/bold] ({change['hits']} of {asked} experts)\n"
        f"read {change['device_bytes'] / 1e6:.0f} MB from the device for"
        f" {change['wanted_bytes'] / 1e6:.0f} MB of experts\n"
        f"mean wait {change['wait_ns'] / 1e6 / tokens:.2f} ms a token",
        highlight=False,
    )
    if modes := {mode for mode in after["files"].values() if mode != "direct"}:
        console.print(
            f"[yellow]reads were not direct[/yellow] ({', '.join(sorted(modes))}): the scratch folder's file"
            " system does not allow it, so bytes may have come from the page cache and the wait is not the"
            " drive's"
        )


def _difference(one: Run, other: Run) -> str:
    for what, a, b in (("token", one.tokens, other.tokens), ("expert", one.routes, other.routes)):
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"{what} {index} is {x}, should be {y}"
    wrong = int((one.state.view(np.uint32) != other.state.view(np.uint32)).sum())
    return f"{wrong} of {one.state.size} numbers of the last state"


@contextmanager
def _bar(console: Console, what: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar, as a function of (done, in all)."""
    columns = (TextColumn(f"{what:>6}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
