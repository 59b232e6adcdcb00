"""What came from anywhere, read without trust: files that may be no files, JSON that was written to do harm.

Owns the bounds that hold whatever is parsed: regular files only (a pipe would be waited for), no more bytes than the
caller allows, no more values than seconds of parsing and some hundred megabytes of memory (100 MB of empty lists are
33 million objects and take minutes), no key twice (two readers would see two files), and a link only to where a
checkpoint's own files may lie. What a value may be is the caller's matter.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

__all__ = ["is_kept_together", "is_text", "parse_json", "read_regular", "shown"]

# Each tensor of a safetensors header has about seven; published checkpoints have up to some 100,000 tensors.
MAX_VALUES = 4_000_000
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 120
_SHOWN.maxlong = 40


def shown(value: object) -> str:
    """`value` for a message: a name of a megabyte in few characters, control characters escaped."""
    return _SHOWN.repr(value)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError, or ValueError for another kind of file or a longer one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is no file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return data


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8 without a key twice. Raises ValueError for anything else, and for too many values."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_text(name: str) -> bool:
    """Whether a name from JSON can be written in UTF-8: half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_kept_together(path: Path) -> bool:
    """Whether a file of a checkpoint lies in its folder, links followed, or where the hub's cache keeps such files.

    That cache links CACHE/models--ORG--NAME/snapshots/REVISION/FILE to the model's `blobs`, and those to CACHE's.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (path.parent, path))  # `resolve` raises for a loop
    homes = [folder]
    if folder.parent.name == "snapshots" and len(folder.parents) > 2:
        homes += [folder.parents[1] / "blobs", folder.parents[2] / "blobs"]
    return any(target.is_relative_to(home) for home in homes)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key appears twice")
    return fields
