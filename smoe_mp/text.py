"""Text and tokens: a model's tokenizer behind three calls, and tokens to text as they come.

A tokenizer's decoding is not of single tokens: a character may take several, and a space may belong to the
next.  `Pieces` therefore decodes a window, the tokens of the last piece and what came since, and gives out
what is new once it does not end inside a character.

A model of 256 tokens without a tokenizer speaks bytes (`Bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from smoe_mp.errors import ModelError

INCOMPLETE = "\ufffd"  # what a character's first bytes are decoded to
HELD_MAX = 16  # tokens without a whole character: it is none that becomes whole

Message = dict[str, str]  # "role" and "content", as chat templates take them


class Text(Protocol):
    """How a model's text is made of tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens of text that begins a sequence."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without those that stand for no text."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        """The tokens of a conversation up to where the model is to answer; None: it has no template."""
        ...


class Bytes:
    """Tokens that are the bytes of UTF-8, behind the token that begins a sequence, if there is one."""

    def __init__(self, begin: int | None = None) -> None:
        self._begin = [] if begin is None else [begin]

    def encode(self, text: str) -> list[int]:
        return [*self._begin, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        return None


class Tokens:
    """By a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's own
            raise ModelError(
                f"the model's chat template fails: {error}; --raw continues the text without it"
            ) from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Pieces:
    """Tokens in, text out, no later than it is sure."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._ids: list[int] = []
        self._given = 0  # of those, the tokens whose text has been given out

    def push(self, token: int) -> str:
        """What can be said since this token; often "" ."""
        self._ids.append(token)
        return self._take(final=len(self._ids) - self._given >= HELD_MAX)

    def end(self) -> str:
        """What was held back."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._text.decode(self._ids[: self._given])
        now = self._text.decode(self._ids)
        if not final and (len(now) <= len(before) or now.endswith(INCOMPLETE)):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return now[len(before) :]


class Streamer:
    """What `generate` of transformers calls: `put` with the prompt, then with each token, and `end`.

    `say` receives text as it is made, without tokens in `stops`; `tokens` are all that came, and `clock`
    (seconds) is read at the start, at the first token and at the end.
    """

    def __init__(
        self, text: Text, say: Callable[[str], None], stops: frozenset[int], clock: Callable[[], float]
    ) -> None:
        self._pieces, self._say, self._stops, self._clock = Pieces(text), say, stops, clock
        self.tokens: list[int] = []
        self._prompt_seen = False
        self.began = self.first = self.ended = clock()

    def put(self, value: Any) -> None:
        """`value`: a tensor of token ids, of one sequence."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.flatten().tolist():
            if not self.tokens:
                self.first = self._clock()
            self.tokens.append(token)
            if token not in self._stops and (piece := self._pieces.push(token)):
                self._say(piece)
        self.ended = self._clock()

    def end(self) -> None:
        if piece := self._pieces.end():
            self._say(piece)
