"""Processors: equal to transformers' own, bit for bit, and independent of neighbouring rows.

At the edge of top-p equal logits compete for the last places. transformers leaves the winner to an unstable
sort, which differs between devices, so there the kept values and their number are compared.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation as hf

from moespeq.decode import processors
from moespeq.decode.params import SamplingParams
from moespeq.decode.processors import (
    keep_min_p,
    keep_top_k,
    keep_top_p,
    merge_custom,
    penalize_repetition,
    suppress_before,
    warp,
)

NO_IDS = torch.zeros(1, 0, dtype=torch.int64)
ROWS = 5


def logits_of(seed: int, vocab_size: int, num_levels: int | None = None) -> torch.Tensor:
    """Random logits [ROWS, V]; with `num_levels` they are whole numbers, so that most of them tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab_size, generator=generator) * 4
    if num_levels is None:
        return logits
    return torch.randint(0, num_levels, (ROWS, vocab_size), generator=generator).float()


def equals_up_to_ties(mine: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor) -> bool:
    has_ties = any(len(row.unique()) < len(row) for row in logits)
    if has_ties:
        return torch.equal(mine.sort().values, theirs.sort().values)
    return torch.equal(mine, theirs)


CASES = st.builds(
    logits_of,
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 8, 33, 257, 1000]),
    st.sampled_from([None, None, 2, 6]),
)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


@FEW
@given(CASES, st.sampled_from([0.5, 1.0, 1.3, 7.0]), st.integers(0, 99))
def test_repetition_penalty_equals_transformers(logits, penalty, seed):
    ids = torch.randint(0, logits.shape[1], (ROWS, 12), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    theirs = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert torch.equal(penalize_repetition(logits, seen, penalty), theirs)


@FEW
@given(CASES, st.sampled_from([1, 2, 5, 50, 5000]))
def test_top_k_equals_transformers_and_keeps_ties(logits, top_k):
    assert torch.equal(keep_top_k(logits, top_k), hf.TopKLogitsWarper(top_k)(NO_IDS, logits))


@FEW
@given(CASES, st.sampled_from([1e-6, 0.1013, 0.3719, 0.8081, 0.9533, 0.9991]))
def test_top_p_equals_transformers(logits, top_p):
    assert equals_up_to_ties(keep_top_p(logits, top_p), hf.TopPLogitsWarper(top_p)(NO_IDS, logits), logits)


@FEW
@given(CASES, st.sampled_from([0.0, 0.01, 0.11, 0.6, 1.0]))
def test_min_p_equals_transformers(logits, min_p):
    assert torch.equal(keep_min_p(logits, min_p), hf.MinPLogitsWarper(min_p)(NO_IDS, logits))


@FEW
@given(CASES, st.integers(1, 12), st.sampled_from([0.3137, 0.9071]), st.sampled_from([0.05, 0.3]))
def test_warpers_chain_as_in_transformers(logits, top_k, top_p, min_p):
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    warpers = (hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(top_k), hf.TopPLogitsWarper(top_p))
    theirs = hf.LogitsProcessorList([*warpers, hf.MinPLogitsWarper(min_p)])(NO_IDS, logits)
    assert equals_up_to_ties(warp(logits, params), theirs, logits)


@pytest.mark.parametrize("num_new_tok", [0, 2, 3, 9])
def test_minimum_new_tokens_equals_transformers(num_new_tok):
    logits, eos = logits_of(1, 20), torch.tensor([3, 17])
    ids = torch.zeros(ROWS, 4 + num_new_tok, dtype=torch.int64)
    theirs = hf.MinNewTokensLengthLogitsProcessor(4, 3, eos)(ids, logits)
    assert torch.equal(suppress_before(logits, eos, torch.full((ROWS,), num_new_tok), 3), theirs)


def test_minimum_new_tokens_counts_for_each_row_of_a_verify_pass():
    rows = suppress_before(torch.zeros(4, 5), torch.tensor([2]), torch.arange(1, 5), 3)
    assert (rows[:, 2] == -torch.inf).tolist() == [True, True, False, False]
    assert (rows[:, [0, 1, 3, 4]] == 0).all()


@pytest.mark.parametrize("vocab_size", [7, 32, 1003])
def test_a_row_does_not_depend_on_its_neighbours_or_their_number(vocab_size):
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
    logits = logits_of(5, vocab_size)
    together = warp(logits, params)
    for row in range(ROWS):
        assert torch.equal(warp(logits[row : row + 1], params)[0], together[row])
        neighbours = torch.full_like(logits, 1e4)
        neighbours[row] = logits[row]
        assert torch.equal(warp(neighbours, params)[row], together[row])


def test_top_p_keeps_the_higher_ids_among_equals():
    kept = keep_top_p(torch.zeros(1, 64), 0.5).isfinite()[0]
    assert kept.tolist() == [False] * 32 + [True] * 32


def test_the_smallest_top_p_keeps_the_most_likely_token():
    logits = logits_of(3, 100)
    kept = keep_top_p(logits, 1e-9).isfinite()
    assert torch.equal(kept.nonzero()[:, 1], logits.argmax(-1))


@pytest.mark.parametrize("num_levels", [None, 3, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.6027, 0.9533, 0.9999])
def test_sorting_a_few_tokens_first_changes_nothing(monkeypatch, num_levels, top_p):
    """With ties across the last of the few, with the edge among them, and with the edge beyond."""
    logits = logits_of(4, 3000, num_levels)
    if num_levels:
        logits = logits / num_levels * 8
    monkeypatch.setattr(processors, "_FEW", 3000)
    whole = keep_top_p(logits, top_p)
    for few in (1, 2, 40, 700, 2999):
        monkeypatch.setattr(processors, "_FEW", few)
        assert torch.equal(keep_top_p(logits, top_p), whole), f"{few} first"


def test_top_p_is_exact_to_the_token_over_a_large_vocabulary():
    logits = torch.full((1, 200_000), -1.2345)
    logits[0, 0] = 0.0
    total = 1 + 199_999 * math.exp(-1.2345)
    num_removed = math.floor(0.2501 * total / math.exp(-1.2345))
    assert int(keep_top_p(logits, 0.7499).isinf().sum()) == num_removed


def test_warpers_rest_in_greedy_decoding():
    logits = logits_of(2, 50)
    assert torch.equal(warp(logits, SamplingParams(top_k=1, top_p=0.1, min_p=0.9)), logits)


def test_a_custom_processor_takes_the_place_of_its_built_in():
    class RepetitionPenaltyLogitsProcessor:
        def __call__(self, input_ids, scores):
            return scores

    def grammar(input_ids, scores):
        return scores

    custom = RepetitionPenaltyLogitsProcessor()
    merged = merge_custom(SamplingParams(repetition_penalty=1.2, logits_processors=(grammar, custom)))
    assert merged.logits_processors == (custom, grammar)
    assert merged.repetition_penalty == 1.0
    kept = merge_custom(SamplingParams(logits_processors=(grammar, custom)))
    assert kept.logits_processors == (grammar, custom)
