"""Free space: checked before a write begins, and named when one fails."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moespeq.config import format_bytes
from moespeq.errors import StorageError

__all__ = ["free_bytes", "require_free", "storage_errors"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def free_bytes(folder: Path) -> int:
    """Bytes that this user can still write where `folder` is, or will be."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def require_free(folder: Path, needed_bytes: int) -> None:
    """Raise StorageError unless `needed_bytes` more fit where `folder` is, or will be."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise StorageError(
            f"{folder} needs {format_bytes(needed_bytes)} and its disk has {format_bytes(free)} free; "
            "free some space or choose another place."
        )


@contextmanager
def storage_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a failing write below `folder`, which still had `needed_bytes` to write, into a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                f"The disk of {folder} is full: {format_bytes(needed_bytes)} are still needed and "
                f"{format_bytes(free_bytes(folder))} are free; free some space and run the same command "
                "again: it goes on where it stopped."
            ) from error
        raise StorageError(f"Writing below {folder} failed ({error.strerror or error}); check the disk.") from error
