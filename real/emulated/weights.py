"""Reading the weights that an emulated engine is told to load: their size and their hash, as the bytes are now."""

from __future__ import annotations

import hashlib
import pathlib
from dataclasses import dataclass

from protocol.training.checkpoint import MANIFEST, decode_manifest, hash_weights


@dataclass(frozen=True)
class Weights:
    """What was found. ``failure`` says why it cannot be loaded, empty when it can."""

    size_bytes: int = 0
    weight_hash: str = ""
    failure: str = ""


def read_weights(folder: str) -> Weights:
    """Read every weight file in ``folder``: those of its manifest, or all files where it has none.

    A file that was cut short or altered loads without a complaint, as it may in a real engine; only the hash tells.
    """
    root = pathlib.Path(folder)
    try:
        names = _names(root)
        if not names:
            return Weights(failure=f"no weights at {folder}")
        size, hashes = 0, []
        for name in names:
            digest = hashlib.sha256()
            with open(root / name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
            hashes.append(digest.hexdigest())
        return Weights(size, hash_weights(hashes))
    except (OSError, ValueError) as error:
        return Weights(failure=f"cannot read weights at {folder}: {error}")


def _names(root: pathlib.Path) -> list[str]:
    manifest = root / MANIFEST
    if manifest.is_file():
        return [name for name, _, _ in decode_manifest(manifest.read_bytes()).shards]
    return sorted(path.name for path in root.iterdir() if path.is_file()) if root.is_dir() else []
