"""What an engine answers: text, tokens, ends and refusals, the same for every draft length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import noisy_draft, open_tight, prompts
from families import VOCAB_SIZE
from moespeq.buckets import LengthBuckets
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.errors import UsageError
from moespeq.types import FinishReason

NUM_SLOTS, NUM_TOKENS = 12, 24
PROMPT = "A router sends every token"
DEPTHS = (0, 1, 4, 8)
EVERY_PROCESSOR: dict[str, Any] = {
    "temperature": 1.2,
    "top_k": 12,
    "top_p": 0.97,
    "min_p": 0.001,
    "repetition_penalty": 1.6,
    "min_new_tokens": 8,
    "logits_processors": (lambda ids, scores: scores + 0.1 * (ids.shape[1] % 3) * (scores > 0),),
}


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, NUM_SLOTS, k=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain_engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, NUM_SLOTS, k=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def answer(engine: Engine) -> GenerationResult:
    """What greedy decoding says when nothing stops it."""
    return engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)


def test_a_generation_has_the_tokens_asked_for_and_their_text(engine: Engine, answer: GenerationResult) -> None:
    assert len(answer.tokens) == NUM_TOKENS
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.text == engine.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
    assert answer.stats.committed == NUM_TOKENS - 1  # the first token is prefill's
    assert answer.stats.prompt_tok == len(engine.tokenizer.encode(PROMPT))


def test_an_engine_answers_the_same_again(engine: Engine, answer: GenerationResult) -> None:
    engine.generate("something else in between", max_new_tokens=5)
    assert engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens == answer.tokens


def test_token_ids_are_a_prompt_too(engine: Engine, answer: GenerationResult) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    assert engine.generate(ids, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens == answer.tokens


def test_a_tensor_of_token_ids_is_a_prompt_too(engine: Engine, answer: GenerationResult) -> None:
    ids = torch.tensor(engine.tokenizer.encode(PROMPT))
    assert engine.generate(ids, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens == answer.tokens


def test_pieces_of_a_stream_are_the_whole_answer(engine: Engine, answer: GenerationResult) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.result.text == answer.text
    assert tuple(token for piece in pieces for token in piece.tokens) == stream.result.tokens == answer.tokens
    assert len(pieces) >= 1 + answer.stats.rounds


def test_next_takes_one_piece_at_a_time(engine: Engine, answer: GenerationResult) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert next(stream).tokens == answer.tokens[:1]
    assert len(next(stream).tokens) in range(1, 6)
    list(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_a_result_asked_for_too_early_is_refused(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=3)
    next(stream)
    with pytest.raises(UsageError, match="iterate the stream to its end"):
        _ = stream.result
    stream.close()


def test_a_chat_is_its_template_as_a_prompt(engine: Engine) -> None:
    messages = [{"role": "user", "content": "How many apples?"}]
    ids = engine.tokenizer.encode_chat(messages)
    assert engine.tokenizer.decode(ids, skip_special_tokens=True).endswith("<|user|>How many apples?\n<|assistant|>")
    assert engine.chat(messages, max_new_tokens=8).tokens == engine.generate(ids, max_new_tokens=8).tokens


@pytest.mark.parametrize("name", ["engine", "plain_engine"])
def test_text_ends_before_a_stop_that_spans_tokens(
    request: pytest.FixtureRequest, answer: GenerationResult, name: str
) -> None:
    engine: Engine = request.getfixturevalue(name)
    head = engine.tokenizer.decode(list(answer.tokens[:9]), skip_special_tokens=True)
    stop = answer.text[len(head) - 1 : len(head) + 1]  # the end of one token and the beginning of the next
    assert answer.text.count(stop) == 1
    stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=("never", stop))
    streamed = "".join(piece.text for piece in stream)
    assert streamed == stream.result.text == answer.text[: len(head) - 1]
    assert stream.result.finish_reason is FinishReason.STOP
    assert stream.result.tokens == answer.tokens[:10]
    assert stream.result.stats.committed == 9


def test_text_that_might_have_become_a_stop_is_handed_out_at_the_end(engine: Engine, answer: GenerationResult) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, stop=(answer.text[-2:] + "never",))
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == stream.result.text == answer.text
    assert pieces[-1].text.endswith(answer.text[-2:])
    assert pieces[-1].tokens == ()


@pytest.mark.parametrize("name", ["engine", "plain_engine"])
def test_a_generation_ends_behind_the_first_of_its_eos_tokens(
    request: pytest.FixtureRequest, answer: GenerationResult, name: str
) -> None:
    engine: Engine = request.getfixturevalue(name)
    eos = (answer.tokens[-1], answer.tokens[6])
    first = min(answer.tokens.index(token) for token in eos)
    result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, eos_token_ids=eos)
    assert result.tokens == answer.tokens[: first + 1]
    assert result.finish_reason is FinishReason.STOP
    unstopped = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, eos_token_ids=eos, ignore_eos=True)
    assert unstopped.tokens == answer.tokens


def test_eos_is_not_chosen_before_the_minimum_is_reached(engine: Engine, answer: GenerationResult) -> None:
    eos = answer.tokens[2]
    result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, min_new_tokens=10, eos_token_ids=eos)
    assert eos not in result.tokens[:10]
    assert len(result.tokens) >= 10


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_the_limit_is_exact_also_inside_a_round(engine: Engine, answer: GenerationResult, count: int) -> None:
    result = engine.generate(PROMPT, max_new_tokens=count, ignore_eos=True)
    assert result.tokens == answer.tokens[:count]
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.stats.rounds == 0) == (count == 1)


@pytest.mark.parametrize(("context_tok", "prompt_tok"), [(24, 12), (40, 39), (256, 250), (262, 252), (260, 255)])
def test_a_generation_ends_where_the_context_is_full_for_every_k(
    tiny_store: Path, context_tok: int, prompt_tok: int
) -> None:
    """Also where the length bucket of 256 ends inside the answer: a round must not cross it."""
    prompt = prompts(1, length=prompt_tok)[0]
    texts = []
    for k in (0, 4, 16):
        with open_tight(tiny_store, NUM_SLOTS, k=k, ctx_size=context_tok) as engine:
            result = engine.generate(prompt, max_new_tokens=1000, ignore_eos=True)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.tokens) == context_tok - prompt_tok
        texts.append(result.tokens)
    assert texts[0] == texts[1] == texts[2]


def test_no_round_crosses_the_end_of_a_length_bucket(tiny_store: Path) -> None:
    """Not even by a drafted row: its token would be computed over another length than in plain decoding."""
    with open_tight(tiny_store, NUM_SLOTS, k=8, ctx_size=280) as engine:
        stats = engine.generate(prompts(1, length=250)[0], max_new_tokens=20, ignore_eos=True).stats
    position, buckets = 250, LengthBuckets(280)
    crossings = 0
    for k, accepted in zip(stats.k_per_round, stats.accepted_per_round, strict=True):
        assert position + k < buckets.above(position)
        crossings += k < min(8, 269 - position)  # cut by the bucket, not by the limit
        position += accepted + 1
    assert crossings
    assert position == 269


def test_every_round_drafts_k_unless_the_limit_is_nearer(engine: Engine, plain_engine: Engine) -> None:
    stats = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).stats
    assert set(stats.k_per_round[:-1]) == {4}
    assert stats.k_per_round[-1] <= 4
    assert set(plain_engine.generate(PROMPT, max_new_tokens=4).stats.k_per_round) == {0}


def test_the_governor_chooses_k_and_never_the_text(tiny_store: Path, answer: GenerationResult) -> None:
    with open_tight(tiny_store, NUM_SLOTS, k="auto") as engine:
        result = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert result.tokens == answer.tokens
    assert len(set(result.stats.k_per_round)) > 1


def test_a_seed_repeats_its_text_and_another_does_not(engine: Engine) -> None:
    texts = [
        engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=2.0, seed=seed).tokens for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_drawn_seed_is_reported_and_repeats_the_text(engine: Engine) -> None:
    drawn = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=2.0)
    other = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=2.0)
    assert drawn.stats.seed != other.stats.seed
    again = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=2.0, seed=drawn.stats.seed)
    assert again.tokens == drawn.tokens != other.tokens


def test_another_choice_of_one_seed_is_another_text(engine: Engine) -> None:
    texts = []
    for choice in (0, 1):
        stream = engine.stream(PROMPT, max_new_tokens=NUM_TOKENS, temperature=2.0, seed=3, choice_index=choice)
        list(stream)
        texts.append(stream.result.tokens)
    assert texts[0] != texts[1]


def test_sampled_text_is_the_same_for_every_k_with_every_processor_on(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy_draft(monkeypatch, tiny_store, 0.3)
    texts, acceptances = [], []
    for k in DEPTHS:
        with open_tight(tiny_store, NUM_SLOTS, k=k) as engine:
            results = [engine.generate(PROMPT, max_new_tokens=16, seed=seed, **EVERY_PROCESSOR) for seed in range(2)]
        texts.append([result.tokens for result in results])
        acceptances += [result.stats.acceptance for result in results if k]
    assert all(text == texts[0] for text in texts)
    assert len(set(texts[0])) == 2
    assert 0 < sum(acceptances) / len(acceptances) < 1  # there was something to reject


def test_rejection_sampling_repeats_with_its_seed(engine: Engine) -> None:
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 2.0, "acceptance": "rejection"}
    texts = [engine.generate(PROMPT, seed=seed, **sampling).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_logits_of_a_prompt_are_those_of_its_next_token(engine: Engine, answer: GenerationResult) -> None:
    logits = engine.prompt_logits(PROMPT)
    assert logits.shape == (answer.stats.prompt_tok, VOCAB_SIZE)
    assert int(logits[-1].argmax()) == answer.tokens[0]
