"""Rounds of any depth out of one text, what computing takes, and what another setting would have changed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from measured_trace import TIMES, measured_trace
from moespeq.errors import TraceError
from moespeq.replay import RoutingTrace
from moespeq.replay.rounds import rounds_of
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import (
    error_share,
    recorded_outcome,
    recorded_setting,
    replay_setting,
    slots_at_first,
)
from moespeq.residency import Eviction
from synthetic_trace import synthetic_trace


@cache
def recorded(rounds_k: int | tuple[int, ...] = 8, *, bytes_per_s: float = 12e9) -> RoutingTrace:
    """As a virtual machine measured it."""
    trace = synthetic_trace(
        num_positions=80, stickiness=0.5, fidelity=0.9, acceptance=0.8, skew=1.0, rounds_k=rounds_k, seed=3
    )
    return measured_trace(trace, bytes_per_s=bytes_per_s)


def timed(*layers: tuple[int, float], verify_s: float | None = None, k: int = 0, draft_s: float = 0.0) -> RoutingTrace:
    """Of one round whose layers, (experts, seconds), are all but the last, which took as long as their mean."""
    seconds = [layer_s for _, layer_s in layers]
    experts = [count for count, _ in layers]
    total_s = sum(seconds) * (len(layers) + 1) / len(layers) if verify_s is None else verify_s
    asked = round(sum(experts) * (len(layers) + 1) / len(layers))
    one = replace(recorded().rounds[0], k=k, hits=asked, late=0, misses=0, draft_s=draft_s, verify_s=total_s + 5e-3)
    return replace(recorded(), rounds=[replace(one, stall_s=5e-3, layer_experts=experts, layer_s=seconds)])


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


def test_compute_times_are_the_line_that_the_layers_lie_on() -> None:
    line = [(count, 2e-3 + count * 1e-4) for count in (2, 10, 40)]
    times = ComputeTimes.of(timed(*line, k=1, draft_s=6e-3))
    assert times.draft_step_s == pytest.approx(3e-3)
    assert times.expert_s == pytest.approx(1e-4, rel=0.05)
    assert times.dense_s == pytest.approx(4 * 2e-3, rel=0.05)


def test_an_interrupted_layer_says_little() -> None:
    line = [(count, 2e-3 + count * 1e-4) for count in (2, 10, 40) for _ in range(3)]
    assert ComputeTimes.of(timed(*line, (10, 5.0))).expert_s == pytest.approx(1e-4, rel=0.2)


def test_layers_that_are_all_alike_give_half_of_the_time_to_the_experts() -> None:
    times = ComputeTimes.of(timed(*[(10, 1e-3)] * 7))
    assert times.draft_step_s == recorded().header.draft_step_s, "no round drafted, but the recorder did"
    assert times.dense_s == pytest.approx(4e-3)
    assert times.expert_s == pytest.approx(5e-5)


def test_what_lies_outside_of_layers_is_dense() -> None:
    times = ComputeTimes.of(timed(*[(10, 1e-3)] * 7, verify_s=9e-3))
    assert (times.dense_s, times.expert_s) == (pytest.approx(5e-3), pytest.approx(5e-5))


@pytest.mark.parametrize("layer_s", [(9e-3, 5e-3, 1e-3), (1e-4, 5e-3, 1e-2)])
def test_noise_makes_no_time_negative(layer_s: tuple[float, ...]) -> None:
    times = ComputeTimes.of(timed(*zip((50, 60, 70), layer_s, strict=True)))
    assert times.dense_s >= 0.0
    assert times.expert_s >= 0.0
    assert times.dense_s + 4 * 60 * times.expert_s == pytest.approx(4 * sum(layer_s) / 3)


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


def test_a_run_that_never_drafted_foretells_one_that_did() -> None:
    trace, other = recorded(0), recorded(3)
    foretold = replay_setting(trace, replace(recorded_setting(trace), k=3))
    assert abs(error_share(recorded_outcome(other), foretold)) < 0.15


def test_a_trace_without_rounds_says_what_it_cannot_tell() -> None:
    with pytest.raises(TraceError, match=r"no round.*record a longer one"):
        recorded_outcome(replace(recorded(), rounds=[]))


def test_a_replay_starts_with_the_slots_that_the_recorded_run_had() -> None:
    """All that its first round asks for is resident, so nothing crosses the link; and of fewer slots, some."""
    trace = recorded()
    first = rounds_of(trace, None, TIMES)[0]
    one_round = replace(
        trace,
        positions=trace.positions[: first.committed + 1],
        rounds=trace.rounds[:1],
        header=replace(trace.header, num_slots=sum(map(len, first.true)), resident=first.true),
    )
    setting = recorded_setting(one_round)
    plain = replace(setting, options=replace(setting.options, prefetch=False))
    assert replay_setting(one_round, plain).bytes_per_tok == 0.0
    assert replay_setting(one_round, replace(plain, num_slots=4)).bytes_per_tok > 0.0


def test_more_slots_than_recorded_start_with_other_experts_of_every_layer() -> None:
    header = replace(recorded().header, resident=[[3, 1], [], [2], []])
    assert slots_at_first(header, 3) == [[3, 1], [], [2], []]
    assert slots_at_first(header, 7) == [[3, 1, 0], [0], [2, 0], [0]]
    assert [len(experts) for experts in slots_at_first(header, 1000)] == [header.num_experts] * 4
