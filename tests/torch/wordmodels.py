"""A tiny random model that reads and writes text: a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import tinymodels
import tokenizers
import torch
import transformers

#: As this family's published models have it: transformers' server looks for those marks in answers.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompted(question: str) -> str:
    """What the template makes of a question."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def write_words(folder: Path) -> Path:
    """A Qwen3-MoE of 2 layers of 16 experts, in float32, in `folder`."""
    tinymodels.write("qwen3_moe", folder, torch.float32, vocab_size=300, eos_token_id=256)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def resident(path: Path, ids: list[int], tokens: int) -> list[int]:
    """The greedy tokens of the model at `path` with all its experts in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    made = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    found: list[int] = made[0, len(ids) :].tolist()
    return found
