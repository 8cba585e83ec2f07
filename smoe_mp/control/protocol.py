"""What is on the wire: JSON messages of one version, at most 1 MiB, over a ZeroMQ ROUTER.

    request   {"v": 1, "id": "a1", "command": "ping", "deadline_ms": 5000, ...the command's own fields}
    reply     {"v": 1, "id": "a1", "ok": true,  "result": {...}}
              {"v": 1, "id": "a1", "ok": false, "error": {"type": "UnknownCommand", "message": "..."}}

A REQ socket puts an empty frame before the message, a DEALER need not; the reply has it where the request
had.  `id` is the asker's, text or number, and comes back as it was; `deadline_ms` is how long the asker
will wait: a reply that is later is not sent.  Nothing is ever unpickled.

Requests are judged in steps, so that an error carries the id wherever there is one:
JSON, then the version, then the command's name, then its fields.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw, Struct

VERSION = 1
MESSAGE_BYTES_MAX = 1 << 20
ID_CHARS_MAX = 128
DEADLINE_MS_MAX = 3_600_000

Id = str | int | None


class ErrorBody(Struct, frozen=True):
    """Why a request failed: `type` for programs, `message` for people."""

    type: str
    message: str


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer; `result` where `ok`, else `error`."""

    v: int
    id: Id
    ok: bool
    result: Raw = Raw()
    error: ErrorBody | None = None


class BadRequest(Exception):
    """A message that is no request; answered with `type` to `id`.  Stays inside the server."""

    def __init__(self, type_: str, message: str, id_: Id = None) -> None:
        super().__init__(message)
        self.type, self.id = type_, id_


def read_request(body: bytes) -> tuple[Id, dict[str, Any]]:
    """The id and the fields of a request of our version.  Raises BadRequest."""
    try:
        message = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest("Malformed", f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadRequest("Malformed", "a request is a JSON object")
    id_ = message.get("id")
    if not _is_id(id_):
        raise BadRequest("Malformed", f"id must be text of at most {ID_CHARS_MAX} characters or a number")
    version = message.get("v")
    if type(version) is not int or version != VERSION:
        raise BadRequest("WrongVersion", f'this supervisor speaks version {VERSION}: "v": {VERSION}', id_)
    if not isinstance(message.get("command"), str):
        raise BadRequest("Malformed", 'no "command"', id_)
    return id_, message


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= ID_CHARS_MAX
    return value is None or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def write(message: Struct) -> bytes:
    """A message as JSON; bytes of a path that are not UTF-8 stand as "?"."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")


def write_result(id_: Id, result: Struct) -> bytes:
    """The reply of a request that was done."""
    return write(Reply(v=VERSION, id=id_, ok=True, result=Raw(write(result))))


def write_error(id_: Id, type_: str, message: str) -> bytes:
    """The reply of a request that was not done; a long message is cut."""
    error = ErrorBody(type_, message[:2000])
    return write(Reply(v=VERSION, id=id_, ok=False, error=error))


def read_reply(body: bytes) -> Reply:
    """Decode a reply.  Raises msgspec.MsgspecError."""
    return msgspec.json.decode(body, type=Reply)
