"""Changes of regime are told from noise, and losses on trials are told from what was allowed."""

from __future__ import annotations

import random

import pytest

from moespeq.residency.allowance import Allowance
from moespeq.residency.regime import AcceptanceRegime, CostRegime, NewRegime


def first_alarm(chance: float, *, expected: float, num_tok: int, seed: int = 0) -> tuple[int, NewRegime] | None:
    draw, regime = random.Random(seed), AcceptanceRegime()
    for at in range(num_tok):
        found = regime.observe(draw.random() < chance, chance=expected)
        if found is not None:
            return at, found
    return None


@pytest.mark.parametrize(("before", "after"), [(0.95, 0.4), (0.4, 0.95), (0.9, 0.0)])
def test_a_change_of_acceptance_is_noticed_within_a_few_tokens(before: float, after: float) -> None:
    waits = [first_alarm(after, expected=before, num_tok=200, seed=seed) for seed in range(20)]
    assert all(wait is not None for wait in waits)
    assert sum(wait[0] for wait in waits if wait is not None) / len(waits) < 12


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.6, 0.95, 1.0])
def test_what_was_expected_is_seldom_taken_for_a_change(chance: float) -> None:
    """A side alarms by chance at most every exp(7) > 1,000 tokens; so no more than one in 20 texts of 100."""
    alarms = [first_alarm(chance, expected=chance, num_tok=100, seed=seed) for seed in range(40)]
    assert sum(alarm is not None for alarm in alarms) <= 4


def test_the_new_chance_is_that_of_the_tokens_since_the_change() -> None:
    regime = AcceptanceRegime()
    for _ in range(50):
        assert regime.observe(True, chance=0.95) is None
    found = None
    while found is None:
        found = regime.observe(False, chance=0.95)
    assert found.mean == 0.0
    assert found.num_samples < 10


def test_rounds_of_twice_the_time_are_a_change_and_rounds_of_a_tenth_more_are_none() -> None:
    regime = CostRegime()
    assert all(regime.observe(1.1, expected_s=1.0) is None for _ in range(200))
    *before, found = [regime.observe(2.0, expected_s=1.0) for _ in range(3)]
    assert not any(before)
    assert found == NewRegime(pytest.approx(0.693, abs=0.001), 3)


def test_a_single_slow_round_is_no_change_of_costs() -> None:
    regime = CostRegime()
    assert regime.observe(2.0, expected_s=1.0) is None
    assert all(regime.observe(1.0, expected_s=1.0) is None for _ in range(50))


def test_an_allowance_earns_a_share_of_time_up_to_its_limit() -> None:
    allowance = Allowance(0.01)
    allowance.open(1.0, 3.0)
    assert allowance.covers(1.0)
    assert not allowance.covers(1.1)
    allowance.earn(100.0)
    assert allowance.balance_s == 2.0
    allowance.earn(1e6)
    assert allowance.balance_s == 3.0


def test_gains_may_be_lost_again_and_losses_are_added_up() -> None:
    allowance = Allowance(0.01)
    allowance.open(1.0, 10.0)
    allowance.charge(3.0)
    assert not allowance.covers(0.0)
    allowance.charge(-4.0)
    assert allowance.covers(2.0)
    assert allowance.lost_s == -1.0
