"""Seconds that may be lost on something not known to pay: earned as time goes by, spent as rounds end.

Counted in seconds and not in rounds, because one round of a long draft that is all wrong costs as much as ten plain
ones. What rounds cost is charged after they are measured; before one begins, its price at the worst must be covered,
so the balance stays above minus the error of one price.
"""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """A balance in seconds that earns `share` of all time and never holds more than its limit."""

    __slots__ = ("_limit_s", "_share", "balance_s", "lost_s")

    def __init__(self, share: float) -> None:
        self._share = share
        self._limit_s = float("inf")
        self.balance_s = 0.0
        self.lost_s = 0.0

    def open(self, advance_s: float, limit_s: float) -> None:
        """Begin with an advance, once what a round takes is known."""
        self.balance_s, self._limit_s = advance_s, limit_s

    def earn(self, elapsed_s: float) -> None:
        """Time went by."""
        self.balance_s = min(self.balance_s + self._share * elapsed_s, self._limit_s)

    def charge(self, lost_s: float) -> None:
        """A round lost so much; a negative loss is a gain, to be lost again."""
        self.lost_s += lost_s
        self.balance_s = min(self.balance_s - lost_s, self._limit_s)

    def covers(self, price_s: float) -> bool:
        """Whether a round may cost so much."""
        return price_s <= self.balance_s
