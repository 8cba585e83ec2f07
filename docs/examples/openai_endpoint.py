"""An OpenAI-compatible endpoint: transformers' own server, with a model whose experts stream.

    pip install 'smoe-mp[transformers]' 'transformers[serving]'
    python openai_endpoint.py Qwen3-30B-A3B/ --port 8000
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \
        -d '{"model": "Qwen3-30B-A3B/", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

Everything but the loading is `transformers serve`: chat, completions and responses, streamed or not, with
the model's chat template.  Its manager of models is replaced by one that has this model alone, under the name
given here.
Written for transformers 5.24; the classes are not part of its stable interface.
"""

import argparse
import contextlib
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

import smoe_mp.transformers
from smoe_mp.launch import private_system


def manager_of(path: str, ring: str) -> type[Any]:
    """A ModelManager that has one model, on the ring."""

    class StreamedModels(model_manager.ModelManager):  # type: ignore[misc]
        def _load_processor(self, *_: Any, **__: Any) -> Any:
            return smoe_mp.transformers.load_tokenizer(path)

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return smoe_mp.transformers.load(path, ring=ring)

    return StreamedModels


def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible endpoint with streamed experts.")
    parser.add_argument("model")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=0, help="of the ring; 0: as memory allows")
    options = parser.parse_args(argv)
    # The server ends its requests at Ctrl-C, and then interrupts once more.
    with (
        private_system(options.model, slots=options.slots) as system,
        contextlib.suppress(KeyboardInterrupt),
    ):
        model_manager.ModelManager = manager_of(options.model, system.name)
        Serve(force_model=options.model, device="cpu", host=options.host, port=options.port)


if __name__ == "__main__":
    main()
