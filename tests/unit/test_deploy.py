"""The container files in docs: what must fit together in them, and with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smoe_mp import config, supervisor

DEPLOY = Path(__file__).resolve().parents[2] / "docs/deploy"


def test_compose_fits_the_image() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    image = (DEPLOY / "Containerfile").read_text()
    system, engine = compose["services"]["experts"], compose["services"]["engine"]

    (gid,) = re.findall(r"groupadd --gid (\d+)", image)
    assert f"--uid {gid} --gid {gid}" in image
    assert engine["group_add"] == [gid]
    assert gid not in engine["user"]
    assert config.load(DEPLOY / "model.toml").config.access.group == gid

    (folder,) = re.findall(r"SMOE_RUNTIME_DIR=(\S+)", image)
    assert engine["environment"]["SMOE_RUNTIME_DIR"] == folder
    shared = [line for line in system["volumes"] if line in engine["volumes"]]
    assert shared == ["shm:/dev/shm", f"run:{folder}"]
    assert {line.split(":")[0] for line in system["volumes"] if line[0] not in "./"} == set(
        compose["volumes"]
    )

    (path,) = re.findall(r'CMD \["up", "(.*)"\]', image)
    assert f"./model.toml:{path}:ro" in system["volumes"]
    limits = (supervisor.GRACE_S, supervisor.TERM_S, supervisor.KILL_S, supervisor.SAVE_S)
    assert int(system["stop_grace_period"].removesuffix("s")) > sum(limits)
    assert system["healthcheck"]["test"][1:] == [
        "smoe-mp",
        "status",
        config.load(DEPLOY / "model.toml").config.name,
    ]
