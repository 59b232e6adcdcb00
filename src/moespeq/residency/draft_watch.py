"""Who looks on while a draft is made, and may end it: stopping early where that was measured to pay.

Asking for a token's confidence before the next is drafted makes a device wait for the host at every step, so nobody
asks until it is known to pay. What is known comes from *audits*: the first drafts, and then some, run to their end,
their confidences are read together with their tokens, and it is reckoned what ending them early would have saved in
time and lost in tokens. Drafts end early while the audits say that this surely gains; audits go on beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from moespeq.residency.depth_estimate import DepthEstimate
from moespeq.residency.early_stop import ConfidenceCalibration, StoppingRule, stopping_step
from moespeq.residency.running_mean import RunningMean
from moespeq.types import StepReport

__all__ = ["DraftWatch", "EarlyStopping"]

_FIRST_AUDITS = 16
_AUDIT_ROUNDS, _AUDIT_ROUNDS_WHILE_STOPPING = 4, 12
_GAIN_MEMORY = 64
_GAIN_FADING = 0.9995
_LEAST_GAIN = 0.01  # of the time, to begin with; none ends it
_STANDARD_ERRORS = 3.0  # that the mean gain must be above the least: audits of one draft in many thousand err so far


@dataclass(frozen=True, slots=True)
class DraftWatch:
    """The draft's confidences are to be reported. goes_on: to be told each token's, the last one excepted, before the
    next is drafted; False ends the draft. None: all may be read when the draft has ended.
    """

    goes_on: Callable[[float], bool] | None = None


class EarlyStopping:
    """Of a governor's drafts. Mutable: `watch` before a draft, `observe` after its round."""

    def __init__(self, estimate: DepthEstimate, *, k_min: int) -> None:
        self._estimate, self._k_min = estimate, k_min
        self._calibration = ConfidenceCalibration()
        self._gain = RunningMean(_GAIN_MEMORY, fading_per_tok=_GAIN_FADING)
        self._squared_gain = RunningMean(_GAIN_MEMORY, fading_per_tok=_GAIN_FADING)
        self._num_drafts = 0
        self._is_audit = False
        self.pays = False

    def watch(self, k: int) -> DraftWatch | None:
        """Of a draft of k tokens at most; None: nobody needs its confidences."""
        if k < 2:
            return None
        self._num_drafts += 1
        every = _AUDIT_ROUNDS_WHILE_STOPPING if self.pays else _AUDIT_ROUNDS
        self._is_audit = self._num_drafts <= _FIRST_AUDITS or self._num_drafts % every == 0
        if self._is_audit:
            return DraftWatch()
        if not self.pays:
            return None
        rule = StoppingRule(
            mean_chance=self._calibration.mean, step_s=self._step_s(k), tokens_per_s=self._estimate.tokens_per_s(k)[k]
        )
        drafted = 0

        def goes_on(confidence: float) -> bool:
            nonlocal drafted
            drafted += 1
            return rule.goes_on(self._calibration.chance(confidence)) or drafted < self._k_min

        return DraftWatch(goes_on)

    def observe(self, report: StepReport) -> None:
        """The round of a watched draft; others tell nothing."""
        if not report.confidences or report.committed <= report.accepted:  # cut by a stop or a limit
            return
        if self._is_audit and self._calibration.num_tok:
            self._judge(report)
        for position, confidence in enumerate(report.confidences[: report.accepted + 1]):
            self._calibration.observe(confidence, is_accepted=position < report.accepted)

    def _judge(self, report: StepReport) -> None:
        """What ending this draft early would have gained, by what was known when it began."""
        k, calibration, estimate = report.k, self._calibration, self._estimate
        chances = [calibration.chance(confidence) for confidence in report.confidences]
        speed = estimate.tokens_per_s(k)[k]
        stopped = stopping_step(chances, mean_chance=calibration.mean, step_s=self._step_s(k), tokens_per_s=speed)
        saved_s = estimate.round_s(k) - estimate.round_s(stopped)
        lost_tok = max(0, report.accepted - stopped)
        gain = (saved_s - lost_tok / speed) / estimate.round_s(k)
        for mean, sample in ((self._gain, gain), (self._squared_gain, gain * gain)):
            mean.add(sample, now_tok=estimate.now_tok)
        if self.pays:
            self.pays = self._gain.value > 0.0
        elif self._gain.num_samples >= _FIRST_AUDITS:
            variance = max(0.0, self._squared_gain.value - self._gain.value**2)
            error = math.sqrt(variance / self._gain.weight_at(estimate.now_tok))
            self.pays = self._gain.value - _STANDARD_ERRORS * error > _LEAST_GAIN

    def _step_s(self, k: int) -> list[float]:
        round_s = [self._estimate.round_s(depth) for depth in range(k + 1)]
        return [after - before for before, after in pairwise(round_s)]
