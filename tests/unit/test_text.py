"""Tokens to text as they come, conversations, and what sampling is asked for; no torch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from smoe_mp.errors import ConfigError
from smoe_mp.run import Answer, Conversation, NoRoom, Sampling, talk
from smoe_mp.text import HELD_MAX, Bytes, Message, Pieces, Streamer

WORDS = "plain, Ärger, 模型, \U0001f600 and e\u0301"


class Words:
    """A tokenizer of words: a space goes before each but the first, as sentencepiece does it."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = list(vocabulary)

    def encode(self, text: str) -> list[int]:
        return [self.vocabulary.index(word) for word in text.split(" ")]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.vocabulary[i] for i in ids if self.vocabulary[i])

    def chat(self, messages: Sequence[Message]) -> list[int] | None:
        return self.encode(" ".join(f"{m['role']} {m['content']}" for m in messages))


class Tensor:
    """As much of a tensor as a streamer uses."""

    def __init__(self, *values: int) -> None:
        self._values = values

    def flatten(self) -> Tensor:
        return self

    def tolist(self) -> list[int]:
        return list(self._values)


def pieces(text: Bytes | Words, ids: Sequence[int]) -> list[str]:
    made = Pieces(text)
    return [*(made.push(i) for i in ids), made.end()]


def test_a_piece_never_ends_inside_a_character() -> None:
    said = pieces(Bytes(), WORDS.encode())
    assert "".join(said) == WORDS
    assert [piece for piece in said if piece] == list(WORDS)


def test_a_space_goes_with_the_word_behind_it() -> None:
    text = Words(["a", "b", "", "c"])
    assert pieces(text, [0, 1, 2, 3]) == ["a", " b", "", " c", ""]
    assert "".join(pieces(text, [0] * 100)) == text.decode([0] * 100)


def test_what_never_becomes_a_character_is_not_held_for_ever() -> None:
    said = pieces(Bytes(), b"a" + b"\xff" * 40 + b"b")
    assert "".join(said) == "a" + "\ufffd" * 40 + "b"
    assert said[HELD_MAX] == "\ufffd" * HELD_MAX


def test_a_character_that_is_cut_is_said_at_the_end() -> None:
    assert pieces(Bytes(), "ü".encode()[:1]) == ["", "\ufffd"]


def test_a_streamer_leaves_out_the_prompt_and_the_stop() -> None:
    said: list[str] = []
    clock = iter(range(100))
    streamer = Streamer(Bytes(), said.append, frozenset([0]), lambda: float(next(clock)))
    streamer.put(Tensor(*b"prompt"))
    for token in (*"hü".encode(), 0):
        streamer.put(Tensor(token))
    streamer.end()
    assert said == ["h", "ü"]
    assert streamer.tokens == [*"hü".encode(), 0]
    assert (streamer.began, streamer.first) == (0.0, 1.0)
    assert streamer.ended > streamer.first


def answer(text: str, **more: float | None) -> Answer:
    facts: dict[str, float | None] = {"tokens_per_s": 2.5, "hit_rate": 0.75, **more}
    return Answer(
        text=text, prompt_tokens=3, tokens=4, seconds=2.0, first_s=0.8, demanded=8, wait_s=0.1,
        device_bytes=3 << 20, interrupted=False, context_full=False, **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_figures_in_a_line() -> None:
    assert answer("x").line() == (
        "[4 tokens: the first after 0.80 s, 2.50 tokens/s after it; hit rate 75.0%; 25.00 ms wait a token;"
        " 3 MiB from the device]"
    )
    assert "s; no expert demanded;" in answer("", tokens_per_s=None, hit_rate=None).line()


def test_a_conversation_by_its_template() -> None:
    text = Words(["system", "user", "assistant", "be", "hi", "ho"])
    talk = Conversation(text, system="be")
    assert text.decode(talk.prompt("hi")) == "system be user hi"
    talk.answered("hi", answer("ho"))
    assert text.decode(talk.prompt("hi")) == "system be user hi assistant ho user hi"
    assert text.decode(talk.new().prompt("ho")) == "system be user ho"


def test_a_conversation_without_template_is_one_text() -> None:
    for one in (Conversation(Bytes()), Conversation(Words(["a"]), raw=True)):
        if one.__dict__["_raw"]:
            assert one.prompt("a") == [0]
            continue
        assert bytes(one.prompt("Once")) == b"Once"
        one.answered("Once", answer(" upon"))
        assert bytes(one.prompt("a time")) == b"Once upon\na time"


class Narrow:
    """As much of a speaker as a conversation uses: a context of so many bytes, answered by as many dots."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.prompts: list[bytes] = []

    def answer(self, prompt: Sequence[int]) -> Answer:
        if len(prompt) >= self.context:
            raise NoRoom(f"the prompt has {len(prompt)} tokens")
        self.prompts.append(bytes(prompt))
        return answer("." * (self.context - len(prompt)))


def test_a_full_context_ends_the_conversation_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker: Any = Narrow(8)
    monkeypatch.setattr("sys.stdin", io.StringIO("much too long\nOnce\nmuch too long\ntwice\n"))
    talk(speaker, Conversation(Bytes()))
    assert speaker.prompts == [b"Once", b"twice"]
    figures = answer("").line()
    assert capsys.readouterr().err.splitlines() == [
        "[the prompt has 13 tokens; the line is left out]",
        figures,
        "[the prompt has 22 tokens; again in a new conversation]",
        "[the prompt has 13 tokens; the line is left out]",
        "[the prompt has 14 tokens; again in a new conversation]",
        figures,
    ]


def test_a_system_message_needs_a_template() -> None:
    with pytest.raises(ConfigError, match="--system: this model has no chat template"):
        Conversation(Bytes(), system="be brief")
    with pytest.raises(ConfigError, match="--raw leaves it out"):
        Conversation(Words(["user", "?"]), system="be brief", raw=True)


def test_bytes_of_the_command_line_that_are_no_text() -> None:
    assert bytes(Conversation(Bytes()).prompt("a\udcff")) == "a\ufffd".encode()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(greedy=True, temperature=0.5), "--greedy always takes"),
        (Sampling(greedy=True, top_p=0.5), "--greedy always takes"),
        (Sampling(temperature=-1), "--temperature -1: must be from 0 to 100"),
        (Sampling(temperature=float("nan")), "--temperature nan"),
        (Sampling(top_p=0), "--top-p 0: must be above 0"),
        (Sampling(top_p=1.5), "--top-p 1.5"),
    ],
)
def test_sampling_that_cannot_be(sampling: Sampling, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampling.check()


def test_sampling_for_generate() -> None:
    for sampling in (Sampling(greedy=True), Sampling(temperature=0), Sampling(greedy=True, temperature=0)):
        sampling.check()
        assert sampling.arguments()["do_sample"] is False
    assert Sampling().arguments() == {}
    assert Sampling(temperature=0.7).arguments() == {"do_sample": True, "temperature": 0.7}
    assert Sampling(top_p=1).arguments() == {"do_sample": True, "top_p": 1}
