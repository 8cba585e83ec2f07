"""A client that writes over the control segment: it may ruin the ring, but it makes no worker read outside a
file or write outside a slot, hangs nobody who serves, and the supervisor says what is wrong.

The segment is mapped as a client maps it, and written to while a system serves demand; the workers run under
a shim that looks at each of their reads.  What a worker moves inside a slot is held against canaries by
tests/c/test_failure.c.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from faultkit import needs, shim
from support import LIMIT_S, SHM, Client, until
from systems import System, Up, make_vault, pids_of, wait_ended, watched

from smoe_mp import runtime, tables
from smoe_mp._native import lib
from smoe_mp.errors import SmoeError
from smoe_mp.observer import Observer

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm to write into")
SEED = int(os.environ.get("FUZZ_SEED", "1"))
#: Of csrc/shm_layout.h.
_WORDS8 = "magic abi creation0 creation1 state fingerprint dev ino control_bytes data_bytes slot_bytes"
_WORDS4 = (
    "slots groups experts files layouts tensors windows parts moves layers columns capacity guesses huge"
)
_SETTINGS = "deadline top_k direct align ranks verify"
_REGIONS = "hot reservations participants counters marks file_modes ticks bounds empties guesses colds demand"
_REGIONS += " speculative homes histogram words slots trace tables grid experts windows parts moves layouts"
_REGIONS += " tensors files strings"
HEADER = np.dtype(
    [(name, "<u8") for name in _WORDS8.split()]
    + [(name, "<u4") for name in _WORDS4.split()]
    + [("strings_bytes", "<u8")]
    + [(name, "<u4") for name in _SETTINGS.split()]
    + [(f"off_{name}", "<u8") for name in _REGIONS.split()]
)
PARTICIPANT = np.dtype(
    [(name, "<u4") for name in ("generation", "landed", "pid", "role")]
    + [("namespace", "<u8"), ("started", "<u8"), ("label", "S32"), ("read_started", "<u8")]
    + [(name, "<u4") for name in ("slot", "reserved0", "publishing")] + [("reserved", "V44")]
)  # fmt: skip
SLOT = np.dtype(
    [("read_started", "<u8"), ("kills", "<u4"), ("error", "<i4"), ("error_file", "<u4"), ("sequence", "<u4")]
    + [(name, "<u8") for name in ("offset", "wanted", "got", "pad0", "pad1")]
)  # fmt: skip
LAYERS, EXPERTS, SLOTS = 2, 12, 6


class Memory:
    """The control segment of a ring, mapped read-write, by its regions."""

    def __init__(self, name: str) -> None:
        with (SHM / f"smoe.{name}").open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.header = np.frombuffer(self.map, HEADER, 1)
        assert HEADER.itemsize == lib.smoe_sizeof(7)
        h = self.h = {name: int(self.header[name][0]) for name in HEADER.names or ()}
        self.participants = self._at("participants", PARTICIPANT, 163)
        self.slots = self._at("slots", SLOT, h["slots"])
        self.words = self._at("words", "<u8", h["slots"])
        self.homes = self._at("homes", "<u4", h["experts"])
        self.hot = self._at("hot", "<u8", 160)
        self.hints = self._at("ticks", "<u8", (h["off_demand"] - h["off_ticks"]) // 8)
        self.queues = self._at("demand", "<u8", (h["off_homes"] - h["off_demand"]) // 8)
        self.small = {
            name: self._at(name, "<u4", n)
            for name, n in (("reservations", 32), ("file_modes", h["files"]), ("histogram", h["experts"]))
        }
        kinds = ("experts", "windows", "parts", "moves", "layouts", "tensors", "files")
        self.tables = {
            kind: self._at(kind, dtype, h[kind]) for kind, dtype in zip(kinds, tables.RECORDS, strict=True)
        }
        self.grid = self._at("grid", "<u4", h["layers"] * h["columns"])
        self.strings = self._at("strings", "u1", h["strings_bytes"])
        self.sound = self.bytes.copy()  # of a ring that nobody has used yet

    def _at(self, name: str, dtype: Any, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.map, dtype, count, self.h[f"off_{name}"])

    def mend(self) -> None:
        """As it was when nobody had used it; who is registered stays."""
        participants = self.participants.copy()
        state = self.bytes[self.h["off_counters"] : self.h["off_file_modes"]].copy()
        self.bytes[:] = self.sound
        self.bytes[self.h["off_counters"] : self.h["off_file_modes"]] = state
        self.participants[:] = participants

    def fields(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """All that has a meaning, by columns.  Without the state, which ends workers: a test of its own."""
        for name in HEADER.names or ():
            if name != "state":
                yield f"header {name}", self.header[name]
        for kind, records in self.tables.items():
            for name in records.dtype.names or ():
                yield f"{kind} {name}", records[name]
        for name in PARTICIPANT.names or ():
            if name not in ("generation", "reserved"):
                yield f"clients' {name}", self.participants[name][:32]
                yield f"workers' {name}", self.participants[name][32:]
        for name in SLOT.names or ():
            yield f"slots' {name}", self.slots[name]
        yield from self.small.items()
        yield from {
            "words": self.words,
            "homes": self.homes,
            "hints": self.hints,
            "queues": self.queues,
        }.items()
        yield from {"grid": self.grid, "strings": self.strings}.items()
        for line in range(0, 160, 16):
            yield f"hot line {line // 16}", self.hot[line : line + 5]

    def values(self, field: npt.NDArray[Any], rng: random.Random) -> Iterator[Any]:
        """What to put into a field: the ends of its range, and values at what bounds others."""
        h = self.h
        yield rng.randbytes(field.nbytes)
        if field.dtype.kind not in "ui":
            return
        most = 2 ** (8 * field.dtype.itemsize)
        near = (
            h["slots"],
            h["experts"],
            h["windows"],
            h["slot_bytes"],
            h["slots"] - 1,
            h["slot_bytes"] - 4096,
        )
        for value in (0, 1, most - 1, most // 2, *rng.sample(near, 2), rng.randrange(most)):
            yield np.array([value % most], np.uint64).astype(field.dtype)[0]


def put(field: npt.NDArray[Any], value: Any) -> None:
    """Write it, whatever the field's type."""
    if isinstance(value, bytes):
        field[...] = np.frombuffer(value, field.dtype, field.size).reshape(field.shape)
    else:
        field[...] = value


