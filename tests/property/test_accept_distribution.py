"""What is emitted has the target's distribution, however bad the draft; coupled text never depends on k."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq.decode.accept import Accepted, accept_coupled, accept_rejection, cut
from moespeq.decode.noise import Stream, gumbel, uniform
from moespeq.decode.params import SamplingParams
from moespeq.decode.sampling import Sampler, drafted_tokens

VOCAB = 8
PROMPT = [3, 1]
EOS = 0
Row = Callable[[list[int]], torch.Tensor]
"""Logits [V] behind a text."""

P = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(10)).softmax(-1)
Q = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(11)).softmax(-1)


@cache
def markov(seed: int, order: int) -> torch.Tensor:
    """Logits of a toy language model: one row for each value of the last `order` tokens, [V, .., V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn([VOCAB] * (order + 1), generator=generator) * 1.5


def target_row(text: list[int]) -> torch.Tensor:
    return markov(1, 2)[text[-2], text[-1]]


def other_row(text: list[int]) -> torch.Tensor:
    """A draft that knows nothing of the target."""
    return markov(2, 1)[text[-1]]


def near_row(text: list[int]) -> torch.Tensor:
    return target_row(text) + 0.3 * other_row(text)


def decode(params: SamplingParams, k: int, draft_row: Row) -> tuple[list[int], int]:
    """New tokens of the toy model with draft length k, and how many drafted ones were accepted."""
    text, num_accepted = list(PROMPT), 0
    sampler = Sampler(params, VOCAB, text)
    while True:
        accepted = one_round(sampler, text, k, draft_row)
        limit_tok = params.max_new_tokens - (len(text) - len(PROMPT))
        result = cut(accepted.tokens, eos_token_ids=params.eos_token_ids, limit_tok=limit_tok)
        num_accepted += accepted.accepted
        sampler.commit(result.tokens)
        text.extend(result.tokens)
        if result.finish_reason:
            return text[len(PROMPT) :], num_accepted


def one_round(sampler: Sampler, text: list[int], k: int, draft_row: Row) -> Accepted:
    drafts = []
    for position in range(len(text), len(text) + k):
        row = draft_row([*text, *drafted_tokens(drafts)])[None]
        drafts.append(sampler.draft_token(row, position, [draft.token for draft in drafts]))
    drafted = drafted_tokens(drafts)
    logits = torch.stack([target_row([*text, *drafted[:j]]) for j in range(k + 1)])
    return sampler.accept(logits, len(text), drafts)


def avoid_doubles(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A custom processor: no token twice in a row."""
    scores[0, input_ids[0, -1]] = -torch.inf
    return scores


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Counts of `tokens` [N] against the expectation under `probs`: [V], or [N, V] when each has its own."""
    observed = tokens.bincount(minlength=VOCAB)
    expected = probs.double().expand(len(tokens), VOCAB).sum(0)
    return float(((observed - expected) ** 2 / expected).sum())


def rounds_of(acceptance: str, num_rounds: int) -> list[tuple[list[int], Accepted]]:
    """(drafted, accepted) of independent rounds of k = 2 in which row j has the fixed rows P[j] and Q[j]."""
    positions = torch.arange(3 * num_rounds)
    noise = gumbel(5, 0, positions, VOCAB).view(num_rounds, 3, VOCAB)
    if acceptance == "coupled":
        drafted, target = (Q.log() + noise[:, :2]).argmax(-1), (P.log() + noise).argmax(-1)
        pairs = zip(drafted.tolist(), target.tolist(), strict=True)
        return [(draft, accept_coupled(draft, row)) for draft, row in pairs]
    private = gumbel(5, 0, positions, VOCAB, stream=Stream.DRAFT).view(num_rounds, 3, VOCAB)
    drafted = (Q.log() + private[:, :2]).argmax(-1)
    uniforms = uniform(5, 0, positions).view(num_rounds, 3)[:, :2]
    cases = zip(drafted.tolist(), uniforms, noise, strict=True)
    return [(draft, accept_rejection(draft, Q, P, u, gumbels)) for draft, u, gumbels in cases]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_emitted_tokens_have_the_targets_distribution(acceptance):
    """Chi-square of every emitted row over 6,000 rounds, with a draft far from the target.

    7 degrees of freedom: 40.5 is passed with probability 1e-6 (3e-6 in all); the seed is fixed.
    """
    rounds = rounds_of(acceptance, 6000)
    for row in range(3):
        emitted = torch.tensor([accepted.tokens[row] for _, accepted in rounds if accepted.accepted >= row])
        assert len(emitted) > 400
        assert chi_square(emitted, P[row]) < 40.5, f"row {row}"
    drafted = torch.tensor([draft[0] for draft, _ in rounds])
    assert chi_square(drafted, P[0]) > 1000  # the statistic would see a draft that leaks
    assert chi_square(drafted, Q[0]) < 40.5


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_generated_text_has_the_targets_distribution(acceptance):
    """Chi-square of 1,000 tokens, given the two before each: 7 degrees of freedom at most, 40.5 is 1e-6."""
    params = SamplingParams(max_new_tokens=1000, temperature=1.0, seed=5, acceptance=acceptance)
    tokens, num_accepted = decode(params, 1, other_row)
    text = [*PROMPT, *tokens]
    probs = torch.stack([target_row(text[:end]) for end in range(len(PROMPT), len(text))]).softmax(-1)
    assert chi_square(torch.tensor(tokens), probs) < 40.5
    assert num_accepted > 100


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.just(40),
    min_new_tokens=st.sampled_from([0, 10]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.03]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**64 - 1),
    eos_token_ids=st.just((EOS,)),
    logits_processors=st.sampled_from([(), (avoid_doubles,)]),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(PARAMS, st.sampled_from([other_row, near_row]))
def test_coupled_text_is_the_same_for_every_k(params, draft_row):
    plain, _ = decode(params, 0, draft_row)
    for k in (1, 4, 8):
        assert decode(params, k, draft_row)[0] == plain, f"k={k}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_for_every_k_with_every_processor_on(temperature):
    params = SamplingParams(
        max_new_tokens=200,
        min_new_tokens=199,
        temperature=temperature,
        top_k=6,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.2,
        seed=77,
        eos_token_ids=(EOS,),
        logits_processors=(avoid_doubles,),
    )
    plain, _ = decode(params, 0, near_row)
    assert len(plain) >= 199
    assert len(set(plain)) > 1
    for k in (1, 4, 8):
        text, num_accepted = decode(params, k, near_row)
        assert text == plain, f"k={k}"
        assert num_accepted > 20
