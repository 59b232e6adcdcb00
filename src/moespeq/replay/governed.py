"""A recorded text decoded by a governor on the virtual clock: it chooses each round's depth from what rounds measured.

Everything but the depth is as in driver.replay. Whether a drafted token is accepted is told by the caller, so that one
recorded text also serves as an easier or harder one: routes and records stay real, and what is drafted behind a
rejection routes as another place of the text does. Owns no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from moespeq.replay.driver import play_prompt, play_round
from moespeq.replay.rounds import round_at
from moespeq.replay.routing_trace import RoutingTrace
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.virtual import VirtualClock, VirtualMover
from moespeq.replay.what_if import Setting, slots_at_first
from moespeq.residency import Governor, Residency, ResidencyCounters
from moespeq.types import StepReport

__all__ = ["replay_governed"]


def replay_governed(
    trace: RoutingTrace,
    verdicts: Sequence[bool],
    governor: Governor,
    setting: Setting,
    times: ComputeTimes,
    *,
    most_k: int,
) -> list[StepReport]:
    """The rounds that decode the text, as a governor hears of them; `setting.k` is not looked at.

    verdicts[i]: whether the target agrees with what is drafted behind token i; most_k: rows - 1.
    """
    clock, header = VirtualClock(), trace.header
    mover = VirtualMover(clock, setting.link)
    residency = Residency(
        mover,
        clock,
        num_slots=setting.num_slots,
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        num_bytes=lambda key: setting.record_bytes[key.layer],
        options=setting.options,
    )
    play_prompt(slots_at_first(header, setting.num_slots), residency)
    reports: list[StepReport] = []
    start, last = 0, len(verdicts) - 1
    while start < last:
        k = governor.choose(min(most_k, last - start - 1))
        watch = governor.watch(k) if k else None
        said = [position.confidence for position in trace.positions[start : start + k]]
        if watch is not None and watch.goes_on is not None:
            k = min(k, 1 + sum(1 for _ in takewhile(watch.goes_on, said[:-1])))
        recorded = round_at(trace, start, k, verdicts, times)
        begin_s, busy_s = clock.now_s(), mover.busy_s
        draft_s, moved = play_round(recorded, residency, clock, is_eager=setting.is_eager)
        report = _report(k, recorded.committed, moved, draft_s, clock.now_s() - begin_s, mover.busy_s - busy_s)
        if watch is not None:
            report = replace(report, confidences=said[:k])
        governor.observe(report)
        reports.append(report)
        start += recorded.committed
    residency.settle()
    return reports


def _report(
    k: int, committed: int, moved: ResidencyCounters, draft_s: float, round_s: float, link_busy_s: float
) -> StepReport:
    return StepReport(
        k=k,
        accepted=committed - 1,
        committed=committed,
        hits=moved.hits,
        late=moved.late,
        misses=moved.misses,
        draft_s=draft_s,
        verify_s=round_s - draft_s,
        stall_s=moved.stall_s,
        bytes_by_cause=dict(moved.bytes_by_cause),
        link_busy_s=link_busy_s,
        used_bytes=moved.used_bytes,
    )
