"""After `make test` has failed: is it the program, or was the machine too busy for one test of thousands?

The tests drive many processes against each other, so a machine that is not run for seconds can bring about an
order that a test did not think of.  That is a fault, mostly of the test, and is to be mended; but it says
nothing of a change.  So: at most MOST failed tests are run TIMES times more, by themselves, and each time all
of them must pass.  Then they are named in the output as UNSTEADY.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST, TIMES = 3, 3
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} failed Python tests: not run again", file=sys.stderr)
        return 1
    for _ in range(TIMES):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *failed], check=False)
        if done.returncode != 0:
            return done.returncode
    print("\n".join(f"UNSTEADY: {name} failed once and passed {TIMES} times; mend it" for name in failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
