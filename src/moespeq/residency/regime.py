"""Whether text or costs have changed: a two-sided cumulative sum (Page, 1954) over what rounds measured.

Each side adds up how much better "it has become more" or "it has become less" explains the samples than "it is as
it was", and starts again whenever that falls to zero; so where it last was zero is when the change began, and the
samples since then are what is known of the new regime. Memory of the means decides what is recent while nothing
changes; this decides when to drop it at once. No clock, no randomness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AcceptanceRegime", "CostRegime", "NewRegime"]

_ODDS_RATIO = 6.0
_ACCEPTANCE_ALARM = 7.0
_SURE = 0.02  # no chance is taken to be nearer to 0 or 1
_COST_SLACK = 0.3
_COST_ALARM = 1.0


@dataclass(frozen=True, slots=True)
class NewRegime:
    """What was measured since the change: a mean, over so many samples."""

    mean: float
    num_samples: int


@dataclass(slots=True)
class _Side:
    """The evidence for one direction, and the samples since it was last none."""

    evidence: float = 0.0
    total: float = 0.0
    num_samples: int = 0

    def add(self, evidence: float, sample: float) -> None:
        self.evidence += evidence
        if self.evidence <= 0.0:
            self.evidence, self.total, self.num_samples = 0.0, 0.0, 0
            return
        self.total += sample
        self.num_samples += 1

    def exceeds(self, alarm: float) -> NewRegime | None:
        """The new regime, where the evidence is enough; the side then starts again."""
        if self.evidence < alarm:
            return None
        found = NewRegime(self.total / self.num_samples, self.num_samples)
        self.evidence, self.total, self.num_samples = 0.0, 0.0, 0
        return found


class AcceptanceRegime:
    """Watches for the odds of acceptance to become `_ODDS_RATIO` times better or worse.

    The evidence is the logarithm of the likelihood ratio, the best there is for two given chances.
    """

    def __init__(self) -> None:
        self._better, self._worse = _Side(), _Side()

    def observe(self, is_accepted: bool, *, chance: float) -> NewRegime | None:
        """One judged position that was expected to be accepted with `chance`."""
        found = None
        for side, ratio in ((self._better, _ODDS_RATIO), (self._worse, 1.0 / _ODDS_RATIO)):
            side.add(_log_likelihood_ratio(is_accepted, chance, ratio), float(is_accepted))
            found = side.exceeds(_ACCEPTANCE_ALARM) or found
        return found


class CostRegime:
    """Watches for rounds that take longer or shorter than expected, by more than noise.

    A sample is the logarithm of measured over expected seconds; what is within `_COST_SLACK` counts for neither side.
    """

    def __init__(self) -> None:
        self._longer, self._shorter = _Side(), _Side()

    def observe(self, measured_s: float, *, expected_s: float) -> NewRegime | None:
        """One round of a depth that was measured before; the mean found is of logarithms."""
        deviation = math.log(measured_s / expected_s)
        found = None
        for side, sign in ((self._longer, 1.0), (self._shorter, -1.0)):
            side.add(sign * deviation - _COST_SLACK, deviation)
            found = side.exceeds(_COST_ALARM) or found
        return found


def _log_likelihood_ratio(is_accepted: bool, chance: float, odds_ratio: float) -> float:
    """log P(outcome | its odds times `odds_ratio`) / P(outcome | chance)."""
    before = min(max(chance, _SURE), 1.0 - _SURE)
    rejected = -math.log1p((odds_ratio - 1.0) * before)
    return rejected + math.log(odds_ratio) if is_accepted else rejected
