"""Host memory that may still be taken, containers included."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["available_host_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(cgroup: Path = _CGROUP) -> int:
    """The smaller of what the system has free and what this container's limit leaves."""
    free_bytes = int(psutil.virtual_memory().available)
    limit_bytes, used_bytes = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit_bytes is None or used_bytes is None:
        return free_bytes
    return min(free_bytes, max(0, limit_bytes - used_bytes))


def _read_number(path: Path) -> int | None:
    """The number in a cgroup file; None where there is none, or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
