"""Every exception that smoe-mp raises on purpose, and the one place where C results become exceptions.

    SmoeError
    ├── ConfigError            a configuration or command line that cannot work          (ValueError)
    ├── VaultError             a model file that is damaged, foreign or does not add up
    ├── SegmentError           shared memory: missing, too small, foreign, taken
    │   ├── NoSuchRing         nothing of that name                          (FileNotFoundError)
    │   ├── RingExists         the name is taken by a living or foreign ring (FileExistsError)
    │   └── SegmentSpaceError  the shared-memory file system is too small    (MemoryError)
    ├── HistogramError         the popularity's file could not be saved      (OSError)
    ├── IdError                no such layer or expert, or one named twice   (ValueError)
    ├── RingError              the ring answered, and the answer is no
    │   ├── Busy               all slots are held: no reservation in time    (TimeoutError)
    │   ├── BatchTooLarge      more experts at once than the ring has slots  (ValueError)
    │   ├── ExpertReadError    the expert could not be read                  (OSError)
    │   ├── ReadTimeout        not read in time; the ring is served          (TimeoutError)
    │   ├── NoSupervisor       not read in time; nobody serves the ring      (TimeoutError)
    │   ├── SourceChanged      a model file changed under the ring: it serves no more
    │   ├── RingStopping       the ring is being stopped: no new demand
    │   ├── RingReplaced       the ring was removed or replaced: attach anew
    │   ├── RingClosed         this handle was closed
    │   ├── LeaseLost          this process's registration was taken from it
    │   └── RingForked         the handle belongs to the parent process
    ├── ModelError             a model that cannot run on streamed experts, or what it cannot be used for
    └── ControlError           the control plane: no answer, or a refusal
        ├── NoAnswer           nobody answered in time                       (TimeoutError)
        └── Refused            the supervisor answered with an error

Messages name the file or segment, the system call, the figures and the remedy.  The command line prints
them as one line and ends with `exit_code`; a traceback is a fault.
"""

from __future__ import annotations


class SmoeError(Exception):
    """Base of all errors of smoe-mp."""

    exit_code = 1


class ConfigError(SmoeError, ValueError):
    exit_code = 2


class VaultError(SmoeError):
    exit_code = 3


class SegmentError(SmoeError):
    exit_code = 4


class NoSuchRing(SegmentError, FileNotFoundError):
    pass


class RingExists(SegmentError, FileExistsError):
    pass


class SegmentSpaceError(SegmentError, MemoryError):
    exit_code = 5


class HistogramError(SmoeError, OSError):
    """The histogram could not be saved; the file is the old one.  `os_error` is the errno."""

    os_error: int


class IdError(SmoeError, ValueError):
    pass


class RingError(SmoeError):
    exit_code = 6


class Busy(RingError, TimeoutError):
    pass


class BatchTooLarge(RingError, ValueError):
    pass


class ExpertReadError(RingError, OSError):
    """A read that failed.

    Attributes: `layer`, `expert`, `path`, `offset`, `wanted` and `got` (bytes), `os_error` (errno, 0
    where the fault is not an errno).
    """

    layer: int
    expert: int
    path: str
    offset: int
    wanted: int
    got: int
    os_error: int


class ReadTimeout(RingError, TimeoutError):
    pass


class NoSupervisor(RingError, TimeoutError):
    pass


class SourceChanged(RingError):
    """A file of the model changed while it was served; the ring serves nothing any more.

    Attributes: `path`, and `changed`, what is not as it was: of "inode", "size", "mtime", "header".
    """

    path: str
    changed: tuple[str, ...]


class RingStopping(RingError):
    pass


class RingReplaced(RingError):
    pass


class RingClosed(RingError):
    pass


class LeaseLost(RingError):
    pass


class RingForked(RingError):
    pass


class ModelError(SmoeError):
    exit_code = 8


class ControlError(SmoeError):
    exit_code = 7


class NoAnswer(ControlError, TimeoutError):
    pass


class Refused(ControlError):
    pass
