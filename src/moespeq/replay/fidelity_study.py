"""How well what is known early foretells what the target does: the draft's routes and tokens, and a lookahead's routes.

Both are asked for the same rows: the INT4 draft before verify begins, for all layers and several tokens ahead; the
one-layer-lookahead predictor while verify runs, one layer ahead. The predictor's order is nobody's claim: it is
compared as a set, and for the first layer it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from moespeq.replay.route_match import RouteMatch, weighted_mean
from moespeq.replay.routing_trace import RoutingTrace, TracePosition

__all__ = [
    "ROUND_K",
    "AcceptanceStudy",
    "FidelityStudy",
    "StepAcceptance",
    "study_acceptance",
    "study_fidelity",
]

ROUND_K = 8


@dataclass(frozen=True, slots=True)
class FidelityStudy:
    """draft, ahead: over all layers and positions; draft_by_layer, ahead_by_layer [L];
    draft_by_step, ahead_by_step: draft step (TracePosition.step) -> over all layers, both of the same rows.
    """

    draft: RouteMatch
    ahead: RouteMatch
    draft_by_layer: Sequence[RouteMatch]
    ahead_by_layer: Sequence[RouteMatch]
    draft_by_step: dict[int, RouteMatch]
    ahead_by_step: dict[int, RouteMatch]


@dataclass(frozen=True, slots=True)
class StepAcceptance:
    """p: accepted drafts of this step / num_drafts, given the text up to there; confidence: the draft's, a mean."""

    p: float
    confidence: float
    num_drafts: int

    @classmethod
    def together(cls, parts: Sequence[StepAcceptance]) -> StepAcceptance:
        """All drafts of the parts."""
        counts = [part.num_drafts for part in parts]
        p, confidence = ([getattr(part, name) for part in parts] for name in ("p", "confidence"))
        return cls(weighted_mean(p, counts), weighted_mean(confidence, counts), sum(counts))


@dataclass(frozen=True, slots=True)
class AcceptanceStudy:
    """p: over all positions; by_step: step j -> p_(j+1), the chance of the token that step j drafts.

    accepted_confidence, rejected_confidence: the draft's mean probability of its token, None where there is none.
    committed: tokens a round of ROUND_K drafts commits where the text is cut into such rounds.
    """

    p: float
    committed: float
    accepted_confidence: float | None
    rejected_confidence: float | None
    by_step: dict[int, StepAcceptance]


def study_fidelity(trace: RoutingTrace) -> FidelityStudy:
    """The draft's routes and the predictor's against the target's."""
    positions, layers = trace.positions, range(trace.header.num_layers)
    draft_by_layer = [RouteMatch.of((each.draft[layer], each.true[layer]) for each in positions) for layer in layers]
    ahead_by_layer = [RouteMatch.of((each.ahead[layer], each.true[layer]) for each in positions) for layer in layers]
    return FidelityStudy(
        draft=RouteMatch.together(draft_by_layer),
        ahead=RouteMatch.together(ahead_by_layer),
        draft_by_layer=draft_by_layer,
        ahead_by_layer=ahead_by_layer,
        draft_by_step={step: _match_all(at_step, "draft") for step, at_step in _by_step(positions).items()},
        ahead_by_step={step: _match_all(at_step, "ahead") for step, at_step in _by_step(positions).items()},
    )


def _match_all(positions: Iterable[TracePosition], guess: str) -> RouteMatch:
    """Over all layers."""
    return RouteMatch.of(pair for each in positions for pair in zip(getattr(each, guess), each.true, strict=True))


def study_acceptance(trace: RoutingTrace) -> AcceptanceStudy:
    """What became of the draft's tokens, and what it thought of them."""
    positions = trace.positions
    by_step = {
        step: StepAcceptance(
            fmean(each.accepted for each in at_step), fmean(each.confidence for each in at_step), len(at_step)
        )
        for step, at_step in _by_step(positions).items()
    }
    return AcceptanceStudy(
        p=fmean(each.accepted for each in positions),
        committed=_committed([each.accepted for each in positions]),
        accepted_confidence=_confidence(positions, accepted=True),
        rejected_confidence=_confidence(positions, accepted=False),
        by_step=by_step,
    )


def _committed(accepted: Sequence[bool]) -> float:
    """Mean over the rounds that the text holds whole; the first in any case."""
    rounds: list[int] = []
    start = 0
    while start + ROUND_K < len(accepted) or not rounds:
        drafted = accepted[start : start + ROUND_K]
        rounds.append(next((place for place, kept in enumerate(drafted) if not kept), len(drafted)) + 1)
        start += rounds[-1]
    return fmean(rounds)


def _by_step(positions: Iterable[TracePosition]) -> dict[int, list[TracePosition]]:
    steps: dict[int, list[TracePosition]] = {}
    for position in positions:
        steps.setdefault(position.step, []).append(position)
    return dict(sorted(steps.items()))


def _confidence(positions: Iterable[TracePosition], *, accepted: bool) -> float | None:
    values = [each.confidence for each in positions if each.accepted == accepted]
    return fmean(values) if values else None
