"""Host memory that may still be taken, limits of containers and batch jobs included.

A control group's usage counts the page cache of files, which the kernel gives up as soon as memory is wanted; a store
that was just read would otherwise look like memory in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

__all__ = ["available_host_bytes", "host_limit_bytes", "oom_kills"]

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What one version of control groups calls its figures."""

    limit: str
    usage: str
    page_cache: tuple[str, ...]
    events: str


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "memory.oom_control",
)
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"), "memory.events")


def available_host_bytes(cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """The smallest of what the system has free and what each limit above this process leaves."""
    free_bytes = int(psutil.virtual_memory().available)
    left_bytes = [_left_bytes(folder, names) for folder, names in _groups(cgroup, own_cgroups)]
    return min([free_bytes, *(left for left in left_bytes if left is not None)])


def host_limit_bytes(cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS) -> int | None:
    """The smallest limit above this process; None where nothing limits it below what the system has."""
    texts = [_read_text(folder / names.limit).strip() for folder, names in _groups(cgroup, own_cgroups)]
    limit_bytes = min((int(text) for text in texts if text.isdigit()), default=None)
    has_limit = limit_bytes is not None and limit_bytes < int(psutil.virtual_memory().total)
    return limit_bytes if has_limit else None


def oom_kills(cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Processes that the kernel ended for memory in this process's own group, since the group was made."""
    folder, names = next(_groups(cgroup, own_cgroups), (cgroup, _V2))
    return int(_fields(folder / names.events).get("oom_kill", 0))


def _groups(root: Path, own_cgroups: Path) -> Iterator[tuple[Path, _Names]]:
    """Memory control groups of this process, from its own up to the root: a limit binds everything below it."""
    for line in _read_text(own_cgroups).splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base, names = (root, _V2) if number == "0" else (root / "memory", _V1)
        parts = PurePosixPath(path).parts[1:]
        if ".." in parts:  # seen from inside another namespace: only the root is ours
            parts = ()
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), names


def _left_bytes(folder: Path, names: _Names) -> int | None:
    """What the limit of one group leaves; None where there is none ("max")."""
    limit, usage = _read_text(folder / names.limit).strip(), _read_text(folder / names.usage).strip()
    if not (limit.isdigit() and usage.isdigit()):
        return None
    fields = _fields(folder / "memory.stat")
    page_cache_bytes = sum(int(fields.get(name, 0)) for name in names.page_cache)
    return max(0, int(limit) - int(usage) + page_cache_bytes)


def _fields(path: Path) -> dict[str, str]:
    """A file of lines like `name 12`."""
    return dict(line.split(maxsplit=1) for line in _read_text(path).splitlines() if " " in line)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
