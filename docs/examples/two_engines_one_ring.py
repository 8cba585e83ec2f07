"""Two processes that generate at once from one ring: each expert is read once and is in memory once.

    pip install 'smoe-mp[transformers]'
    python two_engines_one_ring.py Qwen3-30B-A3B/ "Once upon a time"

Instead of the private system, `smoe-mp up MODEL` in another terminal and its ring's name do as well, and then
engines may come and go: what one had read, the next one finds.
"""

import argparse
import multiprocessing
from typing import Any

from smoe_mp.launch import private_system


def generate(model: str, ring: str, prompt: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """In a process of its own: an engine on the ring; returns its text and its counters."""
    import smoe_mp.transformers  # noqa: PLC0415  only the engines need torch

    engine = smoe_mp.transformers.load(model, ring=ring)
    tokenizer = smoe_mp.transformers.load_tokenizer(model)
    inputs = tokenizer(prompt, return_tensors="pt")
    made = engine.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    counters = smoe_mp.transformers.ring_of(engine).stats()["client"]
    return tokenizer.decode(made[0], skip_special_tokens=True), counters


def main(argv: list[str] | None = None) -> list[str]:
    """Print each engine's text and how many of its demands were in the ring already; returns the texts."""
    parser = argparse.ArgumentParser(description="Two engines on one ring.")
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--slots", type=int, default=0, help="of the ring; 0: as memory allows")
    options = parser.parse_args(argv)

    # A forked process could not use its parent's threads or ring: engines are started afresh.
    processes = multiprocessing.get_context("spawn")
    with private_system(options.model, slots=options.slots) as system, processes.Pool(2) as pool:
        job = (options.model, system.name, options.prompt, options.tokens)
        answers = pool.starmap(generate, [job, job], chunksize=1)
    for text, counters in answers:
        asked = sum(counters[key] for key in ("hits", "joins", "promoted", "misses"))
        print(f"{text}\n[{asked} experts demanded, {asked - counters['misses']} of them read already]\n")
    return [text for text, _ in answers]


if __name__ == "__main__":
    main()
