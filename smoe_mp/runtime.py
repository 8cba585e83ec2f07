"""The run-time folder: where control sockets lie, and who may reach them.

The folder is the lock on the door.  It is the first of
    $SMOE_RUNTIME_DIR,  $XDG_RUNTIME_DIR/smoe-mp,  /tmp/smoe-mp-UID
so that a client finds the socket with no more than the ring's name.  A socket's file name is a short hash
of the ring's name, since a socket's path may have at most 107 bytes (103 on macOS).

Nobody but its owner may write into it, and strangers may not enter: it is made 0700, and 0750 of its group
for a system with [access] group.  A socket says by its own mode who may connect, 0600 or 0660 of that group,
so systems with and without a group may share a folder.

Whose folder is trusted?  A supervisor serves in its own alone.  A client takes its own too, and one more
kind: a folder that SMOE_RUNTIME_DIR names and that its owner opened to a group of the client's.  Nobody can
give a file to a group that he is not in, so a stranger cannot make such a folder; and the places that are
taken by default, which a stranger could foresee, must be one's own.

Beside it, trifles that several parts share: the version, the state folder, sizes, times and lines for people.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import hashlib
import importlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smoe_mp.errors import ConfigError, ControlError
from smoe_mp.platform import system


@functools.cache
def version() -> str:
    """The version of the installed package, "unknown" where it is not installed."""
    metadata: Any = importlib.import_module("importlib.metadata")  # which takes long, and few ask
    try:
        return str(metadata.version("smoe-mp"))
    except metadata.PackageNotFoundError:
        return "unknown"


def runtime_folder() -> Path:
    """The path of the run-time folder; it need not exist."""
    own = os.environ.get("SMOE_RUNTIME_DIR")
    if own:
        return Path(own).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session, "smoe-mp") if session else Path(f"/tmp/smoe-mp-{os.getuid()}")


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """$XDG_STATE_HOME/smoe-mp or ~/.local/state/smoe-mp, which need not exist; None for a user without a
    home."""
    given = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # a relative one is to be ignored (XDG base directories)
        return Path(given, "smoe-mp")
    home = environ.get("HOME", "")
    return Path(home, ".local/state/smoe-mp") if os.path.isabs(home) else None


def group_id(group: str) -> int | None:
    """The number of the group that [access] group names, None for "": nobody else gets in.

    Raises ConfigError where there is no such group, or it is not one of this process's.
    """
    if not group:
        return None
    if not system.SEGMENTS_HAVE_GROUPS:
        raise ConfigError(f'access.group = "{group}": shared memory has no group on macOS; leave it empty')
    try:
        gid = int(group) if group.isascii() and group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f'access.group = "{group}": no such group; getent group lists them') from None
    if os.geteuid() != 0 and gid not in own_groups():
        mine = ", ".join(map(_group_name, sorted(own_groups())))
        raise ConfigError(
            f'access.group = "{group}": uid {os.geteuid()} is not in it, so it cannot give it anything;'
            f" its groups are {mine}"
        )
    return gid


def own_groups() -> set[int]:
    """Numbers of the groups that this process is in."""
    return {os.getegid(), *os.getgroups()}


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def make_runtime_folder(gid: int | None = None) -> Path:
    """Create the run-time folder if it is not there, check it, and open it to the group `gid`.

    Raises ConfigError if it cannot be made, is not ours, is open to others, or to another group already.
    """
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run-time folder {folder}: {error.strerror};"
            " set SMOE_RUNTIME_DIR to a folder of yours"
        ) from error
    _check_owner(folder, _closed(folder))
    if gid is not None:
        _open_to_group(folder, gid)
    return folder


def _open_to_group(folder: Path, gid: int) -> None:
    """Let the members of the group `gid` into the folder, which is ours."""
    found, group = folder.stat(), _group_name(gid)
    if found.st_gid != gid and found.st_mode & 0o070:
        raise ConfigError(
            f"run-time folder {folder} is open to group {_group_name(found.st_gid)}, and access.group is"
            f" {group}: systems of two groups need two folders; set SMOE_RUNTIME_DIR to another"
        )
    try:
        os.chown(folder, -1, gid)
        folder.chmod(0o750)
    except OSError as error:
        raise ConfigError(f"run-time folder {folder}: cannot open it to {group}: {error.strerror}") from error
    for parent in folder.parents:
        st = parent.stat()
        if not (st.st_mode & 0o001 or (st.st_gid == gid and st.st_mode & 0o010)):
            raise ConfigError(
                f"access.group: group {group} cannot reach the run-time folder {folder}: {parent} has mode"
                f" {stat.S_IMODE(st.st_mode):04o}; set SMOE_RUNTIME_DIR to a folder elsewhere"
            )


def check_reachable(path: Path) -> None:
    """For a client of the control socket at `path`, which need not be there.

    Raises ConfigError where its folder is not to be trusted (see above), ControlError where the socket is not
    open to this user.
    """
    if not os.path.lexists(path.parent):  # nobody serves there
        return
    found = _closed(path.parent)
    opened = found.st_gid in own_groups() and found.st_mode & 0o050 == 0o050
    if not (opened and os.environ.get("SMOE_RUNTIME_DIR")):
        _check_owner(path.parent, found)
    with contextlib.suppress(FileNotFoundError):
        st = path.stat()
        if not os.access(path, os.W_OK):
            raise ControlError(
                f"control socket {path}: connect: permission denied for uid {os.geteuid()}: it belongs to uid"
                f" {st.st_uid}, mode {stat.S_IMODE(st.st_mode):04o}; [access] group opens a system to a group"
            )


def _closed(folder: Path) -> os.stat_result:
    """What lstat says of `folder`; ConfigError unless it is a folder, and not a link, that others cannot
    enter and only its owner can write into."""
    try:
        found = folder.lstat()  # a link in /tmp could be anybody's
    except OSError as error:
        raise ConfigError(f"run-time folder {folder}: lstat: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"run-time folder {folder} is no folder; set SMOE_RUNTIME_DIR to a folder of yours")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o027:
        raise ConfigError(f"run-time folder {folder} has mode {mode:04o}, open to others; chmod 0700 it")
    return found


def _check_owner(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"run-time folder {folder} belongs to uid {found.st_uid}, not to uid {os.geteuid()};"
            " set SMOE_RUNTIME_DIR to a folder of yours, or to one that is open to a group of yours"
        )


def socket_path(name: str) -> Path:
    """The control socket of the ring `name`.

    Raises ConfigError if the folder is so deep that the path does not fit a socket address.
    """
    path = runtime_folder() / (hashlib.blake2b(name.encode(), digest_size=8).hexdigest() + ".ctl")
    size = len(os.fsencode(path))
    if size > system.SOCKET_PATH_MAX:
        raise ConfigError(
            f"control socket {path}: {size} bytes, a socket's path may have {system.SOCKET_PATH_MAX};"
            " set SMOE_RUNTIME_DIR to a shorter folder"
        )
    return path


def events_path(control: Path) -> Path:
    """The socket of the events, beside that of the commands."""
    return control.with_suffix(".evt")


def is_served(path: Path) -> bool:
    """Whether some process listens on the socket at `path`; a socket file alone proves nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # a full backlog: it listens
            return True
        except OSError:
            return False
    return True


def serving_pid(path: Path) -> int:
    """The process that listens on the socket at `path`, by its number in this process's pid namespace.

    0 where nobody does, or it is in a namespace that cannot be seen from here, as one container's from
    another; what a process says of its own number is right in its own namespace only.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with contextlib.suppress(OSError):
            probe.connect(str(path))
            return system.peer_pid(probe)
    return 0


def human_bytes(count: float) -> str:
    """`count` bytes for people, in binary units: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_duration(seconds: float) -> str:
    """A time for people: "3.2 s", "5 min 20 s", "2 h 7 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def printable(text: str) -> str:
    """`text` on one line: what cannot be printed stands as "?"."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
