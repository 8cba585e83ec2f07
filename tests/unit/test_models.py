"""What names a model, the hub's cache, and names of rings made of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smoe_mp import models
from smoe_mp.errors import VaultError
from smoe_mp.segments import check_name
from smoe_mp.sources.smoe import MAGIC

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def add(cache: Path, name: str, *, ref: str = COMMIT, commit: str = COMMIT) -> Path:
    """A repository with one file in the cache; its snapshot."""
    repository = cache / name
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(ref)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/m/model.smoe", "model"),
        ("/m/gpt-oss-20b.Q4_K_M.gguf", "gpt-oss-20b.Q4_K_M"),
        ("/m/big-00001-of-00003.gguf", "big"),
        ("/m/olmoe/manifest.json", "olmoe"),
        ("/m/olmoe/model.safetensors", "olmoe"),
        (f"/h/hub/models--org--Mix-8x7B/snapshots/{COMMIT}", "Mix-8x7B"),
        (f"/h/hub/models--org--Mix-8x7B/snapshots/{COMMIT}/x-Q4.gguf", "x-Q4"),
        ("/m/a model, of mine", "a-model-of-mine"),
        ("/m/Ärger", "rger"),
        ("/m/模型", "model"),
        ("/m/..d", "d"),
        ("/m/x.d", "x-d"),
        ("/m/x.d.d", "x.d-d"),
        ("/m/" + "long" * 20, ("long" * 20)[:22]),
        ("/m/" + "x" * 21 + "-y", "x" * 21),
        ("/", "model"),
    ],
)
def test_a_ring_name_is_the_models(path: str, name: str) -> None:
    made = models.stem(Path(path))
    assert made == name
    assert check_name(made) == made


def test_a_name_that_is_served_gets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {models.socket_path("x" * 22), models.socket_path("x" * 20 + "-2")}
    monkeypatch.setattr(models, "is_served", lambda path: path in taken)
    assert models.free_name(Path("/m/" + "x" * 22)) == "x" * 20 + "-3"
    assert models.free_name(Path("/m/other")) == "other"


def test_private_names_differ_and_can_be() -> None:
    made = {models.private_name(Path("/m/a-rather-long-name-of-a-model")) for _ in range(100)}
    assert len(made) == 100
    assert all(check_name(name).startswith("a-rather-long-") or len(name) <= 22 for name in made)


def test_a_hub_id_is_its_snapshot(cache: Path) -> None:
    snapshot = add(cache, "models--org--Some.Model_1")
    assert models.resolve("org/Some.Model_1") == snapshot
    assert models.names_model("org/Some.Model_1")


def test_the_caches_place(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    assert models.hub_cache() == cache
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "own"))
    assert models.hub_cache() == tmp_path / "own"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"


def test_a_path_goes_before_a_hub_id(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add(cache, "models--org--m")
    (tmp_path / "org" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/m") == Path("org/m")


@pytest.mark.parametrize("named", ["absent", "a/b/c", "/absent/x.gguf", "../x", "org/..x\0", "x" * 5000])
def test_what_is_neither_is_said(cache: Path, named: str) -> None:
    with pytest.raises(VaultError, match="no such file or folder"):
        models.resolve(named)


def test_a_cache_without_it_is_named(cache: Path) -> None:
    with pytest.raises(VaultError, match=f"{re.escape(str(cache))}; fetch it first: hf download org/m"):
        models.resolve("org/m")


@pytest.mark.parametrize("ref", ["../../../../etc", "", "0123", "g" * 40, "é" * 40])
def test_a_reference_that_is_no_commit(cache: Path, ref: str) -> None:
    add(cache, "models--org--m", ref=ref)
    with pytest.raises(VaultError, match=r"refs/main: .* is no commit"):
        models.resolve("org/m")


def test_a_snapshot_or_reference_that_is_gone(cache: Path) -> None:
    add(cache, "models--org--m", ref="f" * 40)
    with pytest.raises(VaultError, match=f"{'f' * 40}: not there"):
        models.resolve("org/m")
    (cache / "models--org--m" / "refs" / "main").unlink()
    with pytest.raises(VaultError, match=r"No such file or directory; name the folder below"):
        models.resolve("org/m")


def test_models_and_configurations_are_told_apart(tmp_path: Path) -> None:
    def file(name: str, start: bytes) -> bool:
        path = tmp_path / name
        path.write_bytes(start)
        return models.names_model(str(path))

    assert file("vault", MAGIC + bytes(100))
    assert file("weights", b"GGUF\3\0\0\0")
    assert file("m.gguf", b"")
    assert file("manifest.json", b"{}")
    assert not file("c.toml", MAGIC)
    assert not file("config", b'name = "r"\n')
    assert not file("empty", b"")
    assert models.names_model(str(tmp_path))
    assert models.names_model("absent.smoe")
    assert models.names_model("org/absent")
    assert not models.names_model("configs/absent.toml")
    assert not models.names_model("absent")
    assert not models.names_model("a\0b")
    (tmp_path / "d.toml").mkdir()
    assert not models.names_model(str(tmp_path / "d.toml"))
