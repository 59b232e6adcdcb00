"""Processor cores this process may use."""

from __future__ import annotations

import os

import psutil

__all__ = ["physical_cores"]


def physical_cores() -> int:
    """Cores, hyper-threads counted once, and no more than this process is allowed to run on."""
    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)
