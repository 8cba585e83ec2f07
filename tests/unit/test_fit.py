"""Whose figures the sizing uses: the C core's where it has some (macOS), else those of /proc."""

from __future__ import annotations

import errno
import os
import sys
from types import SimpleNamespace

import pytest

from smoe_mp import fit


def test_the_core_s_level_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "lib", SimpleNamespace(smoe_memory_level=lambda: 25))
    memory = fit.memory()
    assert memory.room_name == "kern.memorystatus_level 25%"
    assert memory.room_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def test_a_level_that_cannot_be_had_is_not_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "lib", SimpleNamespace(smoe_memory_level=lambda: -errno.EPERM))
    assert not fit.memory().certain


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="by /proc on Linux alone")
def test_the_core_itself() -> None:
    assert fit.lib.smoe_memory_level() == -errno.ENOSYS
    assert fit.memory().room_name != "all memory"
