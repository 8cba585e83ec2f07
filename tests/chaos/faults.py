"""Faults under load: chaos goes on while files, disks, memory and the clock fail.

    python tests/chaos/faults.py [--rounds N] [--seed S] [KIND...]

The system, the clients and the deaths are those of chaos.py.  In between a fault begins, some rounds go by,
the fault is lifted, and the system has to be well again, by itself or, where the design says so, by a new
start.  Kinds, all of them where none is named:

    truncated   the model's file is cut                          the serving ends; a new start serves again
    replaced    another version is renamed over it               the same, and then it is the new version
    removed     the file's name leads nowhere for a while        served on; well again when it is back
    full        no space where the popularity is kept            said, the old file stays whole; saved later
    readonly    its file system is remounted read-only           the same
    memory      a hog in the system's cgroup: reclaim            nothing to be seen
    oom         the kernel kills a worker for want of memory     as any death
    clock       the wall clock is set back, and forward again    nothing to be seen

Whatever happens: an attached client gets bytes of one version of the vault, whole experts of it, or an error
that names the file; an error that no fault explains ends in exit status 1; nobody hangs; and the popularity's
file is, at every look, one that loads without a word.

full and readonly mount a tmpfs in a mount namespace of their own, memory and oom make a cgroup: they need
root.  clock runs all of it under tests/c/shim_clock.c, for the machine's clock is not ours to set.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), str(TESTS / "process")]

from chaos import (  # noqa: E402
    CRASHES,
    EXPERTS,
    LIMIT_S,
    RAW,
    SEATS,
    VERSIONS,
    Chaos,
    Client,
    Scribe,
    Span,
    add_options,
    go_through,
    listed,
    scratch,
    write_vault,
)
from faultkit import cached_pages, mounted, shim  # noqa: E402

from smoe_mp import histogram  # noqa: E402
from smoe_mp.bench.cgroup import MemoryGroup, memory_group  # noqa: E402
from smoe_mp.control.client import ControlClient  # noqa: E402
from smoe_mp.control.commands import Command, Histogram, Status, StatusResult  # noqa: E402
from smoe_mp.errors import Refused, SmoeError  # noqa: E402
from smoe_mp.sources import open_source  # noqa: E402

MIB = 1 << 20
ROUNDS_A_FAULT = (4, 10)
POPULARITY_BYTES = 2 * MIB  # of its file system; the file has 0.25, and so has its temporary
GROUP_BYTES, SPARE_BYTES = 768 * MIB, 192 * MIB  # of the system's cgroup; what a hog leaves of it
CLOCK = "SHIM_CLOCK"

# --- clients ------------------------------------------------------------------------------------------


class Sufferer(Client):
    """A client that meets errors of all kinds: it says which, and attaches anew where the ring ended."""

    version: int | None = None  # of the vault, as the first expert of this attachment showed it

    def attach(self) -> None:
        """As soon as there is a ring."""
        while not self.row[0]:
            try:
                super().attach()
            except SmoeError:
                time.sleep(0.02)
            else:
                self.version = None
                return
        sys.exit(0)

    def check(self, layer: int, expert: int, raw: npt.NDArray[np.uint8], how: str) -> None:
        good = self.expected[layer * EXPERTS + expert]
        if self.version is None:
            versions = [v for v, mark in enumerate(VERSIONS) if np.array_equal(raw[:RAW], good ^ mark)]
            self.version = versions[0] if versions else None
        super().check(layer, expert, raw ^ self.mask(len(raw)), how)

    def mask(self, length: int) -> npt.NDArray[np.uint8]:
        """The mark of the version, where there are experts' bytes."""
        return np.where(np.arange(length) < RAW, VERSIONS[self.version or 0], 0).astype(np.uint8)

    def step_by(self, way: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            super().step_by(way)
        except SmoeError as e:
            ended = time.monotonic()
            self.say(error=type(e).__name__, began=began, ended=ended, way=way.__name__, what=str(e))
            self.check_kept()
            self.kept.clear()
            time.sleep(0.02)
            if type(e).__name__ != "ExpertReadError":
                self.ring.close()
                self.attach()


def suffer(name: str, folder: Path, seat: int, seed: str) -> None:
    Sufferer(name, folder, seat, seed).run()


def record(name: str, folder: Path, seat: int, seed: str) -> None:
    scribe = Scribe(name, folder, seat, seed)
    while not scribe.row[0]:
        try:
            scribe.one()
        except SmoeError:  # the ring ended, or there is none
            time.sleep(0.02)


def take_everything(name: str, folder: Path, seat: int, seed: str) -> None:
    Sufferer(name, folder, seat, seed).everything()


# --- faults -------------------------------------------------------------------------------------------


class Fault:
    """One kind: `begin`, `look` after each round, `lift`, and then `recovered` has to hold.

    `excuses`: errors that clients may see from its begin until all is well again.  `ends_ring`: it takes a
    new start to serve again.  `once`: what each supervisor that lives meanwhile may say once.
    """

    excuses: ClassVar[tuple[str, ...]] = ()
    ends_ring = False
    once = ""

    def __init__(self, chaos: Faulty) -> None:
        self.chaos, self.rng = chaos, chaos.rng

    def begin(self) -> None: ...
    def look(self) -> None: ...
    def lift(self) -> None: ...

    def end(self) -> None:
        """Whatever happened: take it away."""

    def recovered(self) -> bool:
        status = self.chaos.status()
        return status is not None and status.state == "live" and status.health == "ok"


class Truncated(Fault):
    excuses = ("SourceChanged", "ExpertReadError", "RingReplaced", "RingStopping")
    ends_ring = True
    once = "nothing is served any more"

    def begin(self) -> None:
        with self.chaos.no_start():
            os.truncate(self.chaos.vault, self.rng.randrange(1, self.chaos.vault.stat().st_size))
            self.starts = self.chaos.starts

    def lift(self) -> None:
        self.chaos.wait(self.noticed, "the change is seen")
        with self.chaos.no_start():
            self.chaos.put_vault(self.chaos.version)
            self.starts = self.chaos.starts

    def noticed(self) -> bool:
        """Whoever serves since before the change says so."""
        status = self.chaos.status()
        stale = status is not None and status.state == "stale"
        if status is not None and stale and not status.health.startswith(f"stale: {self.chaos.vault} was "):
            self.chaos.problem(f"it does not say which file changed: {status.health}")
        return stale or self.chaos.starts > self.starts

    def recovered(self) -> bool:
        """By a new start alone: one that began before the last change may not serve."""
        status = self.chaos.status()
        if status is not None and status.state == "stale":
            self.chaos.end_up()
        return self.chaos.starts > self.starts and super().recovered()


class Replaced(Truncated):
    def begin(self) -> None:
        chaos, times = self.chaos, self.chaos.vault.stat()
        chaos.version = 1 - chaos.version
        # With the old one's times now and then, as rsync -t or tar would.
        with chaos.no_start():
            chaos.put_vault(chaos.version, times if self.rng.random() < 0.5 else None)
            self.starts = chaos.starts
        assert chaos.vault.stat().st_size == times.st_size

    def lift(self) -> None:
        self.chaos.wait(self.noticed, "the change is seen")


class Removed(Fault):
    excuses = ("ExpertReadError",)
    once = "it cannot be looked up"

    def begin(self) -> None:
        self.chaos.vault.rename(self.chaos.folder / "away.smoe")

    def lift(self) -> None:
        (self.chaos.folder / "away.smoe").rename(self.chaos.vault)


class Full(Fault):
    """The file system of the popularity's file has no room for another one."""

    reason = "No space left on device"

    def begin(self) -> None:
        self.log_from, self.lives = self.chaos.log_size(), self.chaos.prewarm_lives()
        self.chaos.wait(self.saved, "the popularity is saved")
        self.complaint = f"histogram {self.chaos.popularity}: not saved: {self.reason}"
        self.spoil()

    def saved(self) -> bool:
        with contextlib.suppress(SmoeError):
            self.chaos.ask(Histogram(action="save"))
        return self.chaos.popularity.exists()

    @property
    def filler(self) -> Path:
        return self.chaos.popularity.with_name("filler")

    def spoil(self) -> bool:
        """Take all there is: a save that was under way gave some back."""
        with contextlib.suppress(OSError), self.filler.open("ab", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        return True

    def make_good(self) -> None:
        self.filler.unlink()

    def complaints(self) -> int:
        return self.chaos.said_since(self.log_from).count(f"prewarm: {self.complaint}")

    def look(self) -> None:
        """Whoever asks for it to be saved is told why it is not."""
        self.spoil()
        try:
            self.chaos.ask(Histogram(action="save"))
        except Refused as refusal:
            if self.complaint in str(refusal):
                self.chaos.refusals += 1
            elif "another process is saving it" not in str(refusal):
                self.chaos.problem(f"refused, and not for want of a place: {refusal}")
        except SmoeError:
            pass  # nobody there just now

    def lift(self) -> None:
        self.chaos.wait(lambda: self.spoil() and self.complaints() > 0, f"the log says: {self.complaint}")
        lives = 1 + self.chaos.prewarm_lives() - self.lives  # each says it for itself
        if self.complaints() > lives:
            self.chaos.problem(f"said {self.complaints()} times by {lives} processes: {self.complaint}")
        self.make_good()
        path = self.chaos.popularity
        self.before = path.stat().st_ino if path.exists() else 0

    def recovered(self) -> bool:
        """The prewarm process has saved it again."""
        path = self.chaos.popularity
        return path.exists() and path.stat().st_ino != self.before and super().recovered()


class ReadOnly(Full):
    reason = "Read-only file system"

    def spoil(self) -> bool:
        return self.chaos.until(lambda: self.remount("ro"), "a remount between two saves")

    def make_good(self) -> None:
        self.remount("rw")

    def remount(self, how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(self.chaos.popularity.parent)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


HOG = """
import sys
held = [bytearray(b"x" * (1 << 20)) for _ in range(int(sys.argv[1]) >> 20)]
while True:
    with open(sys.argv[2], "rb", buffering=0) as f:
        while f.read(1 << 20):
            pass
    print(flush=True)
"""


class Memory(Fault):
    """A hog takes all but a little of the cgroup, and then reads a file through the page cache for ever."""

    def begin(self) -> None:
        self.group = self.chaos.group
        self.kills = self.group.kills()
        self.large.write_bytes(b"")
        os.truncate(self.large, 2 * SPARE_BYTES)  # a hole is read into the cache like anything else
        self.hog = self.start_hog(GROUP_BYTES - SPARE_BYTES - self.group.held_bytes())

    @property
    def large(self) -> Path:
        return self.chaos.folder / "large"

    @property
    def passes(self) -> Path:
        """A line for each time that the hog has read the file."""
        return self.chaos.folder / "passes"

    def start_hog(self, size: int) -> subprocess.Popen[bytes]:
        command = self.group.inside([sys.executable, "-c", HOG, str(size), str(self.large)])
        with self.passes.open("wb") as said:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said)

    def look(self) -> None:
        if self.hog.poll() is not None or self.group.kills() != self.kills:
            self.chaos.problem(f"the hog was to press, not to kill: {self.group.kills() - self.kills} killed")

    def lift(self) -> None:
        self.chaos.wait(lambda: self.passes.stat().st_size > 0, "the hog has read the file")
        dropped = 2 * SPARE_BYTES - cached_pages(self.large) * mmap.PAGESIZE
        if dropped <= 0:
            self.chaos.problem("all of what the hog read is in memory: nothing had to be reclaimed")
        self.chaos.reclaimed += dropped
        self.end()

    def end(self) -> None:
        self.hog.kill()
        self.hog.wait()
        self.large.unlink(missing_ok=True)
        self.passes.unlink(missing_ok=True)


def mark(pid: int, badness: int) -> None:
    """Have the kernel think so much worse of a process when memory is short: 1000 is the worst."""
    with contextlib.suppress(OSError):  # it has ended
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(badness))


class OutOfMemory(Memory):
    """A hog takes more than there is, and the kernel thinks that a worker is the one to go; then the hog."""

    def begin(self) -> None:
        self.group = self.chaos.group
        self.kills, self.hogs = self.group.kills(), 0
        self.victims: list[int] = []
        self.log_from = self.chaos.log_size()

    def look(self) -> None:
        """Try, until it was a worker: one that was to be the victim may be killed by somebody else."""
        chaos, pids = self.chaos, self.chaos.eye.living("worker")
        if self.done() or not pids or chaos.down is not None or not chaos.may_die("worker"):
            return
        victim = self.rng.choice(pids)
        mark(victim, 1000)
        self.victims.append(victim)
        chaos.deaths["worker"].append(time.monotonic())
        hog = self.start_hog(2 * GROUP_BYTES)
        chaos.wait(lambda: hog.poll() is not None, "the end of the hog")
        self.hogs += 1
        mark(victim, 0)

    def done(self) -> bool:
        """One more was killed than there were hogs, and the log has the death of one that was marked."""
        said = self.chaos.said_since(self.log_from)
        more = self.group.kills() - self.kills > self.hogs
        return more and any(f"(pid {pid}) was killed by SIGKILL" in said for pid in self.victims)

    def lift(self) -> None:
        def done() -> bool:
            self.look()
            self.chaos.pass_time(0.3)
            return self.done()

        self.chaos.wait(done, "a worker is killed for want of memory")
        self.chaos.starved += 1

    def end(self) -> None:
        """Its hogs end by themselves."""
        self.passes.unlink(missing_ok=True)


class Clock(Fault):
    def begin(self) -> None:
        self.before = self.stamp_of_a_line()

    def look(self) -> None:
        self.set(-3600 * self.rng.randint(1, 100))

    def lift(self) -> None:
        self.set(-24 * 3600)
        if self.stamp_of_a_line() >= self.before:
            self.chaos.problem("the clock was not set back")
        self.set(0)

    def end(self) -> None:
        self.set(0)

    def set(self, seconds: int) -> None:
        with open(os.environ[CLOCK], "r+b") as file:
            file.write(struct.pack("=q", seconds * 10**9))

    def stamp_of_a_line(self) -> str:
        """The time that the log gives a line that was said just now."""
        log = self.chaos.folder / "system.log"
        size = log.stat().st_size if log.exists() else 0

        def said() -> bool:
            self.chaos.change_workers(self.rng.randint(2, 8))
            return log.exists() and log.stat().st_size > size

        self.chaos.wait(said, "a line of the log")
        return log.read_bytes()[size:].decode().split()[0]


KINDS: dict[str, type[Fault]] = {
    "truncated": Truncated,
    "replaced": Replaced,
    "removed": Removed,
    "full": Full,
    "readonly": ReadOnly,
    "memory": Memory,
    "oom": OutOfMemory,
    "clock": Clock,
}


# --- the harness --------------------------------------------------------------------------------------


class Faulty(Chaos):
    lives = (suffer,) * SEATS
    recorder_life = staticmethod(record)
    last_life = staticmethod(take_everything)
    config = 'vault.check_s = 1\nprewarm.histogram = "popularity/freq.bin"\nlog.file = "system.log"\n'
    known = ("popularity", "system.log")
    group: MemoryGroup

    def __init__(self, rounds: int, seed: int, pace_s: float, folder: Path, kinds: list[str]) -> None:
        super().__init__(rounds, seed, pace_s, folder)
        self.kinds = kinds
        self.vault, self.popularity = folder / "v.smoe", folder / "popularity/freq.bin"
        self.version = self.starts = 0
        self.fault: Fault | None = None
        self.held = False  # starts are put off
        self.refusals = self.reclaimed = self.starved = self.loads = 0
        # A worker that was killed cannot open a file that is away or that has changed.
        loses_files = any(KINDS[kind].ends_ring or kind == "removed" for kind in kinds)
        self.never_said = CRASHES if loses_files else Chaos.never_said

    # --- the system ---

    def prepare(self) -> None:
        super().prepare()
        source = open_source(self.vault)
        self.fingerprint = histogram.fingerprint(source)
        self.pairs = [(expert.layer, expert.expert) for expert in source.experts]

    def put_vault(self, version: int, times: os.stat_result | None = None) -> None:
        """Another file of this version, with other times or these, renamed over what is there."""
        new = self.folder / "new.smoe"
        write_vault(new, version)
        if times is not None:
            os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
        new.rename(self.vault)

    def command(self, argv: list[str]) -> list[str]:
        return self.group.inside(argv) if hasattr(self, "group") else argv

    def begin_up(self) -> None:
        if not self.held:
            self.starts += 1
            super().begin_up()

    @contextlib.contextmanager
    def no_start(self) -> Iterator[None]:
        """Nobody who starts meanwhile has looked at the vault already, or looks at it now."""
        self.held = True
        self.wait(lambda: self.down is None or self.up is None, "an end of a start")
        try:
            yield
        finally:
            self.held = False

    def end_up(self) -> None:
        """In order, by the command for it; the next start is due at once."""
        self.wake_due(everyone=True)
        since = time.monotonic()
        done = subprocess.run([*self.python, "down", self.name], capture_output=True, text=True, check=False)
        assert self.up is not None
        if done.returncode != 0 or self.up.wait(LIMIT_S) != 0:
            self.problem(f"down: {done.stdout}{done.stderr}; up: {self.up_said()[-500:]}")
        self.lose_up(since, 0)

    def must_adopt(self) -> bool:
        return self.fault is None or not self.fault.ends_ring

    def ask(self, command: Command[Any]) -> Any:
        with ControlClient(self.name, timeout_ms=1000) as control:
            return control.call(command)

    def status(self) -> StatusResult | None:
        """None where nobody answers just now."""
        try:
            return None if self.down is not None else self.ask(Status(memory=False))
        except SmoeError:
            return None

    def log_size(self) -> int:
        return self.up_log.stat().st_size

    def said_since(self, size: int) -> str:
        return self.up_log.read_bytes()[size:].decode(errors="replace")

    def prewarm_lives(self) -> int:
        """How many prewarm processes were started up to now, at most."""
        return self.figures.kills["prewarm"] + self.starts

    # --- faults ---

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def passes() -> bool:
            self.pass_time(0.02)
            return condition()

        if not self.until(passes, what):
            raise SystemExit(f"given up: never came: {what}")

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            self.popularity.parent.mkdir()
            if {"full", "readonly"} & {*self.kinds}:
                size = f"size={POPULARITY_BYTES}"
                stack.enter_context(mounted(self.popularity.parent, "-t", "tmpfs", "-o", size, "smoe-test"))
            if {"memory", "oom"} & {*self.kinds}:
                self.group = stack.enter_context(memory_group(GROUP_BYTES))
            self.begin()
            done = 0
            while done < self.rounds:
                todo = [*self.kinds]
                self.rng.shuffle(todo)
                for kind in todo:
                    if done < self.rounds:
                        rounds = min(self.rng.randint(*ROUNDS_A_FAULT), self.rounds - done)
                        self.suffer(kind, rounds)
                        done += rounds
            self.finish()

    def suffer(self, kind: str, rounds: int) -> None:
        self.fault = KINDS[kind](self)
        span, log_from, starts = Span(f"fault {kind}", time.monotonic()), self.log_size(), self.starts
        self.spans.append(span)
        try:
            self.fault.begin()
            for _ in range(rounds):
                self.pass_time(self.rng.uniform(0.2, 1.8) * self.pace_s)
                self.round()
                self.fault.look()
                self.check_popularity()
            self.fault.lift()
            self.wait(self.fault.recovered, f"all is well after: {kind}")
        finally:
            self.fault.end()
        self.check_popularity()
        times = self.said_since(log_from).count(self.fault.once) if self.fault.once else 0
        if times > 1 + self.starts - starts:
            self.problem(f"said {times} times: {self.fault.once}")
        span.ended = time.monotonic()
        self.figures.faults[kind] += 1
        self.fault = None

    def check_popularity(self) -> None:
        """It is there whole, as it was or as it is now."""
        loaded = histogram.load(self.popularity, self.fingerprint, self.pairs, set_aside=False)
        if loaded.notes:
            self.problem(f"the popularity's file is not whole: {loaded.notes}")
        self.loads += loaded.found

    # --- judging ---

    def justified(self, report: dict[str, Any]) -> bool:
        began, ended, error = report["began"], report["ended"], report["error"]
        if error in ("Busy", "NoSupervisor", "ReadTimeout"):
            return super().justified(report)
        if error in ("ExpertReadError", "SourceChanged") and str(self.vault) not in report["what"]:
            return False
        kinds = [s.kind.removeprefix("fault ") for s in self.spans if s.touches(began, ended)]
        return any(error in KINDS[kind].excuses for kind in kinds if kind in KINDS)

    def print_report(self, took_s: float) -> None:
        super().print_report(took_s)
        print(
            f"faults: {listed(self.figures.faults)}; popularity: {self.loads} looks at it whole,"
            f" {self.refusals} saves refused; memory: {self.reclaimed // MIB} MiB reclaimed,"
            f" {self.starved} workers killed for want of it"
        )


def _contained(kinds: set[str]) -> int:
    """All of it once more: under the clock's shim, and where its mounts are nobody else's."""
    with tempfile.NamedTemporaryFile(prefix="smoe-clock-") as clock:
        clock.write(bytes(8))
        clock.flush()
        preload = {"LD_PRELOAD": shim("clock")} if "clock" in kinds else {}
        words = ["unshare", "--mount"] if {"full", "readonly"} & kinds else []
        command = [*words, sys.executable, *sys.argv]
        return subprocess.run(
            command, env={**os.environ, **preload, CLOCK: clock.name}, check=False
        ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos, while files, disks, memory and the clock fail.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    add_options(parser, 100)
    args = parser.parse_args()
    kinds = args.kinds or [*KINDS]
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if CLOCK not in os.environ:
        return _contained({*kinds})
    with scratch("smoe-faults-", args.keep) as folder:
        go_through(Faulty(args.rounds, args.seed, args.pace, folder, kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
