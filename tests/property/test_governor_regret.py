"""Whatever text and costs are, a thousand tokens are never 2 % slower than plain decoding.

Rounds cost what the world says, without noise: with it, a measured mean can be wrong by chance.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from decoding_worlds import Costs, play
from moespeq.residency import AmortizingDepth, GovernorOptions

NUM_TOK = 1000
stretches = st.lists(
    st.tuples(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0]), st.integers(1, 400)), min_size=1, max_size=12
)
worlds = st.builds(
    Costs,
    draft_step_s=st.floats(1e-4, 1e-2),
    pass_s=st.floats(1e-3, 2e-2),
    all_experts_s=st.floats(1e-3, 0.3),
    share=st.sampled_from([1 / 64, 1 / 32, 1 / 15, 1 / 8, 1 / 4]),
    noise=st.just(0.0),
)


def text_of(parts: list[tuple[float, int]], seed: int) -> list[bool]:
    draw = random.Random(seed)
    text: list[bool] = []
    while len(text) < NUM_TOK:
        text += [draw.random() < chance for chance, length in parts for _ in range(length)]
    return text[:NUM_TOK]


@settings(max_examples=60, deadline=None)
@given(parts=stretches, costs=worlds, seed=st.integers(0, 1000), k_max=st.sampled_from([1, 16, 32, 64]))
def test_a_thousand_tokens_are_never_2_percent_slower_than_plain_decoding(
    parts: list[tuple[float, int]], costs: Costs, seed: int, k_max: int
) -> None:
    text = text_of(parts, seed)
    governor = AmortizingDepth(GovernorOptions(k_max=k_max))
    assert play(governor, text, costs, k_max=k_max).seconds <= 1.02 * play(0, text, costs).seconds


@settings(max_examples=40, deadline=None)
@given(parts=stretches, costs=worlds, k_min=st.integers(0, 4), limits=st.lists(st.integers(0, 16), min_size=1))
def test_every_choice_is_one_the_round_allows(
    parts: list[tuple[float, int]], costs: Costs, k_min: int, limits: list[int]
) -> None:
    text, at = text_of(parts, 0)[:200], 0
    governor = AmortizingDepth(GovernorOptions(k_max=12, k_min=k_min))
    while at < len(text):
        max_k = limits[at % len(limits)]
        k = governor.choose(max_k)
        assert min(k_min, max_k) <= k <= min(12, max_k)
        played = play(k, text[at : at + k + 1], costs)
        governor.observe(played.reports[0])
        at += played.reports[0].committed
