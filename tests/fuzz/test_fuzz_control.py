"""100,000 messages at the control plane: bytes, broken and odd JSON, requests with odd fields.  It answers or
counts each, does nothing that a right request would not do, and goes on.  CONTROL_FUZZ_RUNS: how many;
FUZZ_SECONDS: for how long instead."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from cases import cases, first_seed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoe_mp.control.commands import COMMANDS
from smoe_mp.control.server import ControlServer

RUNS = int(os.environ.get("CONTROL_FUZZ_RUNS", "100000"))
SEED = first_seed(1)
LIMIT_MS = 60_000


class Recorder:
    """A system that notes what it is told to do; whatever it is asked for is not there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> dict[str, Any]:
            self.calls.append((name, arguments))
            return {}

        return call


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ControlServer, Recorder, zmq.Socket[bytes]]]:
    folder = Path(tempfile.mkdtemp(prefix="smoe-", dir="/tmp"))
    system = Recorder()
    server = ControlServer(folder / "f.ctl", system)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.connect(f"ipc://{folder}/f.ctl")
    yield server, system, asker
    context.destroy(linger=0)
    server.close()
    shutil.rmtree(folder)


def throw(
    served: tuple[ControlServer, Recorder, zmq.Socket[bytes]], messages: list[list[bytes]]
) -> list[dict[str, Any]]:
    """Send them all; the replies, of which each message has one, but for those that came to have a time limit
    of a millisecond or so and were too late."""
    server, _, asker = served
    before, late = server.counters["requests"], server.counters["late"]
    for frames in messages:
        asker.send_multipart(frames)
    while server.counters["requests"] < before + len(messages):
        assert server.pollable.poll(LIMIT_MS)
        server.handle()
    replies = []
    while len(replies) < len(messages) - (server.counters["late"] - late):
        assert asker.poll(LIMIT_MS)
        replies.append(json.loads(asker.recv_multipart()[-1]))
    return replies


def odd(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value, mostly not what is wanted."""
    kinds = 9 if depth < 3 else 7
    match rng.randrange(kinds):
        case 0:
            return rng.choice([0, 1, -1, 2**31, 2**63, 2**64, 10**30, rng.randrange(100)])
        case 1:
            return rng.choice([0.5, -0.0, 1e308, True, False, None])
        case 2:
            return rng.choice(["", "x" * rng.randrange(300), "\x00", "\u202e", "../../etc/passwd", "1"])
        case 3:
            return rng.choice(list(COMMANDS))
        case 4:
            return rng.choice(["start", "stop", "run", "pause", "trickle", "get", "reset", "set"])
        case 5:
            return [[rng.randrange(99) for _ in range(rng.choice((2, 3)))] for _ in range(rng.randrange(4))]
        case 6:
            return rng.randrange(1, 128)
        case 7:
            return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {str(odd(rng, depth + 1))[:20]: odd(rng, depth + 1) for _ in range(rng.randrange(4))}


FIELDS = (
    "experts",
    "count",
    "action",
    "trickle_ms",
    "lease_ms",
    "counts",
    "first",
    "most",
    "resume",
    "keep_ring",
)


def message(rng: random.Random) -> list[bytes]:
    """One message: raw bytes, a request of ours with odd fields, or one that is cut or has bits flipped."""
    kind = rng.randrange(10)
    if kind == 0:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
    request: dict[str, Any] = {"v": 1, "id": rng.randrange(1000), "command": rng.choice(list(COMMANDS))}
    for field in rng.sample(FIELDS, rng.randrange(3)):
        request[field] = odd(rng)
    if kind == 1:
        request[rng.choice(["v", "id", "command", "deadline_ms", "x"])] = odd(rng)
    body = bytearray(json.dumps(request).encode())
    if kind == 2:
        body = body[: rng.randrange(len(body))]
    elif kind == 3:
        for _ in range(rng.randrange(1, 5)):
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return [b"", bytes(body)] if kind == 4 else [bytes(body)]


def judge(replies: list[dict[str, Any]], system: Recorder) -> None:
    for reply in replies:
        assert reply["v"] == 1
        if reply["ok"]:  # the recorder's empty answer is a result of this command alone
            assert reply["result"]["state"] == "never"
            continue
        assert reply["error"]["type"] in (
            "Malformed", "WrongVersion", "UnknownCommand", "TooLarge", "TooMany", "ConfigError", "Internal"
        )  # fmt: skip
        assert len(reply["error"]["message"]) <= 2000
    for name, arguments in system.calls:  # what came through had been checked
        match name, arguments:
            case (("demand" | "speculate"), (pairs,)):
                assert pairs
                assert all(0 <= layer < 2**31 and 0 <= expert < 2**31 for layer, expert in pairs)
            case "set_workers", (count,):
                assert 1 <= count <= 127
            case "busy", (lease,):
                assert 0 <= lease <= 3_600_000
            case "prewarm", (action, trickle):
                assert action in ("run", "pause", "resume", "trickle")
                assert trickle is None or 0 <= trickle <= 60_000
            case "histogram", (action, counts, first, most):
                assert action in ("get", "save", "set", "reset")
                assert bool(counts) == (action == "set")
                assert all(0 <= count < 2**32 for _, _, count in counts)
                assert first >= 0
                assert 0 <= most <= 20_000
            case "verify", (action,):
                assert action in ("start", "stop", "status")
            case (("drain" | "request_stop"), (flag,)):
                assert type(flag) is bool
            case ("identity", ()):
                pass
            case ("status", (flag,)):
                assert type(flag) is bool
            case _:
                raise AssertionError((name, arguments))
    system.calls.clear()


def test_a_hundred_thousand_messages(
    served: tuple[ControlServer, Recorder, zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    print(f"FUZZ_SEED={SEED}")
    rng = random.Random(SEED)
    seen: set[str] = set()
    for _ in cases(max(1, RUNS // 100)):
        batch = [message(rng) for _ in range(100)]
        replies = throw(served, batch)
        judge(replies, served[1])
        seen |= {reply["error"]["type"] for reply in replies if not reply["ok"]}
    assert {"Malformed", "WrongVersion", "UnknownCommand", "Internal"} <= seen
    served[0].tick()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(st.binary(max_size=300), min_size=1, max_size=3)
    | JSON.map(lambda value: [json.dumps(value).encode()])
    | st.dictionaries(st.sampled_from((*FIELDS, "v", "id", "deadline_ms")), JSON, max_size=4).flatmap(
        lambda fields: st.sampled_from(list(COMMANDS)).map(
            lambda name: [json.dumps({"v": 1, **fields, "command": name}).encode()]
        )
    )
)
def test_whatever_hypothesis_thinks_of(
    served: tuple[ControlServer, Recorder, zmq.Socket[bytes]], frames: list[bytes]
) -> None:
    judge(throw(served, [frames]), served[1])
