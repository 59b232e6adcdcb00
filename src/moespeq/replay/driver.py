"""What-if: the engine's own residency over recorded routes, on a virtual clock and a virtual link.

Owns the trace format and the order of calls, the same as the engine's; decides nothing. Compute times come
from the trace, transfer times from the link model, so only what policy influences changes between two replays
of one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moespeq.replay.virtual import LinkModel, VirtualClock, VirtualMover
from moespeq.residency import PassKind, Residency, ResidencyCounters, ResidencyOptions, ResidentBases
from moespeq.types import ExpertKey

__all__ = ["ReplayResult", "RoundTrace", "Trace", "replay"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. `draft[step][layer]` are experts a draft step used, `true[layer]` the distinct experts
    verify used.
    """

    draft: Sequence[Sequence[Sequence[int]]]
    true: Sequence[Sequence[int]]
    committed: int
    draft_step_s: float
    verify_layer_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """The rounds of one generation, and the model's MoE shape."""

    num_layers: int
    num_experts: int
    rounds: Sequence[RoundTrace]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the generation would have cost."""

    committed: int
    seconds: float
    link_busy_s: float
    counters: ResidencyCounters

    @property
    def bytes_per_tok(self) -> float:
        """Bytes over the link per committed token."""
        return self.counters.link_bytes / self.committed


def replay(
    trace: Trace,
    *,
    num_slots: int,
    num_bytes: Callable[[ExpertKey], int],
    link: LinkModel,
    options: ResidencyOptions,
    bases: ResidentBases | None = None,
) -> ReplayResult:
    """Run every round of `trace` through a fresh Residency; rounds without draft steps run PLAIN."""
    clock = VirtualClock()
    mover = VirtualMover(clock, link)
    residency = Residency(
        mover,
        clock,
        num_slots=num_slots,
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        num_bytes=num_bytes,
        options=options,
        bases=bases,
    )
    for recorded in trace.rounds:
        kind = PassKind.DRAFT_VERIFY if recorded.draft else PassKind.PLAIN
        residency.begin_pass(kind, num_draft_steps=len(recorded.draft))
        _draft(recorded, residency, clock)
        _verify(recorded, residency, clock)
        residency.end_pass(recorded.committed)
    seconds = clock.now_s()
    residency.settle()
    residency.check()
    committed = sum(recorded.committed for recorded in trace.rounds)
    return ReplayResult(committed, seconds, mover.busy_s, residency.counters())


def _draft(recorded: RoundTrace, residency: Residency, clock: VirtualClock) -> None:
    """A step's routes are known, and the link is fed, when it ends, as with one CUDA graph a step."""
    for routes in recorded.draft:
        clock.advance(recorded.draft_step_s)
        residency.predict(routes)
        residency.pump()


def _verify(recorded: RoundTrace, residency: Residency, clock: VirtualClock) -> None:
    """A layer's time is shared among its experts; a wave computes while the rest of the layer arrives."""
    for layer, experts in enumerate(recorded.true):
        for wave in residency.acquire(layer, experts):
            residency.pump()
            clock.advance(recorded.verify_layer_s * len(wave) / len(experts))
