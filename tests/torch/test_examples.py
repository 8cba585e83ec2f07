"""docs/examples on tiny models: each runs, and says what the resident model says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs torch")
transformers: Any = pytest.importorskip("transformers", reason="needs transformers")

from support import LIMIT_S  # noqa: E402
from wordmodels import prompted, resident, write_words  # noqa: E402

from smoe_mp.transformers import load_tokenizer  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("models") / "words")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def continued(path: Path, prompt: str, tokens: int) -> str:
    """What the resident model makes of the prompt."""
    tokenizer = load_tokenizer(path)
    ids = tokenizer(prompt)["input_ids"]
    return str(tokenizer.decode([*ids, *resident(path, ids, tokens)], skip_special_tokens=True))


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count("\n") < 100
    assert f"    python {name}.py " in text.split('"""')[1]


def test_generate_transformers(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = example("generate_transformers").main([str(words), "Once", "--tokens", "8", "--slots", "20"])
    assert text == continued(words, "Once", 8)
    out = capsys.readouterr().out
    assert out.startswith(text)
    assert "MB from the device" in out


def test_numpy_engine(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    made = example("numpy_engine").main(words, ids, tokens=8, slots=20)
    assert made == resident(words, ids, 8)
    assert "hit rate" in capsys.readouterr().out


def test_two_engines_one_ring(words: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "two_engines_one_ring.py"), str(words), "Once"]
    done = subprocess.run(
        [*command, "--tokens", "8", "--slots", "40"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(continued(words, "Once", 8) + "\n[") == 2


def free_port() -> int:
    """A port that nobody has, below those that the system gives to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def endpoint(words: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The example's server and its address."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason=f"needs {name}, for transformers' server")
    port = free_port()
    command = [sys.executable, str(EXAMPLES / "openai_endpoint.py"), str(words), "--slots", "20"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ONE_THREAD,
    )
    yield server, f"http://127.0.0.1:{port}"
    server.kill()
    server.communicate()


def await_health(server: subprocess.Popen[str], address: str) -> None:
    """Until the server listens and says that it is well."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=LIMIT_S) as reply:
                assert json.loads(reply.read()) == {"status": "ok"}
                return
        except urllib.error.URLError:
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_openai_endpoint(words: Path, endpoint: tuple[subprocess.Popen[str], str]) -> None:
    openai: Any = pytest.importorskip("openai")
    server, address = endpoint
    await_health(server, address)
    prompt = prompted("Why?")
    expected = continued(words, prompt, 8).removeprefix(prompt)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        chat: Any = {
            "model": str(words),
            "messages": [{"role": "user", "content": "Why?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = client.chat.completions.create(**chat)
        assert answer.choices[0].message.content == expected
        assert answer.usage.completion_tokens == 8
        chunks = list(client.chat.completions.create(**chat, stream=True))
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(pieces) == expected
    assert len(pieces) > 1
    server.send_signal(signal.SIGINT)
    said = server.communicate(timeout=LIMIT_S)[0]
    assert server.returncode == 0, said
    assert "Traceback" not in said
