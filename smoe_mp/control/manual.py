"""docs/control.md, made from the commands and events themselves:

python -m smoe_mp.control.manual > docs/control.md
"""

from __future__ import annotations

import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from smoe_mp.control import commands, events, protocol

HEAD = f"""# The control plane

<!-- Made by `python -m smoe_mp.control.manual`; change the classes, not this file. -->

Each system has two sockets in its run-time folder (`$SMOE_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/smoe-mp`,
else `/tmp/smoe-mp-UID`), named by a hash of the ring's name: `HASH.ctl` for commands, `HASH.evt` for events.
`smoe_mp.runtime.socket_path(NAME)` is the first; HASH is BLAKE2b of the name, 8 bytes, in hex. There is no
TCP.

Messages are JSON objects of at most {protocol.MESSAGE_BYTES_MAX:,} bytes, `"v": {protocol.VERSION}`. A
request has `command`, an `id` of the asker's (text of at most {protocol.ID_CHARS_MAX} characters, or a
number; it comes back), `deadline_ms` (how long the asker will wait, 5000 by default; a later reply is not
sent) and the command's own fields. A reply has `ok`, and `result` or `error` (`type` for programs, `message`
for people). What is no request is counted, answered with an error where it can be addressed, and changes
nothing.

From Python: `smoe_mp.control.client.ControlClient(NAME).call(Demand(experts=[(0, 3)]))`. From anything that
speaks ZeroMQ, REQ and DEALER alike:

```python
import hashlib, json, os, zmq

own, session = os.environ.get("SMOE_RUNTIME_DIR"), os.environ.get("XDG_RUNTIME_DIR")
folder = own or (f"{{session}}/smoe-mp" if session else f"/tmp/smoe-mp-{{os.getuid()}}")
name = hashlib.blake2b(b"smoe-demo", digest_size=8).hexdigest()
socket = zmq.Context().socket(zmq.REQ)
socket.setsockopt(zmq.RCVTIMEO, 5000)  # zmq.Again where no system of that name runs
socket.setsockopt(zmq.LINGER, 0)
socket.connect(f"ipc://{{folder}}/{{name}}.ctl")


def ask(command, **fields):
    socket.send(json.dumps({{"v": 1, "id": 1, "command": command, **fields}}).encode())
    return json.loads(socket.recv())


print(ask("demand", experts=[[0, 3], [1, 7]]))
print(ask("speculate", experts=[[2, 5]]))
print(ask("status")["result"]["hit_rate"])
```

(A REQ socket that has lost a reply can never ask again: for more than a script use a DEALER with a time limit
on each call, as `ControlClient` does.)

A demand here takes no hold: the answer says that the experts were resident when it was written. Who computes
with experts attaches the ring and holds them; a hit there costs microseconds, here a message there and back.

# Commands
"""


def manual() -> str:
    """The whole text."""
    parts = [HEAD]
    parts += [_command(name, class_) for name, class_ in commands.COMMANDS.items()]
    parts.append(f"# Events\n\n{_events()}")
    return "\n".join(parts)


def _command(name: str, class_: type[commands.AnyCommand]) -> str:
    lines = [f"## {name}\n", f"{inspect.getdoc(class_)}\n"]
    if class_.cli:
        lines.append(f"`smoe-mp {class_.cli}`, as in `{class_.example}`\n")
    common = {f.name for f in msgspec.structs.fields(commands.Command)}
    own = [f for f in msgspec.structs.fields(class_) if f.name not in common]
    if own:
        lines.append("| field | is | default |\n|---|---|---|")
        lines += [f"| `{f.name}` | {_type(f.type)} | {_default(f)} |" for f in own]
        lines.append("")
    lines.append(f"Answers with {_result(class_.result)}\n")
    return "\n".join(lines)


def _result(struct: type[Struct]) -> str:
    fields = ", ".join(f"`{f.name}`" for f in msgspec.structs.fields(struct))
    said = inspect.getdoc(struct) if "__doc__" in vars(struct) and struct.__doc__ else ""
    return f"{fields}." + (f"\n\n{said}" if said else "")


def _default(field: Any) -> str:
    if field.required:
        return ""
    made = field.default_factory is not msgspec.NODEFAULT
    return f"`{msgspec.json.encode(field.default_factory() if made else field.default).decode()}`"


def _type(annotation: Any) -> str:
    """A type for people."""
    if get_origin(annotation) is Annotated:
        base, *notes = get_args(annotation)
        meta = next((n for n in notes if isinstance(n, Meta)), Meta())
        bounds = []
        if meta.ge is not None or meta.le is not None:
            low, high = ("" if x is None else f"{x:,}" for x in (meta.ge, meta.le))
            bounds.append(f"{low} to {high}" if high else f"{low} or more")
        if meta.max_length is not None:
            bounds.append(f"at most {meta.max_length:,}" + (" characters" if base is str else ""))
        return _type(base) + (f", {', '.join(b.strip() for b in bounds)}" if bounds else "")
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f'`"{a}"`' for a in args)
    if origin is list:
        return f"list of {_type(args[0]).removesuffix('.')}"
    if origin is tuple:
        return "`[layer, expert]`"
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in args)
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return inspect.getdoc(annotation) or annotation.__name__
    return {int: "whole number", str: "text", bool: "true or false", type(None): "null"}.get(
        annotation, str(annotation)
    )


def _events() -> str:
    said = inspect.getdoc(events) or ""
    return "A PUB socket; `smoe-mp events NAME` prints them.\n\n" + said.split("\n\n", 1)[1] + "\n"


if __name__ == "__main__":
    print(manual(), end="")