class Attacked:
    """A system whose workers' reads are watched, and its segment."""

    def __init__(self, system: System, guarded: Path) -> None:
        self.system, self._guarded = system, guarded
        self.memory = Memory(system.name)
        self.rng = random.Random(SEED)

    def fetch(self, client: Client, timeout: float) -> Any:
        """Demand what is most likely not there; whatever comes of it."""
        layer, expert = self.rng.randrange(LAYERS), self.rng.randrange(EXPERTS)
        return client.do("take_and_give_back", layer=layer, experts=[expert], timeout=timeout)

    def look(self) -> None:
        """As an operator does, with the supervisor's eyes and with one's own."""
        self.system.look()
        with contextlib.suppress(SmoeError), Observer(self.system.name, "a test") as observer:
            observer.participants(), observer.states(), observer.counters(), observer.queues()
            [observer.expert_in(slot) for slot in range(observer.slots)]

    def serves(self) -> None:
        """Once mended it serves again: no worker hangs."""
        self.memory.mend()
        with Client(self.system.name) as client:
            got = self.fetch(client, LIMIT_S)
            assert isinstance(got, list), got

    def check_reads(self) -> None:
        """No read went where it may not."""
        lines = self._guarded.read_text().splitlines()
        assert lines, "no read was watched"
        assert [line for line in lines if not line.startswith("first: ")] == []

    def end(self) -> str:
        """SIGTERM ends it, whatever its memory looks like; what it said."""
        self.system.signal(signal.SIGTERM)
        status, said = self.system.wait(), "\n".join([*self.system.lines, self.system.errors()])
        assert status == 0, said
        assert "Traceback" not in said
        return said


