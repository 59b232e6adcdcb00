"""What computing takes, as the rounds of a trace say: the part of the model that no policy and no link changes.

A verify's time without its stalls is a straight line over the distinct experts its layers asked for: attention, router
and dense weights cost the same for every depth (a pass has all its rows, live or not), and each expert once more, to be
decoded and multiplied. The line goes through the mean of the recorded rounds, so their sum is kept whatever its slope.
Rounds of one depth ask for nearly equally many experts and say little of the slope, so it is drawn to the middle of
what is possible, half of the time for the experts, as far as the rounds are alike. What the host adds is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from moespeq.replay.routing_trace import TraceRound

__all__ = ["ComputeTimes"]

_ALIKE_SHARE = 0.1  # rounds whose experts spread so far about their mean say half of the slope


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """draft_step_s: None where no round drafted; dense_s: of a verify without experts; expert_s: each of them more."""

    draft_step_s: float | None
    dense_s: float
    expert_s: float

    @classmethod
    def of(cls, rounds: Sequence[TraceRound]) -> ComputeTimes:
        """Of at least one round."""
        drafted = [one for one in rounds if one.k]
        num_steps = sum(one.k + 1 for one in drafted)
        experts = [float(one.hits + one.late + one.misses) for one in rounds]
        compute_s = [max(0.0, one.verify_s - one.stall_s) for one in rounds]
        expert_s = _slope(experts, compute_s)
        return cls(
            draft_step_s=sum(one.draft_s for one in drafted) / num_steps if drafted else None,
            dense_s=max(0.0, fmean(compute_s) - expert_s * fmean(experts)),
            expert_s=expert_s,
        )


def _slope(experts: Sequence[float], compute_s: Sequence[float]) -> float:
    """Seconds an expert: least squares, drawn to the middle, from 0 to where nothing is left for the dense part."""
    mean_experts, mean_s = fmean(experts), fmean(compute_s)
    steepest = mean_s / mean_experts
    spread = sum((x - mean_experts) ** 2 for x in experts)
    together = sum((x - mean_experts) * (y - mean_s) for x, y in zip(experts, compute_s, strict=True))
    drawn = len(experts) * (_ALIKE_SHARE * mean_experts) ** 2
    return min(max(0.0, (together + drawn * steepest / 2) / (spread + drawn)), steepest)
