"""`smoe-mp run`: the resident model's tokens, conversations, Ctrl-C, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs torch")
transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("jinja2", reason="needs jinja2, for chat templates")

import tinymodels  # noqa: E402
from ggufmodels import add_tokenizer  # noqa: E402
from support import LIMIT_S, SHM, shm_of  # noqa: E402
from trained import write_trained  # noqa: E402
from wordmodels import TEMPLATE, prompted, resident, write_words  # noqa: E402

from smoe_mp import cli, models  # noqa: E402
from smoe_mp import run as running  # noqa: E402
from smoe_mp.bench.randommoe import write_gguf  # noqa: E402
from smoe_mp.launch import PrivateSystem, private_system  # noqa: E402
from smoe_mp.run import Conversation, Sampling, Speaker  # noqa: E402


def own(kind: str) -> str:
    """The name of a model's folder, and so of its private rings, that no other process uses."""
    return f"{kind}{os.getpid()}"


def rings_of(kind: str) -> list[str]:
    """What lies in shared memory of such a model's rings."""
    return [p.name for p in SHM.glob(f"smoe.{own(kind)}-*")]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where this module's models and control sockets are, with a short path."""
    with (
        tempfile.TemporaryDirectory(prefix="smoe-", dir="/tmp") as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SMOE_RUNTIME_DIR", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Path(path)
    assert rings_of("words") == []


@pytest.fixture(scope="module")
def bytewise(folder: Path) -> Path:
    """A random Qwen3-MoE of 256 tokens, without a tokenizer, that never stops by itself."""
    return tinymodels.write(
        "qwen3_moe", folder / own("bytes"), torch.float32, vocab_size=256, max_position_embeddings=100_000
    )


@pytest.fixture(scope="module")
def words(folder: Path) -> Path:
    """Another with a byte-level tokenizer and a chat template."""
    return write_words(folder / own("words"))


@pytest.fixture(scope="module")
def system(words: Path) -> Iterator[PrivateSystem]:
    with private_system(words, slots=20, workers=2) as running:
        yield running
    assert shm_of(running.name) == []


def speaker(path: Path, system: PrivateSystem, said: list[str], tokens: int = 12) -> Speaker:
    return Speaker(path, system.name, Sampling(max_tokens=tokens, greedy=True), said.append, threads=1)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run `smoe-mp run ARGUMENTS` in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["smoe-mp", "run", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_an_answer_is_the_resident_models(words: Path, system: PrivateSystem) -> None:
    said: list[str] = []
    one = speaker(words, system, said)
    prompt = Conversation(one.text).prompt("Why?")
    assert one.text.decode(prompt) == prompted("Why?")
    answer = one.answer(prompt)
    tokens = resident(words, prompt, 12)
    assert answer.text == "".join(said) == one.text.decode(tokens)
    assert (answer.prompt_tokens, answer.tokens) == (len(prompt), len(tokens))
    assert answer.demanded > 0
    assert answer.device_bytes > 0
    assert answer.hit_rate is not None
    assert answer.tokens_per_s is not None
    assert not answer.interrupted


def test_the_second_answer_goes_on_from_the_firsts_cache(
    words: Path, system: PrivateSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = speaker(words, system, [])
    first = one.text.encode("Once upon")
    held: list[int] = []
    generate = type(one._model).generate

    def watch(self: Any, **arguments: Any) -> Any:
        cache = arguments.get("cache", arguments.get("past_key_values"))
        held.append(0 if cache is None else cache.get_seq_length())
        return generate(self, **arguments)

    monkeypatch.setattr(type(one._model), "generate", watch)
    one.answer(first)
    second = [*first, *resident(words, first, 12), *one.text.encode("\na time")]
    assert one.text.decode(resident(words, second, 12)) == one.answer(second).text
    other = one.text.encode("Another")
    assert one.text.decode(resident(words, other, 12)) == one.answer(other).text
    assert held == [0, len(first) + 11, 0]


def test_one_answer_on_the_command_line(
    words: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-p", "Why?", "--greedy", "--max-tokens", "8", "--threads", "1", "--workers", "2"]
    assert command(monkeypatch, words, *arguments, "--ring-slots", "20") == 0
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert re.fullmatch(
        r"\[8 tokens: the first after [\d.]+ s, [\d.]+ tokens/s after it; hit rate [\d.]+%; [\d.]+ ms wait a"
        r" token; .* from the device\]",
        line,
    )
    assert command(monkeypatch, words, *arguments, "--memory", "1", "--json") == 0
    shown, err = capfd.readouterr()
    assert err == ""
    report = json.loads(shown)
    assert report["text"] + "\n" == out
    assert (report["tokens"], report["interrupted"]) == (8, False)


def test_a_running_ring_a_seed_and_raw_text(
    words: Path, system: PrivateSystem, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        arguments = (
            "-p",
            "a",
            "--ring",
            system.name,
            "--raw",
            "--seed",
            seed,
            "--temperature",
            "1.5",
            "--json",
        )
        assert command(monkeypatch, words, *arguments, "--max-tokens", "8", "--threads", "1") == 0
        shown.append(json.loads(capfd.readouterr().out))
    assert [one["prompt_tokens"] for one in shown] == [1, 1, 1]
    assert shown[0]["text"] == shown[1]["text"] != shown[2]["text"]


# --- models of every form ----------------------------------------------------------------------------------


def report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str | Path
) -> dict[str, Any]:
    """What `smoe-mp run ARGUMENTS --json` reports of a greedy answer from a private system."""
    capfd.readouterr()
    assert command(monkeypatch, *arguments, "--json", "--greedy", "--threads", "1", "--workers", "2") == 0
    out, err = capfd.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    assert found["demanded"] > 0
    return found


def test_a_gguf_file_whole_or_any_part_or_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="needs gguf")
    pytest.importorskip("accelerate", reason="needs accelerate, for transformers' own loading of GGUF")
    model = tinymodels.build("qwen3_moe", torch.float32, hidden_size=64, moe_intermediate_size=96)

    def chatty(writer: Any, size: int) -> None:
        add_tokenizer(writer, size)
        writer.add_chat_template(TEMPLATE)

    kinds: dict[str, Any] = {"experts": "Q8_0", "dense": "F32", "tokenizer": chatty}
    whole = write_gguf(folder / "whole.gguf", model, **kinds)
    (folder / "parts").mkdir()
    write_gguf(folder / "parts/parts.gguf", model, **kinds, split=12)
    last = max((folder / "parts").iterdir())
    assert last.name == "parts-00003-of-00003.gguf"
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=whole.name,
        config=transformers.AutoConfig.from_pretrained(
            folder, gguf_file=whole.name, moe_intermediate_size=96
        ),
        dtype=torch.bfloat16,
        experts_implementation="eager",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=whole.name)
    ids = tokenizer(prompted("Why?"), return_tensors="pt")["input_ids"]
    made = reference.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    expected = tokenizer.decode(made)
    for path in (whole, last, folder / "parts"):
        answer = report(monkeypatch, capfd, path, "-p", "Why?", "--ring-slots", "20", "--max-tokens", "8")
        assert (answer["text"], answer["prompt_tokens"]) == (expected, ids.shape[1])


def test_a_vault_without_a_tokenizer_speaks_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The trained model: its text is Python, the resident model's, and begins a document."""
    prompt = 'import os\n\n\ndef read_lines(path):\n    """'
    (folder / "trained").mkdir()
    write_trained(folder / "trained")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "trained", dtype=torch.bfloat16, experts_implementation="eager"
    )
    ids = torch.tensor([[0, *prompt.encode()]])
    made = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    # Copied, since a system leaves the popularity beside its vault.
    for name in ("tiny.smoe", "tiny.scout.safetensors", "config.json"):
        shutil.copy(models.TINY / name, folder)
    arguments = ("-p", prompt, "--ring-slots", "256", "--max-tokens", "24")
    answer = report(monkeypatch, capfd, folder / "tiny.smoe", *arguments)
    assert answer["text"].encode() == bytes(made.tolist())
    assert answer["prompt_tokens"] == 1 + len(prompt)
    assert answer["text"].isascii()


def test_a_hub_id_in_the_local_cache(
    words: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As huggingface_hub lays it out: names that are links to blobs."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = folder / "hub" / "models--some--words"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    for number, path in enumerate(sorted(words.iterdir())):
        shutil.copy(path, repository / f"blobs/{number:064x}")
        (repository / f"snapshots/{commit}" / path.name).symlink_to(f"../../blobs/{number:064x}")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ("-p", "Why?", "--ring-slots", "20", "--max-tokens", "8")
    assert (
        report(monkeypatch, capfd, "some/words", *arguments)["text"]
        == report(monkeypatch, capfd, words, *arguments)["text"]
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "no-hub"))
    assert command(monkeypatch, "some/words", "-p", "Why?") == 3
    assert f"not in the local cache {folder / 'no-hub'}; fetch it first" in capfd.readouterr().err


def test_an_answer_that_the_context_ends_says_so(words: Path, system: PrivateSystem) -> None:
    one = Speaker(words, system.name, Sampling(max_tokens=20, greedy=True), lambda piece: None, threads=1)
    one._stops = set()
    answers = [one.answer([65] * length) for length in (200, 250)]
    assert [(a.tokens, a.context_full) for a in answers] == [(20, False), (6, True)]
    assert answers[1].line().endswith("; the context is full]")


# --- Ctrl-C ------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_answer(words: Path, system: PrivateSystem) -> None:
    keys: list[int] = []

    def press(piece: str) -> None:
        if keys:
            os.kill(os.getpid(), keys.pop())

    one = Speaker(words, system.name, Sampling(max_tokens=200, greedy=True), press, threads=1)
    before = signal.getsignal(signal.SIGINT)
    for prompt in ("Once", "Twice"):
        keys.append(signal.SIGINT)
        answer = one.answer(one.text.encode(prompt))
        assert answer.interrupted
        assert answer.tokens < 200
        assert "; interrupted]" in answer.line()
        assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts(words: Path, system: PrivateSystem) -> None:
    def twice(piece: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    one = Speaker(words, system.name, Sampling(max_tokens=50, greedy=True), twice, threads=1)
    with pytest.raises(KeyboardInterrupt):
        one.answer(one.text.encode("Once"))


class Terminal:
    """`smoe-mp run` on a terminal of its own, in the foreground there."""

    def __init__(self, *arguments: str | Path) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ["PYTHONFAULTHANDLER"] = "1"  # SIGABRT has it say where it hangs
            os.execv(sys.executable, [sys.executable, "-m", "smoe_mp", "run", *map(str, arguments)])
        self.pid, self.shown, self._seen = pid, "", 0

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, pattern: str) -> None:
        """Read until what was shown since the last call has the pattern."""
        while (found := re.search(pattern, self.shown[self._seen :])) is None:
            assert self._read(), f"never shown: {pattern}: {self.shown!r}"
        self._seen += found.end()

    def end(self, keys: str) -> int:
        """Type `keys` until the program ends; its exit status.  Once may not do: readline has no eye for a
        signal that comes between its prompt and its wait."""
        deadline = time.monotonic() + LIMIT_S
        self.type(keys)
        while time.monotonic() < deadline:
            if not select.select([self._fd], [], [], 1.0)[0]:
                self.type(keys)
            elif not self._read():
                # Only then: what closes a terminal sends SIGHUP to whoever has not quite ended.
                status = os.waitpid(self.pid, 0)[1]
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGABRT)
        while self._read():
            pass
        raise AssertionError(f"did not end in {LIMIT_S} s: {self.shown!r}")

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], LIMIT_S)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"nothing more shown in {LIMIT_S} s: {self.shown!r}")
        try:
            chunk = os.read(self._fd, 4096)
        except OSError:  # EIO: nobody has the terminal any more
            return False
        self.shown += chunk.decode(errors="replace")
        return chunk != b""


