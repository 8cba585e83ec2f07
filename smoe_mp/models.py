"""What a user may name as a model, and the ring's name that follows from it.

A model is a path that `sources.open_source` takes, or the id of a Hugging Face repository that lies in the
local cache.  Nothing is downloaded: the cache's folders are read as huggingface_hub lays them out

    <cache>/models--ORG--NAME/refs/main              the commit of the branch
    <cache>/models--ORG--NAME/snapshots/<commit>/    its files

which needs no package.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from smoe_mp.errors import VaultError
from smoe_mp.paths import expanded
from smoe_mp.runtime import is_served, socket_path
from smoe_mp.segments import NAME_MAX
from smoe_mp.sources import gguf_file, smoe

#: The folder of the small trained model that comes along: config.json, a vault, its scout file.
TINY = Path(__file__).parent / "tiny"

MODEL_SUFFIXES = (".gguf", ".json", ".safetensors", ".smoe")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"-\d{5}-of-\d{5}$")  # of a model in several files
_TRIES = 1000


def resolve(named: str | Path) -> Path:
    """The path of the model that `named` is: a path as it stands, or the snapshot of a hub id.

    Raises VaultError where it is no path and the local cache has no such repository.
    """
    path = expanded(named)
    if os.path.exists(path):
        return path
    if not _HUB_ID.fullmatch(str(named)):
        raise VaultError(f"{named}: no such file or folder, and no hub id (ORG/NAME) either")
    repository = hub_cache() / f"models--{str(named).replace('/', '--')}"
    if not os.path.isdir(repository):
        raise VaultError(
            f"{named}: no such file or folder, and not in the local cache {repository.parent};"
            f" fetch it first: hf download {named}"
        )
    return _snapshot(str(named), repository)


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps repositories, by its environment variables."""
    if own := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(own)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return expanded(home) / "hub"


def _snapshot(hub_id: str, repository: Path) -> Path:
    """The files of the branch main."""
    ref = repository / "refs" / "main"
    try:
        commit = ref.read_bytes()[:64].decode("ascii", "replace").strip()
    except OSError as error:
        raise VaultError(
            f"{ref}: {error.strerror}; name the folder below {repository / 'snapshots'} itself"
        ) from error
    if not _COMMIT.fullmatch(commit):
        raise VaultError(f"{ref}: {commit!r} is no commit; fetch the model anew: hf download {hub_id}")
    folder = repository / "snapshots" / commit
    if not os.path.isdir(folder):
        raise VaultError(f"{folder}: not there, though {ref} names it; hf download {hub_id} fetches it")
    return folder


def is_model(path: Path) -> bool:
    """Whether `path` is a model rather than a configuration: by its name, else by how it begins."""
    if path.suffix == ".toml":
        return False
    if path.suffix in MODEL_SUFFIXES:
        return True
    try:
        if not path.is_file():  # of a pipe, what is read here would be missing
            return path.is_dir()
        with path.open("rb") as file:
            start = file.read(len(smoe.MAGIC))
    except (OSError, ValueError):
        return False
    return start == smoe.MAGIC or start.startswith(gguf_file.MAGIC)


def names_model(text: str) -> bool:
    """Whether what was given in place of a configuration is a model: such a path, or a hub id."""
    path = expanded(text)
    return is_model(path) or (
        not os.path.exists(path) and path.suffix != ".toml" and bool(_HUB_ID.fullmatch(text))
    )


def stem(model: Path, most: int = NAME_MAX) -> str:
    """A ring name made of the model's own: at most `most` of the characters that may be in one."""
    model = model.absolute()
    repository = model.parent.parent.name
    if model.parent.name == "snapshots" and repository.startswith("models--"):
        name = repository.rsplit("--", 1)[-1]
    elif model.suffix in (".json", ".safetensors"):  # what these are called says nothing
        name = model.parent.name
    elif model.suffix in MODEL_SUFFIXES:
        name = _PART.sub("", model.stem)
    else:
        name = model.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:most].strip("-.")
    if name.endswith(".d"):  # which marks a data segment
        name = f"{name[:-2]}-d"
    return name or "model"


def free_name(model: Path) -> str:
    """The ring name for a system of this model: its own, numbered from 2 where one is served already."""
    name = stem(model)
    for number in range(2, _TRIES):
        if not is_served(socket_path(name)):
            return name
        end = f"-{number}"
        name = stem(model, NAME_MAX - len(end)) + end
    return name


def private_name(model: Path) -> str:
    """A ring name that nobody else has."""
    end = f"-{secrets.token_hex(4)}"
    return stem(model, NAME_MAX - len(end)) + end
