"""What rounds of each depth k would bring and take, learned from the rounds there were.

Three things are measured: the chance p_j that draft token j is accepted given that those before it were, seconds a
draft step, and seconds a verify at each depth, its waits for the link included. Depths nobody tried lie on the chord
between their neighbours; distinct experts saturate with rows, so costs are concave in k: the truth lies above a chord
and below its continuation past the deepest depth known. Owns no choice.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from moespeq.residency.regime import AcceptanceRegime, CostRegime, NewRegime
from moespeq.residency.roofline import tokens_per_s
from moespeq.residency.running_mean import RunningMean
from moespeq.types import StepReport

__all__ = ["DepthEstimate"]

_COST_MEMORY = 12
_LEAST_VERIFY_S = 1e-9  # on a virtual clock a verify may take no time
_ACCEPTANCE_FADING = 0.995
_POSITION_MEMORY = 100
_POOLED_MEMORY = 400
_POOLED_WEIGHT = 30.0  # judged positions a position's own chance is mixed with
_KEPT_WEIGHT = 10.0  # judged positions of before a change that are kept beside those since
_LEAST_KNOWN = 3  # measurements of a depth before another one of it may be called unusual


class DepthEstimate:
    """Estimates for depths 0..k_max. Mutable: `observe` after every round."""

    def __init__(self, k_max: int) -> None:
        self._accept = [RunningMean(_POSITION_MEMORY, fading_per_tok=_ACCEPTANCE_FADING) for _ in range(k_max)]
        self._accept_pooled = RunningMean(_POOLED_MEMORY, fading_per_tok=_ACCEPTANCE_FADING)
        self._draft_step_s = RunningMean(_COST_MEMORY)
        self._verify_s: dict[int, RunningMean] = {}
        self._known: list[int] = []  # measured depths in order
        self._acceptance_regime, self._cost_regime = AcceptanceRegime(), CostRegime()
        self._num_rounds = 0
        self.now_tok = 0

    def observe(self, report: StepReport) -> bool:
        """Learn from one finished round; True: acceptance or costs are no longer what they were."""
        self.now_tok += report.committed
        self._num_rounds += 1
        is_new = self._observe_acceptance(report)
        if report.k:
            self._draft_step_s.add(report.draft_s / (report.k + 1), now_tok=self.now_tok)
        return self._observe_verify(report.k, max(report.verify_s, _LEAST_VERIFY_S)) or is_new

    def num_rounds(self, k: int) -> int:
        """How many rounds of this depth were measured."""
        return self._verify_s[k].num_samples if k in self._verify_s else 0

    def age_tok(self, k: int) -> int:
        """Tokens since a known depth was last measured."""
        return self.now_tok - self._verify_s[k].updated_tok

    @property
    def deepest(self) -> int:
        """The deepest depth measured so far; after at least one round."""
        return self._known[-1]

    def chances(self, k: int, *, benefit_of_doubt_tok: float = 0.0) -> list[float]:
        """p_1..p_k, each drawn to the mean of all positions as far as its own measurements are few or old.

        benefit_of_doubt_tok: so many accepted tokens are added to what was seen, which raises what little was seen of.
        """
        pooled = self._accept_pooled
        pooled_weight = pooled.weight_at(self.now_tok)
        kept = pooled_weight + benefit_of_doubt_tok
        shared = (pooled_weight * pooled.value + benefit_of_doubt_tok) / kept if kept else 0.0
        chances = []
        for own in self._accept[:k]:
            weight = own.weight_at(self.now_tok)
            chances.append((weight * own.value + _POOLED_WEIGHT * shared) / (weight + _POOLED_WEIGHT))
        return chances

    def round_s(self, k: int, *, is_hopeful: bool = False) -> float:
        """T_round(k). Past the deepest known depth costs go on as they rose, or, hopefully, no more than they are.

        A plain round asks for least, so it takes no longer than the shortest that drafts: measured among drafts, whose
        guesses fill slots, plain rounds look slower than plain decoding is.
        """
        if k:
            return (k + 1) * self._draft_step_s.value + self._verify_at(k, is_hopeful=is_hopeful)
        drafting_s = (self.round_s(known) for known in self._known if known)
        return min(self._verify_at(0, is_hopeful=is_hopeful), min(drafting_s, default=math.inf))

    def tokens_per_s(self, k_max: int, *, benefit_of_doubt_tok: float | None = None) -> list[float]:
        """Theta(0..k_max), the expected committed tokens per second; with a benefit of doubt as high as it may be."""
        is_hopeful = benefit_of_doubt_tok is not None
        chances = self.chances(k_max, benefit_of_doubt_tok=benefit_of_doubt_tok or 0.0)
        return tokens_per_s(chances, [self.round_s(k, is_hopeful=is_hopeful) for k in range(k_max + 1)])

    def _observe_acceptance(self, report: StepReport) -> bool:
        is_cut = report.committed <= report.accepted  # by a stop or a limit: nothing was rejected
        num_judged = min(report.accepted if is_cut else report.accepted + 1, report.k)
        found: NewRegime | None = None
        for position, chance in enumerate(self.chances(num_judged)):
            is_accepted = position < report.accepted
            if self._accept_pooled.num_samples:
                found = self._acceptance_regime.observe(is_accepted, chance=chance) or found
            for mean in (self._accept[position], self._accept_pooled):
                mean.add(float(is_accepted), now_tok=self.now_tok)
        if found is None:
            return False
        pooled = self._accept_pooled
        before = min(pooled.weight_at(self.now_tok), _KEPT_WEIGHT)
        weight = before + found.num_samples
        value = (before * pooled.value + found.num_samples * found.mean) / weight
        pooled.restart(value, weight=weight, now_tok=self.now_tok)
        for mean in self._accept:
            mean.restart(value, weight=0.0, now_tok=self.now_tok)
        return True

    def _observe_verify(self, k: int, verify_s: float) -> bool:
        mean = self._verify_s.get(k)
        if mean is None:
            insort(self._known, k)
            mean = self._verify_s[k] = RunningMean(_COST_MEMORY)
        if self._num_rounds == 2:  # the very first round found everything cold, and says nothing of its depth
            mean.restart(0.0, weight=0.0, now_tok=self.now_tok)
        found = None
        if mean.num_samples >= _LEAST_KNOWN:
            found = self._cost_regime.observe(verify_s, expected_s=mean.value)
        if found is not None:
            weight = min(mean.weight_at(self.now_tok), float(found.num_samples))
            mean.restart(mean.value, weight=weight, now_tok=self.now_tok)
        mean.add(verify_s, now_tok=self.now_tok)
        return found is not None

    def _verify_at(self, k: int, *, is_hopeful: bool) -> float:
        known = self._known
        at = bisect_left(known, k)
        if at < len(known) and (known[at] == k or at == 0):
            return self._verify_s[known[at]].value
        if at == len(known) and (is_hopeful or at == 1):
            return self._verify_s[known[-1]].value
        below, above = (known[at - 1], known[at]) if at < len(known) else (known[-2], known[-1])
        low_s, high_s = self._verify_s[below].value, self._verify_s[above].value
        slope_s = (high_s - low_s) / (above - below)
        return low_s + (k - below) * (slope_s if at < len(known) else max(slope_s, 0.0))
