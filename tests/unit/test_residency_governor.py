"""The depth: formulas against hand-computed values, and choices in worlds whose best depth is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moespeq.residency import AmortizingDepth, FixedDepth, GovernorOptions
from moespeq.residency.roofline import (
    amortization_intensity,
    expected_accepted,
    expected_committed,
    paper_cycle_s,
    tokens_per_s,
)
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


def test_expected_tokens_of_a_chain() -> None:
    assert expected_accepted([0.5, 0.5]) == 0.75
    assert expected_committed([0.5, 0.5]) == 1.75
    assert expected_committed([]) == 1.0
    assert expected_committed([1.0] * 8) == 9.0


def test_papers_formulas() -> None:
    assert amortization_intensity([1.0, 0.5], tok_bytes=100.0, sync_bytes=50.0) == 3.0
    assert amortization_intensity([1.0], tok_bytes=100.0, sync_bytes=0.0) == float("inf")
    assert paper_cycle_s(draft_s=2.0, initial_io_s=3.0, new_io_s=4.0, verify_s=5.0) == 12.0


def test_throughput_charges_k_plus_one_steps_and_none_without_a_draft() -> None:
    assert tokens_per_s([1.0, 1.0], draft_step_s=1.0, verify_s=3.0) == 0.5
    assert tokens_per_s([], draft_step_s=1.0, verify_s=2.0) == 0.5


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


def test_first_round_runs_at_the_calibration_depth() -> None:
    assert AmortizingDepth(GovernorOptions(k_max=32)).choose(32) == 4


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
