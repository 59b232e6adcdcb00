"""Accept and cut, case by case."""

from __future__ import annotations

import pytest
import torch

from moespeq.decode.accept import Accepted, Cut, accept_coupled, accept_rejection, cut
from moespeq.types import FinishReason

NO_NOISE = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("drafted", "target", "expected"),
    [
        ([], [7], Accepted(0, (7,))),
        ([1, 2, 3], [9, 2, 3, 4], Accepted(0, (9,))),
        ([1, 2, 3], [1, 9, 3, 4], Accepted(1, (1, 9))),
        ([1, 2, 3], [1, 2, 3, 4], Accepted(3, (1, 2, 3, 4))),
    ],
    ids=["k=0", "recovered at once", "recovered in the middle", "bonus"],
)
def test_coupled_keeps_the_longest_common_prefix_and_one_target_token(drafted, target, expected):
    assert accept_coupled(drafted, target) == expected


def test_a_missing_target_row_is_our_bug():
    with pytest.raises(AssertionError, match="2 drafted tokens, but 2 target rows"):
        accept_coupled([1, 2], [1, 2])


def rows(*probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs)


def test_rejection_accepts_while_the_uniform_is_below_the_ratio():
    q = rows([0.5, 0.5, 0.0], [0.5, 0.5, 0.0])
    p = rows([0.2, 0.8, 0.0], [0.2, 0.8, 0.0], [0.0, 0.0, 1.0])
    assert accept_rejection([0, 1], q, p, torch.tensor([0.39, 0.999]), NO_NOISE[:3]) == Accepted(2, (0, 1, 2))
    assert accept_rejection([0, 1], q, p, torch.tensor([0.41, 0.999]), NO_NOISE[:3]) == Accepted(0, (1,))


def test_nothing_is_accepted_behind_the_first_rejection():
    q, p = rows([1.0, 0.0, 0.0]).repeat(3, 1), rows([0.0, 0.0, 1.0], [1, 0, 0], [1, 0, 0], [1, 0, 0])
    assert accept_rejection([0, 0, 0], q, p, torch.full((3,), 1e-9), NO_NOISE) == Accepted(0, (2,))


def test_recovered_token_comes_from_what_the_target_has_and_the_draft_lacks():
    q, p = rows([0.6, 0.4, 0.0]), rows([0.3, 0.4, 0.3], [1, 0, 0])
    strong_pull = torch.tensor([[5.0, 9.0, 0.0], [0, 0, 0]])  # towards tokens whose p - q is not positive
    assert accept_rejection([0], q, p, torch.tensor([0.9]), strong_pull) == Accepted(0, (2,))


def test_a_draft_that_is_no_distribution_is_rejected_and_the_target_drawn_from():
    q = rows([1.0, 0.0, 0.0], [torch.nan] * 3, [1.0, 0.0, 0.0])
    p = rows([1.0, 0.0, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert accept_rejection([0, 0, 0], q, p, torch.full((3,), 1e-9), NO_NOISE) == Accepted(1, (0, 2))
    assert accept_rejection([0, 2, 0], q, p, torch.full((3,), 0.0), NO_NOISE) == Accepted(1, (0, 2))


def test_rejection_between_rows_equal_but_for_rounding_draws_from_the_target():
    p = rows([0.25, 0.75, 0.0], [1, 0, 0])
    q = rows([0.25, 0.75, 0.0]) * (1 + 1e-6)
    assert accept_rejection([0], q, p, torch.tensor([1 - 1e-9]).double(), NO_NOISE[:2]) == Accepted(0, (1,))


def test_rejection_with_k_0_samples_the_target():
    p = rows([0.2, 0.5, 0.3])
    assert accept_rejection([], p[:0], p, torch.empty(0), rows([2.0, 0, 0])) == Accepted(0, (0,))


@pytest.mark.parametrize(
    ("tokens", "limit_tok", "expected"),
    [
        ([1, 2, 3], 9, Cut((1, 2, 3), None)),
        ([1, 2, 3], 4, Cut((1, 2, 3), None)),
        ([1, 2, 3], 3, Cut((1, 2, 3), FinishReason.LENGTH)),
        ([1, 2, 3], 1, Cut((1,), FinishReason.LENGTH)),
        ([1, 50, 3, 51], 9, Cut((1, 50), FinishReason.STOP)),
        ([51, 50, 3], 9, Cut((51,), FinishReason.STOP)),
        ([1, 50, 3], 2, Cut((1, 50), FinishReason.STOP)),
        ([1, 2, 50], 2, Cut((1, 2), FinishReason.LENGTH)),
    ],
)
def test_cut_is_behind_the_first_eos_or_at_the_limit(tokens, limit_tok, expected):
    assert cut(tokens, eos_token_ids=(50, 51), limit_tok=limit_tok) == expected


def test_ignored_eos_does_not_end_a_generation():
    assert cut([50, 1], eos_token_ids=(50,), limit_tok=3, ignore_eos=True) == Cut((50, 1), None)
    at_limit = cut([50, 1], eos_token_ids=(50,), limit_tok=2, ignore_eos=True)
    assert at_limit.finish_reason is FinishReason.LENGTH
