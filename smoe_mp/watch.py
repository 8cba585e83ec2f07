"""`smoe-mp status --watch`: the same again and again, until Ctrl-C or the system's end.

On a terminal it has the screen to itself and gives it back; into a pipe each look is printed behind the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from typer.core import TyperCommand

EVERY_S = 2.0


class WatchCommand(TyperCommand):
    """A command whose --watch may stand without a number, which the parser itself cannot have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        full = []
        for at, word in enumerate(args):
            full.append(word)
            if word == "--watch" and not _is_number(args[at + 1 : at + 2]):
                full.append(f"{EVERY_S:g}")
        return super().parse_args(ctx, full)


def _is_number(words: Sequence[str]) -> bool:
    try:
        return [float(word) for word in words] != []
    except ValueError:
        return False


def watch(look: Callable[[], RenderableType], every_s: float, console: Console) -> NoReturn:
    """Draw what `look` returns every `every_s` seconds; ends by an exception: its own, or Ctrl-C."""
    first = look()  # what is wrong from the start is said without a screen
    if not console.is_terminal:
        while True:
            console.print(first)
            time.sleep(every_s)
            first = look()
    with Live(_page(first, every_s), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(every_s)
            live.update(_page(look(), every_s))


def _page(view: RenderableType, every_s: float) -> Group:
    head = f"{datetime.now():%H:%M:%S}, every {every_s:g} s; Ctrl-C ends it"
    return Group(Text(head, style="dim"), view)
