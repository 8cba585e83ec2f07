"""The numbers of a release, and what is promised of them: docs/release.md.

Tests whose names end with "of_this_tree" compare what is installed with files that are not.
"""

from __future__ import annotations

import json
import re
import threading
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq

import smoe_mp
from smoe_mp import cli, histogram, runtime, trace
from smoe_mp._native import lib
from smoe_mp.control import protocol
from smoe_mp.control.client import ControlClient
from smoe_mp.control.commands import COMMANDS, Ping, PingResult
from smoe_mp.sources import manifest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: Names of the package and of an attached ring; one that goes from here is a line in the changelog.
PUBLIC = {"Batch", "Expert", "QuantizedTensor", "Ring", "SmoeError", "__version__", "attach"}
RING = """
name close fetch acquire wait release claim_specific speculate route as_ready in_order busy phase stats
resident
"""


def test_numbers_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["smoe-mp", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out == (
        f"smoe-mp {smoe_mp.__version__} (C API {lib.smoe_api_version()},"
        f" memory layout {lib.smoe_layout_version()}, control protocol {protocol.VERSION})\n"
    )


def test_the_version_is_that_of_this_tree() -> None:
    """pyproject.toml is where it is written; what is installed says it, and the changelog begins with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert runtime.version() == smoe_mp.__version__ == project["version"]
    newest = re.search(r"^## (\S+)", (DOCS / "changelog.md").read_text(), flags=re.M)
    assert newest is not None
    assert newest[1] == project["version"]


def test_the_numbers_are_those_of_this_tree() -> None:
    layout, header = (ROOT / "csrc/shm_layout.h").read_text(), (ROOT / "csrc/smoe.h").read_text()
    assert f"#define SMOE_ABI   {lib.smoe_layout_version()}u\n" in layout
    assert f"#define SMOE_API_VERSION {lib.smoe_api_version()}\n" in header
    text = (DOCS / "release.md").read_text()
    said = dict(re.findall(r"^\| ([^|]+?) \| ([\d, ]+) \|", text, flags=re.M))
    assert said == {
        "`.smoe`": "1, 2, 3",
        "manifest": str(manifest.VERSION),
        "popularity": str(histogram.VERSION),
        "trace": str(trace.VERSION),
        "control protocol": str(protocol.VERSION),
        "C API": str(lib.smoe_api_version()),
        "memory layout": str(lib.smoe_layout_version()),
    }


def test_tests_of_promises_are_those_of_this_tree() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)::(\w+)`", (DOCS / "release.md").read_text())
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def fields_of(kind: Any, prefix: str = "") -> set[str]:
    """Names of a reply's fields and of those in them, with dots."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {name for inner in get_args(kind) for name in fields_of(inner, prefix)}
    found = set()
    for field in msgspec.structs.fields(kind):
        found |= {prefix + field.encode_name, *fields_of(field.type, f"{prefix}{field.encode_name}.")}
    return found


def test_replies_keep_the_names_of_their_fields() -> None:
    """The list is of the first release: a name may be added to it, none taken out."""
    promised = json.loads((Path(__file__).parent / "reply_fields.json").read_text())
    assert set(promised) == set(COMMANDS)
    gone = {name: sorted({*fields} - fields_of(COMMANDS[name].result)) for name, fields in promised.items()}
    assert not any(gone.values()), gone


def test_public_names_are_there() -> None:
    assert set(smoe_mp.__all__) >= PUBLIC
    assert all(hasattr(smoe_mp, name) for name in PUBLIC)
    assert all(hasattr(smoe_mp.Ring, name) for name in RING.split())


def test_a_reply_may_say_more_than_the_asker_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a later release of the same protocol does."""
    monkeypatch.setenv("SMOE_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    result = {"name": "n", "pid": 1, "version": "9.0", "state": "live"}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{runtime.socket_path('n')}")

    def answer() -> None:
        asker, body = router.recv_multipart()
        reply = {"v": 1, "id": json.loads(body)["id"], "ok": True, "more": 1, "result": result | {"new": [2]}}
        router.send_multipart([asker, json.dumps(reply).encode()])

    thread = threading.Thread(target=answer)
    thread.start()
    with ControlClient("n", timeout_ms=60_000) as control:
        assert control.call(Ping()) == PingResult("n", 1, "9.0", "live")
    thread.join()
    context.destroy(linger=0)
