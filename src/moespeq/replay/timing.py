"""What computing takes, as the rounds of a trace say: the part of the model that no policy and no link changes.

A verify's time without its stalls is a straight line over the distinct experts its layers asked for: attention, router
and dense weights cost the same for every depth (a pass has all its rows, live or not), and each expert once more, to be
decoded and multiplied. The line goes through the mean of the recorded rounds, so their sum is kept whatever its slope.

The slope is that of single layers, which differ in the experts they ask for even where the rounds are of one depth.
Each is compared with the others of its round, in shares of the round's: what slows a whole round down, such as another
program on the same cores, takes no part, and an interrupted layer little. Layers that are all alike (without a draft
each asks for K) say nothing of the slope; as far as they are, it is drawn to the middle of what is possible, half of
the time for the experts. What the host adds is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from moespeq.replay.routing_trace import RoutingTrace, TraceRound

__all__ = ["ComputeTimes"]

_DRAWN = 0.1  # how much a half weighs: as a layer that asked for a third more experts than its round
_INTERRUPTED = 3.0  # times the middle layer of its round; what took longer counts as so much


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """dense_s: of a verify without experts; expert_s: each of them more."""

    draft_step_s: float
    dense_s: float
    expert_s: float

    @classmethod
    def of(cls, trace: RoutingTrace) -> ComputeTimes:
        """Of a trace with at least one round."""
        rounds = trace.rounds
        num_steps = sum(one.k + 1 for one in rounds if one.k)
        draft_s = sum(one.draft_s for one in rounds if one.k)
        mean_experts = fmean(one.hits + one.late + one.misses for one in rounds)
        compute_s = fmean(max(0.0, one.verify_s - one.stall_s) for one in rounds)
        expert_s = min(_share_of_experts(rounds) * _layer_s_per_expert(rounds), compute_s / mean_experts)
        return cls(
            draft_step_s=draft_s / num_steps if num_steps else trace.header.draft_step_s,
            dense_s=compute_s - expert_s * mean_experts,
            expert_s=expert_s,
        )


def _layer_s_per_expert(rounds: Sequence[TraceRound]) -> float:
    """Of the middle layer of each round; 0 where a model has one layer only, and none was timed."""
    seconds = sum(median(one.layer_s) for one in rounds if one.layer_s)
    experts = sum(fmean(one.layer_experts) for one in rounds if one.layer_s)
    return seconds / experts if experts else 0.0


def _share_of_experts(rounds: Sequence[TraceRound]) -> float:
    """Of a layer's time, what grows with its experts: least squares within the rounds, drawn to a half; 0 to 1."""
    spread, together = _DRAWN, _DRAWN / 2
    for one in rounds:
        middle_s = median(one.layer_s) if one.layer_s else 0.0
        if middle_s == 0.0:
            continue
        mean_experts = fmean(one.layer_experts)
        for experts, layer_s in zip(one.layer_experts, one.layer_s, strict=True):
            more = experts / mean_experts - 1.0
            spread += more**2
            together += more * (min(layer_s / middle_s, _INTERRUPTED) - 1.0)
    return min(max(0.0, together / spread), 1.0)
