"""What the link did during a round: when it moved bytes, and how much of the waiting it was busy.

link utilisation = busy_s / wall; utilisation while waiting = stall_busy_s / stall_s: what it lacks of one was no
wait for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moespeq.transfer.moves import Move

__all__ = ["LinkMeter", "LinkUse", "Span", "merge", "overlap_s"]

Span = tuple[float, float]
"""(begin, end) on the engine's clock, in seconds."""


class LinkUse(NamedTuple):
    """Seconds at least one copy was on the link: in all, and while the target waited with nothing to compute; and the
    copies and waits themselves. busy: the copies as disjoint spans.
    """

    busy_s: float
    stall_busy_s: float
    moves: Sequence[Move] = ()
    stalls: Sequence[Span] = ()
    busy: Sequence[Span] = ()


class LinkMeter:
    """Asks the mover and residency for what happened since the last call; a mover that keeps no record gives zeros."""

    def __init__(self, take_moves: Callable[[], Sequence[Move]], take_stalls: Callable[[], Sequence[Span]]) -> None:
        self._take_moves, self._take_stalls = take_moves, take_stalls

    def measure(self) -> LinkUse:
        """Since the last call. A copy counts where it ended."""
        moves = self._take_moves()
        busy, stalls = merge([(move.begin_s, move.end_s) for move in moves]), merge(self._take_stalls())
        return LinkUse(sum(end - begin for begin, end in busy), overlap_s(busy, stalls), moves, stalls, busy)


def merge(spans: Sequence[Span]) -> list[Span]:
    """The union as disjoint spans in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def overlap_s(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Time in both of two lists of disjoint, ordered spans."""
    total, position = 0.0, 0
    for begin, end in left:
        while position < len(right) and right[position][1] <= begin:
            position += 1
        ahead = position
        while ahead < len(right) and right[ahead][0] < end:
            total += min(end, right[ahead][1]) - max(begin, right[ahead][0])
            ahead += 1
    return total
