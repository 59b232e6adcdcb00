"""How a file is written that people keep: whole or not at all, and what was there before stays until then.

Owns the file beside it that is written first. Stores and exports, which go on where they stopped, do not come here.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `path`, text as UTF-8; a link stays one, an earlier file's mode too. Raises OSError that names `path`."""
    place, data = path.resolve(), content.encode() if isinstance(content, str) else content
    try:
        beside = _write_beside(place, data)
        try:
            if place.exists():
                shutil.copymode(place, beside)
            beside.replace(place)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _write_beside(place: Path, data: bytes) -> Path:
    """A new file of a name that nobody can guess: a link that others left there would lead elsewhere."""
    beside = place.with_name(f".moespeq-{secrets.token_hex(8)}.partial")
    with beside.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            beside.unlink()
            raise
    return beside
