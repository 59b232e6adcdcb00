"""How predicted routes stand to true ones: the one definition that live counters and studies of traces share.

Owns no counting of its own beyond sums; who is asked, and about which rows, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Match", "RouteMatch", "match_of", "weighted_mean"]


class Match(Enum):
    """EXACT: the same experts in the same order; SAME_SET: in another order; WRONG: another expert among them."""

    EXACT = "exact"
    SAME_SET = "same_set"
    WRONG = "wrong"


def match_of(predicted: Sequence[int], true: Sequence[int]) -> Match:
    """Of one token at one layer, whose experts are distinct."""
    if list(predicted) == list(true):
        return Match.EXACT
    return Match.SAME_SET if set(predicted) == set(true) else Match.WRONG


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """Predicted routes P against true ones T, over num_routes tokens at a layer; exact + same_set + wrong = 1.

    overlap: |P & T| / |T|, a mean. All 0 where num_routes is.
    """

    exact: float
    same_set: float
    wrong: float
    overlap: float
    num_routes: int

    @property
    def right(self) -> float:
        """Where a prefetch of P would have brought all of T, and nothing else: exact or the same set."""
        return self.exact + self.same_set

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> RouteMatch:
        """Over (predicted, true); pairs without a prediction do not count."""
        counts, overlap = dict.fromkeys(Match, 0), 0.0
        for predicted, true in pairs:
            if predicted:
                counts[match_of(predicted, true)] += 1
                overlap += len(set(predicted).intersection(true)) / len(true)
        num_routes = sum(counts.values())
        exact, same_set, wrong = (count / max(1, num_routes) for count in counts.values())
        return cls(exact, same_set, wrong, overlap / max(1, num_routes), num_routes)

    @classmethod
    def together(cls, parts: Sequence[RouteMatch]) -> RouteMatch:
        """All routes of the parts."""
        counts = [part.num_routes for part in parts]
        exact, same_set, wrong, overlap = (
            weighted_mean([getattr(part, name) for part in parts], counts)
            for name in ("exact", "same_set", "wrong", "overlap")
        )
        return cls(exact, same_set, wrong, overlap, sum(counts))


def weighted_mean(values: Sequence[float], counts: Sequence[int]) -> float:
    """Of values that stand for so many things each; 0 where there is none."""
    return sum(value * count for value, count in zip(values, counts, strict=True)) / max(1, sum(counts))
