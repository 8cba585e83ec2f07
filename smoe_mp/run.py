"""`smoe-mp run`: text from a model whose experts stream.

    resolve MODEL ─► a private system, or --ring ─► transformers' model on it ─► answer, answer, ...

An `Answer` is made token by token by transformers' own `generate`; the text goes out through a streamer, and
what it cost is the difference of the ring's counters.  In a conversation the model's cache of keys and values
is kept from answer to answer, as long as the new prompt begins with the tokens that it holds: the experts of
a prompt are many, and need not be read again.  Where there is no room for a conversation any more, a new one
begins with what the user said last.

Ctrl-C ends the answer at its next token, a second one the program.

torch is imported last and only here and in what is imported here: the extra `smoe-mp[transformers]`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec import Struct

from smoe_mp import models
from smoe_mp.dequant import MAX_THREADS
from smoe_mp.errors import ConfigError, ModelError, SmoeError
from smoe_mp.runtime import human_bytes
from smoe_mp.stats import KINDS
from smoe_mp.text import Bytes, Message, Streamer, Text, Tokens

EXTRA = "pip install 'smoe-mp[transformers]'"


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are chosen; None: as the model's own generation settings say.  `temperature` 0 is greedy."""

    max_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    greedy: bool = False

    def check(self) -> None:
        """Raises ConfigError for values that contradict each other or cannot be."""
        if self.greedy and (self.temperature or self.top_p is not None):
            raise ConfigError(
                "--greedy always takes the likeliest token: no --temperature or --top-p with it"
            )
        if self.temperature is not None and not 0 <= self.temperature <= 100:
            raise ConfigError(f"--temperature {self.temperature:g}: must be from 0 to 100")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p:g}: must be above 0 and at most 1")

    def arguments(self) -> dict[str, Any]:
        """For `generate`."""
        if self.greedy or self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in given.items() if value is not None}
        return {"do_sample": True, **given} if given else {}


class Answer(Struct, frozen=True, kw_only=True):
    """One answer and what it cost.

    `first_s`: seconds to the first token; `tokens_per_s`: of those after it; `hit_rate`: of this process's
    demands; `wait_s`: its time spent waiting for experts; `device_bytes`: read by the ring's workers
    meanwhile, for whomever.  None where nothing was demanded, or no second token made.  `context_full`: it
    ended because the model's context did.
    """

    text: str
    prompt_tokens: int
    tokens: int
    seconds: float
    first_s: float
    tokens_per_s: float | None
    demanded: int
    hit_rate: float | None
    wait_s: float
    device_bytes: int
    interrupted: bool
    context_full: bool

    def line(self) -> str:
        """The figures for people, in one line."""
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.2f} tokens/s after it"
        hits = "no expert demanded" if self.hit_rate is None else f"hit rate {self.hit_rate:.1%}"
        wait_ms = self.wait_s * 1000 / max(self.tokens, 1)
        return (
            f"[{self.tokens} tokens: the first after {self.first_s:.2f} s{rate}; {hits};"
            f" {wait_ms:.2f} ms wait a token; {human_bytes(self.device_bytes)} from the device"
            f"{'; interrupted' if self.interrupted else ''}"
            f"{'; the context is full' if self.context_full else ''}]"
        )


def check_extra() -> None:
    """Raises ConfigError, naming the extra, where torch or transformers is not installed."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {' and '.join(missing)}: {EXTRA}")


class NoRoom(ModelError):
    """The prompt is too long for the model's context, or for the memory of the device."""


