"""The Hugging Face face: an ordinary PreTrainedModel whose `generate` means what it means in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

import moespeq
from engines import open_tight
from moespeq.decode.hugging_face import speculative_model
from moespeq.errors import UsageError

NUM_TOKENS = 16
PROMPT = "A router sends every token"
UNENDING = {"max_new_tokens": NUM_TOKENS, "eos_token_id": []}


@pytest.fixture(scope="module")
def model(tiny_store: Path) -> Iterator[Any]:
    loaded: Any = moespeq.from_pretrained(tiny_store, device_memory="64MiB", k=4)
    yield loaded
    loaded.moespeq_engine.close()


@pytest.fixture(scope="module")
def float_model(tiny_store: Path) -> Iterator[Any]:
    """In float32, where no token of two implementations ties."""
    engine = open_tight(tiny_store, 12, k=4, dtype=torch.float32)
    yield speculative_model(engine)
    engine.close()


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> PreTrainedModel:
    """transformers itself, on the same checkpoint in float32, all experts in memory."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    return loaded


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> torch.Tensor:
    encoded: torch.Tensor = tokenizer(PROMPT, return_tensors="pt").input_ids
    return encoded


@pytest.fixture(scope="module")
def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    return new_tokens(model, ids, **UNENDING)


def new_tokens(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> list[int]:
    sequences = model.generate(ids, *args, **kwargs)
    assert sequences.dtype is ids.dtype
    assert torch.equal(sequences[:, : ids.shape[1]], ids)
    tokens: list[int] = sequences[0, ids.shape[1] :].tolist()
    return tokens


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


def test_it_is_a_model_of_its_family(model: Any, reference: PreTrainedModel) -> None:
    assert isinstance(model, PreTrainedModel)
    assert isinstance(model, type(reference))
    assert model.config.model_type == "qwen3_moe"


def test_generate_is_the_engines_greedy_text(model: Any, ids: torch.Tensor, greedy: list[int]) -> None:
    result = model.moespeq_engine.generate(ids[0].tolist(), max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert greedy == list(result.tokens)
    assert len(greedy) == NUM_TOKENS


def test_input_ids_may_be_named_and_come_with_their_mask(model: Any, tokenizer: Any, greedy: list[int]) -> None:
    encoded = tokenizer(PROMPT, return_tensors="pt")
    assert encoded.attention_mask.all()
    sequences = model.generate(**encoded, **UNENDING)
    assert sequences[0, encoded.input_ids.shape[1] :].tolist() == greedy


def test_a_streamer_gets_the_prompt_and_then_token_after_token(
    model: Any, ids: torch.Tensor, greedy: list[int]
) -> None:
    recorder = Recorder()
    new_tokens(model, ids, streamer=recorder, **UNENDING)
    assert recorder.values == [ids[0].tolist(), *([token] for token in greedy)]
    assert recorder.has_ended


def test_transformers_own_text_streamer_works(model: Any, ids: torch.Tensor, tokenizer: Any, greedy: list[int]) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    new_tokens(model, ids, streamer=streamer, **UNENDING)
    assert "".join(streamer) == tokenizer.decode(greedy)


def test_a_custom_stopping_criterion_is_asked_after_every_token(
    model: Any, ids: torch.Tensor, greedy: list[int]
) -> None:
    lengths = []

    class AfterSeven(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            lengths.append(input_ids.shape[1] - ids.shape[1])
            return torch.tensor([lengths[-1] >= 7])

    assert new_tokens(model, ids, stopping_criteria=StoppingCriteriaList([AfterSeven()]), **UNENDING) == greedy[:7]
    assert lengths == [1, 2, 3, 4, 5, 6, 7]


def test_lengths_are_those_of_transformers(model: Any, ids: torch.Tensor, greedy: list[int]) -> None:
    length = ids.shape[1] + 5
    assert new_tokens(model, ids, max_length=length, eos_token_id=[]) == greedy[:5]
    shorter = StoppingCriteriaList([MaxLengthCriteria(length - 2)])
    assert new_tokens(model, ids, stopping_criteria=shorter, **UNENDING) == greedy[:3]
    assert new_tokens(model, ids, max_new_tokens=1, eos_token_id=[]) == greedy[:1]


def test_generation_ends_behind_eos(model: Any, ids: torch.Tensor, greedy: list[int]) -> None:
    eos = greedy[6]
    assert new_tokens(model, ids, max_new_tokens=NUM_TOKENS, eos_token_id=eos) == greedy[: greedy.index(eos) + 1]


@pytest.mark.parametrize("place", ["argument", "config", "model"])
def test_stop_strings_end_behind_the_token_that_completes_one(
    model: Any, ids: torch.Tensor, tokenizer: Any, greedy: list[int], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    stop = tokenizer.decode(greedy[5:7])
    kwargs: dict[str, Any] = {"stop_strings": [stop], **UNENDING}
    if place == "config":
        kwargs = {"generation_config": GenerationConfig(**kwargs)}
    if place == "model":
        monkeypatch.setattr(model.generation_config, "stop_strings", kwargs.pop("stop_strings"))
    got = new_tokens(model, ids, tokenizer=tokenizer, **kwargs)
    assert got == greedy[: len(got)]
    assert stop in tokenizer.decode(got)
    assert stop not in tokenizer.decode(got[:-1])
    with pytest.raises(ValueError, match="you must pass the model's tokenizer"):
        model.generate(ids, **kwargs)


def test_a_generation_config_may_be_given_by_name_or_place(model: Any, ids: torch.Tensor, greedy: list[int]) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    assert new_tokens(model, ids, config) == new_tokens(model, ids, generation_config=config) == greedy[:5]


def test_sampling_repeats_with_torchs_seed(model: Any, ids: torch.Tensor) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(new_tokens(model, ids, do_sample=True, temperature=2.0, **UNENDING))
    assert texts[0] == texts[1] != texts[2]


def test_a_dict_is_returned_when_asked_for(model: Any, ids: torch.Tensor, greedy: list[int]) -> None:
    output = model.generate(ids, return_dict_in_generate=True, **UNENDING)
    assert output.sequences[0, ids.shape[1] :].tolist() == greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 10, "eos_token_id": 88},
        {"min_length": 20, "eos_token_id": 88},
        {"suppress_tokens": [88, 196, 285], "repetition_penalty": 1.1},
        {"bad_words_ids": [[302], [88, 196]]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_of_the_generation_config_give_transformers_text(
    float_model: Any, reference: PreTrainedModel, ids: torch.Tensor, settings: dict[str, Any]
) -> None:
    settings = {**UNENDING, **settings}
    assert new_tokens(float_model, ids, **settings) == new_tokens(reference, ids, do_sample=False, **settings)


@pytest.mark.parametrize("penalty_of_config", [1.0, 1.1, 1.3])
def test_a_users_own_repetition_penalty_takes_the_place_of_the_configs(
    float_model: Any, reference: PreTrainedModel, ids: torch.Tensor, penalty_of_config: float
) -> None:
    def own() -> dict[str, Any]:
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
        return {"logits_processor": processors, "repetition_penalty": penalty_of_config, **UNENDING}

    got = new_tokens(float_model, ids, **own())
    assert got == new_tokens(reference, ids, do_sample=False, **own())
    assert got == new_tokens(float_model, ids, repetition_penalty=1.3, **UNENDING)
    assert got != new_tokens(float_model, ids, **UNENDING)


def test_a_users_own_processor_sees_prompt_and_answer(model: Any, ids: torch.Tensor) -> None:
    def only_next(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = (int(input_ids[0, -1]) + 1) % scores.shape[1]
        return scores.scatter(1, torch.tensor([[wanted]]), 1e4)

    first = int(ids[0, -1]) + 1
    got = new_tokens(model, ids, logits_processor=[only_next], **UNENDING)
    assert got == [token % 320 for token in range(first, first + NUM_TOKENS)]


def test_users_warpers_come_before_the_configs_and_both_act(float_model: Any, ids: torch.Tensor) -> None:
    """top-k of 1 after any temperature is greedy; a dropped warper would let the heat through."""
    torch.manual_seed(0)
    hot = {"do_sample": True, "temperature": 50.0, **UNENDING}
    cold = new_tokens(float_model, ids, logits_processor=[TopKLogitsWarper(1)], **hot)
    assert cold == new_tokens(float_model, ids, **UNENDING)
    cooled = new_tokens(float_model, ids, logits_processor=[TemperatureLogitsWarper(1e-4)], **hot)
    assert cooled == new_tokens(float_model, ids, **UNENDING)


def test_a_processor_that_changes_nothing_changes_nothing_about_the_others(float_model: Any, ids: torch.Tensor) -> None:
    """With a custom processor transformers' own classes act in place of ours: once, and to the same effect."""
    texts = []
    for extra in ({}, {"logits_processor": [lambda _, scores: scores]}):
        torch.manual_seed(3)
        settings = {"temperature": 3.0, "top_k": 100, "top_p": 0.6, "repetition_penalty": 1.2, **UNENDING}
        texts.append(new_tokens(float_model, ids, do_sample=True, **settings, **extra))
    assert texts[0] == texts[1]


def test_a_users_ngram_rule_is_transformers(float_model: Any, reference: PreTrainedModel, ids: torch.Tensor) -> None:
    def own() -> dict[str, Any]:
        return {"logits_processor": [NoRepeatNGramLogitsProcessor(2)], **UNENDING}

    assert new_tokens(float_model, ids, **own()) == new_tokens(reference, ids, do_sample=False, **own())


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"num_beams": 2}, "Beam search is not supported, got num_beams=2"),
        ({"num_return_sequences": 2, "do_sample": True}, "got a batch of 2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is not returned"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits is not returned"),
    ],
)
def test_what_is_not_supported_is_refused(model: Any, ids: torch.Tensor, kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        model.generate(ids, max_new_tokens=4, **kwargs)


def test_batches_padding_and_embeddings_are_refused(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="got a batch of 2; call generate for each"):
        model.generate(ids.expand(2, -1), max_new_tokens=4)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(UsageError, match="padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(UsageError, match="give input_ids"):
        model.generate(inputs_embeds=torch.zeros(1, 3, 64, dtype=torch.bfloat16), max_new_tokens=4)


def test_a_bare_forward_is_refused_because_it_cannot_fetch(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="call generate, a bare forward cannot fetch"):
        model(ids)
    assert len(new_tokens(model, ids, max_new_tokens=2, eos_token_id=[])) == 2


def test_a_prompt_longer_than_the_context_is_refused_in_our_words(tiny_store: Path) -> None:
    model: Any = moespeq.from_pretrained(tiny_store, ctx_size=16)
    with pytest.raises(UsageError, match="The prompt has 20 tokens and the context 16"):
        model.generate(torch.full((1, 20), 5), max_new_tokens=4)
    assert model.generate(torch.full((1, 10), 5), max_new_tokens=50, eos_token_id=[]).shape == (1, 16)
    model.moespeq_engine.close()
