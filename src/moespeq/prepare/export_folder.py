"""The folder an export writes to: held by one process, holding nothing else.

The lock is on the folder itself, so nothing is left behind and it dies with its process. File systems that
cannot lock a folder are used without.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from moespeq.errors import UsageError
from moespeq.store.output_path import require_reachable

__all__ = ["export_folder"]


@contextmanager
def export_folder(out: Path, names: Set[str]) -> Iterator[None]:
    """Make `out` and hold it; `names` are the files it may hold, complete or not.

    An error leaves no folder that was not there and is empty. Raises UsageError.
    """
    require_reachable(out)
    is_new = not out.exists()
    fd = _lock(out)
    try:
        _refuse_foreign(out, names)
        yield
    finally:
        if is_new:
            with suppress(OSError):
                out.rmdir()
        os.close(fd)


def _lock(out: Path) -> int:
    try:
        out.mkdir(parents=True, exist_ok=True)
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); choose another output.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"Another process is exporting to {out}; wait until it is done.") from None
    except OSError:
        pass
    return fd


def _refuse_foreign(out: Path, names: Set[str]) -> None:
    """Raise UsageError where `out` holds anything but files of the checkpoint, complete or not."""
    foreign = sorted(entry.name for entry in out.iterdir())
    foreign = [name for name in foreign if name.removesuffix(".partial") not in names]
    if foreign:
        raise UsageError(f"{out} holds {foreign[0]}, which is no file of this checkpoint; choose an empty folder.")
