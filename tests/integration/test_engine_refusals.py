"""What an engine refuses: prompts and options it cannot answer, each with one sentence that says what would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moespeq
from engines import open_tight, prompts
from families import VOCAB_SIZE, make_tiny
from moespeq.decode.engine import Engine
from moespeq.errors import MoespeqError, PromptError, UsageError
from moespeq.prepare import prepare_store

NUM_SLOTS = 12
PROMPT = "A router sends every token"


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, NUM_SLOTS, k=4) as opened:
        yield opened


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths(tiny_store: Path) -> None:
    with open_tight(tiny_store, NUM_SLOTS, ctx_size=40) as engine:
        with pytest.raises(PromptError, match="The prompt has 40 tokens and the context 40"):
            engine.generate(prompts(1, length=40)[0])
        assert len(engine.generate(prompts(1, length=39)[0]).tokens) == 1


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: str | list[int]) -> None:
    with pytest.raises(PromptError, match="The prompt is empty"):
        engine.generate(prompt)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    with pytest.raises(PromptError, match=f"Token {token} is not in the vocabulary of {VOCAB_SIZE}"):
        engine.generate([5, token])


def test_an_unknown_sampling_option_is_refused_with_the_nearest_name(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"'temprature'.* Did you mean 'temperature'"):
        engine.generate(PROMPT, temprature=1.0)


def test_a_checkpoint_without_a_tokenizer_takes_tokens_and_refuses_text(tmp_path: Path) -> None:
    checkpoint = make_tiny("olmoe", tmp_path / "checkpoint")
    for path in checkpoint.glob("*token*"):
        path.unlink()
    with open_tight(prepare_store(checkpoint, tmp_path / "store"), NUM_SLOTS) as engine:
        result = engine.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True)
        assert (len(result.tokens), result.text) == (4, "")
        with pytest.raises(UsageError, match="has no tokenizer; give the prompt as token ids"):
            engine.generate("text")
        with pytest.raises(UsageError, match="use eos_token_ids"):
            engine.generate([5, 6, 7], stop="text")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a"], "whole number, got 'a'"),
        ([None], "whole number, got None"),
        ([319.7], "whole number, got 319.7"),
        ([True], "whole number, got True"),
        (None, "text or a list of token ids, got NoneType"),
        (b"abc", "text or a list of token ids, got bytes"),
        (torch.ones(1, 5, dtype=torch.int64), r"shape \(1, 5\); give one sequence"),
        (torch.ones(5), "whole number, got 1.0"),
        (torch.ones(5, dtype=torch.bool), "whole number, got True"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_is(engine: Engine, prompt: Any, expected: str) -> None:
    with pytest.raises(PromptError, match=expected):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"choice_index": -1}, "choice_index must be a whole number of at least 0, got -1"),
        ({"choice_index": 1.5}, "choice_index must be a whole number of at least 0, got 1.5"),
        ({"choice_index": True}, "choice_index must be a whole number of at least 0, got True"),
        ({"logits_processors": 5}, "logits_processors must be callables"),
        ({"logits_processors": [5]}, "logits_processors must be callables"),
        ({"logits_processors": lambda ids, scores: None}, "function returned None; it must return"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(engine: Engine, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        engine.generate(PROMPT, **options)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "acceptance": "rejection"}]
)
def test_logits_that_are_not_numbers_are_refused_with_their_position(engine: Engine, sampling: dict[str, Any]) -> None:
    def spoilt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[0, 7] = torch.nan if ids.shape[1] == 12 else scores[0, 7]
        return scores

    ids = engine.tokenizer.encode(PROMPT)[:5]
    with pytest.raises(MoespeqError, match="produced NaN at position 12"):
        engine.generate(ids, logits_processors=spoilt, ignore_eos=True, **sampling)


@pytest.mark.parametrize("source", [5, None, 1.5, ["a"], b"model", {}])
def test_what_is_no_path_is_no_model(source: Any) -> None:
    for load in (moespeq.load, moespeq.from_pretrained):
        with pytest.raises(UsageError, match="A model is the path of a store or checkpoint, or a hub id, got"):
            load(source)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"progress": 5}, "progress takes an object with an `update` method, got 5"),
        ({"link_threads": "2"}, "link_threads must be a whole number from 1 to 256, got .2."),
        ({"link_threads": 10**6}, "link_threads must be a whole number from 1 to 256, got 1000000"),
        ({"prefill_rows": 0}, "prefill_rows must be a whole number of at least 1, got 0"),
        ({"device": 5}, "device '5' is unknown"),
        ({"device_memory": [1]}, r"'\[1\]' is not a size"),
        ({"prefetch": "yes"}, "prefetch must be True or False"),
        ({"rows": 17.0}, "rows must be one of 1, 17, 33, 65, got 17.0"),
    ],
)
def test_a_load_option_of_the_wrong_kind_is_refused(tiny_store: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        moespeq.load(tiny_store, **options)
