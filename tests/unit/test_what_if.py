"""Rounds of any depth out of one text, what computing takes, and what another setting would have changed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from measured_trace import TIMES, measured_trace
from moespeq.errors import TraceError
from moespeq.replay import RoutingTrace, TraceRound
from moespeq.replay.rounds import rounds_of
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import error_share, recorded_outcome, recorded_setting, replay_setting
from moespeq.residency import Eviction
from synthetic_trace import synthetic_trace


@cache
def recorded(rounds_k: int | tuple[int, ...] = 8, *, bytes_per_s: float = 12e9) -> RoutingTrace:
    """As a virtual machine measured it."""
    trace = synthetic_trace(
        num_positions=80, stickiness=0.5, fidelity=0.9, acceptance=0.8, skew=1.0, rounds_k=rounds_k, seed=3
    )
    return measured_trace(trace, bytes_per_s=bytes_per_s)


def a_round(num_experts: int, verify_s: float, *, k: int = 0, draft_s: float = 0.0, stall_s: float = 0.0) -> TraceRound:
    return TraceRound(k, 0, 1, num_experts, 0, 0, 0, 0, draft_s, verify_s, stall_s, 0.0)


@pytest.mark.parametrize("k", [0, 1, 3, 8, 64])
def test_rounds_of_any_depth_commit_all_tokens_but_the_first(k: int) -> None:
    rounds = rounds_of(recorded(), k, TIMES)
    assert sum(one.committed for one in rounds) == 79
    assert all(one.committed <= k + 1 for one in rounds)
    assert max(len(one.draft) for one in rounds) == (min(k + 1, 79) if k else 0)


def test_a_round_commits_the_accepted_run_and_one_token_more() -> None:
    trace = recorded(0)
    flags = [True, True, False, True, False, *[True] * 75]
    positions = [replace(one, accepted=flag) for one, flag in zip(trace.positions, flags, strict=True)]
    rounds = rounds_of(replace(trace, positions=positions), 4, TIMES)
    assert [one.committed for one in rounds[:4]] == [3, 2, 5, 5]


def test_verify_uses_the_union_of_its_rows_and_the_draft_names_each_row() -> None:
    trace = recorded()
    first = rounds_of(trace, 4, TIMES)[0]
    assert [len(set(experts)) for experts in first.true] == [len(experts) for experts in first.true]
    rows = trace.positions[:5]
    assert [set(experts) for experts in first.true] == [
        {expert for row in rows for expert in row.true[layer]} for layer in range(trace.header.num_layers)
    ]
    assert first.draft == [row.draft for row in rows]


def test_rounds_as_recorded_are_cut_where_the_run_cut_them() -> None:
    trace = recorded((8, 0, 3))
    rounds = rounds_of(trace, None, TIMES)
    assert [one.committed for one in rounds] == [one.committed for one in trace.rounds]
    assert [bool(one.draft) for one in rounds[:3]] == [True, False, True]


def test_a_recorded_verdict_counts_up_to_its_depth_and_the_text_beyond() -> None:
    trace = recorded(8)
    for flag, beyond in ((False, {1}), (True, {10, 9})):  # the last round is what remains
        told = replace(trace, positions=[replace(one, accepted=flag) for one in trace.positions])
        assert [one.committed for one in rounds_of(told, 8, TIMES)][:3] == [one.committed for one in trace.rounds][:3]
        assert {one.committed for one in rounds_of(told, 9, TIMES)} == beyond


def test_compute_times_are_the_line_that_the_rounds_lie_on() -> None:
    rounds = [a_round(n, 2e-3 + n * 1e-4 + 5e-3, stall_s=5e-3, k=1, draft_s=6e-3) for n in (10, 100, 400)]
    times = ComputeTimes.of(rounds)
    assert times.draft_step_s == pytest.approx(3e-3)
    assert times.expert_s == pytest.approx(1e-4, rel=0.02)
    assert times.dense_s == pytest.approx(2e-3, rel=0.2)


def test_rounds_that_are_all_alike_give_half_of_the_time_to_the_experts() -> None:
    times = ComputeTimes.of([a_round(100, 8e-3)] * 3)
    assert times.draft_step_s is None
    assert times.dense_s == pytest.approx(4e-3)
    assert times.expert_s == pytest.approx(4e-5)


@pytest.mark.parametrize("verify_s", [(9e-3, 5e-3, 1e-3), (1e-4, 5e-3, 1e-2)])
def test_noise_makes_no_time_negative(verify_s: tuple[float, ...]) -> None:
    times = ComputeTimes.of([a_round(n, s) for n, s in zip((50, 60, 70), verify_s, strict=True)])
    assert times.dense_s >= 0.0
    assert times.expert_s >= 0.0
    assert times.dense_s + 60 * times.expert_s == pytest.approx(sum(verify_s) / 3)


@pytest.mark.parametrize("rounds_k", [0, 8, (8, 0, 3)])
@pytest.mark.parametrize("bytes_per_s", [3e9, 55e9])
def test_the_recorded_setting_takes_what_was_measured(rounds_k: int | tuple[int, ...], bytes_per_s: float) -> None:
    trace = recorded(rounds_k, bytes_per_s=bytes_per_s)
    measured, replayed = recorded_outcome(trace), replay_setting(trace, recorded_setting(trace))
    assert abs(error_share(measured, replayed)) < 0.05
    assert replayed.hit_share == pytest.approx(measured.hit_share, abs=0.03)
    assert replayed.stall_share == pytest.approx(measured.stall_share, abs=0.05)


@pytest.mark.parametrize("k", [0, 3])
def test_another_depth_is_foretold_as_a_machine_of_that_depth_measures_it(k: int) -> None:
    trace, other = recorded((8, 0, 3)), recorded(k)
    foretold = replay_setting(trace, replace(recorded_setting(trace), k=k))
    assert abs(error_share(recorded_outcome(other), foretold)) < 0.15


def test_a_faster_link_and_more_slots_never_cost_time() -> None:
    trace = recorded()
    own = recorded_setting(trace)
    by_link = [
        replay_setting(trace, replace(own, link=replace(own.link, bytes_per_s=rate))) for rate in (3e9, 12e9, 55e9)
    ]
    by_slots = [replay_setting(trace, replace(own, num_slots=slots)) for slots in (8, 16, 64)]
    for outcomes in (by_link, by_slots):
        assert all(slow.tok_per_s <= fast.tok_per_s for slow, fast in pairwise(outcomes))
    assert by_slots[-1].bytes_per_tok == 0.0, "everything fits, and the prompt brought it"


def test_without_prefetch_nothing_is_late_or_wasted() -> None:
    trace = recorded()
    own = recorded_setting(trace)
    outcome = replay_setting(trace, replace(own, options=replace(own.options, prefetch=False)))
    assert (outcome.late_share, outcome.wasted_share) == (0.0, 0.0)
    assert outcome.hit_share + outcome.miss_share == pytest.approx(1.0)


def test_the_recorded_setting_is_what_the_header_says() -> None:
    trace = recorded()
    options = {"mode": "on_demand", "link_threads": 5, "link_depth": 7}
    header = replace(trace.header, options=options, link_bytes_per_s=0.0)
    setting = recorded_setting(replace(trace, header=header))
    assert setting.options.eviction is Eviction.LRU
    assert not setting.options.prefetch
    assert (setting.options.link_depth, setting.link.depth, setting.is_eager) == (7, 5, True)
    assert setting.link.bytes_per_s == math.inf, "nothing crossed it"
    on_gpu = recorded_setting(replace(trace, header=replace(header, device="NVIDIA H200")))
    assert (on_gpu.link.depth, on_gpu.is_eager) == (3, False)


def test_a_trace_without_drafts_or_rounds_says_what_it_cannot_tell() -> None:
    trace = recorded(0)
    with pytest.raises(TraceError, match=r"never drafted.*record it with k=4"):
        replay_setting(trace, replace(recorded_setting(trace), k=4))
    with pytest.raises(TraceError, match=r"no round.*record a longer one"):
        recorded_outcome(replace(trace, rounds=[]))
