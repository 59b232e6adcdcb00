"""What the loop notes of the open prefill or round, until it becomes a report. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moespeq.decode.link_meter import LinkUse
from moespeq.decode.timeline import RoundTimes
from moespeq.residency import ResidencyCounters
from moespeq.types import StepReport

__all__ = ["PrefillMeasures", "RoundMeasures", "report_of"]


@dataclass(slots=True)
class PrefillMeasures:
    """A prefill: when it began, what had moved by then, and the logits of its last row so far."""

    at_s: float
    counters: ResidencyCounters
    logits: torch.Tensor | None = None


@dataclass(slots=True)
class RoundMeasures:
    """A round: what it has measured so far."""

    begin_s: float = 0.0
    k: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    draft_routes: list[Sequence[Sequence[int]]] = field(default_factory=list)  # [step][layer][K]
    target_routes: list[Sequence[Sequence[int]]] = field(default_factory=list)  # [layer][row][K]
    confidences: list[torch.Tensor] = field(default_factory=list)  # float32 [1] a drafted token, where asked for
    times: RoundTimes | None = None  # where somebody looks on

    def hear_target_routes(self, layer: int, rows: Sequence[Sequence[int]]) -> None:
        """A verified layer's; a runner may keep this method, so it must not lead back to the loop that owns it."""
        self.target_routes.append(rows)
        if self.times is not None:
            self.times.note_layer(rows)


def report_of(measured: RoundMeasures, committed: int, moved: ResidencyCounters, link: LinkUse) -> StepReport:
    """A round that committed so many tokens; a prefill is one without a draft."""
    return StepReport(
        k=measured.k,
        accepted=min(measured.accepted, committed),
        committed=committed,
        hits=moved.hits,
        late=moved.late,
        misses=moved.misses,
        draft_s=measured.draft_s,
        verify_s=measured.verify_s,
        stall_s=moved.stall_s,
        bytes_by_cause=dict(moved.bytes_by_cause),
        link_busy_s=link.busy_s,
        stall_busy_s=link.stall_busy_s,
        used_bytes=moved.used_bytes,
        confidences=torch.cat(measured.confidences).tolist() if measured.confidences else (),
    )
