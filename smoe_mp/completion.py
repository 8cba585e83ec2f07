"""What the shell completes: the names of running systems (`smoe-mp --install-completion` sets it up)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from smoe_mp import segments
from smoe_mp.errors import SmoeError
from smoe_mp.runtime import is_served, socket_path


def running(incomplete: str = "") -> list[str]:
    """Names that begin so of rings whose supervisor can be asked from here.  Says nothing on any error."""
    found = []
    for path in sorted(Path("/dev/shm").glob("smoe.*")):
        name = path.name.removeprefix("smoe.")
        if name.startswith(incomplete):
            with contextlib.suppress(SmoeError):  # a data segment's name, or a folder too deep for a socket
                if is_served(socket_path(segments.check_name(name))):
                    found.append(name)
    return found


Name = Annotated[str, typer.Argument(metavar="NAME", help="The ring's name.", autocompletion=running)]
