"""When copies were on the link: the device says how long each moved, the host when that was, and pacing may stretch it.

Copies are on the link one after another. Those found ended together ended back to back, the last just now; a copy never
begins before the one ahead of it ended, so that late looks move the spans but never make them overlap or vanish.

A paced link is an imaginary one. Its copy takes the interval from when the record was ready, or the interval before
ended, at its rate, and is reported no sooner; a host that looks late takes nothing from its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

from moespeq.transfer.moves import Move

__all__ = ["LinkTimes"]


class LinkTimes:
    """The spans of a link's copies. `bytes_per_s`: None for the link as it is; a paced one has one copy at a time."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def reserve(self, num_bytes: int, ready_s: float) -> Move | None:
        """The interval of a copy that begins now on a paced link, before whose end it must not be reported."""
        if self.bytes_per_s is None:
            return None
        begin_s = max(self._free_at_s, ready_s)
        return Move(begin_s, begin_s + num_bytes / self.bytes_per_s, num_bytes)

    def ended(self, copies: Sequence[tuple[int, float, Move | None]], now_s: float) -> list[Move]:
        """The spans of copies found ended together, in order: (num_bytes, seconds moved, interval reserved)."""
        moves: list[Move] = []
        begin_s = now_s - sum(moved_s for _, moved_s, _ in copies)
        for num_bytes, moved_s, reserved in copies:
            if reserved is not None:
                begin_s, moved_s = reserved.begin_s, max(moved_s, reserved.end_s - reserved.begin_s)
            begin_s = max(begin_s, self._free_at_s)
            self._free_at_s = begin_s + moved_s
            moves.append(Move(begin_s, self._free_at_s, num_bytes))
            begin_s = self._free_at_s
        return moves