class Speaker:
    """A model with its text, giving answers.

    `say` receives the text as it is made.  For the main thread, whose Ctrl-C it takes during an answer.
    """

    def __init__(
        self,
        path: Path,
        ring: str,
        sampling: Sampling,
        say: Callable[[str], None],
        threads: int = 0,
        **where: Any,
    ) -> None:
        """Load the model at `path` with its experts from the running `ring`.  `threads`: torch's, 0: as it
        chooses; `where`: `device`, `gpu_cache_gb` and `look_ahead` of `smoe_mp.transformers.load`."""
        self._torch: Any = importlib.import_module("torch")
        hub: Any = importlib.import_module("transformers")
        streamed: Any = importlib.import_module("smoe_mp.transformers")
        if threads:
            self._torch.set_num_threads(threads)
        hub.utils.logging.set_verbosity_error()
        hub.utils.logging.disable_progress_bar()
        with _named(path, "transformers cannot load it"):
            decoders = min(self._torch.get_num_threads(), MAX_THREADS)
            self._model = streamed.load(path, ring=ring, threads=decoders, **where)
        self._ring = streamed.ring_of(self._model)
        self._path, self._sampling, self._say = path, sampling, say
        config = self._model.config.get_text_config()
        self.text = _text_of(streamed, path, config)
        self._context = int(getattr(config, "max_position_embeddings", 0) or 0)  # 0: it does not say
        self._stops = _stops(self._model.generation_config)
        self._cache: dict[str, Any] = {}  # by the name that generate has for it, which differs by version
        self._held: list[int] = []  # the tokens in the cache
        if sampling.seed is not None:
            self._torch.manual_seed(sampling.seed)

    def answer(self, prompt: Sequence[int]) -> Answer:
        """Continue the tokens `prompt`.  NoRoom where there is none for them, else ModelError."""
        if not prompt:
            raise ModelError("an empty prompt: give the model something to continue")
        if self._context and len(prompt) >= self._context:
            raise NoRoom(
                f"the prompt has {len(prompt)} tokens, and the model's context {self._context}: shorten it"
            )
        said: list[str] = []

        def say(piece: str) -> None:
            said.append(piece)
            self._say(piece)

        streamer = Streamer(self.text, say, self._stops, time.monotonic)
        before = self._ring.stats()
        with _interruptible() as stop, _named(self._path, "it cannot answer", (RuntimeError, ValueError)):
            try:
                self._generate(list(prompt), streamer, stop)
            except self._torch.OutOfMemoryError as error:
                n = len(prompt)
                raise NoRoom(f"{self._path}: no memory for a prompt of {n} tokens: {error}") from error
        return self._counted("".join(said), len(prompt), streamer, before, interrupted=stop.is_set())

    def _generate(self, prompt: list[int], streamer: Streamer, stop: threading.Event) -> None:
        torch = self._torch

        def stopped(ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((ids.shape[0],), stop.is_set(), dtype=torch.bool, device=ids.device)

        room = self._context - len(prompt) if self._context else self._sampling.max_tokens
        ids = torch.tensor([prompt], device=self._model.device)
        goes_on = len(prompt) > len(self._held) and prompt[: len(self._held)] == self._held
        cache, self._cache = (self._cache if goes_on else {}), {}
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(self._sampling.max_tokens, room),
                streamer=streamer,
                stopping_criteria=[stopped],
                pad_token_id=min(self._stops, default=0),
                return_dict_in_generate=True,
                **cache,
                **self._sampling.arguments(),
            )
        self._keep(made)

    def _keep(self, made: Any) -> None:
        """Keep the cache for the next answer, if it says what it holds."""
        name = next((n for n in ("cache", "past_key_values") if made.get(n) is not None), "")
        length = getattr(made.get(name), "get_seq_length", None)
        if length is not None and (n := int(length())) > 0:
            self._cache, self._held = {name: made[name]}, made.sequences[0, :n].tolist()

    def _counted(
        self, text: str, prompt_tokens: int, streamer: Streamer, before: dict[str, Any], *, interrupted: bool
    ) -> Answer:
        after = self._ring.stats()
        own = {key: after["client"][key] - before["client"][key] for key in (*KINDS, "wait_ns")}
        demanded = sum(own[key] for key in KINDS)
        tokens, rest_s = len(streamer.tokens), streamer.ended - streamer.first
        ended = bool(streamer.tokens) and streamer.tokens[-1] in self._stops
        return Answer(
            text=text,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            seconds=streamer.ended - streamer.began,
            first_s=streamer.first - streamer.began,
            tokens_per_s=(tokens - 1) / rest_s if tokens > 1 and rest_s > 0 else None,
            demanded=demanded,
            hit_rate=own["hits"] / demanded if demanded else None,
            wait_s=own["wait_ns"] / 1e9,
            device_bytes=after["device_bytes"] - before["device_bytes"],
            interrupted=interrupted,
            context_full=not ended and 0 < self._context <= prompt_tokens + tokens,
        )


#: What transformers raises over a model's files, and torch over devices and their memory.
_OF_FILES = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@contextlib.contextmanager
def _named(path: Path, what: str, errors: tuple[type[Exception], ...] = _OF_FILES) -> Iterator[None]:
    """Such errors as ModelError, with the path."""
    try:
        yield
    except SmoeError:
        raise
    except errors as error:
        raise ModelError(f"{path}: {what}: {type(error).__name__}: {error}") from error


def _text_of(streamed: Any, path: Path, config: Any) -> Text:
    try:
        with _named(path, "its tokenizer cannot be loaded"):
            return Tokens(streamed.load_tokenizer(path))
    except ModelError as error:
        if config.vocab_size == 256 and error.__cause__ is None:  # there is none, rather than a damaged one
            return Bytes(config.bos_token_id)
        raise


