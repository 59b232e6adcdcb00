"""Drafts of a governor end early where audits say that it pays, and are never asked about otherwise."""

from __future__ import annotations

import random

import pytest

from decoding_worlds import H200, Costs, even, play
from moespeq.residency import AmortizingDepth, FixedDepth, GovernorOptions
from moespeq.residency.depth_estimate import DepthEstimate
from moespeq.residency.draft_watch import DraftWatch, EarlyStopping
from moespeq.types import StepReport

NUM_TOK = 3000
CHEAP_LINK_DEAR_DRAFT = Costs(draft_step_s=2e-3, pass_s=30e-3, all_experts_s=1e-3, share=1 / 15, noise=0.02)
"""A pass takes as long as 15 draft steps, whatever its rows: drafting on behind a wrong token is all that costs."""


def telling(text: list[bool], seed: int = 1) -> list[float]:
    """Confidences that tell what will be rejected."""
    draw = random.Random(seed)
    return [draw.uniform(0.7, 1.0) if is_right else draw.uniform(0.0, 0.3) for is_right in text]


def saying_nothing(text: list[bool], seed: int = 1) -> list[float]:
    """Confidences that are low as often for right tokens as for wrong ones, as between a model and its own base."""
    draw = random.Random(seed)
    return [draw.random() for _ in text]


def governor() -> AmortizingDepth:
    return AmortizingDepth(GovernorOptions(k_max=16))


def test_stopping_pays_where_drafts_are_dear_and_confidence_tells() -> None:
    text = even(0.85, NUM_TOK, seed=2)
    stopping, whole = governor(), governor()
    stopped_s = play(stopping, text, CHEAP_LINK_DEAR_DRAFT, k_max=16, confidences=telling(text)).seconds
    assert stopping.stops_drafts
    assert stopped_s < 0.93 * play(whole, text, CHEAP_LINK_DEAR_DRAFT, k_max=16).seconds


@pytest.mark.parametrize("costs", [CHEAP_LINK_DEAR_DRAFT, H200])
@pytest.mark.parametrize("chance", [0.98, 0.85])
def test_nobody_is_asked_where_confidence_says_nothing(costs: Costs, chance: float) -> None:
    text = even(chance, NUM_TOK, seed=2)
    asked = governor()
    played = play(asked, text, costs, k_max=16, confidences=saying_nothing(text))
    assert not asked.stops_drafts
    assert played.depths == play(governor(), text, costs, k_max=16).depths, "looking on changes no choice"


def test_stopping_ends_when_it_no_longer_pays() -> None:
    text = even(0.85, 2 * NUM_TOK, seed=2)
    confidences = telling(text[:NUM_TOK]) + saying_nothing(text[NUM_TOK:])
    chooser = governor()
    play(chooser, text[:NUM_TOK], CHEAP_LINK_DEAR_DRAFT, k_max=16, confidences=confidences)
    assert chooser.stops_drafts
    play(chooser, text[NUM_TOK:], CHEAP_LINK_DEAR_DRAFT, k_max=16, confidences=confidences[NUM_TOK:])
    assert not chooser.stops_drafts


def report(k: int, accepted: int, confidences: tuple[float, ...] = ()) -> StepReport:
    costs = CHEAP_LINK_DEAR_DRAFT
    return StepReport(
        k, accepted, accepted + 1, 0, 0, 0, costs.draft_s(k), costs.verify_s(k), 0.0, confidences=confidences
    )


@pytest.fixture
def estimate() -> DepthEstimate:
    known = DepthEstimate(8)
    for k in (0, 0, 1, 2, 4, 8) * 4:
        known.observe(report(k, k))
    return known


def test_the_first_drafts_and_then_every_fourth_are_audited_and_the_others_left_alone(estimate: DepthEstimate) -> None:
    stopping = EarlyStopping(estimate, k_min=0)
    watches = [stopping.watch(8) for _ in range(24)]
    assert watches[:16] == [DraftWatch(None)] * 16, "an audit asks nobody before the draft has ended"
    assert [watch is not None for watch in watches[16:]] == [False, False, False, True] * 2
    assert stopping.watch(1) is None, "a draft of one token has nothing to end"


def test_no_draft_ends_before_the_least_depth(estimate: DepthEstimate) -> None:
    stopping = EarlyStopping(estimate, k_min=3)
    for at in range(64):
        stopping.watch(8)
        wrong = report(8, 2, (0.95, 0.95, 0.1, *[0.95] * 5))
        stopping.observe(wrong if at % 4 else report(8, 8, (0.95,) * 8))
    assert stopping.pays
    watch = next(found for found in map(stopping.watch, [8] * 2) if found is not None and found.goes_on)
    assert watch.goes_on is not None
    assert [watch.goes_on(0.1) for _ in range(3)] == [True, True, False]


def test_a_round_cut_by_a_stop_text_is_no_evidence(estimate: DepthEstimate) -> None:
    stopping = EarlyStopping(estimate, k_min=0)
    for _ in range(8 * 8):
        if stopping.watch(8) is not None:
            stopping.observe(StepReport(8, 3, 3, 0, 0, 0, 0.02, 0.03, 0.0, confidences=(0.1,) * 8))
    assert not stopping.pays


def test_a_fixed_depth_looks_at_nothing() -> None:
    assert FixedDepth(8).watch(8) is None
