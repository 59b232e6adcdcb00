"""The least any policy could move, knowing the future: the floor a replay is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moespeq.types import ExpertKey

__all__ = ["belady_misses"]


def belady_misses(uses: Sequence[ExpertKey], *, num_slots: int) -> int:
    """Fetches of Belady's MIN over a sequence of uses, one record at a time, starting empty (records of equal
    size).
    """
    next_use = [math.inf] * len(uses)
    seen_at: dict[ExpertKey, int] = {}
    for index in range(len(uses) - 1, -1, -1):
        next_use[index] = seen_at.get(uses[index], math.inf)
        seen_at[uses[index]] = index
    resident: dict[ExpertKey, float] = {}
    misses = 0
    for key, following in zip(uses, next_use, strict=True):
        if key not in resident:
            misses += 1
            if len(resident) == num_slots:
                del resident[max(resident, key=lambda held: resident[held])]
        resident[key] = following
    return misses
