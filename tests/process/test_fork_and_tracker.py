"""Forks, multiprocessing's start methods, plain scripts, and the resource tracker.  Field reports 27, 50."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, Served, StampedSource, serve, shm_of, until

import smoe_mp
from smoe_mp import errors


@pytest.fixture
def served(source: StampedSource) -> Iterator[Served]:
    with serve(source, slots=8) as s:
        yield s
        s.assert_quiet()


def in_child(work: Callable[[], None]) -> None:
    """Do `work` in a forked child; a failure, a crash or a hang there is one here."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            faulthandler.disable()  # a crash is told by the exit status
            signal.alarm(LIMIT_S)
            work()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)
    os.close(write)
    said = b""
    while chunk := os.read(read, 4096):
        said += chunk
    os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (code, said.decode()) == (0, ""), f"the child ended with {code}: {said.decode()}"


USES: dict[str, Callable[[smoe_mp.Ring], object]] = {
    "fetch": lambda r: r.fetch(0, [1]),
    "fetch with a time limit": lambda r: r.fetch(0, [1], timeout=1),
    "fetch of nothing": lambda r: r.fetch(0, []),
    "acquire": lambda r: r.acquire(0, [1]),
    "acquire with a time limit": lambda r: r.acquire(0, [1], timeout=1),
    "claim_specific": lambda r: r.claim_specific(0, 1),
    "speculate": lambda r: r.speculate(0, [2]),
    "route": lambda r: r.route(0, [1, 2], 1),
    "as_ready": lambda r: list(r.as_ready(0, [1, 2])),
    "wait": lambda r: r.wait(r.fetch(0, [1])),
    "stats": lambda r: r.stats(),
    "resident": lambda r: r.resident(0, 1),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_s_calls_raise(served: Served, use: str) -> None:
    """And do not crash, though the control segment is not in the child's memory."""
    with served.attach() as ring, ring.fetch(0, [1]):

        def work() -> None:
            with pytest.raises(errors.RingForked, match="attach in the child"):
                USES[use](ring)

        in_child(work)
        assert (served.census()["held"], served.census()["reserved"]) == (1, 1)


BATCH_USES: dict[str, Callable[[smoe_mp.Batch], object]] = {
    "wait": lambda b: b.wait(),
    "wait with a time limit": lambda b: b.wait(1),
    "a view": lambda b: b[0]["p0"],
    "parts": lambda b: b[0].parts,
    "raw": lambda b: b[0].raw,
    "tensors": lambda b: b[0].tensors,
    "dequantize": lambda b: b[0].dequantize("p0"),
}


@pytest.mark.parametrize("known", [False, True], ids=["first use", "used before"])
@pytest.mark.parametrize("use", BATCH_USES)
def test_a_forked_child_s_batches_raise(served: Served, use: str, known: bool) -> None:
    with served.attach() as ring, ring.fetch(0, [0]) as batch:
        if known:
            assert batch[0].parts
            assert batch[0].tensors

        def work() -> None:
            if use == "tensors" and known:  # what is known needs no shared memory
                return
            with pytest.raises(errors.RingForked):
                BATCH_USES[use](batch)

        in_child(work)
        assert batch[0].parts


def test_a_forked_child_s_end_leaves_the_parent_alone(served: Served, source: StampedSource) -> None:
    """Finalisers of rings, batches and views included."""
    ring = served.attach()
    batch = ring.fetch(0, [1, 2])
    views = batch[0].parts
    kept: dict[str, Any] = {"ring": ring, "batch": batch, "views": views}

    def work() -> None:
        kept["batch"].release()
        kept["ring"].close()
        kept["views"].clear()  # the finalisers of the views
        kept.clear()
        gc.collect()

    for _ in range(3):
        in_child(work)
        assert (served.census()["held"], served.census()["reserved"]) == (2, 2)
        assert served.segments.recover()["clients"] == 0
    # A child that ends as programs do, with all of its finalisers.
    program = (
        "import os, sys, smoe_mp\n"
        "ring = smoe_mp.attach(sys.argv[1])\n"
        "batch = ring.fetch(0, [1, 3])\n"
        "view = batch[0].parts[0]\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    del view, batch, ring\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "census = ring.stats()['census']\n"
        "assert (census['held'], census['reserved']) == (3, 4), census\n"
        "assert ring.fetch(0, [3])[0].parts\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, served.name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [v.tobytes() for v in views] == source.expected(1)
    with ring.fetch(1, [4]):
        pass
    views.clear()
    batch.release()
    ring.close()


def test_a_forked_child_may_attach_anew(served: Served, source: StampedSource) -> None:
    with served.attach() as ring, ring.fetch(0, [1]) as batch:

        def work() -> None:
            with smoe_mp.attach(served.name) as mine:
                assert mine.client_id != ring.client_id
                with mine.fetch(0, [1, 2]) as got:
                    assert got.hits == 1
                    assert got[1].parts[0].tobytes() == source.expected(2)[0]
                # A grandchild as well, and the child's own handle is then dead in it.
                in_grandchild(mine)

        def in_grandchild(mine: smoe_mp.Ring) -> None:
            def deeper() -> None:
                with pytest.raises(errors.RingForked):
                    mine.fetch(0, [2], timeout=1)
                with smoe_mp.attach(served.name) as third, third.fetch(0, [2]) as got:
                    assert got.hits == 1

            in_child(deeper)
            with mine.fetch(0, [2]) as got:
                assert got.hits == 1

        in_child(work)
        assert batch[0].parts[0].tobytes() == source.expected(1)[0]
        with ring.fetch(0, [1]) as again:
            assert again.hits == 1


def test_a_child_does_not_keep_its_dead_parent_s_lock(served: Served) -> None:
    """Who forks and dies is seen as dead, though its child lives."""
    program = (
        "import os, signal, sys, time, smoe_mp\n"
        "ring = smoe_mp.attach(sys.argv[1])\n"
        "batch = ring.fetch(0, [0, 1])\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "print(pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, served.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait(LIMIT_S)
        os.kill(child, 0)  # it lives
        # Once it has run for the first time, that is: until then it has all that its parent had.
        until(lambda: served.segments.recover()["clients"] == 1, "the dead parent seen")
        assert (served.census()["held"], served.census()["reserved"]) == (0, 0)
        assert parent.stdin is not None
        parent.stdin.close()


# --- plain scripts ----------------------------------------------------------------------------------------

NO_GUARD = """
import multiprocessing, os, sys, warnings
warnings.simplefilter("error")
import smoe_mp
ring = smoe_mp.attach({name!r})
with ring.fetch(0, [1]) as batch:
    print(sum(int(p.sum()) for p in batch[0].parts))
"""

WITH_CHILDREN = """
import multiprocessing, os, sys
import smoe_mp

def work(name, expert):
    ring = smoe_mp.attach(name)
    batch = ring.fetch(1, [expert])  # neither released nor closed
    os.write(1, b"%d\\n" % batch[0].parts[0].nbytes)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    ring = smoe_mp.attach(sys.argv[1])
    kept = ring.fetch(0, [1])
    children = [context.Process(target=work, args=(sys.argv[1], e)) for e in range(2)]
    for c in children:
        c.start()
    for c in children:
        c.join()
        assert c.exitcode == 0
    assert ring.claim_specific(0, 1)[0].parts
"""


def run_script(path: Path, program: str, *arguments: str) -> str:
    """Its output; there may be nothing on its stderr."""
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_script_without_a_main_guard_attaches_and_ends(
    served: Served, source: StampedSource, tmp_path: Path
) -> None:
    right = sum(sum(part) for part in source.expected(1))
    for _ in range(2):
        assert int(run_script(tmp_path / "plain.py", NO_GUARD.format(name=served.name))) == right
        assert len(shm_of(served.name)) == 2
        assert served.segments.recover()["clients"] == 0  # it said good-bye
    assert served.counters()["reads"] == 1


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_readers_of_every_start_method_leave_the_ring(served: Served, tmp_path: Path, method: str) -> None:
    out = run_script(tmp_path / "children.py", WITH_CHILDREN, served.name, method)
    assert len(out.split()) == 2
    assert len(shm_of(served.name)) == 2
    served.segments.recover()
    assert (served.census()["held"], served.census()["reserved"]) == (0, 0)
    with served.attach() as ring, ring.fetch(0, [1]) as batch:
        assert batch.hits == 1


def test_nothing_starts_at_import() -> None:
    """No process, no thread, no resource tracker, no descriptor, no socket."""
    program = (
        "import os, sys, numpy\n"
        "state = lambda: (sorted(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')),\n"
        "    open(f'/proc/self/task/{os.getpid()}/children').read())\n"
        "before = state()\n"
        "import smoe_mp, smoe_mp.ring\n"
        "assert state() == before, (before, state())\n"
        "assert 'multiprocessing.resource_tracker' not in sys.modules\n"
        "assert 'zmq' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_attaching_and_fetching_start_nothing(served: Served) -> None:
    program = (
        "import os, sys, smoe_mp\n"
        "state = lambda: (sorted(os.listdir('/proc/self/task')),\n"
        "    open(f'/proc/self/task/{os.getpid()}/children').read())\n"
        "before = state()\n"
        "with smoe_mp.attach(sys.argv[1]) as ring, ring.fetch(0, [1]):\n"
        "    assert state() == before\n"
        "assert 'multiprocessing.resource_tracker' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, served.name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
