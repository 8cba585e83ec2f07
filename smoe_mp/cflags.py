"""What a compiler needs for an engine in C or C++:

    cc engine.c $(python -m smoe_mp.cflags)             compile and link
    python -m smoe_mp.cflags --cflags | --libs          either alone
    PKG_CONFIG_PATH=$(python -m smoe_mp.cflags --pkgconfig) pkg-config --cflags --libs smoe
    cmake -Dsmoe_DIR=$(python -m smoe_mp.cflags --cmake) ...      find_package(smoe), target smoe::smoe

See docs/embedding.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from smoe_mp.errors import SmoeError
from smoe_mp.segments import installed


def cflags() -> list[str]:
    """Arguments of the compiler that find smoe.h."""
    return [f"-I{installed('capi/include/smoe.h').parent}"]


def libs() -> list[str]:
    """Arguments of the linker that find libsmoe, now and when the program runs."""
    folder = installed("capi/lib")
    return [f"-L{folder}", "-lsmoe", f"-Wl,-rpath,{folder}"]


def main(argv: list[str] | None = None) -> int:
    """Print what is asked for, one line."""
    parser = argparse.ArgumentParser(
        prog="python -m smoe_mp.cflags", description=(__doc__ or "").split("\n")[0]
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cflags", action="store_true", help="the compiler's arguments alone")
    which.add_argument("--libs", action="store_true", help="the linker's arguments alone")
    which.add_argument("--pkgconfig", action="store_true", help="the folder of smoe.pc")
    which.add_argument("--cmake", action="store_true", help="the folder of smoe-config.cmake")
    asked = parser.parse_args(argv)
    try:
        if asked.pkgconfig or asked.cmake:
            print(installed("capi/lib/pkgconfig" if asked.pkgconfig else "capi/lib/cmake/smoe"))
        else:
            parts = [] if asked.libs else cflags()
            print(shlex.join(parts + ([] if asked.cflags else libs())))
    except SmoeError as error:
        print(f"smoe_mp.cflags: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
