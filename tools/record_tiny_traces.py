#!/usr/bin/env python3
"""Record the traces that come with the small model: 2,000 tokens in each of its corpus' four domains.

    python tools/record_tiny_traces.py --corpus corpus --out smoe_mp/tiny/traces

A trace has four requests of 500 tokens.  A request begins with 250 bytes of a held-out document, each its own
token, and goes on with 250 that the model draws.  The engine is smoe_mp.engine on a ring of half the
experts; the recorder is the one of `smoe-mp trace record`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console

import smoe_mp
from smoe_mp import models
from smoe_mp.demo import System
from smoe_mp.engine import Cache, Engine
from smoe_mp.ring import Ring
from smoe_mp.trace import Recorder, Trace, write_trace

DOMAINS = ("library", "tests", "documentation", "headers")
REQUESTS, PROMPT, DRAWN = 4, 250, 250
TEMPERATURE = 0.7
SEED = 20261130


def beginnings(text: bytes) -> list[bytes]:
    """The first bytes of documents that are long enough, spread over the text."""
    documents = [d for d in text.split(b"\0") if len(d) > 4 * PROMPT]
    step = len(documents) / REQUESTS
    return [documents[int(i * step)][:PROMPT] for i in range(REQUESTS)]


def serve(engine: Engine, prompt: bytes, seed: int) -> None:
    """One request, token by token."""
    cache, draw = Cache(engine.config), np.random.default_rng(seed)
    logits = None
    for token in prompt:
        logits = engine.forward([token], cache)[-1]
    for _ in range(DRAWN):
        assert logits is not None
        p = np.exp((logits - logits.max()).astype(np.float64) / TEMPERATURE)
        logits = engine.forward([int(draw.choice(256, p=p / p.sum()))], cache)[-1]


def record(ring: Ring, text: bytes, note: str) -> Trace:
    engine, done = Engine.open(models.TINY, ring), threading.Event()
    with Recorder(ring.name) as recorder:

        def poll() -> None:
            while not done.is_set():
                recorder.poll()
                time.sleep(0.01)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            for number, prompt in enumerate(beginnings(text)):
                with ring.busy():
                    serve(engine, prompt, SEED + number)
        finally:
            done.set()
            thread.join()
    trace = recorder.trace
    if trace.lost:
        raise SystemExit(f"{note}: {trace.lost} cells were lost")
    return trace


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the traces that come with the small model.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        text = (args.corpus / f"held-{domain}.bin").read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "up.toml"
            config.write_text(
                f'name = "trace-{domain[:4]}"\nvault.path = "{models.TINY / "tiny.smoe"}"\nring.slots = 256\n'
                f'workers.count = 4\nprewarm.histogram = "{folder}/popularity.bin"\n'
            )
            command = [sys.executable, "-m", "smoe_mp", "up", str(config)]
            with System(command, Console()), smoe_mp.attach(f"trace-{domain[:4]}") as ring:
                trace = record(ring, text, domain)
        path = args.out / f"{domain}.trace"
        write_trace(trace, path)
        print(f"{path}: {len(trace)} records, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
