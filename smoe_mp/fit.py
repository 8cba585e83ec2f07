"""The ring that a configuration gets on this machine: the sum of `sizing` over a source's own figures."""

from __future__ import annotations

import dataclasses
import errno

from smoe_mp import segments, sizing, tables
from smoe_mp._native import lib
from smoe_mp.config import MIB, LoadedConfig
from smoe_mp.errors import ConfigError
from smoe_mp.runtime import human_bytes
from smoe_mp.sizing import Memory, Sizing
from smoe_mp.sources.base import Source


def memory() -> Memory:
    """What memory this process may have: on macOS by kern.memorystatus_level, which the C core asks for."""
    level = lib.smoe_memory_level
    return sizing.read_memory(level=None if level() == -errno.ENOSYS else level)


def fit(loaded: LoadedConfig, source: Source, read_align: int = 4096) -> Sizing:
    """How many slots of what size, with the line that shows the sum.

    Raises ConfigError or SegmentSpaceError, with the figures, where the ring cannot work or does not fit.
    """
    config = loaded.config
    t = tables.build(source, read_align)
    slot_bytes = segments.choose_slot_bytes(t, loaded.slot_bytes)
    given = config.ring.slots
    scout = config.reserve.scout_mb
    most = given or min(sizing.MOST_SLOTS, len(source.experts))
    found = sizing.size(
        memory(),
        sizing.Reserve(scout_bytes=sizing.dense_bytes(source) if scout < 0 else scout * MIB),
        slot_bytes=slot_bytes,
        n_experts=len(source.experts),
        layers=len({x.layer for x in source.experts}),
        top_k=source.model.top_k,
        slots_given=given,
        control_bytes=segments.control_bytes(t, most, slot_bytes),
    )
    wasted = segments.wasted_bytes(t, found.slots, slot_bytes)
    if not wasted:
        return found
    note = (
        f"experts differ in size and a slot holds the largest: {human_bytes(wasted)}"
        f" ({wasted / found.data_bytes:.1%}) of the ring stay empty with the mean expert in each slot"
    )
    return dataclasses.replace(found, notes=(*found.notes, note), wasted_bytes=wasted)


def slots_in(source: Source, ring_bytes: int, read_align: int = 4096) -> int:
    """How many slots `ring_bytes` of memory hold, no more than the source has experts.

    Raises ConfigError where that is none.
    """
    slot_bytes = segments.choose_slot_bytes(tables.build(source, read_align), None)
    if ring_bytes < slot_bytes:
        raise ConfigError(
            f"{source.path}: {human_bytes(ring_bytes)} hold no slot of {human_bytes(slot_bytes)}, the size of"
            " its largest expert"
        )
    return min(ring_bytes // slot_bytes, len(source.experts), sizing.MOST_SLOTS)
