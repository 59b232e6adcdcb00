"""The depth: choices in worlds whose best depth is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moespeq.residency import AmortizingDepth, FixedDepth, GovernorOptions
from moespeq.residency.running_mean import RunningMean
from moespeq.types import StepReport


class World:
    """Rounds with a fixed pattern of acceptance and costs that depend on k only."""

    def __init__(self, *, runs: list[int], draft_step_s: float, verify_s: Callable[[int], float]) -> None:
        self.runs = runs  # how many tokens the target would accept, round after round
        self.draft_step_s = draft_step_s
        self.verify_s = verify_s
        self.depths: list[int] = []

    def play(self, governor: AmortizingDepth, *, num_rounds: int, k_max: int) -> None:
        for _ in range(num_rounds):
            k = governor.choose(k_max)
            accepted = min(self.runs[len(self.depths) % len(self.runs)], k)
            self.depths.append(k)
            governor.observe(self.report(k, accepted))

    def report(self, k: int, accepted: int) -> StepReport:
        return StepReport(
            k=k,
            accepted=accepted,
            committed=accepted + 1,
            hits=0,
            late=0,
            misses=0,
            draft_s=self.draft_step_s * (k + 1) if k else 0.0,
            verify_s=self.verify_s(k),
            stall_s=0.0,
        )

    def favourite(self) -> int:
        late = self.depths[len(self.depths) // 2 :]
        return max(sorted(set(late)), key=late.count)


@pytest.mark.parametrize(("max_k", "chosen"), [(8, 4), (2, 2), (0, 0)])
def test_fixed_depth_yields_only_to_the_round(max_k: int, chosen: int) -> None:
    assert FixedDepth(4).choose(max_k) == chosen


def test_long_drafts_are_chosen_where_verifying_is_dear_and_acceptance_high() -> None:
    world = World(runs=[40], draft_step_s=0.001, verify_s=lambda k: 0.1 + 0.001 * k)
    world.play(AmortizingDepth(GovernorOptions(k_max=32)), num_rounds=60, k_max=32)
    assert world.favourite() == 32


def test_no_draft_is_chosen_where_nothing_is_accepted() -> None:
    world = World(runs=[0], draft_step_s=0.01, verify_s=lambda k: 0.1 + 0.01 * k)
    world.play(AmortizingDepth(GovernorOptions(k_max=16)), num_rounds=600, k_max=16)
    assert world.favourite() == 0
    late = world.depths[300:]
    assert late.count(0) / len(late) > 0.9, "measuring again must stay cheap"


def test_middle_depth_is_found_where_rejections_are_regular() -> None:
    world = World(runs=[3], draft_step_s=0.01, verify_s=lambda k: 0.04 + 0.005 * k)
    world.play(AmortizingDepth(GovernorOptions(k_max=16)), num_rounds=300, k_max=16)
    assert world.favourite() == 3


def test_choice_follows_a_change_of_regime() -> None:
    governor = AmortizingDepth(GovernorOptions(k_max=16))
    good = World(runs=[16], draft_step_s=0.001, verify_s=lambda k: 0.1)
    good.play(governor, num_rounds=60, k_max=16)
    bad = World(runs=[0], draft_step_s=0.01, verify_s=lambda k: 0.01 + 0.01 * k)
    bad.play(governor, num_rounds=600, k_max=16)
    assert (good.favourite(), bad.favourite()) == (16, 0)


def test_plain_rounds_come_first_and_then_drafts_grow_while_they_pay() -> None:
    world = World(runs=[40], draft_step_s=0.001, verify_s=lambda k: 0.1 + 0.001 * k)
    world.play(AmortizingDepth(GovernorOptions(k_max=32)), num_rounds=7, k_max=32)
    assert world.depths == [0, 0, 0, 1, 4, 16, 32]


def test_drafts_stop_growing_where_nothing_is_accepted() -> None:
    world = World(runs=[0], draft_step_s=0.01, verify_s=lambda k: 0.1 + 0.05 * k)
    world.play(AmortizingDepth(GovernorOptions(k_max=32)), num_rounds=1000, k_max=32)
    assert max(world.depths) <= 4
    assert world.depths.count(0) > 980


def test_no_depth_below_the_least_is_chosen() -> None:
    world = World(runs=[0], draft_step_s=0.01, verify_s=lambda k: 0.1 + 0.05 * k)
    governor = AmortizingDepth(GovernorOptions(k_max=16, k_min=3))
    world.play(governor, num_rounds=200, k_max=16)
    assert min(world.depths) == 3
    assert governor.k == 3


def test_a_better_depth_is_left_alone_for_less_than_it_takes_to_matter() -> None:
    world = World(runs=[1], draft_step_s=1e-6, verify_s=lambda k: 0.1 if k == 0 else 0.1985)  # k = 1 is 0.8 % faster
    world.play(AmortizingDepth(GovernorOptions(k_max=1)), num_rounds=300, k_max=1)
    assert world.favourite() == 0
    better = World(runs=[1], draft_step_s=1e-6, verify_s=lambda k: 0.1 if k == 0 else 0.18)
    better.play(AmortizingDepth(GovernorOptions(k_max=1)), num_rounds=300, k_max=1)
    assert better.favourite() == 1


def test_rounds_longer_than_the_latency_budget_are_not_chosen_although_they_would_pay() -> None:
    world = World(runs=[40], draft_step_s=0.001, verify_s=lambda k: 0.1 + 0.002 * k)
    governor = AmortizingDepth(GovernorOptions(k_max=32, round_budget_s=0.1255))
    world.play(governor, num_rounds=300, k_max=32)
    assert governor.k == 8
    too_long = [k for k in world.depths if 0.001 * (k + 1) + world.verify_s(k) > 0.1255]
    assert len(too_long) <= 1, "one round tells what a depth takes"


def test_a_slow_link_is_not_asked_for_more_than_advised_until_that_is_the_best_depth() -> None:
    advised = GovernorOptions(k_max=32, advised_k=8)
    shallow = World(runs=[4, 3, 5, 4], draft_step_s=0.001, verify_s=lambda k: 0.02 + 0.004 * k)
    shallow.play(AmortizingDepth(advised), num_rounds=300, k_max=32)
    assert max(shallow.depths) <= 8
    deep = World(runs=[40], draft_step_s=0.001, verify_s=lambda k: 0.1 + 0.001 * k)
    deep.play(AmortizingDepth(advised), num_rounds=300, k_max=32)
    assert deep.favourite() == 32


def test_a_slow_first_round_does_not_make_drafting_look_good_for_long() -> None:
    governor = AmortizingDepth(GovernorOptions(k_max=16))
    cold = World(runs=[0], draft_step_s=0.001, verify_s=lambda k: 0.2)
    cold.play(governor, num_rounds=1, k_max=16)
    warm = World(runs=[0], draft_step_s=0.001, verify_s=lambda k: 0.02 + 0.01 * k)
    warm.play(governor, num_rounds=300, k_max=16)
    assert warm.depths.count(0) > 260
    assert governor.k == 0


def test_equal_reports_give_equal_choices() -> None:
    worlds = [World(runs=[2, 7, 0], draft_step_s=0.002, verify_s=lambda k: 0.03 + 0.001 * k) for _ in range(2)]
    for world in worlds:
        world.play(AmortizingDepth(GovernorOptions(k_max=16)), num_rounds=150, k_max=16)
    assert worlds[0].depths == worlds[1].depths


def test_depth_never_exceeds_what_the_round_allows() -> None:
    world = World(runs=[9], draft_step_s=0.001, verify_s=lambda k: 0.1)
    world.play(AmortizingDepth(GovernorOptions(k_max=16)), num_rounds=80, k_max=5)
    assert max(world.depths) <= 5


def test_tokens_cut_by_a_limit_are_not_counted_as_rejected() -> None:
    governor = AmortizingDepth(GovernorOptions(k_max=4))
    world = World(runs=[4], draft_step_s=0.001, verify_s=lambda k: 0.1)
    for _ in range(20):
        cut = world.report(4, 2)
        governor.observe(StepReport(**{**{f: getattr(cut, f) for f in cut.__slots__}, "committed": 2}))
    assert governor.tokens_per_s(4) == pytest.approx(5 / (5 * 0.001 + 0.1))


def test_good_times_are_noticed_after_bad_ones() -> None:
    governor = AmortizingDepth(GovernorOptions(k_max=16))
    World(runs=[0], draft_step_s=0.01, verify_s=lambda k: 0.02).play(governor, num_rounds=300, k_max=16)
    good = World(runs=[16], draft_step_s=0.001, verify_s=lambda k: 0.1)
    good.play(governor, num_rounds=600, k_max=16)
    assert good.favourite() == 16


def test_one_new_sample_outweighs_an_old_mean() -> None:
    mean = RunningMean(memory=5)
    for now_tok in range(10):
        mean.add(1.0, now_tok=now_tok)
    mean.add(0.0, now_tok=1000)
    assert mean.value < 0.01


def test_mean_of_fresh_samples_remembers_as_many_as_it_should() -> None:
    mean = RunningMean(memory=4)
    for sample in (8.0, 0.0, 0.0, 0.0):
        mean.add(sample, now_tok=0)
    assert mean.value == 2.0
    mean.add(10.0, now_tok=0)
    assert mean.value == 4.0
