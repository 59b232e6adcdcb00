"""How a file is written that people keep: whole or not at all, and what was there before stays until then.

Owns the file beside it that is written first. Stores and exports, which go on where they stopped, do not come here.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `path`, text as UTF-8; a link stays one, an earlier file's mode too. Raises OSError that names `path`."""
    place = path.resolve()
    beside = place.with_name(f".moespeq-{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, beside)
        beside.replace(place)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        beside.unlink(missing_ok=True)
