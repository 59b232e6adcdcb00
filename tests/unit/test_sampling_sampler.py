"""The sampler: transformers' whole chain row by row, one noise for draft and target, honest books."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from moespeq.decode.accept import accept_rejection
from moespeq.decode.noise import Stream, gumbel, uniform
from moespeq.decode.params import SamplingParams
from moespeq.decode.sampling import DraftToken, Sampler, drafted_tokens
from moespeq.errors import MoespeqError, UsageError

VOCAB = 40
PROMPT = [1, 5, 9, 5]
DRAFTED = [7, 30, 7]


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def favour_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A custom processor that depends on the tokens before the row, and writes into its argument."""
    scores[0, int(input_ids[0, -1])] += 2.0 + input_ids.shape[1] / 10
    return scores


class Transformers(GenerationMixin):
    """Just enough of a model to ask transformers for its list of processors."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def __init__(self) -> None:
        pass


def refuse_after_thirty(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A grammar with a dead end behind token 30."""
    if int(input_ids[0, -1]) == 30:
        raise UsageError("nothing may follow")
    return scores


def test_what_a_processor_raises_behind_a_drafted_token_counts_only_where_that_is_kept():
    sampler = Sampler(SamplingParams(logits_processors=(refuse_after_thirty,)), VOCAB, PROMPT)
    logits = torch.zeros(3, VOCAB)
    logits[0, 7], logits[1, 9] = 1.0, 1.0
    rejected = [sampler.draft_token(logits[:1] + torch.eye(VOCAB)[30] * 2, 4, [])]
    rejected.append(sampler.draft_token(logits[1:2], 5, [draft.token for draft in rejected]))
    assert drafted_tokens(rejected) == [30, 9]
    assert sampler.accept(logits, 4, rejected).tokens == (7,)
    kept = [DraftToken(torch.tensor([30]), None)]
    with pytest.raises(UsageError, match="nothing may follow"):
        sampler.accept(logits[:2] + torch.eye(VOCAB)[30] * 2, 4, kept)


@pytest.mark.parametrize("do_sample", [False, True])
def test_every_row_equals_the_whole_chain_of_transformers(do_sample):
    config = GenerationConfig(
        do_sample=do_sample,
        temperature=0.8 if do_sample else None,
        top_k=12 if do_sample else None,
        top_p=0.9 if do_sample else None,
        min_p=0.02 if do_sample else None,
        repetition_penalty=1.3,
        min_new_tokens=2,
        max_new_tokens=20,
        eos_token_id=[7, 8],
    )
    config._eos_token_tensor = torch.tensor([7, 8])
    chain = Transformers()._get_logits_processor(config, len(PROMPT), logits_processor=[favour_last])
    params = SamplingParams.from_generation_config(config, logits_processors=(favour_last,))
    drafted, logits = [3, 30, 3], random_logits(4)
    rows = Sampler(params, VOCAB, PROMPT)._process_rows(logits, len(PROMPT), drafted)
    for j in range(4):
        theirs = chain(torch.tensor([[*PROMPT, *drafted[:j]]]), logits[j : j + 1].clone())
        assert torch.equal(rows[j], theirs[0]), f"row {j}"


def test_greedy_takes_the_first_of_equal_maxima():
    logits = torch.zeros(1, VOCAB)
    logits[0, [11, 4, 25]] = 3.0
    assert Sampler(SamplingParams(), VOCAB, PROMPT).target_tokens(logits, 4, []) == [4]


def test_target_choice_is_the_argmax_of_log_probabilities_plus_noise():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), VOCAB, PROMPT, choice_index=2)
    logits = random_logits(4)
    noise = gumbel(3, 2, torch.arange(4, 8), VOCAB)
    expected = (logits.log_softmax(-1) + noise).argmax(-1).tolist()
    assert sampler.target_tokens(logits, 4, DRAFTED) == expected


def test_draft_and_target_with_equal_logits_choose_the_same_tokens():
    params = SamplingParams(temperature=1.5, seed=8, top_k=30, repetition_penalty=1.4)
    sampler, logits = Sampler(params, VOCAB, PROMPT), random_logits(4)
    drafts = []
    for j in range(3):
        drafts.append(sampler.draft_token(logits[j : j + 1], 4 + j, [d.token for d in drafts]))
    accepted = sampler.accept(logits, 4, drafts)
    assert accepted.accepted == 3
    assert accepted.tokens[:3] == tuple(drafted_tokens(drafts))


def test_a_draft_of_nan_is_some_token_which_the_target_refuses():
    logits = torch.full((1, VOCAB), torch.nan)
    sampler = Sampler(SamplingParams(), VOCAB, PROMPT)
    draft = sampler.draft_token(logits, 4, [])
    assert 0 <= int(draft.token) < VOCAB
    other = torch.zeros(2, VOCAB)
    other[0, (int(draft.token) + 1) % VOCAB] = 1.0
    assert sampler.accept(other, 4, [draft]).accepted == 0
    with pytest.raises(MoespeqError, match="NaN at position 4"):
        sampler.accept(logits.repeat(2, 1), 4, [draft])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_processors_of_a_draft_that_is_no_number_see_zeros_and_rejection_accepts_none_of_it(bad):
    seen = []

    def only_seven(ids, scores):
        seen.append(scores.clone())
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)

    logits = torch.full((1, VOCAB), bad)
    params = SamplingParams(temperature=1.0, seed=1, acceptance="rejection", logits_processors=(only_seven,))
    sampler = Sampler(params, VOCAB, PROMPT)
    draft = sampler.draft_token(logits, 4, [])
    assert int(draft.token) == 7
    assert torch.equal(seen[0], torch.zeros(1, VOCAB))
    assert sampler.accept(random_logits(2), 4, [draft]).accepted == 0


