"""A tokenizer for GGUF files of tests."""

from __future__ import annotations

from typing import Any


def add_tokenizer(writer: Any, size: int) -> None:
    """To a writer of gguf-py: a byte-level tokenizer of so many tokens, with one merge."""
    tokens = [f"<{i}>" for i in range(size)]
    for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz"):
        tokens[i + 10] = letter
    tokens[40] = "ab"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_pad_token_id(0)
