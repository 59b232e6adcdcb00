"""What rounds teach about depths, tried and untried."""

from __future__ import annotations

import pytest

from moespeq.residency.depth_estimate import DepthEstimate
from moespeq.types import StepReport


def report(k: int, *, accepted: int = 0, verify_s: float = 0.1, draft_s: float = 0.0) -> StepReport:
    return StepReport(
        k=k,
        accepted=accepted,
        committed=accepted + 1,
        hits=0,
        late=0,
        misses=0,
        draft_s=draft_s,
        verify_s=verify_s,
        stall_s=0.0,
    )


def told(*reports: StepReport, k_max: int = 8) -> DepthEstimate:
    estimate = DepthEstimate(k_max)
    for each in reports:
        estimate.observe(each)
    return estimate


def test_the_very_first_round_is_forgotten_with_the_second() -> None:
    assert told(report(0, verify_s=9.0)).round_s(0) == 9.0
    assert told(report(0, verify_s=9.0), report(0, verify_s=0.1)).round_s(0) == pytest.approx(0.1)


def test_depths_between_measured_ones_lie_on_the_chord() -> None:
    assert told(report(0, verify_s=0.1), report(4, verify_s=0.3)).round_s(1) == pytest.approx(0.15)


def test_past_the_deepest_costs_go_on_as_they_rose_or_hopefully_stay() -> None:
    estimate = told(report(0, verify_s=0.1), report(2, verify_s=0.2))
    assert estimate.deepest == 2
    assert estimate.round_s(4) == pytest.approx(0.3)
    assert estimate.round_s(4, is_hopeful=True) == pytest.approx(0.2)


def test_a_draft_of_k_takes_k_plus_one_steps_and_none_without() -> None:
    estimate = told(report(0, verify_s=0.1), report(1, verify_s=0.1, draft_s=0.02))
    assert estimate.round_s(0) == pytest.approx(0.1)
    assert estimate.round_s(1) == pytest.approx(0.12)


def test_a_position_nobody_judged_takes_the_chance_of_all() -> None:
    estimate = told(*[report(2, accepted=2)] * 20)
    assert estimate.chances(8) == pytest.approx([1.0] * 8)


def test_the_benefit_of_doubt_is_worth_less_the_more_is_known() -> None:
    few, many = told(*[report(1)] * 2), told(*[report(1)] * 50)
    assert few.chances(1)[0] == many.chances(1)[0] == 0.0
    assert few.chances(1, benefit_of_doubt_tok=3.0)[0] > 0.5 > many.chances(1, benefit_of_doubt_tok=3.0)[0]


def test_rejections_in_a_row_are_a_change_that_is_believed_at_once() -> None:
    estimate = told(*[report(8, accepted=8)] * 20)
    rounds = 0
    while not estimate.observe(report(8, accepted=0)):
        rounds += 1
    assert rounds < 6
    assert estimate.chances(1)[0] < 0.8


def test_costs_that_doubled_are_believed_after_a_few_rounds() -> None:
    estimate = told(*[report(0, verify_s=0.1)] * 30)
    news = [estimate.observe(report(0, verify_s=0.2)) for _ in range(8)]
    assert any(news)
    unwatched = 0.2 - 0.1 * (11 / 12) ** 8  # what a mean of twelve rounds would say
    assert unwatched + 0.01 < estimate.round_s(0) <= 0.2


def test_a_verify_that_took_no_time_is_taken_in() -> None:
    assert told(*[report(0, verify_s=0.0)] * 8).tokens_per_s(0)[0] > 0.0
