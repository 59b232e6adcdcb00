"""How often each expert is truly used, with old uses fading by committed tokens.

    f <- f * 0.98 ** (committed tokens since the last update) + w, once per pass that used the expert

w is 1, and where the lookahead said how many rows would use the expert, the length of that number in bits: 1 for one
row, 2 for two and three, up to 6 for 33. In a long pass most experts are used, so that alone says little about the next
one; but its rows are one text, and 16 of them are not 16 times the evidence of one.

Decay is the same for everyone, so the *order* of two experts changes only when one is used. So nothing is decayed here:
a new use weighs more instead, 0.98 ** -(tokens committed so far). `score` is the sum of those weights, f times today's
weight: a number that stays valid while time passes, which lets eviction keep a heap instead of scanning all slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

__all__ = ["DECAY_PER_TOK", "UseFrequency"]

DECAY_PER_TOK = 0.98
_LARGEST_WEIGHT = 1e200
_UNFORESEEN: Mapping[int, int] = MappingProxyType({})


class UseFrequency:
    """Frequencies of all records; they outlive eviction: a returning expert keeps its standing."""

    def __init__(self, num_records: int) -> None:
        self.score = [0.0] * num_records
        """Record -> a number in the order of f, 0 if never used; the order outlives `advance`, the numbers may not."""
        self._weight = 1.0

    def advance(self, committed_tok: int) -> None:
        """Time passes: `committed_tok` more tokens were committed."""
        assert committed_tok >= 0, committed_tok
        self._weight /= DECAY_PER_TOK**committed_tok
        if self._weight > _LARGEST_WEIGHT:
            self.score = [score / self._weight for score in self.score]
            self._weight = 1.0

    def touch(self, records: Iterable[int], uses: Mapping[int, int] = _UNFORESEEN) -> None:
        """A pass truly used these records; call once per pass. uses: record -> rows that were expected to use it."""
        score, weight = self.score, self._weight
        for record in records:
            score[record] += weight * uses.get(record, 1).bit_length()

    def of(self, record: int) -> float:
        """The frequency f as of now; 0 for an expert never used."""
        return self.score[record] / self._weight
