"""The paper's formulas and ours against hand-computed values."""

from __future__ import annotations

import math

import pytest

from moespeq.residency.roofline import (
    RooflinePoint,
    RoundCosts,
    amortization_intensity,
    best_depth,
    expected_accepted,
    paper_best_depth,
    paper_cycle_s,
    paper_tokens_per_s,
    roofline_point,
    tokens_per_s,
)

COSTS = RoundCosts(draft_s=1.0, compute_s=2.0, stall_s=1.0, early_io_s=1.5, late_io_s=2.5)


def point(k: int, *, committed: float, costs: RoundCosts = COSTS) -> RooflinePoint:
    return roofline_point(k, committed, costs, tok_bytes=10.0, link_bytes_per_s=100.0)


def test_expected_tokens_of_a_chain_by_depth() -> None:
    assert expected_accepted([0.5, 0.5]) == [0.0, 0.5, 0.75]
    assert expected_accepted([]) == [0.0]
    assert expected_accepted([1.0] * 8)[-1] == 8.0


def test_papers_formulas() -> None:
    assert amortization_intensity(1.5, tok_bytes=100.0, sync_bytes=50.0) == 3.0
    assert amortization_intensity(1.0, tok_bytes=100.0, sync_bytes=0.0) == math.inf
    assert paper_cycle_s(draft_s=2.0, initial_io_s=3.0, new_io_s=4.0, verify_s=5.0) == 12.0
    assert paper_tokens_per_s([1.0, 0.5], [1.0, 2.0, 3.0]) == [0.0, 0.5, 0.5]


def test_ours_counts_the_token_that_every_round_emits() -> None:
    assert tokens_per_s([1.0, 0.5], [1.0, 4.0, 5.0]) == [1.0, 0.5, 0.5]


def test_a_depth_by_both_reckonings_from_the_same_costs() -> None:
    found = point(4, committed=4.0)
    assert found.tokens_per_s == 4.0 / 4.0
    assert found.unstalled_tokens_per_s == 4.0 / 3.0
    assert found.intensity == pytest.approx(4.0 * 10.0 / 100.0)
    assert found.paper_tokens_per_s == 3.0 / (1.5 + 2.5 + 2.0), "what verify hides of the link is charged in full"
    assert found.paper_intensity == pytest.approx(3.0 * 10.0 / 250.0)


def test_no_point_lies_above_its_roofs() -> None:
    found = point(4, committed=4.0)
    assert found.tokens_per_s <= found.intensity * 100.0 / 10.0
    assert found.tokens_per_s <= found.unstalled_tokens_per_s


def test_a_round_that_waits_for_nothing_has_no_finite_intensity() -> None:
    hidden = RoundCosts(draft_s=1.0, compute_s=2.0, stall_s=0.0, early_io_s=0.5, late_io_s=0.0)
    assert point(2, committed=2.0, costs=hidden).intensity == math.inf


def test_both_choices_can_differ() -> None:
    plain = point(0, committed=1.0, costs=RoundCosts(0.0, 0.5, 0.0, 0.0, 0.1))
    drafted = point(4, committed=2.0)
    assert (best_depth([plain, drafted]), paper_best_depth([plain, drafted])) == (0, 4)


def test_of_equal_depths_the_shallower_is_chosen() -> None:
    assert best_depth([point(2, committed=2.0), point(4, committed=2.0)]) == 2
