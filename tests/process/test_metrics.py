"""The metrics process, asked over HTTP by a port and by a socket: what it says is what status says."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from systems import LIMIT_S, System, Up, processes_of, until
from systems import smoe_mp as run

import smoe_mp
from smoe_mp import metrics, segments, stats

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
ROOT = Path(__file__).resolve().parents[2]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("smoe", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(self._path)


def connection(url: str) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return UnixConnection(url.removeprefix("unix:"))
    return http.client.HTTPConnection(url.split("/")[2], timeout=LIMIT_S)


def get(url: str, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    asker = connection(url)
    try:
        asker.request("GET", path, headers=headers)
        answer = asker.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        asker.close()


def scrape(url: str, parse: Callable[[str], Any] = parse_text, **headers: str) -> Samples:
    status, _, body = get(url, **headers)
    assert status == 200
    found: Samples = {}
    for family in parse(body):
        for s in family.samples:
            key = s.name, frozenset(s.labels.items())
            assert key not in found, key
            found[key] = s.value
    return found


def summed(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = labels.items()
    values = [v for (n, have), v in samples.items() if n == f"smoe_mp_{name}" and wanted <= set(have)]
    assert values, (name, labels)
    return sum(values)


def url_of(system: System) -> str:
    (line,) = [line for line in system.lines if line.startswith("metrics: ")]
    return line.removeprefix("metrics: ")


@pytest.fixture(params=["port", "socket"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    address = "127.0.0.1:0" if request.param == "port" else f"unix:{tmp_path / 'm.sock'}"
    return f'metrics.listen = "{address}"\n'


def test_what_is_served_is_what_status_says(up: Up, ring_name: str, listen: str) -> None:
    system = up(slots=12, more=listen + "prewarm.trickle_ms = 0\n")
    url = url_of(system)
    if url.startswith("unix:"):
        assert stat.S_IMODE(os.stat(url.removeprefix("unix:")).st_mode) == 0o600
    with smoe_mp.attach(ring_name, 'an "engine"\\\n') as ring, ring.busy():
        with ring.phase("prefill"), ring.fetch(0, range(8)):
            pass
        with ring.phase("decode"), ring.fetch(0, [0, 1]):
            samples = scrape(url)
            status = system.look()
        assert ring.speculate(2, [5]) == 1
    assert summed(samples, "demands_total", phase="prefill", kind="missed", client="0") == 8
    assert summed(samples, "demands_total", phase="decode", kind="resident") == 2
    assert summed(samples, "demands_total") == status.demand.demanded == 10
    for phase in ("prefill", "decode"):
        wait = status.phases[phase].wait
        if not wait.count:
            continue
        assert summed(samples, "wait_seconds_count", phase=phase) == wait.count
        assert summed(samples, "wait_seconds_sum", phase=phase) == pytest.approx(wait.sum_s)
        assert summed(samples, "wait_seconds_bucket", phase=phase, le="+Inf") == wait.count
    assert summed(samples, "read_seconds_count") == status.counters["reads"] == 8
    for counter, (name, _) in (*metrics._OF_CLIENTS.items(), *metrics._OF_ALL.items()):
        assert summed(samples, f"{name}_total") == status.counters[counter], name
    for state in segments.CENSUS[:6]:
        assert summed(samples, "slots", state=state) == status.ring.census[state]
    assert summed(samples, "slots_held") == 2
    assert summed(samples, "slots_reserved", client="0") == 2
    assert summed(samples, "client_info", client="0", label='an "engine"\\\n', pid=str(os.getpid())) == 1
    assert summed(samples, "clients_busy") == 1
    assert summed(samples, "workers") == 2
    assert summed(samples, "ring_state", state="live") == summed(samples, "ring_state") == 1
    assert summed(samples, "prewarm_state") == 1
    assert summed(samples, "file_info", path=status.files[0].path, mode=status.files[0].mode) == 1
    assert summed(samples, "supervisor_up") == summed(samples, "healthy") == 1
    assert summed(samples, "vault_experts") == status.vault.experts
    assert summed(samples, "ring_bytes") == status.ring.data_bytes
    assert all(("ring", ring_name) in labels for _, labels in samples)
    assert status.metrics is not None
    assert (status.metrics.url, status.metrics.state) == (url, "ok")
    assert f"metrics{url}:ok" in re.sub(r"\s", "", run("status", ring_name).stdout)
    assert run("down", ring_name).returncode == 0
    assert not url.startswith("unix:") or not os.path.exists(url.removeprefix("unix:"))


def test_every_family_is_served_and_documented(up: Up, ring_name: str) -> None:
    """In both formats; names, types and help as the table of docs/metrics.md has them."""
    system = up(slots=256, workers=1, more='metrics.listen = "127.0.0.1:0"\nprewarm.trickle_ms = 0\n')
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, [0]):
        until(lambda: system.look().prewarm.state == "idle", "prewarm is done")
        until(lambda: "smoe_mp_ring_resident_bytes" in get(url_of(system))[2], "a look at the memory")
        status, content_type, body = get(url_of(system), Accept=OPENMETRICS)
        assert status == 200
        assert content_type.startswith("application/openmetrics-text")
        families = {f.name: f for f in parse_openmetrics(body)}
        assert scrape(url_of(system)).keys() == {
            (s.name, frozenset(s.labels.items())) for f in families.values() for s in f.samples
        }
    assert "prewarm" in {s.labels["client"] for s in families["smoe_mp_guesses"].samples}
    wanted = {f.name: f for f in metrics.FAMILIES if f.name != "smoe_mp_worker_reading_seconds"}  # none reads
    assert families.keys() == wanted.keys()
    for name, family in families.items():
        assert (family.type, family.documentation) == (wanted[name].kind, wanted[name].help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {"ring", *wanted[name].labels}
            assert re.fullmatch(r"smoe_mp_[a-z_]+", sample.name)
    assert metrics.table() in (ROOT / "docs/metrics.md").read_text()


def test_histograms_are_those_of_the_format(up: Up, ring_name: str) -> None:
    """Cumulative, and with the bounds that the buckets have."""
    system = up(more='metrics.listen = "127.0.0.1:0"\nprewarm.enabled = false\n')
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, range(8)):
        pass
    samples = scrape(url_of(system))
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name.endswith("read_seconds_bucket")
    }
    bounds = [float(le) for le in buckets]
    assert bounds == sorted(bounds) == [*stats.BOUNDS_S, float("inf")]
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets["+Inf"] == 8


def test_other_paths(up: Up) -> None:
    url = url_of(up(more='metrics.listen = "127.0.0.1:0"\n'))
    assert get(url, "/")[0] == 404
    assert get(url, "/metrics?x=1")[0] == 200
    asker = connection(url)
    asker.request("POST", "/metrics", body=b"x")
    assert asker.getresponse().status == 501
    asker.close()


def test_stuck_scrapers_disturb_nobody(up: Up, ring_name: str, listen: str) -> None:
    """Some send nothing, some half a request, some never read: more than may be connected at a time."""
    system = up(more=listen + "prewarm.enabled = false\n")
    url, stuck = url_of(system), []
    for number in range(3 * metrics.CONNECTIONS_MAX):
        asker = connection(url)
        asker.connect()
        asker.sock.sendall([b"", b"GET /metr", b"GET /metrics HTTP/1.0\r\n\r\n"][number % 3])
        stuck.append(asker)
        if number % 10 == 0:
            assert summed(scrape(url), "workers") == 2
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, range(8)):
        assert summed(scrape(url), "slots_held") == 8
    assert system.look().health == "ok"
    for asker in stuck:
        asker.close()
    assert summed(scrape(url), "slots_held") == 0


def metrics_pid(name: str) -> int:
    (line,) = [line for line in processes_of(name) if "smoe_mp.metrics" in line]
    return int(line.split(":")[0])


def test_one_that_is_killed_is_started_again_on_the_same_socket(up: Up, ring_name: str, listen: str) -> None:
    """Who asks meanwhile waits; counters go on from where they were."""
    system = up(more=listen + "prewarm.enabled = false\n")
    url = url_of(system)
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, range(8)):
        pass
    assert summed(scrape(url), "demands_total") == 8
    before = metrics_pid(ring_name)
    os.kill(before, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{before}").exists(), "its end")
    samples = scrape(url)
    assert metrics_pid(ring_name) != before
    assert summed(samples, "demands_total", client="0", kind="missed") == 8
    assert any(w.startswith(f"metrics (pid {before}) was killed by SIGKILL") for w in system.look().warnings)


def test_a_supervisor_that_does_not_answer(up: Up, ring_name: str) -> None:
    """What is in shared memory is served all the same."""
    system = up(more='metrics.listen = "127.0.0.1:0"\nprewarm.enabled = false\n')
    system.signal(signal.SIGSTOP)
    samples = scrape(url_of(system))
    assert summed(samples, "supervisor_up") == 0
    assert summed(samples, "workers") == 2
    assert not any(name == "smoe_mp_healthy" for name, _ in samples)
    system.signal(signal.SIGCONT)


def test_a_killed_system_and_the_next_one_at_the_same_address(up: Up, ring_name: str, tmp_path: Path) -> None:
    """It ends with its supervisor, and the next one takes the path over with the ring and its counts."""
    listen = f'metrics.listen = "unix:{tmp_path / "m.sock"}"\nprewarm.enabled = false\n'
    first = up(more=listen)
    with smoe_mp.attach(ring_name) as ring, ring.fetch(0, range(8)):
        pass
    first.kill()
    second = up(more=listen)
    assert summed(scrape(url_of(second)), "demands_total") == 8
    assert processes_of(ring_name)


def test_an_address_that_is_taken_ends_the_start(ring_name: str, vault: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "c.toml"
        config.write_text(
            f'name = "{ring_name}"\nvault.path = "{vault}"\nring.slots = 16\n'
            f'metrics.listen = "127.0.0.1:{port}"\n'
        )
        done = run("up", str(config))
    assert done.returncode == 2
    assert f'metrics.listen = "127.0.0.1:{port}": another process listens there' in done.stderr


def test_nothing_listens_unless_it_is_asked_for(up: Up, ring_name: str) -> None:
    system = up()
    assert system.look().metrics is None
    assert not any("smoe_mp.metrics" in line for line in processes_of(ring_name))
