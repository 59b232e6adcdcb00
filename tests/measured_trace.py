"""Traces whose rounds took what a virtual machine takes: its compute times and its link are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moespeq.replay import ReplayResult, RoundTrace, RoutingTrace, Trace, TraceRound, replay
from moespeq.replay.rounds import rounds_of
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import recorded_setting, slots_at_first
from moespeq.residency import ResidencyCounters

__all__ = ["TIMES", "measured_trace"]

TIMES = ComputeTimes(draft_step_s=2e-3, dense_s=4e-3, expert_s=1e-4)


def measured_trace(trace: RoutingTrace, *, bytes_per_s: float) -> RoutingTrace:
    """`trace` with its rounds as a machine of TIMES and such a link measures them, at the depths they have."""
    trace = replace(trace, header=replace(trace.header, link_bytes_per_s=bytes_per_s))
    rounds, measured = rounds_of(trace, None, TIMES), []
    before = ReplayResult(0, 0.0, 0.0, ResidencyCounters())
    for index, recorded in enumerate(trace.rounds):
        after = _run(trace, rounds[: index + 1])
        measured.append(_difference(recorded, rounds[index], after, before))
        before = after
    return replace(trace, rounds=measured)


def _run(trace: RoutingTrace, rounds: Sequence[RoundTrace]) -> ReplayResult:
    header, setting = trace.header, recorded_setting(trace)
    return replay(
        Trace(header.num_layers, header.num_experts, rounds, prompt=slots_at_first(header, setting.num_slots)),
        num_slots=setting.num_slots,
        num_bytes=lambda key: header.record_bytes[key.layer],
        link=setting.link,
        options=setting.options,
        is_eager=setting.is_eager,
    )


def _difference(recorded: TraceRound, cut: RoundTrace, after: ReplayResult, before: ReplayResult) -> TraceRound:
    moved = after.counters.since(before.counters)
    draft_s = TIMES.draft_step_s * (recorded.k + 1) if recorded.k else 0.0
    return replace(
        recorded,
        hits=moved.hits,
        late=moved.late,
        misses=moved.misses,
        link_bytes=moved.link_bytes,
        used_bytes=moved.used_bytes,
        draft_s=draft_s,
        verify_s=max(1e-9, after.seconds - before.seconds - draft_s),  # a difference may round below it
        stall_s=moved.stall_s,
        link_busy_s=after.link_busy_s - before.link_busy_s,
        layer_experts=[len(experts) for experts in cut.true[:-1]],
        layer_s=[TIMES.dense_s / len(cut.true) + TIMES.expert_s * len(experts) for experts in cut.true[:-1]],
    )
