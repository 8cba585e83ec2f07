"""The ring that a configuration gets on this machine: the sum of `sizing` over a source's own figures."""

from __future__ import annotations

import dataclasses

from smoe_mp import segments, sizing, tables
from smoe_mp.config import MIB, LoadedConfig
from smoe_mp.runtime import human_bytes
from smoe_mp.sizing import Sizing
from smoe_mp.sources.base import Source


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
        sizing.read_memory(),
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
