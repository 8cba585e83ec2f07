"""What `smoe-mp status` draws: tables that can be read at 80 columns and without colour."""

from __future__ import annotations

import collections

import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from smoe_mp.control.commands import (
    FileStatus,
    PrewarmStatus,
    RingStatus,
    StatusResult,
    VaultStatus,
)
from smoe_mp.runtime import human_bytes, human_duration

__all__ = ["draw_status", "status_view", "titled_table"]


def draw_status(result: StatusResult, console: Console) -> None:
    """Draw a system's status as tables, readable at 80 columns and without colour."""
    for table in (*_tables(result), _settings(result)):
        console.print(table)
    for line in _warning_lines(result):
        console.print(line)


def status_view(result: StatusResult, as_json: bool) -> RenderableType:
    """For --watch: without the settings, which do not change, and side by side where there is room; as JSON
    one line."""
    if as_json:
        return Text(msgspec.json.encode(result).decode())
    facts, *tables = _tables(result)
    return Group(facts, *_warning_lines(result), Columns(tables))


def _tables(result: StatusResult) -> list[Table]:
    parts = (_facts, _workers, _clients, _demands, _latencies, _counters)
    return [table for part in parts if (table := part(result)).row_count]


def _warning_lines(result: StatusResult) -> list[Text]:
    return [Text.assemble(("warning:", "yellow"), f" {warning}") for warning in result.warnings]


