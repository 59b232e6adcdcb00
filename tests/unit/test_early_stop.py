"""Drafts end early where it pays, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moespeq.replay import RoutingTrace
from moespeq.replay.early_stop import early_stop
from moespeq.replay.roofline_points import Roofline
from moespeq.residency.early_stop import ConfidenceCalibration, drafting_on_gain_s, stopping_step
from moespeq.residency.roofline import RooflinePoint
from synthetic_trace import synthetic_trace

STEPS_S = [0.004] * 16


@pytest.mark.parametrize(
    ("survives", "gain_s"),
    [
        (1.0, 0.01 - 0.004 + (0.01 - 0.004) + (0.01 - 0.004)),
        (0.4, 0.0),
        (0.1, -0.003),
    ],
)
def test_a_step_earns_its_chance_of_a_token_and_costs_its_time(survives: float, gain_s: float) -> None:
    found = drafting_on_gain_s(survives, mean_chance=1.0, further_s=[0.004] * 3, tokens_per_s=100.0)
    assert found == pytest.approx(gain_s)


def test_steps_that_lose_at_first_are_worth_it_where_later_ones_are_free() -> None:
    dear_first = drafting_on_gain_s(0.5, mean_chance=1.0, further_s=[0.008, 0.0, 0.0], tokens_per_s=100.0)
    assert dear_first == pytest.approx(0.015 - 0.008)


def test_a_draft_ends_behind_the_token_that_makes_the_rest_unlikely() -> None:
    chances = [0.98, 0.97, 0.1, 0.99, 0.99, 0.99]
    assert stopping_step(chances, mean_chance=0.9, step_s=STEPS_S, tokens_per_s=100.0) == 3


def test_a_draft_runs_to_its_end_where_further_steps_cost_next_to_nothing() -> None:
    chances = [0.5] * 8
    assert stopping_step(chances, mean_chance=0.9, step_s=[1e-6] * 8, tokens_per_s=100.0) == 8
    assert stopping_step([], mean_chance=0.9, step_s=STEPS_S, tokens_per_s=100.0) == 0


def test_confidence_counts_as_the_share_that_was_accepted() -> None:
    calibration = ConfidenceCalibration()
    for at in range(400):
        calibration.observe(0.35, is_accepted=at % 10 != 0)
        calibration.observe(1.0, is_accepted=True)
    assert calibration.mean == pytest.approx(0.95)
    assert calibration.chance(0.31) == pytest.approx(0.9, abs=0.01)
    assert calibration.chance(0.99) > 0.99
    assert calibration.chance(0.05) == pytest.approx(0.95), "of what was never seen, nothing else is known"


def uninformative(trace: RoutingTrace) -> RoutingTrace:
    """Confidences that say nothing of acceptance, as between a model and its own quantised draft."""
    return replace(
        trace,
        positions=[
            replace(position, confidence=0.2 + 0.7 * (at * 0.618 % 1.0)) for at, position in enumerate(trace.positions)
        ],
    )


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return synthetic_trace(num_positions=1000, acceptance=0.93, rounds_k=[0, 8])


@pytest.fixture(scope="module")
def roofline() -> Roofline:
    """Rounds that begin at 15 ms and take 2 ms more for each drafted token; k = 8 is taken to be the best."""
    points = [RooflinePoint(k, 1.0, 1.0, 1.0 / (0.015 + 0.002 * k), 1.0, 1.0, 1.0) for k in (0, 1, 2, 4, 8, 16)]
    return Roofline("m", points, [], 1.0, 1.0, best_k=8, paper_k=8, recorded_k=8)


def test_stopping_gains_where_confidence_tells_what_will_be_rejected(trace: RoutingTrace, roofline: Roofline) -> None:
    found = early_stop(trace, roofline)
    assert found.stopped_share > 0.1
    assert found.gain > 0.01


def test_stopping_is_hardly_chosen_where_confidence_says_nothing(trace: RoutingTrace, roofline: Roofline) -> None:
    found = early_stop(uninformative(trace), roofline)
    assert found.stopped_share < 0.05
    assert abs(found.gain) < 0.01


def test_a_run_that_is_best_without_a_draft_has_nothing_to_stop(trace: RoutingTrace, roofline: Roofline) -> None:
    assert early_stop(trace, replace(roofline, best_k=0)).gain == 0.0
