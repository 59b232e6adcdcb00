"""What computing takes, as the rounds of a trace say: the part of the model that no policy and no link changes.

A verify's time without its stalls is a straight line over the distinct experts its layers asked for: attention, router
and dense weights cost the same for every depth (a pass has all its rows, live or not), and each expert once more, to be
decoded and multiplied. The line goes through the mean of the recorded rounds, so their sum is kept whatever its slope.

The slope is that of single layers, which differ in the experts they ask for even where the rounds are of one depth: a
straight line through the median seconds of each number of experts, so that a layer which was interrupted says nothing.
Layers that are all alike (without a draft each asks for K) say nothing of the slope; as far as they are, it is drawn to
the middle of what is possible, half of the time for the experts. What the host adds is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from moespeq.replay.routing_trace import RoutingTrace

__all__ = ["ComputeTimes"]

_DRAWN = 0.1  # of a layer that asked for no expert or for twice the mean, and took half or half more


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
        expert_s = min(
            _slope([layer for one in rounds for layer in zip(one.layer_experts, one.layer_s, strict=True)]),
            compute_s / mean_experts,
        )
        return cls(
            draft_step_s=draft_s / num_steps if num_steps else trace.header.draft_step_s,
            dense_s=compute_s - expert_s * mean_experts,
            expert_s=expert_s,
        )


def _slope(layers: Sequence[tuple[int, float]]) -> float:
    """Seconds an expert of (experts, seconds): least squares, drawn to the middle, never below 0."""
    if not layers:
        return 0.0
    seconds: dict[int, list[float]] = {}
    for experts, layer_s in layers:
        seconds.setdefault(experts, []).append(layer_s)
    points = [(experts, median(all_s), len(all_s)) for experts, all_s in seconds.items()]  # (x, y, weight)
    mean_experts = sum(x * weight for x, _, weight in points) / len(layers)
    mean_s = sum(y * weight for _, y, weight in points) / len(layers)
    spread = sum(weight * (x - mean_experts) ** 2 for x, _, weight in points)
    together = sum(weight * (x - mean_experts) * (y - mean_s) for x, y, weight in points)
    drawn = _DRAWN * mean_experts**2
    steepest = mean_s / mean_experts
    return min(max(0.0, (together + drawn * steepest / 2) / (spread + drawn)), steepest)
