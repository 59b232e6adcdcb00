"""Whether a draft should end before its depth, because what it is least sure of has made the rest unlikely to be kept.

One more step is worth the chance that it is kept, times what a committed token is worth in seconds at the depth's own
speed; it costs its draft step and its row of the verify, bytes included. A draft ends where no number of further steps
is expected to earn what it costs. Confidence is the draft's own probability of its token, and says less than it seems:
draft and target are nearly one model and choose with one noise, so a token that both think improbable is still mostly
accepted. So a confidence counts as the share of such tokens that was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

__all__ = ["ConfidenceCalibration", "StoppingRule", "drafting_on_gain_s", "stopping_step"]

_NUM_BINS = 10
_PRIOR_TOK = 8.0  # a bin with fewer tokens than this is drawn to the share of all


class ConfidenceCalibration:
    """The share accepted of tokens drafted with about a given confidence. Mutable: `observe` every judged token."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _NUM_BINS
        self._judged = [0.0] * _NUM_BINS

    def observe(self, confidence: float, *, is_accepted: bool) -> None:
        """One drafted token that was accepted, or the first of its round that was not."""
        at = _bin_of(confidence)
        self._judged[at] += 1.0
        self._accepted[at] += float(is_accepted)

    @property
    def num_tok(self) -> int:
        """How many were observed."""
        return int(sum(self._judged))

    @property
    def mean(self) -> float:
        """The share of all; after at least one token."""
        return sum(self._accepted) / sum(self._judged)

    def chance(self, confidence: float) -> float:
        """That a token drafted with this confidence is accepted if those before it are."""
        at = _bin_of(confidence)
        return (self._accepted[at] + _PRIOR_TOK * self.mean) / (self._judged[at] + _PRIOR_TOK)


def drafting_on_gain_s(
    survives: float, *, mean_chance: float, further_s: Sequence[float], tokens_per_s: float
) -> float:
    """Seconds gained by drafting on, for the best number of further steps; at most 0: end the draft here.

    survives: the chance that all tokens drafted so far are accepted; further_s: what each further step costs.
    """
    best_s = gain_s = 0.0
    for count, cost_s in enumerate(further_s, start=1):
        survives *= mean_chance
        gain_s += survives / tokens_per_s - cost_s
        best_s = gain_s if count == 1 else max(best_s, gain_s)
    return best_s


def stopping_step(chances: Sequence[float], *, mean_chance: float, step_s: Sequence[float], tokens_per_s: float) -> int:
    """How many of a round's tokens to draft, told their chances one by one; all of them where stopping never pays.

    step_s: what the first, second, ... token costs beyond a round that drafts one fewer.
    """
    rule = StoppingRule(mean_chance=mean_chance, step_s=step_s[: len(chances)], tokens_per_s=tokens_per_s)
    return min(len(chances), 1 + sum(1 for _ in takewhile(rule.goes_on, chances)))


class StoppingRule:
    """Of one draft, whose tokens' chances come one by one. Mutable; see stopping_step."""

    def __init__(self, *, mean_chance: float, step_s: Sequence[float], tokens_per_s: float) -> None:
        self._mean_chance, self._step_s, self._tokens_per_s = mean_chance, step_s, tokens_per_s
        self._survives = 1.0
        self._drafted = 0

    def goes_on(self, chance: float) -> bool:
        """One more token was drafted, to be accepted with `chance` if those before it are: is another one worth it?"""
        self._survives *= chance
        self._drafted += 1
        further_s = self._step_s[self._drafted :]
        return not further_s or self._gain_s(further_s) > 0.0

    def _gain_s(self, further_s: Sequence[float]) -> float:
        return drafting_on_gain_s(
            self._survives, mean_chance=self._mean_chance, further_s=further_s, tokens_per_s=self._tokens_per_s
        )


def _bin_of(confidence: float) -> int:
    return min(int(confidence * _NUM_BINS), _NUM_BINS - 1)
