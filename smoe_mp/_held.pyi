"""csrc/held.c: batches of held experts, and views of them."""

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

class View:
    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def install(release: int, hold_again: int, slot_data: int) -> None: ...
def view(batch: Held, index: int, offset: int, nbytes: int, writable: bool) -> View | int | None: ...
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
