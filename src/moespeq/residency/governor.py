"""How far to draft: the depth k of each round, chosen from what rounds measured. k = 0 is legal: plain
decoding.

`AmortizingDepth` takes the depth with the most expected committed tokens per second (`DepthEstimate`) and goes on with
it until another one is better by more than `_HYSTERESIS`, looked at every `update_tok` tokens, when a trial ended, and
when text or costs change. The depth that would be the best if what is not known were as good as it may be is tried, at
most `_GROWTH` times as deep as any before: a verified round tells of every shorter prefix what it would have brought,
and one accepted to its end that more would have been. Known depths that may matter are tried again when they grow
stale. A draft may end before its depth where audits say that this pays (`draft_watch`).

What that may cost is bounded in seconds, whatever the world does (`Allowance`; conservative exploration):
- trials may lose a share of the time, and an advance, against the best depth known;
- all drafting together may lose as little against the least depth, plain decoding, and again what it gained; a round
  is cut to a depth whose worst case, nothing accepted, is at most a part of that, so that bad luck leaves something for
  another attempt. Costs rise ever more slowly with k, so a straight line past the deepest one known is above them.
So calibration is no phase with turns of its own: in the first `calibration_tok` tokens the choice is made afresh after
every round. Equal reports give equal choices: no clock, no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moespeq.residency.allowance import Allowance
from moespeq.residency.depth_estimate import DepthEstimate
from moespeq.residency.draft_watch import DraftWatch, EarlyStopping
from moespeq.types import StepReport

__all__ = ["AmortizingDepth", "FixedDepth", "Governor", "GovernorOptions"]

_HYSTERESIS = 0.02
_TRIAL_SHARE, _RISK_SHARE = 0.005, 0.008  # of all time: the 1 % promised, less what one round may go over it
_TRIAL_ADVANCE_ROUNDS, _RISK_ADVANCE_ROUNDS = 1.8, 6.0  # time of plain rounds that may be lost before any was earned
_MOST_TRIAL_ROUNDS, _MOST_RISK_ROUNDS = 10.0, 30.0  # what may be saved up, in the same unit: 1 and 3 % of 1,000 tokens
_STAKES = 2.0  # a round may cost no more than balance / this
_BENEFIT_OF_DOUBT_TOK = 3.0
_GROWTH = 4
_FIRST_ROUNDS = 3  # of the least depth, which all others are measured by; the very first one finds everything cold
_FIRST_REFRESH_TOK, _LEAST_REFRESH_ROUNDS = 16, 6
_NEAR_SHARE = 0.7  # of the best depth's speed: what is slower has to be far from what it was to be chosen


class Governor(Protocol):
    """Chooses each round's depth."""

    def choose(self, max_k: int) -> int:
        """Depth of the next round, in 0..max_k; `max_k` is what context and rows leave for this round."""
        ...

    def watch(self, k: int) -> DraftWatch | None:
        """Who looks on at the draft of k tokens that comes next, and may end it."""
        ...

    def observe(self, report: StepReport) -> None:
        """One finished round, in order."""
        ...


class FixedDepth:
    """Always k, or what the round allows."""

    def __init__(self, k: int) -> None:
        assert k >= 0, k
        self._k = k

    def choose(self, max_k: int) -> int:
        return min(self._k, max_k)

    def watch(self, k: int) -> DraftWatch | None:
        return None

    def observe(self, report: StepReport) -> None:
        del report  # nothing to learn


@dataclass(frozen=True, slots=True)
class GovernorOptions:
    """Depths k_min..k_max may be chosen; k_max is k_SLO where a latency budget asks for less than the rows allow.

    advised_k: no deeper one is tried before this one is the best of those measured; None is k_max.
    round_budget_s: no depth is chosen whose rounds are known to take longer, k_min excepted.
    In the first calibration_tok tokens the choice is made afresh after every round, later every update_tok; a depth
    near the best one is measured again after refresh_tok, a far slower one after twice as many.
    """

    k_max: int
    k_min: int = 0
    advised_k: int | None = None
    round_budget_s: float | None = None
    calibration_tok: int = 100
    update_tok: int = 50
    refresh_tok: int = 300


