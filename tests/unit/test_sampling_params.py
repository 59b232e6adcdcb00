"""SamplingParams: illegal values are refused with the legal range, and the user's value always wins."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from moespeq.decode.params import SamplingParams
from moespeq.errors import UsageError


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max_new_tokens", 0, "of at least 1"),
        ("max_new_tokens", 2.5, "of at least 1"),
        ("max_new_tokens", True, "of at least 1"),
        ("min_new_tokens", -1, "from 0 to 256"),
        ("min_new_tokens", 257, "from 0 to 256"),
        ("temperature", -0.1, "0 (greedy) or at least 1e-30"),
        ("temperature", 1e-40, "0 (greedy) or at least 1e-30"),
        ("temperature", float("nan"), "0 (greedy)"),
        ("temperature", float("inf"), "0 (greedy)"),
        ("temperature", 10**400, "0 (greedy)"),
        ("temperature", "hot", "0 (greedy)"),
        ("top_k", -1, "of at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
        ("ignore_eos", "no", "True or False"),
        ("stop", "abc", "tuple of texts"),
        ("stop", ("",), "at least 1 character"),
        ("eos_token_ids", [2], "tuple of token ids"),
        ("eos_token_ids", (-1,), "of at least 0"),
        ("acceptance", "typical", "'coupled' or 'rejection'"),
    ],
)
def test_illegal_value_is_refused_with_the_legal_range(option, value, allowed):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{option: value})
    assert allowed in str(caught.value)
    assert str(caught.value).startswith(option.removesuffix("_token_ids")) or "EOS" in str(caught.value)


def test_the_ends_of_every_range_are_legal():
    SamplingParams(max_new_tokens=1, min_new_tokens=1, temperature=1e-6, top_p=1, min_p=1, seed=2**64 - 1)
    SamplingParams(top_k=0, top_p=1e-9, min_p=0, repetition_penalty=1e-3, seed=0)


def test_a_seed_is_drawn_once_and_can_be_reported():
    params = SamplingParams(temperature=1.0)
    drawn = params.seeded()
    assert drawn.seed is not None
    assert drawn.seeded() is drawn
    assert params.seeded().seed != drawn.seed  # equal once in 2^53
    assert SamplingParams(seed=5).seeded().seed == 5


def test_checkpoint_defaults_are_honoured():
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        min_p=0.05,
        repetition_penalty=1.05,
        eos_token_id=[7, 9],
        max_new_tokens=64,
        min_new_tokens=3,
        stop_strings=["###"],
    )
    expected = SamplingParams(64, 3, 0.7, 20, 0.8, 0.05, 1.05, eos_token_ids=(7, 9), stop=("###",))
    assert SamplingParams.from_generation_config(config) == expected


def test_do_sample_false_or_unset_is_greedy_whatever_the_temperature():
    assert SamplingParams.from_generation_config(SimpleNamespace(do_sample=False, temperature=0.7)).is_greedy
    assert SamplingParams.from_generation_config(GenerationConfig()).is_greedy
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True)).temperature == 1.0


def test_an_explicit_value_wins_over_the_checkpoint_and_none_is_not_given():
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=20, eos_token_id=7, min_new_tokens=10)
    params = SamplingParams.from_generation_config(
        config, temperature=0.0, top_k=0, top_p=None, eos_token_ids=(), max_new_tokens=4
    )
    assert (params.temperature, params.top_k, params.top_p, params.eos_token_ids) == (0.0, 0, 1.0, ())
    assert params.min_new_tokens == 4  # the checkpoint's 10 yields to the user's limit


def test_no_generation_config_leaves_the_defaults():
    assert SamplingParams.from_generation_config(None, seed=1) == SamplingParams(seed=1)


def test_a_mistyped_option_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"'temprature'.*Did you mean 'temperature'"):
        SamplingParams.from_generation_config(None, temprature=1.0)


def test_a_checkpoint_setting_that_is_not_applied_is_said_aloud():
    with pytest.warns(UserWarning, match="no_repeat_ngram_size=3 is not applied"):
        SamplingParams.from_generation_config(GenerationConfig(no_repeat_ngram_size=3))


def test_settings_that_the_callers_own_processors_take_care_of_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = GenerationConfig(no_repeat_ngram_size=3)
        SamplingParams.from_generation_config(config, logits_processors=[lambda ids, scores: scores])


def test_what_is_no_list_of_stops_is_not_taken_for_one():
    with pytest.raises(UsageError, match="stop must be a tuple of texts"):
        SamplingParams.from_generation_config(None, stop={"a": 1})


def test_one_stop_or_a_list_may_stand_for_a_tuple():
    params = SamplingParams.from_generation_config(None, stop="END", eos_token_ids=[3, 4])
    assert (params.stop, params.eos_token_ids) == (("END",), (3, 4))
    assert SamplingParams.from_generation_config(None, stop=["a", "b"], eos_token_ids=5).eos_token_ids == (5,)


def test_neutral_settings_of_a_checkpoint_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams.from_generation_config(GenerationConfig(num_beams=1, typical_p=1.0, min_length=0))
