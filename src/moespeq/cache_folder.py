"""Where moespeq keeps what it can make again: stores of checkpoints, the machine's profile."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`MOESPEQ_CACHE`, or `moespeq` in the user's cache folder."""
    if own := os.environ.get("MOESPEQ_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "moespeq"
