"""Experts on a GPU: the ring's memory registered with CUDA, and a cache of experts in GPU memory before it.

    pinned = pin(ring)                                    once: copies run at the bus's speed
    cache = ExpertCache(ring, 8 << 30, "cuda", pinned)    an exact LRU of experts, in slots like the ring's
    with cache.hold(layer, [3, 17]) as held:              bytes on the GPU, until the block ends
        w = held[0].tensor("gate", torch.bfloat16)        a view; what is quantised becomes numbers there

An expert's way: SSD, by a worker, to the ring; ring to GPU, by an asynchronous copy on a stream of its own;
from then on the GPU has it, and a hot expert crosses the bus once.  The words are the ring's: resident, hold,
retained.

Two orders have to be kept, and events keep them, without this thread's waiting for the GPU:

    a hold on the ring's slot ends only when the copy out of it has ended     (`ExpertCache._copying`)
    a slot in GPU memory is written only when all that read it has ended      (`_Slot.read`)

A copy that has ended is let go of when the next one begins.  This thread waits for copies only where the ring
has no slot left for a demand, since those may be what it would wait for, and in `synchronize`.

Where the driver refuses to register the ring (a client maps it read-only, and a device has to know read-only
registration), one warning says so, and copies go through a few pinned buffers.

On another device than CUDA's, as in tests on the CPU, the same code runs, and a copy has ended when it
returns.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from smoe_mp._native import ffi, lib
from smoe_mp.errors import ConfigError, RingError
from smoe_mp.ring import Expert, Ring, TensorInfo
from smoe_mp.torch import DTYPES, scales_of
from smoe_mp.torch_blocks import TYPES, dequantize_blocks

__all__ = ["CacheStats", "ExpertCache", "HeldExpert", "Pinned", "pin"]

CHUNK_BYTES = 1 << 30  # registered at a time: some drivers refuse much more at once
PORTABLE, READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly
BOUNCE_BUFFERS = 4
ALIGNMENT = 16  # of tensors in a slot in GPU memory, bytes
PADDING = 4096  # of such a slot, for that alignment


class Pinned:
    """The data segment of one client, registered with CUDA for as long as this object lives.

    It keeps the mapping alive, so that it is unregistered before it is unmapped.  `nbytes` are registered.
    """

    def __init__(
        self, ring: Ring, register: Callable[[int, int], int], unregister: Callable[[int], object]
    ) -> None:
        """`register(pointer, bytes)` returns an error's number, 0: none.  Raises RingError where it is
        refused; then nothing stays registered."""
        self._handle = ring._open()
        base = int(ffi.cast("uintptr_t", lib.smoe_slot_data(self._handle.ptr, 0)))
        self.nbytes = ring.slots * ring.slot_bytes
        # Whole slots: a copy out of memory of two registrations is refused.
        chunk = max(1, CHUNK_BYTES // ring.slot_bytes) * ring.slot_bytes
        done: list[int] = []
        for start in range(0, self.nbytes, chunk):
            size = min(chunk, self.nbytes - start)
            if code := register(base + start, size):
                _unregister(unregister, done)
                raise RingError(
                    f"{ring!r}: cudaHostRegister of {size} bytes at {start} of {self.nbytes}: error {code}"
                )
            done.append(base + start)
        self._end = weakref.finalize(self, _unregister, unregister, done)

    def close(self) -> None:
        """Unregister.  A second call does nothing."""
        self._end()


def _unregister(unregister: Callable[[int], object], pointers: Sequence[int]) -> None:
    for pointer in pointers:
        unregister(pointer)


def pin(ring: Ring) -> Pinned | None:
    """Register the ring's data segment with CUDA, read-only, so that copies run at the bus's speed.

    None, after one warning, where the driver refuses.  Raises ConfigError where there is no CUDA.
    """
    if not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here, or torch was built without CUDA")
    torch.cuda.init()
    runtime: Any = torch.cuda.cudart()
    flags = PORTABLE | READ_ONLY
    try:
        return Pinned(
            ring,
            lambda pointer, size: int(runtime.cudaHostRegister(pointer, size, flags)),
            runtime.cudaHostUnregister,
        )
    except RingError as error:
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error for whoever asks next
            torch.zeros(1, device="cuda")
        warnings.warn(f"{error}: copies to the GPU go through pinned buffers and are slower", stacklevel=2)
        return None


class HeldExpert:
    """An expert in GPU memory, for kernels of the stream that was current when it was taken.  `slot`: which
    of the cache's; `memory`: its bytes; `tensors`: what lies where in them."""

    __slots__ = ("memory", "slot", "tensors")

    def __init__(self, slot: int, memory: torch.Tensor, tensors: dict[str, TensorInfo]) -> None:
        self.slot, self.memory, self.tensors = slot, memory, tensors

    def bytes_of(self, name: str) -> torch.Tensor:
        """The tensor's bytes, flat uint8, a view.  KeyError: there is none of that name."""
        info = self.tensors[name]
        return self.memory[info.offset : info.offset + info.nbytes]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as numbers of `dtype`, in its shape; a view where it is of that type.

        KeyError: there is none of that name.  RingError for what torch operations cannot make numbers.
        """
        info = self.tensors[name]
        scales = scales_of(self.tensors, info)
        if (info.dtype, scales is not None) in TYPES:
            apart = None if scales is None else self.bytes_of(scales.name)
            return dequantize_blocks(info.dtype, self.bytes_of(name), info.shape, dtype, scales=apart)
        own = DTYPES.get(info.dtype)
        if own is None or not own.is_floating_point or own.itemsize < 2:
            raise RingError(f"{name} is {info.dtype}: no torch operations make it numbers on a GPU")
        return self.bytes_of(name).view(own).view(info.shape).to(dtype)


@dataclass(slots=True)
class CacheStats:
    """What a cache did: experts found in GPU memory, copied into it and evicted, and bytes over the bus."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    copied_bytes: int = 0


