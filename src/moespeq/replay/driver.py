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

__all__ = ["ReplayResult", "RoundTrace", "Trace", "play_prompt", "play_round", "replay"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. `draft[step][layer]` are experts a draft step used, `true[layer]` the distinct experts verify used.

    A verify's layer takes `dense_layer_s` until its routes are known, then `verify_layer_s`, shared by its experts.
    """

    draft: Sequence[Sequence[Sequence[int]]]
    true: Sequence[Sequence[int]]
    committed: int
    draft_step_s: float
    verify_layer_s: float
    dense_layer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """The rounds of one generation, and the model's MoE shape.

    prompt[layer]: the distinct experts its prefill used, which are in the slots when the first round begins; by default
    none, and the slots are empty. What the prefill took is not counted.
    """

    num_layers: int
    num_experts: int
    rounds: Sequence[RoundTrace]
    prompt: Sequence[Sequence[int]] = ()


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
    is_eager: bool = False,
) -> ReplayResult:
    """Run every round of `trace` through a fresh Residency; rounds without draft steps run PLAIN.

    is_eager: layers run as on a CPU, expert by expert, and the link is looked after before each; else as on a GPU,
    where a wave is one launch.
    """
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
    if trace.prompt:
        play_prompt(trace.prompt, residency)
    begin_s, busy_s, before = clock.now_s(), mover.busy_s, residency.counters()
    for recorded in trace.rounds:
        play_round(recorded, residency, clock, is_eager=is_eager)
    seconds = clock.now_s() - begin_s
    residency.settle()
    residency.check()
    committed = sum(recorded.committed for recorded in trace.rounds)
    return ReplayResult(committed, seconds, mover.busy_s - busy_s, residency.counters().since(before))


def play_round(
    recorded: RoundTrace, residency: Residency, clock: VirtualClock, *, is_eager: bool
) -> tuple[float, ResidencyCounters]:
    """One round, in the order of the engine's calls. Returns the seconds of its draft, and what the round moved."""
    kind, begin_s = PassKind.DRAFT_VERIFY if recorded.draft else PassKind.PLAIN, clock.now_s()
    residency.begin_pass(kind, num_draft_steps=len(recorded.draft))
    _draft(recorded, residency, clock)
    draft_s = clock.now_s() - begin_s
    (_verify_eagerly if is_eager else _verify)(recorded, residency, clock)
    return draft_s, residency.end_pass(recorded.committed)


def play_prompt(prompt: Sequence[Sequence[int]], residency: Residency) -> None:
    """All that a layer will use is known ahead, as where a prompt streams or a draft foresees it."""
    residency.begin_pass(PassKind.PREFILL)
    for layer, experts in enumerate(prompt):
        residency.expect(layer, [experts])
    for layer, experts in enumerate(prompt):
        for _ in residency.acquire(layer, experts):
            residency.pump()
    residency.end_pass(1)
    residency.settle()


def _draft(recorded: RoundTrace, residency: Residency, clock: VirtualClock) -> None:
    """A step's routes are known, and the link is fed, when it ends, as with one CUDA graph a step."""
    for routes in recorded.draft:
        clock.advance(recorded.draft_step_s)
        residency.predict(routes)
        residency.pump()


def _verify(recorded: RoundTrace, residency: Residency, clock: VirtualClock) -> None:
    """A layer's time is shared among its experts; a wave computes while the rest of the layer arrives."""
    for layer, experts in enumerate(recorded.true):
        residency.approach(layer)
        clock.advance(recorded.dense_layer_s)
        for wave in residency.acquire(layer, experts):
            residency.pump()
            clock.advance(recorded.verify_layer_s * len(wave) / len(experts))


def _verify_eagerly(recorded: RoundTrace, residency: Residency, clock: VirtualClock) -> None:
    for layer, experts in enumerate(recorded.true):
        clock.advance(recorded.dense_layer_s)
        for wave in residency.acquire(layer, experts):
            for _ in wave.experts:
                residency.pump()
                clock.advance(recorded.verify_layer_s / len(experts))