def test_nan_behind_a_rejected_token_is_not_live_and_no_error():
    sampler, target = Sampler(SamplingParams(), VOCAB, PROMPT), random_logits(3)
    target[1:] = torch.nan
    right, wrong = (DraftToken((target[0].argmax() + step)[None], None) for step in (0, 1))
    assert sampler.accept(target, 4, [wrong, right]).tokens == (int(right.token),)
    with pytest.raises(MoespeqError, match="NaN at position 5"):
        sampler.accept(target, 4, [right, wrong])


def test_rejected_tokens_leave_no_trace_in_the_penalty():
    params = SamplingParams(repetition_penalty=5.0)
    logits = random_logits(4).abs() + 1
    sampler = Sampler(params, VOCAB, PROMPT)
    sampler.target_tokens(logits, 4, DRAFTED)
    sampler.commit([2])
    fresh = Sampler(params, VOCAB, [*PROMPT, 2])
    assert torch.equal(sampler._process_rows(logits, 5, DRAFTED), fresh._process_rows(logits, 5, DRAFTED))


def test_padding_rows_do_not_matter():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1, top_p=0.9), VOCAB, PROMPT)
    logits = random_logits(17)
    expected = sampler.target_tokens(logits[:4], 4, DRAFTED)
    logits[4:] = torch.nan
    assert sampler.target_tokens(logits, 4, DRAFTED) == expected


def test_bf16_logits_are_processed_in_float32():
    logits = random_logits(4).bfloat16()
    params = SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.1)
    sampler = Sampler(params, VOCAB, PROMPT)
    mine = sampler._process_rows(logits, 4, DRAFTED)
    assert mine.dtype == torch.float32
    assert torch.equal(mine, sampler._process_rows(logits.float(), 4, DRAFTED))


def test_custom_processor_sees_committed_and_drafted_tokens_and_cannot_touch_the_logits():
    seen = []

    def spy(input_ids, scores):
        seen.append(input_ids.tolist())
        return scores.fill_(1.0)

    sampler = Sampler(SamplingParams(logits_processors=(spy,)), VOCAB, PROMPT)
    sampler.commit([6])
    logits = random_logits(3)
    before = logits.clone()
    sampler.target_tokens(logits, 5, [7, 8])
    assert seen == [[[*PROMPT, 6]], [[*PROMPT, 6, 7]], [[*PROMPT, 6, 7, 8]]]
    assert torch.equal(logits, before)


def test_custom_processor_is_not_asked_behind_a_drafted_eos():
    seen = []

    def spy(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    params = SamplingParams(logits_processors=(spy,), eos_token_ids=(7,))
    Sampler(params, VOCAB, PROMPT).target_tokens(random_logits(4), 4, [3, 7, 9])
    assert seen == [4, 5]


def test_a_processor_of_the_wrong_shape_or_that_leaves_nothing_is_explained():
    wrong = Sampler(SamplingParams(logits_processors=(lambda ids, scores: scores[0],)), VOCAB, PROMPT)
    with pytest.raises(UsageError, match=r"returned shape \(40,\); it must return \(1, 40\)"):
        wrong.target_tokens(random_logits(1), 4, [])
    empty = Sampler(SamplingParams(logits_processors=(lambda ids, s: s - torch.inf,)), VOCAB, PROMPT)
    with pytest.raises(UsageError, match="left no token to choose at position 4"):
        empty.target_tokens(random_logits(1), 4, [])


def test_a_drawn_seed_is_reported_and_repeats_the_choice():
    first = Sampler(SamplingParams(temperature=2.0), VOCAB, PROMPT)
    again = Sampler(SamplingParams(temperature=2.0, seed=first.seed), VOCAB, PROMPT)
    logits = random_logits(4)
    assert first.target_tokens(logits, 4, DRAFTED) == again.target_tokens(logits, 4, DRAFTED)


def test_rejection_draws_the_draft_from_a_stream_of_its_own():
    params = SamplingParams(temperature=1.0, seed=3, acceptance="rejection")
    draft = Sampler(params, VOCAB, PROMPT).draft_token(random_logits(1), 4, [])
    noise = gumbel(3, 0, torch.tensor([4]), VOCAB, stream=Stream.DRAFT)
    assert draft.token == int((random_logits(1).log_softmax(-1) + noise).argmax())
    assert torch.equal(draft.probs, random_logits(1)[0].softmax(-1))
    assert not Sampler(SamplingParams(acceptance="rejection"), VOCAB, PROMPT).uses_rejection


def test_rejection_accepts_and_recovers_by_streams_of_their_own():
    params = SamplingParams(temperature=1.0, seed=3, acceptance="rejection")
    q_logits, p_logits = random_logits(1, 1), random_logits(2, 2)
    num_accepted = 0
    for position in range(1, 41):
        sampler = Sampler(params, VOCAB, [0] * position)
        draft = sampler.draft_token(q_logits, position, [])
        accepted = sampler.accept(p_logits, position, [draft])
        positions = torch.arange(position, position + 2)
        uniforms = uniform(3, 0, positions[:1], stream=Stream.ACCEPT)
        noise = gumbel(3, 0, positions, VOCAB, stream=Stream.TARGET)
        q, p = q_logits.softmax(-1), p_logits.softmax(-1)
        assert accepted == accept_rejection(drafted_tokens([draft]), q, p, uniforms, noise)
        num_accepted += accepted.accepted
    assert 0 < num_accepted < 40


def test_a_position_out_of_step_is_our_bug():
    with pytest.raises(AssertionError, match="position 3"):
        Sampler(SamplingParams(), VOCAB, PROMPT).target_tokens(random_logits(1), 3, [])