@dataclass(slots=True)
class _Slot:
    """A slot in GPU memory, and who holds it.  `filled`, `read`: events, when the copy into it and the last
    reading of it end; None: there was none."""

    number: int
    memory: torch.Tensor
    tensors: dict[str, TensorInfo] | None = None
    holds: int = 0
    filled: Any = None
    read: Any = None


class _CopyStream:
    """Copies on a stream of their own, and what orders them and the kernels of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.cuda = device, torch.cuda.Stream(device)

    def copy(self, source: torch.Tensor, slot: _Slot, runs: Sequence[Run]) -> Any:
        """Copy when all that reads the slot has ended; the event of the copy's end."""
        if slot.read is not None:
            self.cuda.wait_event(slot.read)
        with torch.cuda.stream(self.cuda):
            _copy_runs(source, slot.memory, runs)
        return self.cuda.record_event()

    def mark(self) -> Any:
        """The event that ends what the current stream has been given."""
        return torch.cuda.current_stream(self._device).record_event()

    def follow(self, event: Any) -> None:
        """Have the current stream wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class ExpertCache:
    """Experts of `ring` in memory of `device`: as many as `nbytes` has slots for, the least recently used
    first to go.

    For one thread at a time, as is usual of what drives a GPU.  Raises ConfigError where not one fits.
    """

    def __init__(
        self, ring: Ring, nbytes: int, device: str | torch.device, pinned: Pinned | None = None
    ) -> None:
        self.ring, self.device = ring, torch.device(device)
        self.slot_bytes = ring.slot_bytes + PADDING
        self.slots = nbytes // self.slot_bytes
        if self.slots < 1:
            raise ConfigError(
                f"a cache of {nbytes} bytes in GPU memory has no room for an expert of {self.slot_bytes}"
            )
        self.stats = CacheStats()
        #: By layer: parameters of a model as views over all slots, for whoever computes on them.
        self.stacks: dict[int, dict[str, torch.Tensor | None]] = {}
        #: Layers whose experts differ in their tensors: no such view is of all of them.
        self.mixed: set[int] = set()
        self._first: dict[int, dict[str, TensorInfo]] = {}  # by layer: the first expert's
        #: All slots, uint8 [slots, slot_bytes].
        self.memory = torch.empty((self.slots, self.slot_bytes), dtype=torch.uint8, device=self.device)
        self._empty = [_Slot(i, self.memory[i]) for i in reversed(range(self.slots))]
        self._used: OrderedDict[tuple[int, int], _Slot] = OrderedDict()  # the least recently used first
        self._copying: deque[tuple[Any, torch.Tensor]] = deque()  # (event, what is copied from)
        self._bounce: deque[tuple[Any, torch.Tensor]] = deque()  # (event of its last copy, buffer)
        self._pinned = pinned
        self._stream = _CopyStream(self.device) if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def hold(self, layer: int, experts: Sequence[int]) -> Iterator[list[HeldExpert]]:
        """The experts' bytes in GPU memory, in the order given, held until the block ends.

        Kernels of the current stream may read them from the start: the stream waits for the copies, this
        thread does not.  At most `slots` at once, none twice.  Raises what `Ring.as_ready` raises.
        """
        if len(experts) > self.slots:
            raise RingError(f"{len(experts)} experts at once: the cache in GPU memory has {self.slots} slots")
        held: dict[int, _Slot] = {}
        try:
            missing = self._hold_resident(layer, experts, held)
            if missing:
                self._let_go()
                for expert in self.ring.as_ready(layer, missing, let_go=self.synchronize):
                    self._load((layer, expert.expert), expert, held)
                    self._let_go()
            self._await_copies(held)
            yield [HeldExpert(s.number, s.memory, s.tensors or {}) for s in (held[e] for e in experts)]
        finally:
            self._release(held)
            self._let_go()

    def synchronize(self) -> None:
        """Wait for the copies under way; then the cache holds no slot of the ring.  For the end of a pass:
        what the last copies hold, others cannot have until the next `hold`."""
        while self._copying:
            self._copying[0][0].synchronize()  # first, and then its hold: an interrupt may come between
            self._copying.popleft()

    def close(self) -> None:
        """Wait for copies under way, and let go of the memory."""
        self.synchronize()
        for event, _ in self._bounce:
            event.synchronize()
        self._used.clear()
        self._empty.clear()
        self._bounce.clear()
        self.stacks.clear()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Is the expert (layer, expert) in GPU memory?"""
        return key in self._used

    def _hold_resident(self, layer: int, experts: Sequence[int], held: dict[int, _Slot]) -> list[int]:
        """Hold what is there; the others."""
        missing = []
        for e in experts:
            slot = self._used.get((layer, e))
            if slot is None:
                missing.append(e)
                continue
            self._used.move_to_end((layer, e))
            slot.holds += 1
            held[e] = slot
            self.stats.hits += 1
        return missing

    def _load(self, key: tuple[int, int], expert: Expert, held: dict[int, _Slot]) -> None:
        """Have an expert that the ring holds copied into a slot."""
        there, runs = packed(expert.tensors)
        if sum(runs[-1][1:]) > self.slot_bytes:
            raise RingError(f"{expert!r}: has more tensors than a slot in GPU memory has room for")
        if self._first.setdefault(key[0], there) != there:
            self.mixed.add(key[0])
        slot = self._free_slot()
        try:
            self._copy(_over(expert, self.ring.slot_bytes), slot, runs)
        except BaseException:
            self._empty.append(slot)  # whatever its bytes are, they are nobody's
            raise
        slot.tensors, slot.holds = there, 1
        held[key[1]] = slot
        self._used[key] = slot
        self.stats.misses += 1
        self.stats.copied_bytes += sum(size for _, _, size in runs)

    def _copy(self, source: torch.Tensor, slot: _Slot, runs: Sequence[Run]) -> None:
        if self._stream is None:
            _copy_runs(source, slot.memory, runs)
            return
        if self._pinned is None:
            source = self._bounced(source)
        slot.filled = self._stream.copy(source, slot, runs)
        (self._bounce if self._pinned is None else self._copying).append((slot.filled, source))

    def _bounced(self, source: torch.Tensor) -> torch.Tensor:
        """The bytes in a pinned buffer whose last copy has ended."""
        if len(self._bounce) < BOUNCE_BUFFERS:
            buffer = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        else:
            event, buffer = self._bounce.popleft()
            event.synchronize()
        return buffer.copy_(source)

    def _free_slot(self) -> _Slot:
        if self._empty:
            return self._empty.pop()
        for key, slot in self._used.items():
            if slot.holds == 0:
                del self._used[key]
                self.stats.evictions += 1
                return slot
        raise RingError("all slots of the cache in GPU memory are held")

    def _await_copies(self, held: dict[int, _Slot]) -> None:
        """Have the current stream wait for what is still being copied."""
        if self._stream is None:
            return
        for slot in held.values():
            if slot.filled is None:
                continue
            if slot.filled.query():
                slot.filled = None  # asked once: a hot expert costs no call any more
            else:
                self._stream.follow(slot.filled)

    def _release(self, held: dict[int, _Slot]) -> None:
        read = self._stream.mark() if self._stream is not None and held else None
        for slot in held.values():
            slot.holds -= 1
            slot.read = read

    def _let_go(self) -> None:
        """End the holds on the ring's slots that have been copied."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()


#: Bytes to copy: from where in the ring's slot, to where in the cache's, how many.
Run = tuple[int, int, int]


def packed(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[Run]]:
    """Where an expert's tensors lie in a slot of the cache, and the copies that bring them there.

    In the ring they lie as direct I/O left them, for each expert of a layer at other places; here one behind
    the other in the order of the table, so that a layer's parameter is at the same place in all slots.
    """
    there: dict[str, TensorInfo] = {}
    runs: list[Run] = []
    at = 0
    for name, info in tensors.items():
        at = -(-at // ALIGNMENT) * ALIGNMENT
        there[name] = replace(info, offset=at)
        if runs and info.offset - at == runs[-1][0] - runs[-1][1] and info.offset >= sum(runs[-1][::2]):
            first, to, _ = runs[-1]
            runs[-1] = first, to, at + info.nbytes - to
        else:
            runs.append((info.offset, at, info.nbytes))
        at += info.nbytes
    return there, runs


def _copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Run]) -> None:
    for start, to, size in runs:
        target[to : to + size].copy_(source[start : start + size], non_blocking=True)


def _over(expert: Expert, nbytes: int) -> torch.Tensor:
    """An expert's slot in the ring; the tensor holds the slot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of memory that is read-only, as it is to be
        return torch.from_numpy(expert._view(0, (nbytes,), "|u1"))