class AmortizingDepth:
    """argmax over k_min..k_max of expected committed tokens per second, at a bounded price of finding it."""

    def __init__(self, options: GovernorOptions) -> None:
        assert 0 <= options.k_min <= options.k_max, options
        self._options = options
        self._estimate = DepthEstimate(options.k_max)
        self._stopping = EarlyStopping(self._estimate, k_min=options.k_min)
        self._trials, self._risk = Allowance(_TRIAL_SHARE), Allowance(_RISK_SHARE)
        self._k = options.k_min
        self._curve = [0.0]  # Theta(0..k_max) at the last look
        self._trial: int | None = None  # the depth to try as soon as its price is covered
        self._is_trial = False  # of the running round
        self._next_look_tok = 0

    @property
    def k(self) -> int:
        """The best depth known, what rounds run at between trials."""
        return self._k

    @property
    def stops_drafts(self) -> bool:
        """Whether drafts end early now."""
        return self._stopping.pays

    @property
    def trials_lost_s(self) -> float:
        """What trials lost so far against the best depth known at the time."""
        return self._trials.lost_s

    def choose(self, max_k: int) -> int:
        if self._estimate.num_rounds(self._options.k_min) < _FIRST_ROUNDS:
            return min(self._options.k_min, max_k)
        if self._trial is not None:
            trial = self._covered(min(self._trial, max_k))
            self._is_trial = trial != self._k and self._trials.covers(self._price_s(trial))
            if self._is_trial:
                return trial
        self._is_trial = False
        return min(self._covered(self._k), max_k)

    def watch(self, k: int) -> DraftWatch | None:
        return None if self._is_trial else self._stopping.watch(k)  # a trial is to tell of its depth

    def observe(self, report: StepReport) -> None:
        estimate, round_s = self._estimate, report.draft_s + report.verify_s
        is_new = estimate.observe(report)
        self._stopping.observe(report)
        self._account(report, round_s)
        if report.k == self._options.k_min and estimate.num_rounds(report.k) == _FIRST_ROUNDS:
            plain_s = estimate.round_s(report.k)
            self._trials.open(_TRIAL_ADVANCE_ROUNDS * plain_s, _MOST_TRIAL_ROUNDS * plain_s)
            self._risk.open(_RISK_ADVANCE_ROUNDS * plain_s, _MOST_RISK_ROUNDS * plain_s)
        is_calibrating = estimate.now_tok <= self._options.calibration_tok
        if is_new or is_calibrating or self._is_trial or estimate.now_tok >= self._next_look_tok:
            self._look()

    def tokens_per_s(self, k: int) -> float:
        """Theta(k) as estimated now; after at least one report."""
        return self._estimate.tokens_per_s(k)[k]

    def _account(self, report: StepReport, round_s: float) -> None:
        self._trials.earn(round_s)
        self._risk.earn(round_s)
        if report.k > self._options.k_min:
            self._risk.charge(round_s - report.committed * self._plain_s_per_tok())
        if self._is_trial:  # by what it was to be expected to commit: luck is neither spent nor saved
            estimate = self._estimate
            expected_tok = estimate.tokens_per_s(report.k)[-1] * estimate.round_s(report.k)
            self._trials.charge(round_s - expected_tok / self._curve[self._k])

    def _look(self) -> None:
        """Choose the best depth known, and the next one to try."""
        options, estimate = self._options, self._estimate
        self._next_look_tok = estimate.now_tok + options.update_tok
        self._curve = estimate.tokens_per_s(options.k_max)
        known = range(options.k_min, max(options.k_min, estimate.deepest) + 1)
        best = max(filter(self._is_allowed, known), key=lambda k: (self._curve[k], -k))
        if not self._is_allowed(self._k) or self._curve[best] > (1.0 + _HYSTERESIS) * self._curve[self._k]:
            self._k = best
        trial = self._promising()
        self._trial = self._stale() if trial is None else trial

    def _is_allowed(self, k: int) -> bool:
        budget_s = self._options.round_budget_s
        return k == self._options.k_min or budget_s is None or self._estimate.round_s(k) <= budget_s

    def _promising(self) -> int | None:
        """The depth that may be the best one, where it may be better than the best one known."""
        options, estimate = self._options, self._estimate
        deepest = max(1, options.k_min + 1, _GROWTH * estimate.deepest)
        if options.advised_k is not None and not self._outgrew(options.advised_k):
            deepest = min(deepest, options.advised_k)
        hopeful = estimate.tokens_per_s(options.k_max, benefit_of_doubt_tok=_BENEFIT_OF_DOUBT_TOK)
        enough = (1.0 + _HYSTERESIS) * self._curve[self._k]
        depths = _doubling(options.k_min, min(deepest, options.k_max))
        better = [k for k in depths if k != self._k and hopeful[k] > enough and self._is_allowed(k)]
        return max(better, key=hopeful.__getitem__, default=None)

    def _outgrew(self, k: int) -> bool:
        """Whether depth k is the best one known, or a deeper one, and not by one lucky round."""
        return self._k >= k and self._estimate.num_rounds(k) >= _FIRST_ROUNDS

    def _stale(self) -> int | None:
        """A depth to measure again: the least, half or twice the best; soon at first, then every `refresh_tok`."""
        near = {self._options.k_min, max(self._k // 2, self._options.k_min), 2 * self._k} - {self._k}
        for k in sorted(near):
            if self._estimate.num_rounds(k) and self._is_allowed(k) and self._estimate.age_tok(k) > self._wait_tok(k):
                return k
        return None

    def _wait_tok(self, k: int) -> int:
        """How old what is known of depth k may grow: a share of the tokens that rounds of the best depth bring."""
        refresh_tok = self._options.refresh_tok
        if self._curve[k] < _NEAR_SHARE * self._curve[self._k]:
            return 2 * refresh_tok
        doublings = min(max(self._estimate.num_rounds(k) - _FIRST_ROUNDS, 0), 30)
        return max(min(_FIRST_REFRESH_TOK << doublings, refresh_tok), _LEAST_REFRESH_ROUNDS * (self._k + 1))

    def _price_s(self, k: int) -> float:
        """What a round of depth k is expected to lose against the best depth known."""
        return self._estimate.round_s(k) * (1.0 - self._curve[k] / self._curve[self._k])

    def _covered(self, k: int) -> int:
        """k, halved until a part of the allowance covers that nothing is accepted."""
        k_min = self._options.k_min
        while k > k_min and not self._risk.covers(_STAKES * (self._estimate.round_s(k) - self._plain_s_per_tok())):
            k = max(k // 2, k_min)
        return k

    def _plain_s_per_tok(self) -> float:
        """Seconds a token at the least depth."""
        return 1.0 / self._estimate.tokens_per_s(self._options.k_min)[-1]


def _doubling(k_min: int, k_max: int) -> list[int]:
    """1, 2, 4, ... within the bounds, and both bounds."""
    powers = (1 << exponent for exponent in range(k_max.bit_length()))
    return sorted({k_min, *(k for k in powers if k_min < k), k_max})
