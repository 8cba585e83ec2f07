"""The client: attach a ring by name and take experts from it.

    with smoe_mp.attach("demo") as ring:
        with ring.fetch(layer, [3, 7]) as batch:            # demand both, wait, hold
            y = x @ batch[0].dequantize("gate").T
        for expert in ring.as_ready(layer, union):          # each as it lands
            ...

Life of a hold.  A batch holds its slots until its block ends.  A view (`raw`, `["gate"]`) is a numpy
array over the data segment itself, read-only, and carries a hold of its own that ends when the last
array made from it is gone; so a view is right as long as it can be seen, also after the block and after
`ring.close()`.  What is kept keeps its slot from being reused: keep copies of what is kept for long.

Objects that will own holds exist before the C call that takes them, so an interrupt loses none.  One
handle may be used from several threads.  In a forked child the handle is dead and says so; its parent's
is untouched.

The hot path is one C call a batch, on shared memory; a hit makes no system call.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from smoe_mp import dequant, stats
from smoe_mp._held import Held, View, demand, install, view
from smoe_mp._held import batch as batch_of
from smoe_mp._native import check, check_plain, ffi, lib, new_error, raise_error, text
from smoe_mp.errors import IdError, RingClosed, RingError, VaultError
from smoe_mp.segments import CENSUS, MODES, check_name, slot_word
from smoe_mp.sources import scaled
from smoe_mp.sources.dtypes import BITS, NUMPY

_HOLD = ffi.typeof("smoe_hold *")  # parsed once, not at each call


def _address(function: str) -> int:
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


_FETCH, _ACQUIRE = _address("smoe_fetch"), _address("smoe_acquire")
install(_address("smoe_release"), _address("smoe_hold_again"), _address("smoe_slot_data"))
_BITS = {"SMOE_Q4": 4, "SMOE_Q2": 2}
#: Ranks behind the top-k that a trace has of a router.
TRACED_RANKS = 8
ID_MAX = 1 << 31  # of layers and experts: less than that
_UNDER_WAY = (CENSUS.index("queued"), CENSUS.index("reading"))
_RESIDENT = (CENSUS.index("ready"), CENSUS.index("consumed"))
#: Slots that a request of more than the ring can keep goes on in, at most: enough for all workers to read.
BULK_SLOTS = 64


def _milliseconds(timeout: float | None) -> int:
    """Seconds to milliseconds; None is -1: the ring's own read deadline."""
    if timeout is None:
        return -1
    if not timeout >= 0:
        raise ValueError(f"timeout {timeout!r}: seconds, at least 0, or None for the ring's own limit")
    return int(min(timeout, 1e12) * 1000 + 0.999)


