"""Where metrics may be served: addresses of this machine alone, taken ones, and what a killed one left."""

from __future__ import annotations

import re
import socket
import stat
from pathlib import Path

import pytest

from smoe_mp import listener
from smoe_mp.config import load
from smoe_mp.errors import ConfigError
from smoe_mp.listener import PATTERN, Listener


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "RETRY_S", 0.0)


def reachable(address: str) -> bool:
    family = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
    with socket.socket(family) as asker:
        host, _, port = address.rpartition(":")
        asker.connect(address[5:] if family == socket.AF_UNIX else (host, int(port)))
        return True


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:9464", "127.9.8.7:1", "[::1]:9464", "localhost:0", "unix:/x", "unix:/x y/ü.sock", ""],
)
def test_addresses_of_this_machine(address: str) -> None:
    assert re.search(PATTERN, address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:9464",
        "10.0.0.1:9464",
        ":9464",
        "9464",
        "[::]:9464",
        "localhost",
        "a.127.0.0.1:1",
        "unix:x",
        "unix:",
    ],
)
def test_others_are_refused_with_the_remedy(tmp_path: Path, address: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'name = "r"\nvault.path = "m.smoe"\nmetrics.listen = "{address}"\n')
    with pytest.raises(ConfigError, match=r"metrics\.listen = .*this machine alone.*reverse proxy"):
        load(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_free_port(host: str) -> None:
    made = Listener(f"{host}:0")
    port = int(made.url.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
    assert reachable(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f'"127.0.0.1:{port}": another process listens there'):
        Listener(f"127.0.0.1:{port}")
    made.close()
    Listener(f"127.0.0.1:{port}").close()


def test_a_port_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match='70000": a port is at most 65535'):
        Listener("127.0.0.1:70000")


def test_a_socket_is_its_owners_alone_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    made = Listener(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert reachable(made.url)
    with pytest.raises(ConfigError, match="another process listens there"):
        Listener(f"unix:{path}")
    made.close()
    assert not path.exists()


def test_what_a_killed_one_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    made = Listener(f"unix:{path}")
    assert reachable(made.url)
    made.close()


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="it is no socket"):
        Listener(f"unix:{path}")
    assert path.read_text() == "precious"


def test_a_socket_that_is_another_ones_by_now_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    made = Listener(f"unix:{path}")
    path.unlink()
    other = Listener(f"unix:{path}")
    made.close()
    assert reachable(other.url)
    other.close()


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a socket's path may have"):
        Listener(f"unix:{tmp_path}/{'x' * 120}")
    with pytest.raises(ConfigError, match="cannot listen there: No such file"):
        Listener(f"unix:{tmp_path}/no/m.sock")
