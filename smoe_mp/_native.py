"""The one importer of the C module: `lib` and `ffi`, and results that become exceptions.

C functions return a value >= 0 or a negative error and describe it in an `smoe_error`.  `check` is the
only place where that turns into Python: the code picks the exception, the record gives the figures.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NoReturn

from smoe_mp import errors
from smoe_mp._smoe import ffi, lib

__all__ = ["CHANGES", "Error", "check", "check_plain", "ffi", "lib", "new_error", "text"]

#: An `smoe_error *`, as cffi has it.
Error = Any

_READ_REASONS = {
    lib.SMOE_READ_SHORT: "the file ended before the expert's last byte",
    lib.SMOE_READ_CHANGED: "the file is not the one that the ring was made for: it was replaced or changed",
    lib.SMOE_READ_PLAN: "the read plan in shared memory does not add up",
    lib.SMOE_READ_KILLER: "three workers died reading it, so it is not tried again by itself",
    lib.SMOE_READ_UNSERVED: "no worker is left to read it: see `smoe-mp status`",
    lib.SMOE_READ_CHECKSUM: "the bytes do not match the vault's checksum",
}


#: What of a file is not as it was, by the bits of SMOE_CHANGED_*.
CHANGES = {
    "inode": lib.SMOE_CHANGED_INODE,
    "size": lib.SMOE_CHANGED_SIZE,
    "mtime": lib.SMOE_CHANGED_MTIME,
    "header": lib.SMOE_CHANGED_HEADER,
}
_ERROR = ffi.typeof("smoe_error *")


def new_error() -> Error:
    return ffi.new(_ERROR)


def text(pointer: Any) -> str:
    """A C string, "" for NULL."""
    return ffi.string(pointer).decode(errors="replace") if pointer else ""


def reason(os_error: int) -> str:
    """An errno or SMOE_READ_* in words."""
    return (
        _READ_REASONS.get(os_error) or f"{os.strerror(os_error)} ({errno.errorcode.get(os_error, os_error)})"
    )


def _read_error(error: Error, ring: Any, name: str) -> errors.ExpertReadError:
    path = text(lib.smoe_file_path(ring, error.file)) if ring else "?"
    what = f"ring {name}: expert {error.expert} of layer {error.layer}: "
    hint = (
        " One expert of one file: look at that file's storage; every expert: at its mount."
        if error.os_error == errno.EIO
        else " Restart `smoe-mp up` once the file is whole."
        if error.os_error in (lib.SMOE_READ_SHORT, lib.SMOE_READ_CHANGED)
        else ""
    )
    happened = (
        f"its bytes at {error.offset} of {path} have CRC-32C {error.got:08x}, the vault says "
        f"{error.wanted:08x}: the storage or a copy damaged them; `smoe-mp verify` lists all such experts."
        if error.os_error == lib.SMOE_READ_CHECKSUM
        else f"read of {error.wanted} bytes at {error.offset} of {path} gave {error.got}: "
        f"{reason(error.os_error)}.{hint}"
    )
    e = errors.ExpertReadError(what + happened)
    e.layer, e.expert, e.path = error.layer, error.expert, path
    e.offset, e.wanted, e.got, e.os_error = error.offset, error.wanted, error.got, error.os_error
    return e


def _source_changed(error: Error, ring: Any, name: str) -> errors.SourceChanged:
    path = text(lib.smoe_file_path(ring, error.file)) if ring else "?"
    changed = tuple(what for what, bit in CHANGES.items() if error.got & bit)
    e = errors.SourceChanged(
        f"ring {name}: {path} changed while it was served ({', '.join(changed)}): nothing is served any more;"
        f" when the file is as it should be, `smoe-mp down {name}` and start `smoe-mp up` anew"
    )
    e.path, e.changed = path, changed
    return e


def _ring_error(code: int, error: Error, ring: Any, name: str) -> errors.SmoeError | None:
    where = f"ring {name}: "
    what = f"expert {error.expert} of layer {error.layer}"
    if code == lib.SMOE_EREAD:
        return _read_error(error, ring, name)
    if code == lib.SMOE_ECHANGED:
        return _source_changed(error, ring, name)
    if code == lib.SMOE_EBUSY:
        ids = [str(c) for c in range(32) if error.holders >> c & 1]
        return errors.Busy(
            f"{where}no {error.wanted} slots to be had in time ({error.got} free); held by client"
            f"{'s' if len(ids) != 1 else ''} {', '.join(ids)}: release holds, or make the ring larger"
        )
    if code == lib.SMOE_ETOOLARGE:
        return errors.BatchTooLarge(
            f"{where}{error.wanted} experts at once, but the ring has {error.got} slots: "
            f"ask for fewer, or use as_ready, which takes them in waves"
        )
    if code == lib.SMOE_ETIMEOUT:
        state = {lib.SMOE_STATE_QUEUED: "queued", lib.SMOE_STATE_READING: "being read"}.get(
            error.got, "not there"
        )
        return errors.ReadTimeout(f"{where}{what} is {state} still after {error.wanted} ms")
    if code == lib.SMOE_ENOSUPERVISOR:
        return errors.NoSupervisor(
            f"{where}{what} did not come in {error.wanted} ms, and nobody serves the ring: start `smoe-mp up`"
        )
    kind, message = {
        lib.SMOE_EGONE: (errors.RingReplaced, "it was removed or replaced: attach anew"),
        lib.SMOE_ELEASE: (errors.LeaseLost, "this process's registration was taken from it: attach anew"),
        lib.SMOE_EFORKED: (
            errors.RingForked,
            "the handle belongs to the parent process: attach in the child",
        ),
        lib.SMOE_ESTOPPING: (errors.RingStopping, "it is being stopped: no new demand"),
    }.get(code, (None, ""))
    return kind(where + message) if kind else None


def _attach_error(code: int, error: Error, name: str) -> errors.SmoeError | None:
    where = f"ring {name} (shared memory /smoe.{name}): "
    step = text(error.call)
    if code == -errno.ENOENT and step == "shm_open of the data segment":
        return errors.NoSuchRing(where + "its data segment is gone: stop and start `smoe-mp up`")
    if code == -errno.ENOENT:
        return errors.NoSuchRing(where + "there is none: start `smoe-mp up`, or look at the name")
    if code == -errno.EACCES and step == "segment mode":
        return errors.SegmentError(
            where + f"anybody may write it{_owner(name)}: no smoe-mp made it so, and it is not to be trusted:"
            " remove it, or choose another name"
        )
    if code in (-errno.EACCES, -errno.EPERM) and step.startswith("shm_open"):
        return errors.SegmentError(
            where + f"{step}: permission denied for uid {os.geteuid()}{_owner(name)}; [access] group opens a"
            " system to a group"
        )
    if code == lib.SMOE_EABI:
        return errors.SegmentError(
            where + f"was made by another version or build: {step} is {error.got:#x}, this build's is "
            f"{error.wanted:#x}: stop it with the smoe-mp that made it"
        )
    if code == lib.SMOE_ENOTLIVE:
        return errors.SegmentError(
            where + "is not finished: `smoe-mp up` is creating it, or was killed doing so"
        )
    if code == lib.SMOE_ECORRUPT:
        return errors.SegmentError(where + f"{step} does not add up: wanted {error.wanted}, got {error.got}")
    if code == lib.SMOE_ECLIENTS:
        return errors.SegmentError(where + f"{error.got} clients are attached already, which is the limit")
    if code == lib.SMOE_ETAKEN:
        return errors.RingExists(where + "a living process holds it")
    if code == lib.SMOE_ENOSPACE:
        return errors.SegmentSpaceError(where + f"{step}: no space for {error.wanted} bytes")
    return None


def _owner(name: str) -> str:
    try:
        st = os.stat(f"/dev/shm/smoe.{name}")
    except OSError:
        return ""
    return f": it belongs to uid {st.st_uid}, mode {st.st_mode & 0o777:04o}"


def raise_error(code: int, error: Error, name: str, ring: Any = None) -> NoReturn:
    found = _ring_error(code, error, ring, name) or _attach_error(code, error, name)
    if found is None:
        step = text(error.call) or "a call"
        found = errors.SegmentError(f"ring {name}: {step}: {text(lib.smoe_strerror(code))} ({code})")
    raise found


def check(code: int, error: Error, name: str, ring: Any = None) -> int:
    """`code` if it is >= 0, else the exception that it stands for."""
    if code < 0:
        raise_error(code, error, name, ring)
    return code


def check_plain(code: int, name: str) -> int:
    """`check` for functions that describe nothing."""
    if code < 0:
        raise_error(code, new_error(), name)
    return code
