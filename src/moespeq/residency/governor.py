"""How far to draft: the depth k of each round, chosen from what rounds measured. k = 0 is legal: plain
decoding.

`AmortizingDepth` learns three things from the reports: seconds a draft step, the chance that a position is
accepted, and seconds a verify takes at each depth, stalls included. Depths nobody tried are interpolated over
rows; distinct experts saturate with rows, so the truth lies above the chord and a depth that looks too good
is tried once and then known. Every `update_tok` tokens one *probe* round runs at the candidate measured
longest ago, then the best depth is chosen afresh. Equal reports give equal choices: no clock, no randomness.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

from moespeq.residency.roofline import tokens_per_s
from moespeq.residency.running_mean import RunningMean
from moespeq.types import StepReport

__all__ = ["AmortizingDepth", "FixedDepth", "Governor", "GovernorOptions"]

_COST_MEMORY = 5
_POSITION_MEMORY = 20
_POOLED_MEMORY = 64
_POOLED_WEIGHT = 2.0


class Governor(Protocol):
    """Chooses each round's depth."""

    def choose(self, max_k: int) -> int:
        """Depth of the next round, in 0..max_k; `max_k` is what context and rows leave for this round."""
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

    def observe(self, report: StepReport) -> None:
        del report  # nothing to learn


@dataclass(frozen=True, slots=True)
class GovernorOptions:
    """Calibration takes turns at `calibration_k`, 0 and `k_max` for `calibration_tok` committed tokens."""

    k_max: int
    calibration_k: int = 4
    calibration_tok: int = 100
    update_tok: int = 50


class AmortizingDepth:
    """argmax over 0..k_max of expected committed tokens per second, kept up to date by probes."""

    def __init__(self, options: GovernorOptions) -> None:
        self._options = options
        middle = min(options.calibration_k, options.k_max)
        self._candidates = sorted({0, middle, options.k_max})
        self._accept = [RunningMean(_POSITION_MEMORY) for _ in range(options.k_max)]
        self._accept_pooled = RunningMean(_POOLED_MEMORY)
        self._draft_step_s = RunningMean(_COST_MEMORY)
        self._verify_s: dict[int, RunningMean] = {}
        self._now_tok = 0
        self._next_update_tok = options.calibration_tok
        self._k = middle
        self._is_probing = False

    def choose(self, max_k: int) -> int:
        if self._now_tok < self._options.calibration_tok:
            return min(self._least_measured(), max_k)
        if self._now_tok >= self._next_update_tok:
            self._next_update_tok = self._now_tok + self._options.update_tok
            self._is_probing = True
            return min(self._stalest(), max_k)
        if self._is_probing:
            self._is_probing = False
            self._k = self._best()
        return min(self._k, max_k)

    def observe(self, report: StepReport) -> None:
        self._now_tok += report.committed
        is_cut = report.committed <= report.accepted  # by a stop or a limit: nothing was rejected
        num_judged = report.accepted if is_cut else report.accepted + 1
        for position in range(min(num_judged, report.k, len(self._accept))):
            outcome = 1.0 if position < report.accepted else 0.0
            self._accept[position].add(outcome, now_tok=self._now_tok)
            self._accept_pooled.add(outcome, now_tok=self._now_tok)
        if report.k:
            self._draft_step_s.add(report.draft_s / (report.k + 1), now_tok=self._now_tok)
        verify_s = self._verify_s.setdefault(report.k, RunningMean(_COST_MEMORY))
        verify_s.add(report.verify_s, now_tok=self._now_tok)

    def tokens_per_s(self, k: int) -> float:
        """Theta(k) as estimated now; after at least one report."""
        p = [self._chance(position) for position in range(k)]
        return tokens_per_s(p, draft_step_s=self._draft_step_s.value, verify_s=self._estimate_verify_s(k))

    def _chance(self, position: int) -> float:
        """p_j, drawn to the mean of all positions as far as its own measurements are few or old."""
        own = self._accept[position]
        weight = own.weight_at(self._now_tok)
        return (weight * own.value + _POOLED_WEIGHT * self._accept_pooled.value) / (weight + _POOLED_WEIGHT)

    def _best(self) -> int:
        return max(range(self._options.k_max + 1), key=lambda k: (self.tokens_per_s(k), -k))

    def _least_measured(self) -> int:
        """Calibration: the middle depth first, then each candidate in turn."""
        counts = {k: self._verify_s[k].num_samples if k in self._verify_s else 0 for k in self._candidates}
        return min(self._candidates, key=lambda k: (counts[k], k != self._k, k))

    def _stalest(self) -> int:
        """The depth to measure again: a calibrated one, or one of half or twice the best one's rows."""
        near = {(self._k + 1) // 2, min(2 * self._k + 1, self._options.k_max)}
        depths = sorted(near.union(self._candidates).difference({self._k}))
        if not depths:
            return self._k
        return min(depths, key=lambda k: self._verify_s[k].updated_tok if k in self._verify_s else -1)

    def _estimate_verify_s(self, k: int) -> float:
        """Linear between the two nearest measured depths, level outside them."""
        known = sorted(self._verify_s)
        at = bisect_left(known, k)
        if at == len(known):
            return self._verify_s[known[-1]].value
        if at == 0 or known[at] == k:
            return self._verify_s[known[at]].value
        below, above = known[at - 1], known[at]
        low_s, high_s = self._verify_s[below].value, self._verify_s[above].value
        return low_s + (high_s - low_s) * (k - below) / (above - below)
