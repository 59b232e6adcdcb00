"""The least any policy could move, knowing the future: the floor a replay is compared with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

__all__ = ["belady_misses"]


def belady_misses(uses: Sequence[Hashable], *, num_slots: int) -> int:
    """Fetches of Belady's MIN over a sequence of uses, one record at a time, starting empty (records of equal size).

    n log n for n uses, whatever num_slots: the next uses of resident records are a heap of places in `uses`. A place
    that has passed is never its farthest, so nothing is ever removed from its middle.
    """
    assert num_slots > 0, num_slots
    never = len(uses)
    resident: set[Hashable] = set()
    ahead: list[int] = []  # heap of -(next use): the farthest on top
    finished: list[Hashable] = []  # resident and never used again: these leave first
    misses = 0
    for key, next_use in zip(uses, _next_uses(uses), strict=True):
        if key not in resident:
            misses += 1
            if len(resident) == num_slots:
                resident.remove(finished.pop() if finished else uses[-heappop(ahead)])
            resident.add(key)
        if next_use == never:
            finished.append(key)
        else:
            heappush(ahead, -next_use)
    return misses


def _next_uses(uses: Sequence[Hashable]) -> list[int]:
    """[i]: where uses[i] comes again, len(uses) if nowhere."""
    next_uses = [len(uses)] * len(uses)
    last_seen: dict[Hashable, int] = {}
    for place, key in enumerate(uses):
        if key in last_seen:
            next_uses[last_seen[key]] = place
        last_seen[key] = place
    return next_uses
