"""What a study finds in traces whose answers are known, and what it says about them."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from rich.console import Console

from moespeq.cli.trace_tables import tables
from moespeq.errors import TraceError
from moespeq.replay import RoutingTrace, belady_misses
from moespeq.replay.cache_study import lru_misses, study_cache
from moespeq.replay.fidelity_study import study_acceptance
from moespeq.replay.findings import findings
from moespeq.replay.route_match import RouteMatch
from moespeq.replay.study import TraceStudy, study_trace
from synthetic_trace import synthetic_trace

UNIFORM = study_trace(synthetic_trace(3, 16, 2, 1500, stickiness=0.0))
FROZEN = study_trace(synthetic_trace(3, 16, 1, 100, stickiness=1.0))


def test_uniform_routes_have_the_greatest_entropy_and_what_chance_gives() -> None:
    assert UNIFORM.entropy.max_bits == 4.0
    assert all(3.97 < bits <= 4.0 for bits in UNIFORM.entropy.bits)
    assert UNIFORM.reuse.mean == pytest.approx(UNIFORM.reuse.chance, abs=0.02)
    assert UNIFORM.distinct.mean == pytest.approx(UNIFORM.distinct.uniform, rel=0.02)


def test_one_expert_for_ever_has_no_entropy_and_is_always_used_again() -> None:
    assert FROZEN.entropy.bits == [0.0] * 3
    assert FROZEN.reuse.share == [[1.0] * 3] * 4
    assert FROZEN.distinct.count == [[1.0] * 3] * 33


def test_chance_is_that_of_drawing_k_of_e_afresh() -> None:
    assert UNIFORM.reuse.windows_tok == [1, 2, 4, 8]
    assert UNIFORM.reuse.chance[:2] == pytest.approx([1 / 8, 1 - (7 / 8) ** 2])
    assert UNIFORM.distinct.uniform[:2] == pytest.approx([2.0, 16 * (1 - (7 / 8) ** 2)])


@pytest.mark.parametrize("stickiness", [0.3, 0.8])
def test_reuse_is_the_chance_to_keep_an_expert_and_to_draw_it_again(stickiness: float) -> None:
    study = study_trace(synthetic_trace(3, 16, 1, 1500, stickiness=stickiness))
    assert study.reuse.mean[0] == pytest.approx(stickiness + (1 - stickiness) / 16, abs=0.02)
    assert all(near <= far for near, far in pairwise(study.reuse.mean)), "a longer memory holds more"


def test_skewed_use_has_less_entropy() -> None:
    entropies = [study_trace(synthetic_trace(skew=skew)).entropy.mean_bits for skew in (0.0, 1.0, 2.0)]
    assert entropies[0] > entropies[1] > entropies[2]


def test_entropy_reuse_and_distinct_experts_of_a_text_by_hand() -> None:
    trace = synthetic_trace(1, 4, 2, 4)
    routes = [[0, 1], [1, 2], [1, 2], [3, 0]]
    trace = replace(trace, positions=[replace(p, true=[r]) for p, r in zip(trace.positions, routes, strict=True)])
    study = study_trace(trace)
    counts = [2, 3, 2, 1]
    assert study.entropy.bits == pytest.approx([-sum(n / 8 * math.log2(n / 8) for n in counts)])
    assert study.reuse.share == [[pytest.approx((1 / 2 + 1 + 0) / 3)], [pytest.approx((1 + 0) / 2)]]
    assert study.distinct.count == [[2.0], [3.0], [3.0], [4.0]]


def test_windows_longer_than_the_text_are_left_out() -> None:
    study = study_trace(synthetic_trace(num_positions=3))
    assert study.reuse.windows_tok == [1, 2]
    assert len(study.distinct.count) == len(study.distinct.uniform) == 3


@pytest.mark.parametrize("num_positions", [0, 1])
def test_a_text_without_a_next_token_is_refused(num_positions: int) -> None:
    whole = synthetic_trace(num_positions=2)
    with pytest.raises(TraceError, match=f"has {num_positions} generated token.* record a longer text"):
        study_trace(RoutingTrace(whole.header, whole.positions[:num_positions], []))


def test_a_pass_asks_for_each_distinct_expert_once_and_in_layer_order() -> None:
    routes = [[[1, 0], [2, 3]], [[0, 2], [3, 1]], [[3, 0], [0, 1]]]
    one, two = (study_cache(routes, rows=rows, num_experts=4) for rows in (1, 2))
    assert (one.num_uses, two.num_uses) == (12, 3 + 3 + 2 + 2)
    assert one.num_records == two.num_records == 8
    misses = lru_misses([0, 1, 6, 7, 0, 2, 5, 7, 0, 3, 4, 5], num_slots=4)
    assert one.hit_rate["LRU"][one.share.index(0.5)] == 1 - misses / 12


def test_lru_hits_nothing_in_a_cyclic_scan_that_does_not_fit_and_belady_keeps_a_part() -> None:
    routes = [position.true for position in synthetic_trace(8, 16, 4, 90, stickiness=1.0).positions]
    cache = study_cache(routes, rows=9, num_experts=16)  # 32 of 128 records, again and again
    fits = [share >= 0.25 for share in cache.share]
    for policy in ("LRU", "MIN"):
        assert [rate == cache.ceiling for rate in cache.hit_rate[policy]] == fits
    assert cache.hit_rate["LRU"][:2] == [0.0, 0.0]
    assert cache.hit_rate["MIN"][1] == pytest.approx((13 - 1) / (32 - 1), abs=0.05), (
        "13 slots: the newest is given away"
    )


def test_hit_rates_grow_with_the_cache_up_to_first_uses_and_none_beats_belady() -> None:
    for cache in study_trace(synthetic_trace(stickiness=0.5, skew=0.5)).cache:
        for rates in cache.hit_rate.values():
            assert rates[-1] == pytest.approx(cache.ceiling)
            assert all(rate <= best for rate, best in zip(rates, cache.hit_rate["MIN"], strict=True))
        for policy in ("LRU", "MIN"):
            assert cache.hit_rate[policy] == sorted(cache.hit_rate[policy])


def test_belady_of_many_uses_takes_no_time_that_grows_with_the_slots() -> None:
    uses = [(place * place) % 6007 for place in range(60_000)]  # 0.1 s; slot by slot it would take minutes
    assert belady_misses(uses, num_slots=2000) > belady_misses(uses, num_slots=2500)


def test_fidelity_counts_order_set_and_overlap_apart() -> None:
    position = synthetic_trace(4, 16, 2, 2).positions[0]
    true = [[0, 1], [2, 3], [4, 5], [6, 7]]
    draft = [[0, 1], [3, 2], [4, 9], [8, 9]]
    told = [[], [3, 2], [4, 5], [7, 9]]
    whole = synthetic_trace(4, 16, 2, 2)
    fidelity = study_trace(
        replace(whole, positions=[replace(position, true=true, draft=draft, ahead=told)] * 2)
    ).fidelity
    assert fidelity.draft == RouteMatch(exact=0.25, same_set=0.25, wrong=0.5, overlap=0.625, num_routes=8)
    assert fidelity.draft_by_layer[1] == RouteMatch(0.0, 1.0, 0.0, 1.0, 2)
    assert fidelity.ahead_by_layer[0].num_routes == 0, "nobody looks ahead to the first layer"
    assert (fidelity.ahead.right, fidelity.ahead.num_routes) == (pytest.approx(2 / 3), 6)
    assert fidelity.ahead.overlap == pytest.approx((1 + 1 + 0.5) / 3)


def test_fidelity_and_acceptance_are_those_the_trace_was_made_with() -> None:
    made = synthetic_trace(4, 16, 2, 1500, fidelity=0.8, same_set=0.15, ahead=0.4, acceptance=0.7)
    study = study_trace(made)
    assert study.fidelity.draft.exact == pytest.approx(0.8, abs=0.02)
    assert study.fidelity.draft.same_set == pytest.approx(0.15, abs=0.02)
    assert study.fidelity.ahead.right == pytest.approx(0.4, abs=0.02)
    assert study.acceptance.p == pytest.approx(0.7, abs=0.03)
    assert study.acceptance.by_step[0].p == pytest.approx(0.7, abs=0.06)
    accepted, rejected = study.acceptance.accepted_confidence, study.acceptance.rejected_confidence
    assert (accepted, rejected) == (pytest.approx(0.8, abs=0.02), pytest.approx(0.4, abs=0.02))


def test_steps_share_out_all_positions_and_are_in_order() -> None:
    study = study_trace(synthetic_trace(acceptance=0.8, fidelity=0.9, rounds_k=[4, 8]))
    steps = study.acceptance.by_step
    assert list(steps) == sorted(steps) == list(study.fidelity.draft_by_step) == list(study.fidelity.ahead_by_step)
    together = RouteMatch.together(list(study.fidelity.ahead_by_step.values()))
    assert together.overlap == pytest.approx(study.fidelity.ahead.overlap)
    assert sum(step.num_drafts for step in steps.values()) == study.num_positions
    assert RouteMatch.together(list(study.fidelity.draft_by_step.values())).exact == pytest.approx(
        study.fidelity.draft.exact
    )


def test_confidence_is_absent_where_nothing_was_rejected() -> None:
    acceptance = study_trace(synthetic_trace(acceptance=1.0)).acceptance
    assert (acceptance.p, acceptance.rejected_confidence) == (1.0, None)


def test_what_is_said_follows_from_what_was_measured() -> None:
    uniform, frozen = findings(UNIFORM), findings(FROZEN)
    assert uniform.keys() == frozen.keys() == {name for name, _ in tables(UNIFORM)}
    assert "as if 16 of 16 were equally popular: popularity hardly tells" in uniform["entropy"]
    assert "as if 1 of 16 were equally popular: a few hot experts" in frozen["entropy"]
    assert "must be kept from earlier, predicted or waited for" in uniform["reuse"]
    assert "the ones before it have brought" in frozen["reuse"]
    assert "as by chance" in uniform["distinct"]
    assert "33.0 times fewer" in frozen["distinct"]
    assert "the recorded run: 25%" in uniform["cache"]
    assert "the draft is right least in layer" in uniform["layers"]
    assert uniform["acceptance"] == "100.0% of drafted tokens are accepted; drafting 8 commits 9.0 a round."


def test_what_a_round_commits_is_counted_from_the_text_and_not_from_a_mean() -> None:
    trace = synthetic_trace(num_positions=40, acceptance=1.0)
    flags = [index % 10 != 2 for index in range(40)]  # rounds of 3, 9, 1, 9, 1, 9; the next does not fit
    positions = [replace(each, accepted=flag) for each, flag in zip(trace.positions, flags, strict=True)]
    assert study_acceptance(replace(trace, positions=positions)).committed == pytest.approx((3 + 9 + 1 + 9 + 1 + 9) / 6)


def test_a_short_text_is_not_made_to_say_more_than_it_can() -> None:
    said = findings(study_trace(synthetic_trace(num_positions=40, acceptance=0.5, stickiness=0.4)))
    assert "but 40 tokens say little of 33 rows: most uses are first ones" in said["cache"]
    assert "too few tokens lie far from one to compare" in said["steps"]


def test_hit_rates_are_told_for_a_cache_that_does_not_hold_all() -> None:
    said = [findings(replace(UNIFORM, cache_share=share))["cache"].split("LRU", maxsplit=1)[0] for share in (0.42, 1.0)]
    assert said == [
        "With 40% of all experts resident (the recorded run: 42%) ",
        "With 25% of all experts resident (the recorded run: 100%) ",
    ]


def test_a_draft_that_gets_worse_with_every_step_is_said_to() -> None:
    made = synthetic_trace(num_positions=400, fidelity=0.9)
    far = [replace(p, draft=[[0, 0]] * 4) if p.step > 4 else p for p in made.positions]
    assert "times as often" in findings(study_trace(replace(made, positions=far)))["steps"]
    assert "does not make a prefetch worse" in findings(study_trace(made))["steps"]


def rendered(study: TraceStudy, *, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, color_system=None)
    for _, table in tables(study):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_tables_of_deep_models_stay_short_and_fit_a_narrow_terminal() -> None:
    deep = study_trace(synthetic_trace(48, 64, 4, 40, rounds_k=32))
    assert max(table.row_count for _, table in tables(deep)) <= 13
    assert max(map(len, rendered(deep, width=60).splitlines())) <= 60
    assert "44-47" in rendered(deep, width=60)


def test_bands_of_layers_show_the_mean_of_their_layers() -> None:
    study = study_trace(synthetic_trace(24, 16, 2, 60))
    line = next(line for line in rendered(study, width=80).splitlines() if line.split()[:1] == ["0-1"])
    assert float(line.split()[1]) == pytest.approx(fmean(study.entropy.bits[:2]), abs=0.005)
