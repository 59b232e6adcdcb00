"""How often each expert is truly used, with old uses fading by committed tokens.

    f <- f * 0.98 ** (committed tokens since the last update) + 1, once per pass that used the expert

Decay is the same for everyone, so the *order* of two experts changes only when one is used. `score` is ln f
moved back to token 0: a number that stays valid while time passes, which lets eviction keep a heap instead of
scanning all slots.
"""

from __future__ import annotations

import math

from moespeq.types import ExpertKey

__all__ = ["DECAY_PER_TOK", "UseFrequency"]

DECAY_PER_TOK = 0.98
_FADING_PER_TOK = -math.log(DECAY_PER_TOK)


class UseFrequency:
    """Frequencies of all experts ever used; they outlive eviction: a returning expert keeps its standing."""

    def __init__(self) -> None:
        self._score: dict[ExpertKey, float] = {}
        self._now_tok = 0

    def advance(self, committed_tok: int) -> None:
        """Time passes: `committed_tok` more tokens were committed."""
        assert committed_tok >= 0, committed_tok
        self._now_tok += committed_tok

    def touch(self, key: ExpertKey) -> None:
        """A pass truly used the expert; call once per pass."""
        self._score[key] = math.log(self.of(key) + 1.0) + self._now_tok * _FADING_PER_TOK

    def of(self, key: ExpertKey) -> float:
        """The frequency f as of now; 0 for an expert never used."""
        return math.exp(self.score(key) - self._now_tok * _FADING_PER_TOK)

    def score(self, key: ExpertKey) -> float:
        """A time-independent number in the order of f; -inf if never used; every touch raises it."""
        return self._score.get(key, -math.inf)
