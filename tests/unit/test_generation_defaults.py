"""What a checkpoint says of generation: where it may say it, who wins, and that transformers reads the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from families import auto_class, make_tiny, tiny_config
from moespeq.decode.params import SamplingParams, end_token_ids
from moespeq.errors import CheckpointError
from moespeq.model.loading import load_config, load_generation_config

LEGACY = {"do_sample": True, "temperature": 0.5, "top_p": 0.7, "repetition_penalty": 1.2, "max_new_tokens": 7}
READ = ("eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("defaults") / "checkpoint", num_hidden_layers=1)


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> None:
    """Change what the model's configuration says (None: no longer), and what the generation config does."""
    path, own = folder / "config.json", folder / "generation_config.json"
    said = {name: value for name, value in (json.loads(path.read_text()) | config).items() if value is not None}
    path.write_text(json.dumps(said))
    own.unlink(missing_ok=True)
    if generation is not None:
        own.write_text(json.dumps(generation))


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({}, None),
        ({"eos_token_id": [1, 5]}, None),
        ({"eos_token_id": 4, **LEGACY}, None),
        ({}, {"eos_token_id": 9}),
        ({}, {"eos_token_id": [9, 10], "do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1}),
        ({"eos_token_id": 4, **LEGACY}, {"eos_token_id": 9}),
        ({}, {"eos_token_id": 9, "temperature": 0.6, "top_p": 0.95}),
    ],
)
def test_defaults_are_those_that_transformers_generates_with(
    checkpoint: Path, config: dict[str, Any], generation: dict[str, Any] | None
) -> None:
    before = (checkpoint / "config.json").read_text()
    try:
        write(checkpoint, config, generation)
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint).generation_config
        ours = load_generation_config(checkpoint, load_config(checkpoint))
    finally:
        (checkpoint / "config.json").write_text(before)
    assert {name: getattr(ours, name) for name in READ} == {name: getattr(theirs, name) for name in READ}


def test_a_generation_config_without_an_end_takes_the_models(tmp_path: Path) -> None:
    tiny_config("qwen3_moe", eos_token_id=4).save_pretrained(tmp_path)
    write(tmp_path, {}, {"do_sample": True, "temperature": 0.6})
    read = load_generation_config(tmp_path, load_config(tmp_path))
    assert (read.eos_token_id, read.temperature) == (4, 0.6)


def test_a_model_of_images_too_has_its_texts_end(tmp_path: Path) -> None:
    config = tiny_config("qwen3_vl_moe", eos_token_id=[6, 8])
    config.save_pretrained(tmp_path)
    write(tmp_path, {"eos_token_id": None}, None)
    theirs = auto_class(config).from_config(config).generation_config
    assert load_generation_config(tmp_path, load_config(tmp_path)).eos_token_id == theirs.eos_token_id == [6, 8]


def test_nonsense_of_generation_in_the_model_config_is_named(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    write(tmp_path, {"max_new_tokens": "many"}, None)
    with pytest.raises(CheckpointError, match=r"config\.json says nonsense of generation"):
        load_generation_config(tmp_path, config)


@pytest.mark.parametrize(
    ("named", "of_tokenizer", "ends"),
    [
        (None, None, ()),
        (None, 3, (3,)),
        (5, None, (5,)),
        (5, 3, (5, 3)),
        ([5, 7], 3, (5, 7, 3)),
        ([5, 3], 3, (5, 3)),
        ([-1, 5, 99], 100, (5,)),
    ],
)
def test_every_named_token_of_the_vocabulary_ends_a_text(
    named: Any, of_tokenizer: int | None, ends: tuple[int, ...]
) -> None:
    assert end_token_ids(GenerationConfig(eos_token_id=named), of_tokenizer, vocab_size=99) == ends


def test_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams.from_generation_config(GenerationConfig(do_sample=True, top_k=-1)).top_k == 0


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "penalty_alpha"])
def test_a_default_that_nobody_applies_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: 0.6}))
    read = load_generation_config(tmp_path, tiny_config("qwen3_moe"))
    with pytest.warns(UserWarning, match=f"{name}=0.6 is not applied"):
        SamplingParams.from_generation_config(read)