def _facts(result: StatusResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    vault, ring = result.vault, result.ring
    size = f"{human_bytes(ring.slot_bytes)} = {human_bytes(ring.data_bytes)}"
    rows = [
        ("system", f"{result.name}: {result.state} for {human_duration(result.uptime_s)}"),
        ("process", f"pid {result.pid}, smoe-mp {result.version}"),
        ("vault", f"{vault.path}: {vault.format}, {vault.experts} experts, {human_bytes(vault.bytes)}"),
        ("checksums", _checksum_line(vault)),
        *((f"file {i}", _file_line(f)) for i, f in enumerate(result.files)),
        ("ring", f"{ring.slots} slots x {size}, {ring.pages}"),
        *([("waste", _waste_line(ring))] if ring.wasted_bytes else []),
        ("memory", _memory_line(ring)),
        ("health", result.health),
        *([("metrics", f"{result.metrics.url}: {result.metrics.state}")] if result.metrics else []),
        ("prewarm", _prewarm_line(result.prewarm)),
        ("census", ", ".join(f"{count} {state}" for state, count in ring.census.items())),
        ("hit rate", "no demand yet" if result.hit_rate is None else f"{result.hit_rate:.1%}"),
        ("guesses", _guess_line(result.counters)),
        ("device", _device_line(result.counters)),
    ]
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    return table


def _checksum_line(vault: VaultStatus) -> str:
    have = f"{vault.checksums} of {vault.experts} experts have one"
    return (
        f"{have}; {'each read is' if vault.verify and vault.checksums else 'reads are not'} held against it"
    )


def _waste_line(ring: RingStatus) -> str:
    share = ring.wasted_bytes / ring.data_bytes
    return f"{human_bytes(ring.wasted_bytes)} ({share:.1%}) of the ring: experts differ in size"


def _memory_line(ring: RingStatus) -> str:
    if ring.resident_bytes is None:
        return f"{human_bytes(ring.locked_bytes)} locked"
    line = (
        f"{human_bytes(ring.resident_bytes)} of the ring in memory, {human_bytes(ring.locked_bytes)} locked"
    )
    out = ring.data_bytes - ring.resident_bytes
    return f"{line}; {human_bytes(out)} are swapped out, so hits are slow" if out > 0 else line


def _prewarm_line(prewarm: PrewarmStatus) -> str:
    line = f"{prewarm.state}, {prewarm.done} of {prewarm.goal} experts, every {prewarm.trickle_ms:g} ms"
    return f"{line}; popularity in {prewarm.histogram}"


def _guess_line(counters: dict[str, int]) -> str:
    n = collections.Counter(counters)  # 0 for what an older supervisor does not tell
    used, wasted = human_bytes(n["guess_used_bytes"]), human_bytes(n["guess_wasted_bytes"])
    return (
        f"{n['guesses']:,}: {n['guess_hits'] + n['promoted']:,} used ({used}), {n['guess_wasted']:,} evicted"
        f" unread ({wasted}), {n['guess_displaced']:,} displaced before they were read"
    )


def _device_line(counters: dict[str, int]) -> str:
    n = collections.Counter(counters)
    return f"{human_bytes(n['device_bytes'])} read for {human_bytes(n['wanted_bytes'])} of experts"


def _file_line(file: FileStatus) -> str:
    refused = f" (direct reads refused: {file.refusal})" if file.refusal else ""
    return f"{file.path}: {file.mode}{refused}, {human_bytes(file.size)}"


def titled_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in `numbers` stand to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def _workers(result: StatusResult) -> Table:
    table = titled_table("workers", "worker", "pid", "state", numbers=("worker", "pid"))
    for worker in result.workers:
        busy = "idle" if worker.slot is None else f"reads into slot {worker.slot}"
        if worker.stuck:
            busy = f"STUCK: {busy} for {human_duration(worker.reading_s or 0)}"
        table.add_row(str(worker.id), str(worker.pid), busy if worker.alive else "dead")
    return table


def _clients(result: StatusResult) -> Table:
    numbers = ("id", "pid", "slots", "demanded", "coverage", "wait p99")
    table = titled_table("clients", "id", "pid", "label", *numbers[2:], numbers=numbers)
    for client in result.clients:
        label = escape(client.label) if client.alive else f"{escape(client.label)} (dead)"
        did = client.demand
        row = (str(client.id), str(client.pid), label, str(client.reserved), f"{did.demanded:,}")
        table.add_row(*row, _share(did.coverage), _length(did.wait.p99_s))
    if (gone := result.departed.demand).demanded:
        table.add_row(
            "", "", "(gone)", "", f"{gone.demanded:,}", _share(gone.coverage), _length(gone.wait.p99_s)
        )
    return table


def _demands(result: StatusResult) -> Table:
    kinds = ("demanded", "resident", "joined", "promoted", "missed", "coverage")
    table = titled_table("demand", "phase", *kinds, numbers=kinds)
    rows = {**result.phases, "all": result.demand} if result.demand.demanded else {}
    for phase, did in rows.items():
        counts = (did.demanded, did.hits, did.joins, did.promoted, did.misses)
        table.add_row(phase, *(f"{n:,}" for n in counts), _share(did.coverage))
    return table


def _latencies(result: StatusResult) -> Table:
    columns = ("times", "mean", "p50", "p90", "p99")
    table = titled_table("how long", "what", *columns, numbers=columns)
    waits = {f"wait, {phase}": did.wait for phase, did in result.phases.items()}
    for what, took in {**waits, "read": result.read_latency}.items():
        if took.count:
            mean = took.sum_s / took.count
            row = map(_length, (mean, took.p50_s, took.p90_s, took.p99_s))
            table.add_row(what, f"{took.count:,}", *row)
    return table


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.1%}"


def _length(seconds: float | None) -> str:
    """A length of time in a fitting unit."""
    if seconds is None:
        return ""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def _counters(result: StatusResult) -> Table:
    table = titled_table("counters", "counter", "value", numbers=("value",))
    for name, value in result.counters.items():
        table.add_row(name, human_bytes(value) if name.endswith("_bytes") else f"{value:,}")
    return table


def _settings(result: StatusResult) -> Table:
    table = titled_table("settings", "option", "value", "from")
    for setting in result.config:
        table.add_row(setting.key, escape(str(setting.value)), setting.origin)
    return table
