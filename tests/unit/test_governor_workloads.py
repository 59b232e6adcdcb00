"""The adaptive depth against every fixed one on simulated workloads, with what finding it costs counted.

The best fixed depth is the one of least time over all texts of a workload. Texts and noise are drawn from fixed seeds,
so these are facts about the code and no statistical tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from decoding_worlds import FAST_LINK, H200, MIDDLING_LINK, Costs, Play, alternating, even, play, uneven, wrong
from moespeq.residency import AmortizingDepth, GovernorOptions

DEPTHS = (0, 1, 4, 8, 16, 24, 32)
SEEDS = range(8)
TEXTS: dict[str, Callable[[int, int], list[bool]]] = {
    "easy": lambda num_tok, seed: even(0.95, num_tok, seed=seed),
    "hard": lambda num_tok, seed: even(0.4, num_tok, seed=seed),
    "sampled": lambda num_tok, seed: uneven(0.6, num_tok, seed=seed),
    "alternating": lambda num_tok, seed: alternating(0.95, 0.4, num_tok, seed=seed),
    "always wrong": lambda num_tok, seed: wrong(num_tok),
}
WORLDS = {"H200": H200, "middling link": MIDDLING_LINK, "fast link": FAST_LINK}


def governor(k_max: int = 32) -> AmortizingDepth:
    return AmortizingDepth(GovernorOptions(k_max=k_max))


@cache
def fixed_s(text: str, world: str, num_tok: int, k: int) -> float:
    plays = (play(k, TEXTS[text](num_tok, seed), WORLDS[world], seed=seed) for seed in SEEDS)
    return sum(each.seconds for each in plays)


@cache
def adaptive(text: str, world: str, num_tok: int) -> list[tuple[Play, AmortizingDepth]]:
    found = []
    for seed in SEEDS:
        chooser = governor()
        found.append((play(chooser, TEXTS[text](num_tok, seed), WORLDS[world], seed=seed), chooser))
    return found


def adaptive_s(text: str, world: str, num_tok: int) -> float:
    return sum(each.seconds for each, _ in adaptive(text, world, num_tok))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("text", TEXTS)
def test_adaptive_depth_is_within_3_percent_of_the_best_fixed_one_over_2500_tokens(text: str, world: str) -> None:
    best_s = min(fixed_s(text, world, 2500, k) for k in DEPTHS)
    assert adaptive_s(text, world, 2500) <= 1.03 * best_s


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_thousand_tokens_take_2_percent_longer_than_without_a_draft(text: str, world: str) -> None:
    for seed, (found, _) in zip(SEEDS, adaptive(text, world, 1000), strict=True):
        assert found.seconds <= 1.02 * play(0, TEXTS[text](1000, seed), WORLDS[world], seed=seed).seconds


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("text", TEXTS)
def test_trials_cost_at_most_1_percent_of_the_time(text: str, world: str) -> None:
    for found, chooser in adaptive(text, world, 2500):
        assert chooser.trials_lost_s <= 0.01 * found.seconds


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_first_answer_of_100_tokens_is_at_most_4_percent_slower_than_without_a_draft(text: str, world: str) -> None:
    assert adaptive_s(text, world, 100) <= 1.04 * fixed_s(text, world, 100, 0)


@pytest.mark.parametrize(("world", "gain"), [("H200", 1.1), ("middling link", 1.2)])
def test_a_first_answer_of_100_easy_tokens_is_faster_than_without_a_draft(world: str, gain: float) -> None:
    assert gain * adaptive_s("easy", world, 100) <= fixed_s("easy", world, 100, 0)


@pytest.mark.parametrize("world", ["H200", "middling link"])
def test_text_that_alternates_is_faster_than_at_any_fixed_depth(world: str) -> None:
    assert adaptive_s("alternating", world, 2500) < min(fixed_s("alternating", world, 2500, k) for k in DEPTHS)


def test_where_drafting_never_pays_nine_rounds_of_ten_are_plain() -> None:
    for found, _ in adaptive("easy", "fast link", 2500):
        assert found.depths.count(0) > 0.9 * len(found.depths)


def test_sixty_five_rows_are_used_where_long_drafts_pay() -> None:
    saturated = Costs(draft_step_s=1e-3, pass_s=0.1, all_experts_s=0.05, share=0.1)
    chooser = governor(64)
    play(chooser, even(0.99, 3000, seed=1), saturated, k_max=64)
    assert chooser.k > 32


def test_equal_worlds_give_equal_choices() -> None:
    text = uneven(0.7, 600, seed=3)
    first, second = (play(governor(), text, H200, seed=5).depths for _ in range(2))
    assert first == second
