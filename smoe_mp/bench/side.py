"""One side of `bench transformers`: a program that loads a model, gives two answers, and says what it took.

    python -c TEXT SPEC       TEXT: of this file; SPEC: JSON, see `main`

It needs smoe-mp only where it is smoe-mp's side, so that another interpreter can run it.  After each
phase it prints a line of JSON and waits for one on stdin: its parent reads the machine's counters meanwhile,
and no clock runs.

    imported ─► loaded ─► prefill ─► decode ─► (pause) rested ─► prefill ─► decode
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: What a client counts of its demands.
DEMANDS = ("hits", "joins", "promoted", "misses")

#: Called with each token when it is there.
Said = Callable[[int], None]


class _Streamer:
    """What generate gives its tokens to: first the prompt, then one by one."""

    def __init__(self, said: Said) -> None:
        self._said, self._prompted = said, False

    def put(self, value: Any) -> None:
        if self._prompted:
            self._said(int(value.reshape(-1)[-1]))
        self._prompted = True

    def end(self) -> None:
        pass


class Transformers:
    """transformers, with the model resident or mapped (`system` None) or its experts from a ring."""

    def __init__(self, threads: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        hub: Any = importlib.import_module("transformers")
        hub.utils.logging.set_verbosity_error()
        hub.utils.logging.disable_progress_bar()
        self._auto = hub.AutoModelForCausalLM
        self._model: Any = None
        self._ring: Any = None

    def load(self, path: str, system: dict[str, Any] | None) -> None:
        dtype = self._torch.bfloat16
        if system is None:
            self._model = self._auto.from_pretrained(path, dtype=dtype, experts_implementation="eager")
        else:
            streamed: Any = importlib.import_module("smoe_mp.transformers")
            self._model = streamed.load(path, system=system, dtype=dtype)
            self._ring = streamed.ring_of(self._model)

    def answer(self, prompt: Sequence[int], tokens: int, limit_s: float, said: Said) -> None:
        ids = self._torch.tensor([prompt])

        with self._torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=_Streamer(said),
                max_time=limit_s,
            )

    def counters(self) -> dict[str, int]:
        """What this process demanded of the ring so far."""
        if self._ring is None:
            return {}
        own = self._ring.stats()["client"]
        return {key: own[key] for key in (*DEMANDS, "wait_ns")}


class Llama:
    """llama.cpp by llama-cpp-python, the file mapped.  By the functions of its C API: those of Python want a
    tokenizer."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._np: Any = importlib.import_module("numpy")
        self._c: Any = importlib.import_module("llama_cpp")
        self._log = self._c.llama_log_callback(lambda *_: None)
        self._c.llama_log_set(self._log, None)
        self._c.llama_backend_init()
        self._context: Any = None
        self._vocabulary = 0

    def load(self, path: str, system: dict[str, Any] | None) -> None:
        del system
        wanted = self._c.llama_model_default_params()
        wanted.use_mmap = True
        model = self._c.llama_model_load_from_file(path.encode(), wanted)
        if not model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        context = self._c.llama_context_default_params()
        context.n_ctx = context.n_batch = 2048
        context.n_threads = context.n_threads_batch = self._threads
        self._context = self._c.llama_init_from_model(model, context)
        self._vocabulary = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(model))

    def answer(self, prompt: Sequence[int], tokens: int, limit_s: float, said: Said) -> None:
        deadline = time.monotonic() + limit_s
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        ids = list(prompt)
        for _ in range(tokens):
            held = (ctypes.c_int32 * len(ids))(*ids)
            if self._c.llama_decode(self._context, self._c.llama_batch_get_one(held, len(ids))):
                raise SystemExit("llama_decode failed")
            logits = self._c.llama_get_logits_ith(self._context, -1)
            ids = [int(self._np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())]
            said(ids[0])
            if time.monotonic() > deadline:
                return

    def counters(self) -> dict[str, int]:
        return {}


class Teller:
    """The lines to the parent.  What libraries print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def tell(self, phase: str, **facts: Any) -> None:
        print(json.dumps({"phase": phase, **facts}), file=self._out, flush=True)
        sys.stdin.readline()


class Answer:
    """The clock of one answer; the first token ends the prefill."""

    def __init__(self, engine: Transformers | Llama, teller: Teller) -> None:
        self._engine, self._teller = engine, teller
        self.tokens: list[int] = []
        self._began = self._last = time.perf_counter()

    def said(self, token: int) -> None:
        self._last = time.perf_counter()
        self.tokens.append(token)
        if len(self.tokens) == 1:
            self._teller.tell("prefill", s=self._last - self._began, **self._engine.counters())
            self._began = self._last = time.perf_counter()

    def decoded_s(self) -> float:
        """From the first token to the last."""
        return self._last - self._began


def main(spec: dict[str, Any]) -> None:
    """`engine`: "transformers" or "llama"; `path` of the model; `system`: options of a private system, or
    null; `threads`; `prompts`: two lists of ids; `tokens` and `limit_s`: of each answer; `pause_s`: between
    them."""
    teller = Teller()
    engine = Llama(spec["threads"]) if spec["engine"] == "llama" else Transformers(spec["threads"])
    teller.tell("imported")
    began = time.perf_counter()
    engine.load(spec["path"], spec["system"])
    teller.tell("loaded", s=time.perf_counter() - began, **engine.counters())
    for number, prompt in enumerate(spec["prompts"]):
        if number:
            time.sleep(spec["pause_s"])
            teller.tell("rested", **engine.counters())
        answer = Answer(engine, teller)
        engine.answer(prompt, spec["tokens"], spec["limit_s"], answer.said)
        teller.tell("decode", s=answer.decoded_s(), tokens=answer.tokens, **engine.counters())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
