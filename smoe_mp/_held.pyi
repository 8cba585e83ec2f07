"""csrc/held.c: batches of held experts."""

from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T", bound=Held)

class Held:
    _handle: Any
    _facts: Any
    _layer: int
    _experts: list[int]
    _n: int
    _address: int
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def release(self) -> None: ...

def install(release: int) -> None: ...
def batch(kind: type[T], ring: int, handle: Any, facts: Any, layer: int, experts: list[int]) -> T: ...
def demand(
    kind: type[T],
    function: int,
    ring: int,
    handle: Any,
    facts: Any,
    layer: int,
    experts: Any,
    timeout_ms: int,
) -> T | tuple[T, int, bytes] | None: ...
