"""Where the model is that a person names: a folder here, maybe a store, or the hub. Reads and downloads nothing."""

from __future__ import annotations

from pathlib import Path

from moespeq.errors import CheckpointError, StoreError

__all__ = ["MANIFEST_NAME", "is_store", "local_folder", "require_store"]

MANIFEST_NAME = "manifest.json"


def local_folder(source: Path | str) -> Path | None:
    """What is there under the name `source`; None for a hub id. Raises CheckpointError for what is neither."""
    folder = Path(source)
    try:
        if folder.exists():
            return folder
    except OSError as error:
        raise CheckpointError(f"{source} cannot be a checkpoint ({error.strerror}); give its folder.") from error
    if isinstance(source, Path) or source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(f"{source} does not exist; give a checkpoint folder or a hub id such as org/name.")
    return None


def is_store(path: Path) -> bool:
    """Whether `path` is a finished store."""
    return (path / MANIFEST_NAME).is_file()


def require_store(path: Path) -> None:
    """Raises StoreError for what is none."""
    if not (path / MANIFEST_NAME).exists():
        raise StoreError(f"{path} has no {MANIFEST_NAME}: it is no store; prepare one first.")
