"""When a link carried bytes: what utilisation is computed from, whatever the link is."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["Move", "MoveLog"]

_MOST_MOVES = 1 << 16  # the oldest go first where nobody asks


class Move(NamedTuple):
    """One record on the link, on the mover's clock."""

    begin_s: float
    end_s: float
    num_bytes: int


class MoveLog:
    """Moves in the order they ended. `add` is for a mover's threads, `take` for the engine's."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque(maxlen=_MOST_MOVES)

    def add(self, move: Move) -> None:
        """`move` has ended."""
        self._moves.append(move)

    def take(self) -> list[Move]:
        """What was added since the last call."""
        return [self._moves.popleft() for _ in range(len(self._moves))]
