"""Generate with Hugging Face transformers from a model whose experts stay on disk.

    pip install 'smoe-mp[transformers]'
    python generate_transformers.py Qwen3-30B-A3B/ "Once upon a time"

MODEL is a safetensors folder, a hub id in the local cache, a GGUF file, or a .smoe vault with its scout file.
The ring is as large as memory allows, and ends with this program.
"""

import argparse

from transformers import TextStreamer

import smoe_mp.transformers


def main(argv: list[str] | None = None) -> str:
    """Print the text as it is made; returns it."""
    parser = argparse.ArgumentParser(description="Generate from a model whose experts stay on disk.")
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=0, help="of the ring; 0: as memory allows")
    options = parser.parse_args(argv)

    model = smoe_mp.transformers.load(options.model, system={"slots": options.slots})
    tokenizer = smoe_mp.transformers.load_tokenizer(options.model)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    made = model.generate(
        **inputs,
        max_new_tokens=options.tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )

    stats = smoe_mp.transformers.ring_of(model).stats()
    print(f"\nhit rate {stats['hit_rate']:.1%}, {stats['device_bytes'] / 1e6:.1f} MB from the device")
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