def test_a_conversation_on_a_terminal(bytewise: Path) -> None:
    terminal = Terminal(bytewise, "--max-tokens", "50000", "--ring-slots", "20", "--workers", "2", "--greedy")
    terminal.until("> ")
    terminal.type("Once upon a time\n")
    terminal.until("a time\r\n[^\r]")  # the first of the answer
    terminal.type("\x03")
    terminal.until(r"\[\d+ tokens: .*; interrupted\]\r\n> ")
    terminal.type("and then\n")
    terminal.until("and then\r\n[^\r]")
    terminal.type("\x03")
    terminal.until(r"\[\d+ tokens: .*; interrupted\]\r\n> ")
    assert terminal.end("\x04") == 0
    assert "Traceback" not in terminal.shown
    assert not re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", terminal.shown.replace("\x1b[?2004", ""))
    assert rings_of("bytes") == []


def test_ctrl_c_without_an_answer_ends_the_program(bytewise: Path) -> None:
    terminal = Terminal(bytewise, "--ring-slots", "20", "--workers", "2")
    terminal.until("> ")
    assert terminal.end("\x03") == 130
    assert "Traceback" not in terminal.shown
    assert rings_of("bytes") == []


@pytest.mark.parametrize(
    ("arguments", "status", "words_said"),
    [
        (("-p", "a", "--ring", "nobody"), 4, "nobody"),
        (("-p", "a", "--ring", "r", "--memory", "9"), 2, "--memory is for a system of its own"),
        (("-p", "a", "--ring-slots", "9", "--memory", "9"), 2, "give one"),
        (("-p", "a", "--ring-slots", "2"), 2, "no client fits"),
        (("-p", "a", "--device", "tpu"), 8, "device='tpu'"),
        (("-p", "a", "--gpu-cache-gb", "4"), 8, "for device='cuda'"),
        (("-p", "a", "--top-p", "2"), 2, "--top-p 2: must be"),
        (("--json",), 2, "--json reports one answer"),
        (("-p", ""), 1, "an empty prompt"),
        (("-p", "a" * 300, "--raw"), 1, "the prompt has 300 tokens, and the model's context 256"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    *,
    words: Path,
    system: PrivateSystem,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    words_said: str,
) -> None:
    if status == 1:
        arguments += ("--raw", "--ring", system.name)
    found = command(monkeypatch, words, *arguments)
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("smoe-mp: error: ")
    assert words_said in line
    assert (found == status) if status != 1 else (found != 0)


@pytest.mark.parametrize("option", [("--seed", str(2**64)), ("--threads", str(10**10))])
def test_numbers_that_torch_cannot_take_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert command(monkeypatch, "no-model", *option) == 2
    assert f"Invalid value for '{option[0]}'" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["from_pretrained", "generate"])
def test_what_torch_says_of_memory_is_said_in_a_line(
    *,
    words: Path,
    system: PrivateSystem,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    where: str,
) -> None:
    def fails(*arguments: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, where, fails)
    assert command(monkeypatch, words, "-p", "a", "--ring", system.name) == 8
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(rf"smoe-mp: error: {words}: .*: CUDA out of memory. Tried to allocate\n", err)


def test_torch_may_have_more_threads_than_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("tiny.smoe", "tiny.scout.safetensors", "config.json"):
        shutil.copy(models.TINY / name, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 128)
    arguments = ("-p", "a", "--ring-slots", "256", "--max-tokens", "1", "--greedy", "--workers", "1")
    assert command(monkeypatch, tmp_path / "tiny.smoe", *arguments) == 0
    assert capfd.readouterr().err.startswith("[1 tokens")


def test_a_model_that_transformers_cannot_load_is_said_in_a_line(
    words: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, change, said in (
        ("config.json", '"model_type": "qwen3_moe"', "model"),
        ("tokenizer.json", "{", "its tokenizer cannot be loaded"),
    ):
        broken = folder / own(name[:3])
        shutil.copytree(words, broken)
        text = (broken / name).read_text()
        assert change in text
        (broken / name).write_text(text.replace(change, "[" if change == "{" else '"model_type": "nobodys"'))
        found = command(monkeypatch, broken, "-p", "a", "--ring-slots", "20", "--workers", "1")
        out, err = capfd.readouterr()
        assert (found != 0, out) == (True, "")
        (line,) = (line for line in err.splitlines() if line.startswith("smoe-mp: error: "))
        assert str(broken) in line
        assert said in line
        assert "Traceback" not in err
        assert rings_of(name[:3]) == []


def test_without_the_extra_it_is_named(
    words: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: None)
    assert command(monkeypatch, words, "-p", "a") == 2
    assert capfd.readouterr().err == (
        "smoe-mp: error: this needs torch and transformers: pip install 'smoe-mp[transformers]'\n"
    )


def test_importing_the_command_line_does_not_import_torch() -> None:
    program = (
        "import sys, smoe_mp.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)