def _stops(settings: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    found = settings.eos_token_id
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one interrupts.  In the main thread, which alone can take signals."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """What was said, and the prompt that it makes: by the model's chat template, or (`raw`, or where there
    is none) as one text that each line continues."""

    def __init__(self, text: Text, *, system: str = "", raw: bool = False) -> None:
        self._text, self._raw, self._system, self._plain = text, raw, system, ""
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if system and self._template() is None:
            raise ConfigError("--system: this model has no chat template, or --raw leaves it out")

    def _template(self) -> list[int] | None:
        return None if self._raw else self._text.chat(self._messages or [{"role": "user", "content": "?"}])

    @property
    def begun(self) -> bool:
        """Whether anything has been said."""
        return self._plain != ""

    def new(self) -> Conversation:
        """One in which nothing has been said."""
        return Conversation(self._text, system=self._system, raw=self._raw)

    def prompt(self, line: str) -> list[int]:
        """The tokens for the model if the user says `line` now."""
        messages, plain = self._with(line)
        tokens = None if self._raw else self._text.chat(messages)
        return self._text.encode(plain) if tokens is None else tokens

    def answered(self, line: str, answer: Answer) -> None:
        """The user has said `line`, and the model `answer`."""
        messages, plain = self._with(line)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._plain = plain + answer.text

    def _with(self, line: str) -> tuple[list[Message], str]:
        """What was said with `line` behind it, as messages and as one text."""
        line = line.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no UTF-8
        plain = f"{self._plain}\n{line}" if self._plain else line
        return [*self._messages, {"role": "user", "content": line}], plain


@contextlib.contextmanager
def served(path: Path, ring: str, options: dict[str, Any]) -> Iterator[str]:
    """The name of the ring to use: `ring`, or that of a private system for the time of the block."""
    if ring:
        yield ring
        return
    launch: Any = importlib.import_module("smoe_mp.launch")
    with launch.private_system(path, **options) as system:
        for warning in system.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        try:
            yield system.name
        finally:
            # Its end is bounded, and a Ctrl-C must not cut it short.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            system.stop()
            signal.signal(signal.SIGINT, before)


def once(speaker: Speaker, conversation: Conversation, prompt: str, *, as_json: bool) -> int:
    """Answer one prompt; returns the exit status, 130 where it was interrupted."""
    answer = speaker.answer(conversation.prompt(prompt))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        print(flush=True)
        print(answer.line(), file=sys.stderr)
    return 130 if answer.interrupted else 0


def talk(speaker: Speaker, conversation: Conversation) -> None:
    """Answer line by line until the input ends."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # editing and history for input()
    prompt = "> " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print(flush=True)
            return
        if not line.strip():
            continue
        conversation = _turn(speaker, conversation, line)


def _turn(speaker: Speaker, conversation: Conversation, line: str) -> Conversation:
    """Answer a line; the conversation to go on with.  It is a new one where the old has no room for the line;
    a line that has none in a new one either is left out."""
    tries = [conversation, conversation.new()] if conversation.begun else [conversation]
    for said in tries:
        try:
            answer = speaker.answer(said.prompt(line))
        except NoRoom as error:
            then = "the line is left out" if said is tries[-1] else "again in a new conversation"
            print(f"[{' '.join(str(error).split())}; {then}]", file=sys.stderr, flush=True)
            continue
        said.answered(line, answer)
        print(flush=True)
        print(answer.line(), file=sys.stderr, flush=True)
        return said
    return conversation


def printer() -> Callable[[str], None]:
    """Writes text at once.  On a terminal without what would command it: a model may say anything."""
    plain = not sys.stdout.isatty()

    def say(piece: str) -> None:
        shown = piece if plain else "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece)
        sys.stdout.write(shown.encode(errors="replace").decode())
        sys.stdout.flush()

    return say


def speak(
    model: str,
    prompt: str | None,
    sampling: Sampling,
    *,
    ring: str = "",
    threads: int = 0,
    options: dict[str, Any] | None = None,
    system: str = "",
    raw: bool = False,
    as_json: bool = False,
    device: str = "cpu",
    gpu_cache_gb: float | None = None,
    look_ahead: int = 0,
) -> int:
    """What `smoe-mp run` does; returns the exit status.  `options`: of the private system."""
    if as_json and prompt is None:
        raise ConfigError("--json reports one answer: it needs -p")
    sampling.check()
    check_extra()
    path = models.resolve(model)
    with served(path, ring, options or {}) as name:
        say = (lambda piece: None) if as_json else printer()
        where = {"device": device, "gpu_cache_gb": gpu_cache_gb, "look_ahead": look_ahead}
        speaker = Speaker(path, name, sampling, say, threads, **where)
        conversation = Conversation(speaker.text, system=system, raw=raw)
        if prompt is not None:
            return once(speaker, conversation, prompt, as_json=as_json)
        talk(speaker, conversation)
    return 0