class _Handle:
    """Owner of the native handle.  Ring, batches and views share it; the last one to go detaches."""

    __slots__ = ("address", "name", "ptr")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ptr: Any = None
        self.address = 0

    def attach(self, role: int, label: str) -> None:
        out, error = ffi.new("smoe_ring **"), new_error()
        code = lib.smoe_attach(self.name.encode(), role, 0, label.encode()[:31], out, error)
        check(code, error, self.name)
        self.ptr = out[0]
        self.address = int(ffi.cast("uintptr_t", self.ptr))
        lib.smoe_set_interruptible(self.ptr, 1)

    def __del__(self, _detach: Any = lib.smoe_detach) -> None:
        if self.ptr is not None:
            _detach(self.ptr)
            self.ptr = None


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A quantised tensor in place: `codes` (uint8, packed), `scales` (float16, one a group of 64 weights),
    the logical `shape` and the `bits` of a code.  Both arrays are read-only views over the ring."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    shape: tuple[int, ...]
    bits: int

    def dequantize(self) -> npt.NDArray[np.float32]:
        """A new float32 array of `shape`."""
        return dequant.dequantize(f"SMOE_Q{self.bits}", self.codes, self.shape, scales=self.scales)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` from the slot's start and `nbytes`, in bytes; `dtype` as the source
    names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    tag: str = ""


class Expert:
    """One expert that a batch holds."""

    __slots__ = ("_batch", "_index", "expert", "layer")

    def __init__(self, batch: Batch, index: int, layer: int, expert: int) -> None:
        self._batch = batch
        self._index = index
        self.layer = layer
        self.expert = expert

    def __repr__(self) -> str:
        return f"<Expert layer {self.layer} expert {self.expert}>"

    def _hold(self) -> Any:
        batch = self._batch
        hold = batch._holds[self._index]
        if hold.status != lib.SMOE_HOLD_RESIDENT:
            raise RingError(
                f"ring {batch._handle.name}: expert {self.expert} of layer {self.layer} is not held"
                + (": wait for it first" if hold.status else ": its block has ended")
            )
        return hold

    def memory(self, offset: int, nbytes: int, *, writable: bool = False) -> View:
        """Bytes of its slot as a buffer, which holds the slot for as long as it is used.

        `writable`: as which it gives itself out, for those who take no other; who writes dies of it.
        RingError where the expert is not held.
        """
        made = view(self._batch, self._index, offset, nbytes, writable)
        if isinstance(made, View):
            return made
        self._hold()  # says why
        check_plain(made or lib.SMOE_ELEASE, self._batch._handle.name)
        raise AssertionError

    def _view(self, offset: int, shape: tuple[int, ...], typestr: str) -> npt.NDArray[Any]:
        dtype = np.dtype(typestr)
        buffer: Any = self.memory(offset, prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=buffer)

    @property
    def hit(self) -> bool:
        """Whether it was resident when it was asked for."""
        return bool(self._hold().hit)

    @property
    def parts(self) -> list[npt.NDArray[np.uint8]]:
        """Its bytes as they are in the file, one uint8 view an extent."""
        index = self._hold().expert_index
        return [self._view(offset, (size,), "|u1") for offset, size in self._batch._facts.parts(index)]

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """Its bytes as one uint8 view; RingError where it has several parts."""
        index = self._hold().expert_index
        parts = self._batch._facts.parts(index)
        if len(parts) != 1:
            raise RingError(
                f"ring {self._batch._handle.name}: expert {self.expert} of layer {self.layer} has "
                f"{len(parts)} parts in its files: use .parts"
            )
        offset, size = parts[0]
        return self._view(offset, (size,), "|u1")

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Its tensors by name, scales ("gate.scales") included."""
        facts: _Facts = self._batch._facts
        return facts.tensors(self._hold().expert_index)

    def __getitem__(self, name: str) -> npt.NDArray[Any] | QuantizedTensor:
        """A tensor as a read-only view: a numpy array of its dtype and shape, with the types of ml_dtypes
        for BF16 and float8; for `.smoe` ones a QuantizedTensor; for what is packed or not known its bytes as
        uint8.  KeyError names what there is."""
        tensors = self.tensors
        if name not in tensors:
            raise KeyError(
                f"expert {self.expert} of layer {self.layer} has no {name!r}: {', '.join(tensors)}"
            )
        t = tensors[name]
        if t.dtype in _BITS:
            codes = self._view(t.offset, (t.nbytes,), "|u1")
            s = tensors[name + ".scales"]
            scales = self._view(s.offset, s.shape, "<f2")
            return QuantizedTensor(codes, scales, t.shape, _BITS[t.dtype])
        dtype = NUMPY.get(t.dtype)
        if dtype is None:
            return self._view(t.offset, (t.nbytes,), "|u1")
        if dtype.isbuiltin == 1:
            return self._view(t.offset, t.shape, dtype.str)
        # numpy's interface has no name for the types of other packages.
        return self._view(t.offset, (t.nbytes,), "|u1").view(dtype).reshape(t.shape)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as a new float32 array of its logical shape.

        Floating-point types; float8 with the scales that go with it (`sources/scaled.py`); the block types of
        `.smoe` and GGUF.  RingError for others, and where scales are missing or of a form not known.
        """
        t = self[name]
        if isinstance(t, QuantizedTensor):
            return t.dequantize()
        info = self.tensors[name]
        try:
            if info.dtype in scaled.FLOAT8:
                return self._scaled(name, t)
            if info.dtype in ("F64", "F32", "F16", "BF16"):
                return t.astype(np.float32)
            if info.dtype not in BITS:
                return _dequantize_ggml(info, t)
        except (ValueError, VaultError) as error:
            raise RingError(
                f"expert {self.expert} of layer {self.layer}: {name!r} cannot be made float32: {error}"
            ) from error
        raise RingError(
            f"expert {self.expert} of layer {self.layer}: {name!r} is {info.dtype}, "
            f"which cannot be made float32 here"
        )

    def _scaled(self, name: str, codes: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        tensors = self.tensors
        found = next((name + end for end in scaled.SCALE_SUFFIXES if name + end in tensors), None)
        if found is None:
            raise ValueError(f"it is {tensors[name].dtype} and has no scales: {', '.join(tensors)}")
        scales = self[found]
        assert not isinstance(scales, QuantizedTensor)  # those are of .smoe alone
        return scaled.dequantize(codes, scales, tensors[found].tag)


def _dequantize_ggml(info: TensorInfo, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """By the C core's decoders, else by gguf-py; ValueError for what neither knows."""
    if (info.dtype, False) in dequant.TYPES:
        return dequant.dequantize(info.dtype, raw, info.shape)
    gguf: Any = importlib.import_module("smoe_mp.sources.gguf")  # of no use to other models' clients
    weights: npt.NDArray[np.float32] = gguf.dequantize(info.dtype, raw, info.shape)
    return weights


class _Facts:
    """Where parts and tensors lie, asked of the tables once an expert."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle
        self._parts: dict[int, list[tuple[int, int]]] = {}
        self._tensors: dict[int, dict[str, TensorInfo]] = {}

    def parts(self, index: int) -> list[tuple[int, int]]:
        """(offset in the slot, bytes) of each part."""
        if (known := self._parts.get(index)) is None:
            n = check_plain(lib.smoe_expert_parts(self._handle.ptr, index, ffi.NULL, 0), self._handle.name)
            room = ffi.new("smoe_part[]", n)
            check_plain(lib.smoe_expert_parts(self._handle.ptr, index, room, n), self._handle.name)
            known = self._parts[index] = [(p.offset, p.bytes) for p in room]
        return known

    def tensors(self, index: int) -> dict[str, TensorInfo]:
        if (known := self._tensors.get(index)) is None:
            n = check_plain(lib.smoe_expert_tensors(self._handle.ptr, index, ffi.NULL, 0), self._handle.name)
            room = ffi.new("smoe_tensor[]", n)
            check_plain(lib.smoe_expert_tensors(self._handle.ptr, index, room, n), self._handle.name)
            known = self._tensors[index] = {
                text(t.name): TensorInfo(
                    text(t.name),
                    text(t.dtype),
                    tuple(t.shape[i] for i in range(t.ndim)),
                    t.offset,
                    t.bytes,
                    text(t.tag),
                )
                for t in room
            }
        return known


class Batch(Held, Sequence[Expert]):
    """Experts that are held, in the order asked for, until the block ends or `release`."""

    __slots__ = ()

    @property
    def _holds(self) -> Any:
        return ffi.cast(_HOLD, self._address)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(self._n))]
        at = operator.index(i)
        if not -self._n <= at < self._n:
            raise IndexError(f"expert {i} of a batch of {self._n}")
        at %= self._n
        return Expert(self, at, self._layer, self._experts[at])

    @property
    def hits(self) -> int:
        """How many were resident when asked for."""
        holds = self._holds
        return sum(bool(holds[i].hit) for i in range(self._n))

    @property
    def landed(self) -> bool:
        """Whether no read of it is under way any more, so that `wait` returns or raises at once."""
        ptr, holds = self._handle.ptr, self._holds
        return not any(
            holds[i].status == lib.SMOE_HOLD_LOADING and slot_word(ptr, holds[i].slot)[0] in _UNDER_WAY
            for i in range(self._n)
        )

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until all are resident.  `timeout`: seconds, None for the ring's read deadline.

        Raises ExpertReadError, ReadTimeout, NoSupervisor, RingReplaced, LeaseLost; then the batch is
        released.
        """
        error = new_error()
        ms = _milliseconds(timeout)
        code = -errno.EINTR
        try:
            while (
                code == -errno.EINTR
            ):  # Python's own signal handlers run between two turns; `error` keeps time
                code = lib.smoe_wait(self._handle.ptr, self._holds, self._n, ms, error)
            check(code, error, self._handle.name, self._handle.ptr)
        except BaseException:
            self.release()
            raise
        return self


class Ring:
    """A ring that this process is a client of.  Made by `attach`; a context manager."""

    def __init__(self, handle: _Handle) -> None:
        self._handle: _Handle | None = handle
        self._name = handle.name
        self._facts = _Facts(handle)
        info = ffi.new("smoe_info *")
        lib.smoe_get_info(handle.ptr, info)
        self.slots = int(info.n_slots)
        self.slot_bytes = int(info.slot_bytes)
        self.experts = int(info.n_experts)
        self._files = int(info.n_files)
        self.client_id = int(info.id)
        self.top_k = int(info.top_k)
        self.speculation_ranks = int(info.speculation_ranks)
        self._grid = (int(info.grid_layers), int(info.grid_experts))
        self._tracing = lib.smoe_tracing(handle.ptr)

    def __repr__(self) -> str:
        return f"<smoe_mp.Ring {self._name!r} {'closed' if self._handle is None else f'{self.slots} slots'}>"

    @property
    def name(self) -> str:
        return self._name

    def _open(self) -> _Handle:
        handle = self._handle
        if handle is None:
            raise RingClosed(f"ring {self._name}: this handle was closed")
        return handle

    def close(self) -> None:
        """Let go of the ring.  Views that are still used keep their holds and the mapping."""
        self._handle = None
        self._facts = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        self.close()

    # --- ids ------------------------------------------------------------------------------------

    def _one_id(self, value: Any, what: str) -> int:
        if type(value) is int and 0 <= value < ID_MAX:
            return value
        if isinstance(value, (bool, np.bool_)):
            raise IdError(f"ring {self._name}: {what} {value!r} is a truth value, not a number")
        try:
            number = operator.index(value)
        except TypeError:
            raise IdError(f"ring {self._name}: {what} {value!r} is not a whole number") from None
        if not 0 <= number < ID_MAX:
            raise IdError(f"ring {self._name}: there is no {what} {number}")
        return number

    def _ids(self, experts: Iterable[Any]) -> list[int]:
        ids = experts.tolist() if isinstance(experts, np.ndarray) else list(experts)
        for x in ids:  # faster than all(...), and this is called for each layer of each token
            if type(x) is not int or not 0 <= x < ID_MAX:
                return [self._one_id(one, "expert") for one in ids]
        return ids

    def _fail(self, code: int, error: Any, handle: _Handle, layer: int, ids: Sequence[int]) -> NoReturn:
        if code == lib.SMOE_EID:
            expert = ids[error.got]
            if text(error.call) == "named twice":
                raise IdError(f"ring {self._name}: expert {expert} of layer {layer} is named twice: ask once")
            layers, experts = self._grid
            raise IdError(
                f"ring {self._name}: the vault has no expert {expert} in layer {layer} "
                f"(layers below {layers}, experts below {experts})"
            )
        raise_error(code, error, self._name, handle.ptr)

    # --- demand -----------------------------------------------------------------------------------

    def fetch(self, layer: int, experts: Iterable[int], timeout: float | None = None) -> Batch:
        """Demand experts of a layer, wait for all, hold them: `with ring.fetch(...) as batch:`.

        `experts`: ids, each once, in any order; the batch has that order.  `timeout`: seconds for the
        reservation and for the reads, None for the ring's read deadline.  Raises IdError, BatchTooLarge,
        Busy (slots could not be had), ExpertReadError, ReadTimeout, NoSupervisor, RingStopping,
        RingReplaced, RingClosed, RingForked, LeaseLost; then nothing is held.
        """
        handle = self._handle or self._open()
        ms = -1 if timeout is None else _milliseconds(timeout)
        made = demand(Batch, _FETCH, handle.address, handle, self._facts, layer, experts, ms)
        return made if type(made) is Batch else self._go_on(made, _FETCH, layer, experts, ms)

    def _go_on(
        self,
        made: Batch | tuple[Batch, int, bytes] | None,
        function: int,
        layer: Any,
        experts: Iterable[Any],
        ms: int,
    ) -> Batch:
        """After `demand` gave no batch: numbers of other kinds, signals, errors."""
        handle = self._open()
        if made is None:
            layer, experts = self._one_id(layer, "layer"), self._ids(experts)
            made = demand(Batch, function, handle.address, handle, self._facts, layer, experts, ms)
        if isinstance(made, Batch):
            return made
        assert made is not None
        batch, code, record = made
        ids, n, error = batch._experts, batch._n, new_error()
        ffi.buffer(error)[:] = record
        again = lib.smoe_fetch if function == _FETCH else lib.smoe_acquire
        try:
            while code == -errno.EINTR:  # the handlers of Python's signals run between two turns
                if batch._holds[0].status:  # interrupted in the wait
                    code = lib.smoe_wait(handle.ptr, batch._holds, n, ms, error)
                else:
                    code = again(handle.ptr, layer, ids, n, batch._holds, ms, error)
            if code < 0:
                self._fail(code, error, handle, layer, ids)
        except BaseException:  # a handler's exception, too, comes right behind a call that took holds
            batch.release()
            raise
        return batch

    def acquire(self, layer: int, experts: Iterable[int], timeout: float | None = None) -> Batch:
        """Demand with hold, without waiting for the reads: `batch.wait()` does.  Errors as for `fetch`."""
        handle = self._handle or self._open()
        ms = -1 if timeout is None else _milliseconds(timeout)
        made = demand(Batch, _ACQUIRE, handle.address, handle, self._facts, layer, experts, ms)
        return made if type(made) is Batch else self._go_on(made, _ACQUIRE, layer, experts, ms)

    def _batch(self, handle: _Handle, layer: int, ids: list[int]) -> Batch:
        """One that holds nothing yet."""
        return batch_of(Batch, handle.address, handle, self._facts, layer, ids)

    def wait(self, batch: Batch, timeout: float | None = None) -> Batch:
        """`batch.wait(timeout)`."""
        self._open()
        return batch.wait(timeout)

    def release(self, batch: Batch) -> None:
        """`batch.release()`."""
        batch.release()

    def claim_specific(self, layer: int, expert: int) -> Batch | None:
        """The non-blocking poll: a batch of one if the expert is resident, else None.  Reads nothing."""
        handle, layer = self._open(), self._one_id(layer, "layer")
        ids = [self._one_id(expert, "expert")]
        batch, error = self._batch(handle, layer, ids), new_error()
        try:
            code = lib.smoe_claim_specific(handle.ptr, layer, ids[0], batch._holds, error)
            if code < 0:
                self._fail(code, error, handle, layer, ids)
        except BaseException:
            batch.release()
            raise
        return batch if code else None

    def speculate(self, layer: int, experts: Iterable[int]) -> int:
        """Guess: have the experts read when no demand is waiting.  Takes no hold, never waits.

        Returns how many were queued; what is in the ring already, or finds no idle slot, is not.
        """
        handle, layer = self._open(), self._one_id(layer, "layer")
        ids, error = self._ids(experts), new_error()
        code: int = lib.smoe_speculate(handle.ptr, layer, ids, len(ids), error)
        if code < 0:
            self._fail(code, error, handle, layer, ids)
        return code

    def route(self, layer: int, ranked: Iterable[int], top_k: int, timeout: float | None = None) -> Batch:
        """Demand the first `top_k` of a list that a router ranked, best first; guess the next
        `speculation_ranks` of it.  Waits and holds like `fetch`."""
        ids = self._ids(ranked)
        k = self._one_id(top_k, "top_k")
        if len(ids) < k:
            raise IdError(f"ring {self._name}: top_k is {k}, but only {len(ids)} experts are ranked")
        batch = self.acquire(layer, ids[:k], timeout)
        try:
            if self._tracing[0]:
                self._trace_ranks(layer, ids[k : k + TRACED_RANKS])
            if guesses := ids[k : k + self.speculation_ranks]:
                self.speculate(layer, guesses)
        except BaseException:
            batch.release()
            raise
        return batch.wait(timeout)

    def _trace_ranks(self, layer: int, ids: list[int]) -> None:
        handle, error = self._open(), new_error()
        code = lib.smoe_trace_ranks(handle.ptr, self._one_id(layer, "layer"), ids, len(ids), error)
        if code < 0:
            self._fail(code, error, handle, layer, ids)

    def as_ready(
        self,
        layer: int,
        experts: Iterable[int],
        timeout: float | None = None,
        *,
        let_go: Callable[[], object] | None = None,
    ) -> Generator[Expert, None, None]:
        """Yield each expert as it lands, so that computing overlaps with reading.

        An expert is held until the next one is asked for (its views for as long as they are used).  More
        experts than half the ring are asked for in waves that never hold more than that half, so a
        request may be larger than the ring.  Errors as for `fetch`, at the expert concerned.

        Whoever keeps views from one expert to the next holds slots that the request may come to need.
        `let_go` is called before it waits for others' slots, and has to end those holds: it would wait for
        them too.

        More experts than one token wants are taken for a prompt's, which wants as many of every layer.  If
        the ring cannot keep all those, the request goes on in a quarter of the slots or fewer, so that what
        else is used stays: what it has to read is the next to be evicted until somebody asks for it again.
        """
        handle, layer = self._open(), self._one_id(layer, "layer")
        ids = self._ids(experts)
        return _Waves(self, self._batch(handle, layer, ids), timeout, let_go=let_go).run()

    def in_order(
        self, layer: int, experts: Iterable[int], timeout: float | None = None
    ) -> Generator[Expert, None, None]:
        """`as_ready` for those who need the experts in the order given, as sums in floating point do: reads
        overlap with computing and with each other, but an expert waits for those before it."""
        handle, layer = self._open(), self._one_id(layer, "layer")
        ids = self._ids(experts)
        return _Waves(self, self._batch(handle, layer, ids), timeout, in_order=True).run()

    def pin_cuda(self) -> Any:
        """Register the ring's memory with CUDA, so that copies to a GPU run at the bus's speed: keep what is
        returned for as long as they are to (`smoe_mp.cuda.Pinned`; None, after a warning, where the driver
        refuses).  Raises ConfigError where there is no CUDA, ImportError without torch."""
        return importlib.import_module("smoe_mp.cuda").pin(self)

    def waves(self, n: int) -> tuple[bool, int]:
        """How `as_ready` and `in_order` go about a request of `n` experts: whether it is more than the ring
        can keep, so that what it reads is the next to be evicted, and how many of it are held at a time."""
        bulk = n > self.top_k and n * self.experts > self.slots * self._grid[1]
        window = min(n, max(1, self.slots // 2))
        return bulk, min(window, max(2, self.slots // 4), BULK_SLOTS) if bulk else window

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request is being served: `with ring.busy():`.  The prewarm process rests meanwhile.  Blocks of
        several threads may overlap; a process that dies in one is noticed."""
        handle = self._open()
        check_plain(lib.smoe_busy(handle.ptr, 1), self._name)
        try:
            yield
        finally:
            lib.smoe_busy(handle.ptr, 0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What this thread demands and waits for in the block is counted as "prefill" or "decode":
        `with ring.phase("prefill"):`.  Blocks may be nested; the innermost counts.  It is the thread's on all
        rings.  ValueError for another name."""
        self._open()
        if name not in stats.PHASES:
            raise ValueError(f"phase {name!r}: wanted is one of {', '.join(stats.PHASES)}")
        before = lib.smoe_phase(stats.PHASES.index(name))
        try:
            yield
        finally:
            lib.smoe_phase(before)

    # --- looking on --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters of all participants since the ring was made, with `hit_rate`, `mean_wait_us`, the
        `census` of the slots, `files` (path: the way of reading that was achieved), `demand`, `phases`,
        `read_latency` (see `smoe_mp.stats`), and under `client` the counters, `demand` and `phases` of this
        client alone, since it attached."""
        ptr = self._open().ptr
        out = ffi.new("uint32_t[9]")
        check_plain(lib.smoe_census(ptr, out), self._name)
        everybody, own = stats.tally(ptr), stats.tally(ptr, self.client_id, lib.SMOE_OF_PRESENT)
        if everybody is None or own is None:
            raise_error(lib.SMOE_ELEASE, new_error(), self._name, ptr)
        total = _flat(everybody)
        total["read_latency"] = stats.latency(everybody.reads, total["read_ns"])
        total["hit_rate"] = total["demand"]["coverage"] or 0.0
        total["mean_wait_us"] = total["wait_ns"] / total["waits"] / 1000 if total["waits"] else 0.0
        total["census"] = dict(zip(CENSUS, list(out), strict=True))
        total["files"] = {
            text(lib.smoe_file_path(ptr, i)): MODES[lib.smoe_file_mode(ptr, i)] for i in range(self._files)
        }
        total["client"] = _flat(own)
        return total

    def resident(self, layer: int, expert: int) -> bool:
        """Whether the expert's bytes are in the ring now (it may be evicted the moment after)."""
        handle, ids = self._open(), [self._one_id(expert, "expert")]
        ptr, layer = handle.ptr, self._one_id(layer, "layer")
        index = lib.smoe_expert_index(ptr, layer, ids[0])
        if index < 0:
            self._fail(index, new_error(), handle, layer, ids)
        home = lib.smoe_home(ptr, index)
        if not home:
            return False
        state, now = slot_word(ptr, home - 1)
        return state in _RESIDENT and now == index


def _flat(tally: stats.Tally) -> dict[str, Any]:
    """A tally's figures, its counters among them by their names."""
    figures = stats.figures(tally)
    return {**figures.pop("counters"), **figures}


class _Waves:
    """The running state of one `as_ready` or `in_order`."""

    def __init__(
        self,
        ring: Ring,
        batch: Batch,
        timeout: float | None,
        *,
        in_order: bool = False,
        let_go: Callable[[], object] | None = None,
    ) -> None:
        self.ring = ring
        self.let_go = let_go
        self.batch = batch
        self.ms = _milliseconds(timeout)
        self.in_order = in_order
        self.yielded = 0
        self.asked = 0  # ids[:asked] have been demanded
        self.flying = 0  # demanded and not yet yielded
        self.ready: deque[int] = deque()
        self.bulk, self.window = ring.waves(len(batch))

    def _demand(self, n: int, wait: bool) -> bool:
        """Demand the next n, waiting for the reservation or not."""
        b, error = self.batch, new_error()
        handle, holds = b._handle, b._holds + self.asked
        ids = list(b._experts[self.asked : self.asked + n])
        code = -errno.EINTR
        while code == -errno.EINTR:
            if self.bulk:
                code = lib.smoe_acquire_cold(
                    handle.ptr, b._layer, ids, n, holds, wait, self.ms if wait else -1, error
                )
            elif wait:
                code = lib.smoe_acquire(handle.ptr, b._layer, ids, n, holds, self.ms, error)
            else:
                code = lib.smoe_acquire_nowait(handle.ptr, b._layer, ids, n, holds, error)
        if code == lib.SMOE_EBUSY and not wait:
            return False
        if code < 0:
            self.ring._fail(code, error, handle, b._layer, ids)
        self.ready.extend(self.asked + i for i in range(n) if holds[i].status == lib.SMOE_HOLD_RESIDENT)
        self.asked += n
        self.flying += n
        return True

    def _top_up(self) -> None:
        """Demand as much of the rest as the window and the others leave room for.  It waits for room only
        while it holds nothing, so that two such requests cannot wait for each other."""
        n = min(self.window - self.flying, len(self.batch) - self.asked)
        while n > 0 and not self._demand(n, wait=False):
            n //= 2
        if self.flying == 0 and self.asked < len(self.batch):
            if self.let_go is not None:
                self.let_go()
            self._demand(1, wait=True)

    def _next(self) -> int:
        if self.in_order:
            return self._wait_for(self.yielded)
        if self.ready:
            return self.ready.popleft()
        b, error = self.batch, new_error()
        code = -errno.EINTR
        while code == -errno.EINTR:
            code = lib.smoe_wait_any(b._handle.ptr, b._holds, self.asked, self.ms, error)
        return check(code, error, b._handle.name, b._handle.ptr)

    def _wait_for(self, at: int) -> int:
        b, error = self.batch, new_error()
        code = -errno.EINTR
        while code == -errno.EINTR:
            code = lib.smoe_wait(b._handle.ptr, b._holds + at, 1, self.ms, error)
        check(code, error, b._handle.name, b._handle.ptr)
        return at

    def run(self) -> Generator[Expert, None, None]:
        b = self.batch
        with contextlib.closing(_Releaser(b)):
            if len(set(b._experts)) < len(b):  # across waves, which C does not see
                twice = sorted({x for x in b._experts if b._experts.count(x) > 1})
                raise IdError(f"ring {b._handle.name}: experts named twice in layer {b._layer}: {twice}")
            while self.asked < len(b) or self.flying:
                self._top_up()
                at = self._next()
                self.flying -= 1
                self.yielded += 1
                yield b[at]
                lib.smoe_release(b._handle.ptr, b._holds + at, 1)


class _Releaser:
    """Closes a batch when a generator ends, however it ends."""

    def __init__(self, batch: Batch) -> None:
        self.close = batch.release


def attach(name: str, label: str = "", spin_us: int = 20) -> Ring:
    """Attach the ring `name` as a client.

    `label`: at most 31 bytes, shown by `smoe-mp status`.  `spin_us`: how long a wait spins before it
    sleeps, microseconds.  Raises NoSuchRing, SegmentError (another build, not finished, 32 clients there
    already, no permission), ConfigError for an impossible name.
    """
    handle = _Handle(check_name(name))
    handle.attach(lib.SMOE_ROLE_CLIENT, label)
    lib.smoe_set_spin_us(handle.ptr, spin_us)
    return Ring(handle)
