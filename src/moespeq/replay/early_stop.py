"""What ending drafts early would have gained on a recorded text, at the best depth of its roofline.

Chances are calibrated on the same text and costs are read off the roofline, so the answer leans towards stopping: where
it says that nothing is gained, nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moespeq.replay.roofline_points import Roofline
from moespeq.replay.routing_trace import RoutingTrace, TracePosition
from moespeq.residency.early_stop import ConfidenceCalibration, stopping_step

__all__ = ["EarlyStop", "early_stop"]


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """k: the depth that drafts end before; gain: in tokens per second, over drafts of full depth; 0.02 is 2 %."""

    k: int
    stopped_share: float
    gain: float


def early_stop(trace: RoutingTrace, roofline: Roofline) -> EarlyStop:
    """Cut the text into rounds of the best depth twice: each draft to its end, and to where it pays to end it."""
    k, positions = roofline.best_k, trace.positions[:-1]
    if k < 2 or not positions:
        return EarlyStop(k, 0.0, 0.0)
    round_s = _round_s(roofline, k)
    step_s = [after - before for before, after in pairwise(round_s)]
    calibration = ConfidenceCalibration()
    for position in positions:
        calibration.observe(position.confidence, is_accepted=position.accepted)
    whole = _play(positions, k, round_s, len)

    def stop(confidences: Sequence[float]) -> int:
        chances = [calibration.chance(confidence) for confidence in confidences]
        return stopping_step(chances, mean_chance=calibration.mean, step_s=step_s, tokens_per_s=whole.tokens_per_s)

    stopped = _play(positions, k, round_s, stop)
    return EarlyStop(k, stopped.short_share, stopped.tokens_per_s / whole.tokens_per_s - 1.0)


@dataclass(frozen=True, slots=True)
class _Play:
    tokens_per_s: float
    short_share: float


def _play(
    positions: Sequence[TracePosition],
    k: int,
    round_s: Sequence[float],
    num_drafted: Callable[[Sequence[float]], int],
) -> _Play:
    """num_drafted: of the confidences of a round's drafts of full depth, how many are drafted."""
    start, seconds, rounds, short = 0, 0.0, 0, 0
    while start < len(positions):
        ahead = positions[start : start + k]
        drafted = num_drafted([position.confidence for position in ahead])
        accepted = next((step for step in range(drafted) if not ahead[step].accepted), drafted)
        seconds += round_s[drafted]
        rounds, short = rounds + 1, short + (drafted < len(ahead))
        start += accepted + 1
    return _Play(start / seconds, short / rounds)


def _round_s(roofline: Roofline, k: int) -> list[float]:
    """T_round(0..k), linear between the depths of the roofline."""
    known = [(point.k, point.committed / point.tokens_per_s) for point in roofline.points]
    round_s = [known[0][1]]
    for (low, low_s), (high, high_s) in pairwise(known):
        round_s += [low_s + (high_s - low_s) * step / (high - low) for step in range(1, high - low + 1)]
    return round_s[: k + 1]
