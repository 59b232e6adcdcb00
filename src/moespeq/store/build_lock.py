"""One builder a store: a lock file that dies with its process.

flock belongs to the open file, so a kill releases it and nothing stale is left to clean up. The folder may
vanish between making it and locking in it, when another process finishes: then the lock would be on a deleted
file, which is noticed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from moespeq.errors import StoreInUseError

__all__ = ["acquire"]


def acquire(folder: Path) -> int:
    """Make `folder` if needed and lock it; returns the descriptor that holds the lock until it is closed.

    Raises StoreInUseError when another process holds it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StoreInUseError(f"Another process is preparing {folder}; wait until it is done.") from None
        if _is_open_file(fd, path):
            return fd
        os.close(fd)


def _is_open_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