@pytest.fixture
def attacked(up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attacked:
    needs("cc")
    guarded, vault = tmp_path / "guarded", make_vault(tmp_path / "v.smoe", layers=LAYERS, experts=EXPERTS)
    monkeypatch.setenv("LD_PRELOAD", shim())
    monkeypatch.setenv("SHIM_GUARD", f"16384:{guarded}")
    system = up(vault=vault, slots=SLOTS, workers=2, more="prewarm.enabled = false\n")
    monkeypatch.delenv("LD_PRELOAD")
    found = Attacked(system, guarded)
    assert found.memory.h["slot_bytes"] == 16384
    return found


def test_every_field(attacked: Attacked) -> None:
    """One field of all records at a time: the ends of its range, and values near others' bounds."""
    memory, rng = attacked.memory, attacked.rng
    fields = list(memory.fields())
    for first in range(0, len(fields), 16):
        with Client(attacked.system.name) as client:
            for _, field in fields[first : first + 16]:
                before = field.copy()
                for value in memory.values(field, rng):
                    put(field, value)
                    attacked.fetch(client, 0.005)
                attacked.look()
                field[...] = before
                memory.mend()
        attacked.serves()
    attacked.check_reads()
    attacked.end()


def test_random_places(attacked: Attacked) -> None:
    """Random values at random places, many at a time, while clients demand and guess."""
    memory, rng = attacked.memory, attacked.rng
    fields = [field for _, field in memory.fields() if len(field)]
    for _ in range(4):
        with Client(attacked.system.name) as client, Client(attacked.system.name) as other:
            for _ in range(150):
                for _ in range(rng.randrange(1, 6)):
                    field = rng.choice(fields)
                    at = rng.randrange(len(field))
                    put(field[at : at + 1], rng.choice(list(memory.values(field[at : at + 1], rng))))
                at = rng.randrange(64, len(memory.bytes) - 8)
                memory.bytes[at : at + 8] = rng.randrange(256)
                other.do("speculate", layer=rng.randrange(LAYERS), experts=[rng.randrange(EXPERTS)])
                attacked.fetch(client, 0.002)
                if rng.random() < 0.1:
                    memory.mend()
            attacked.look()
        attacked.serves()
    attacked.check_reads()
    attacked.end()


def test_it_is_said(attacked: Attacked) -> None:
    """What somebody wrote over is named by the log and by status, and the system ends in order."""
    attacked.memory.words[3] = 7  # a state that there is not
    until(lambda: "a slot word" in attacked.system.look().health, "a word of it")
    said = attacked.end()
    assert f"somebody wrote over the shared memory /smoe.{attacked.system.name}: a slot word" in said


def test_a_state_that_nobody_set(attacked: Attacked) -> None:
    """Workers take it for the ring's end; the supervisor knows better and says so."""
    attacked.memory.bytes[32:36] = [3, 0, 0, 0]  # GONE
    until(lambda: "the state" in attacked.system.look().health, "a word of it", LIMIT_S)
    attacked.end()


def test_a_worker_that_starts_later_goes_by_no_other_files(attacked: Attacked) -> None:
    """By the records of the files in shared memory it would open any file that its user may read."""
    system = attacked.system
    attacked.memory.strings[-2] ^= 1  # of the path
    os.kill(pids_of(system.name)[0], signal.SIGKILL)
    until(lambda: any("records of its files" in w for w in system.look().warnings), "a word of it")
    attacked.check_reads()
    attacked.end()


def test_a_segment_that_was_cut_short(attacked: Attacked) -> None:
    """Nobody can go on then; the supervisor says which segment it was that ended it."""
    system = attacked.system
    watches = watched(pids_of(system.name))
    del attacked.memory
    os.truncate(SHM / f"smoe.{system.name}", 4096)
    assert system.wait() == -signal.SIGBUS
    assert f"error: ring {system.name}: ended by SIGBUS" in system.errors()
    assert f"/smoe.{system.name}" in system.errors()
    wait_ended(watches)
    for path in SHM.glob(f"smoe.{system.name}*"):
        path.unlink()
    for path in runtime.runtime_folder().iterdir():
        path.unlink()
