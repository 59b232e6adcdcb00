"""When the target waited for bytes: spans on the engine's clock that never overlap, and their sum."""

from __future__ import annotations

__all__ = ["Stalls"]


class Stalls:
    """Spans in the order they ended."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._until_s = float("-inf")
        self._spans: list[tuple[float, float]] = []

    def add(self, begin_s: float, end_s: float) -> None:
        """A wait; what an earlier span covers already is left out."""
        begin_s = max(begin_s, self._until_s)
        if end_s <= begin_s:
            return
        self._until_s = end_s
        self.total_s += end_s - begin_s
        self._spans.append((begin_s, end_s))

    def take(self) -> list[tuple[float, float]]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans
