"""The roofline of a recorded run: what every depth would have done with its text, and what the run's own rounds did.

Depths are replayed on the virtual clock, with the memory, the link and the policy of the recorded run, so hits, waits
and overlap are the engine's own and only times of computing are estimates. Owns no formula; see residency.roofline.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from moespeq.errors import TraceError
from moespeq.replay.driver import Trace, replay
from moespeq.replay.routing_trace import RoutingTrace, TraceRound
from moespeq.replay.what_if import Setting, recorded_setting, routed
from moespeq.residency.roofline import RooflinePoint, RoundCosts, best_depth, paper_best_depth, roofline_point
from moespeq.types import Cause

__all__ = ["MeasuredPoint", "Roofline", "roofline_points"]

_LEAST_ROUNDS = 3  # of one depth, for its mean to be shown as measured
_MOST_TOK = 256  # of the text are replayed, at every depth: enough for a mean, and done in seconds
_LATE = (Cause.DEMAND, Cause.STAGE)


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """The recorded rounds of one depth together."""

    k: int
    num_rounds: int
    intensity: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """points: replayed, by depth; measured: recorded, by depth. tok_bytes: S_token, of the experts of one token.

    best_k: ours; paper_k: by the paper's formula; recorded_k: the depth most tokens were committed at.
    """

    model: str
    points: Sequence[RooflinePoint]
    measured: Sequence[MeasuredPoint]
    tok_bytes: float
    link_bytes_per_s: float
    best_k: int
    paper_k: int
    recorded_k: int

    @property
    def io_roof(self) -> float:
        """Tokens a second for one unit of intensity."""
        return self.link_bytes_per_s / self.tok_bytes

    @property
    def compute_roof(self) -> float:
        """Tokens a second of the best depth, if nothing was waited for."""
        return max(point.unstalled_tokens_per_s for point in self.points)


def roofline_points(trace: RoutingTrace) -> Roofline:
    """Raises TraceError where the trace holds no round."""
    if not trace.rounds:
        raise TraceError("The trace holds no round: the recorded run ended with its first token; record a longer one.")
    setting, header = recorded_setting(trace), trace.header
    tok_bytes = float(header.top_k * sum(header.record_bytes))
    points = [_replayed(trace, replace(setting, k=k), tok_bytes) for k in _depths(trace)]
    depths = sorted({one.k for one in trace.rounds})
    groups = {k: [one for one in trace.rounds if one.k == k] for k in depths}
    return Roofline(
        model=header.model,
        points=points,
        measured=[
            _measured(k, rounds, tok_bytes, header.link_bytes_per_s)
            for k, rounds in groups.items()
            if len(rounds) >= _LEAST_ROUNDS
        ],
        tok_bytes=tok_bytes,
        link_bytes_per_s=header.link_bytes_per_s,
        best_k=best_depth(points),
        paper_k=paper_best_depth(points),
        recorded_k=max(depths, key=lambda k: sum(one.committed for one in groups[k])),
    )


def _depths(trace: RoutingTrace) -> list[int]:
    """0, 1, 2, 4, ... up to what the recorded rows allow."""
    deepest = max(max(one.k for one in trace.rounds), trace.header.options.get("rows", 1) - 1)
    powers = [1 << exponent for exponent in range(deepest.bit_length())]
    return sorted({0, *powers, deepest})


def _replayed(trace: RoutingTrace, setting: Setting, tok_bytes: float) -> RooflinePoint:
    """One depth over the beginning of the text."""
    cut = _beginning(routed(trace, setting))
    result = replay(
        cut,
        num_slots=setting.num_slots,
        num_bytes=lambda key: setting.record_bytes[key.layer],
        link=setting.link,
        options=setting.options,
        is_eager=setting.is_eager,
    )
    num_rounds, counters, k = len(cut.rounds), result.counters, setting.k or 0
    draft_s = sum(len(one.draft) * one.draft_step_s for one in cut.rounds)
    late_bytes = sum(counters.bytes_by_cause.get(cause, 0) for cause in _LATE)
    early_bytes = counters.link_bytes - late_bytes
    costs = RoundCosts(
        draft_s=draft_s / num_rounds,
        compute_s=(result.seconds - draft_s - counters.stall_s) / num_rounds,
        stall_s=counters.stall_s / num_rounds,
        early_io_s=early_bytes / setting.link.bytes_per_s / num_rounds,
        late_io_s=late_bytes / setting.link.bytes_per_s / num_rounds,
    )
    rate = 0.0 if math.isinf(setting.link.bytes_per_s) else setting.link.bytes_per_s
    return roofline_point(k, result.committed / num_rounds, costs, tok_bytes=tok_bytes, link_bytes_per_s=rate)


def _beginning(text: Trace) -> Trace:
    """Its rounds up to the one that commits token `_MOST_TOK`."""
    ends = list(accumulate(one.committed for one in text.rounds))
    return replace(text, rounds=text.rounds[: bisect_left(ends, _MOST_TOK) + 1])


def _measured(k: int, rounds: Sequence[TraceRound], tok_bytes: float, link_bytes_per_s: float) -> MeasuredPoint:
    committed = fmean(one.committed for one in rounds)
    sync_bytes = fmean(one.stall_s for one in rounds) * link_bytes_per_s
    return MeasuredPoint(
        k=k,
        num_rounds=len(rounds),
        intensity=committed * tok_bytes / sync_bytes if sync_bytes else math.inf,
        tokens_per_s=committed / fmean(one.draft_s + one.verify_s for one in rounds),
    )
