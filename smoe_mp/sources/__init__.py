"""Sources: the model files that experts are read from, behind one interface (`base.Source`).

base         what a source yields
files        opening a file, reading by numbers that stand in it
smoe         `.smoe` vaults, versions 1 and 2; smoe3.py version 3; smoe_file.py what they share
safetensors  Hugging Face folders; families.py has the names that models give to their experts
gguf         GGUF files
manifest     files of one's own
"""

from __future__ import annotations

from pathlib import Path

from smoe_mp.errors import VaultError
from smoe_mp.sources.base import Source
from smoe_mp.sources.gguf import open_gguf
from smoe_mp.sources.manifest import MANIFEST_NAME, open_manifest
from smoe_mp.sources.safetensors import open_safetensors
from smoe_mp.sources.smoe3 import open_vault

__all__ = ["Source", "open_source"]


def open_source(path: str | Path) -> Source:
    """Open and check the model at `path`.

    A `.smoe` vault, a GGUF file (any part of a split one), a `.safetensors` file, a manifest, or a folder:
    one with safetensors files and their config.json (either of which, or the index file, may be named
    itself), else one with GGUF files.  What a file is follows from its name; a name that says nothing is
    taken for a vault's.

    Raises VaultError with the file, the tensor and the numbers where something does not add up.
    """
    path = Path(path)
    if _is_folder(path):
        return _open_folder(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".safetensors" or path.name == "config.json" or path.name.endswith(".index.json"):
        return open_safetensors(path)
    if path.suffix == ".json":
        return open_manifest(path)
    return open_vault(path)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # what is wrong with it is said by who opens it
        return False


def _open_folder(path: Path) -> Source:
    try:
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise VaultError(f"{path}: {error.strerror} (errno {error.errno})") from error
    weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if weights:
        return open_safetensors(path)
    if ggufs:
        return open_gguf(path / ggufs[0] if len(ggufs) == 1 else path)
    if MANIFEST_NAME in names:
        return open_manifest(path / MANIFEST_NAME)
    raise VaultError(
        f"{path}: a folder with no .safetensors, no .gguf and no {MANIFEST_NAME} in it (folders below it are"
        " not searched); name a vault by its own path"
    )
