"""Prompts with images, tiny and random, against transformers and against themselves.

Prefill's logits are those of transformers' own forward of the whole prompt, wherever its chunks end; tokens behind it
are those of its own generate, which go on from the positions that the images left; and no k changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from engines import flip_schedule, noisy_draft, open_tight
from families import auto_class
from image_families import IMAGE_FAMILIES, make_reader, png
from moespeq.decode.engine import Engine
from moespeq.model.images import ImagePrompt
from moespeq.prepare import prepare_store

NUM_SLOTS, NUM_TOKENS = 9, 12
ALWAYS = ("qwen3_vl_moe", "gemma4")
MANY = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exact) for name in IMAGE_FAMILIES]
# Rows of a chunk in which an image fits, and at whose end one would be cut.
CUTTING = {"qwen3_vl_moe": 28, "qwen3_5_moe": 28, "gemma4": 80}
BOTH_WAYS = {"gemma4": {"use_bidirectional_attention": "vision"}}  # as the published ones with experts


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    return make_reader(request.param, folder, **BOTH_WAYS.get(request.param, {}))


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return prepare_store(checkpoint, checkpoint.parent / "store")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    auto = auto_class(AutoConfig.from_pretrained(checkpoint))
    return auto.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")


def _open(store: Path, *, prefill_rows: int = 8192, **options: Any) -> Engine:
    return open_tight(store, NUM_SLOTS, ctx_size=320, prefill_rows=prefill_rows, **options)


def _ask(engine: Engine, *files: bytes) -> ImagePrompt:
    """A question about images, with text before, between and behind them."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look here: "}]
    for file in files:
        parts += [
            {"type": "image", "image": engine.images.read(file)},
            {"type": "text", "text": " and what is in it? "},
        ]
    prompt = engine.encode_chat([{"role": "user", "content": parts}])
    assert isinstance(prompt, ImagePrompt)
    return prompt


def _inputs(model: PreTrainedModel, prompt: ImagePrompt) -> dict[str, torch.Tensor]:
    """What transformers' processor gives for the same prompt."""
    ids = torch.tensor([list(prompt.tokens)])
    images = [placed.image.inputs for placed in prompt.images]
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        **{name: torch.cat([inputs[name] for inputs in images]) for name in images[0]},
    }


def _texts(store: Path, k: int) -> list[tuple[int, ...]]:
    with _open(store, k=k) as engine:
        asked = [_ask(engine, png(1), png(2, 33, 50)), _ask(engine, png(3, 64, 16))]
        return [engine.generate(one, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens for one in asked]


@pytest.mark.parametrize("checkpoint", IMAGE_FAMILIES, indirect=True, scope="module")
@pytest.mark.parametrize("is_cut", [False, True])
def test_target_logits_equal_those_of_transformers(
    checkpoint: Path, store: Path, reference: PreTrainedModel, is_cut: bool
) -> None:
    """float32, atol 1e-4: in one chunk, and in several of which none cuts an image.

    The kernel of Qwen3.5's layers with a state takes 64 rows at once, so their sums depend on where chunks begin: 1e-3.
    """
    atol = 1e-3 if is_cut and reference.config.model_type == "qwen3_5_moe" else 1e-4
    rows = CUTTING[reference.config.model_type] if is_cut else 8192
    with _open(store, dtype=torch.float32, prefill_rows=rows) as engine:
        prompt = _ask(engine, png(1), png(2, 33, 50))
        logits = engine.prompt_logits(prompt)
        blind = engine.prompt_logits(list(prompt.tokens))
    with torch.inference_mode():
        expected = reference(**_inputs(reference, prompt)).logits[0]
    assert len(prompt) > rows or not is_cut
    assert (blind - expected).abs().max() > 1  # the images count
    torch.testing.assert_close(logits, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("checkpoint", IMAGE_FAMILIES, indirect=True, scope="module")
def test_tokens_behind_images_are_those_of_transformers_generate(
    checkpoint: Path, store: Path, reference: PreTrainedModel
) -> None:
    with _open(store, dtype=torch.float32, k=4) as engine:
        prompt = _ask(engine, png(1), png(2, 33, 50))
        tokens = engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens
    with torch.inference_mode():
        expected = reference.generate(
            **_inputs(reference, prompt), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    assert list(tokens) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("checkpoint", MANY, indirect=True, scope="module")
def test_speculative_text_is_plain_text(checkpoint: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16; every number of drafted tokens is rejected once."""
    plain = _texts(store, 0)
    noisy_draft(monkeypatch, store, 0.0)
    flip_schedule(monkeypatch, 4)
    assert _texts(store, 4) == plain
    assert plain[0] != plain[1]


@pytest.mark.parametrize("checkpoint", MANY, indirect=True, scope="module")
def test_another_image_of_the_same_size_is_another_prompt(checkpoint: Path, store: Path) -> None:
    """Equal tokens: what an engine kept of the first must not be used for the second."""
    rows = CUTTING[AutoConfig.from_pretrained(checkpoint).model_type]

    def answer(engine: Engine, prompt: ImagePrompt, reuse: Any) -> tuple[Sequence[int], int]:
        stream = engine.stream(prompt, reuse=reuse, max_new_tokens=4, ignore_eos=True)
        list(stream)
        return stream.result.tokens, stream.reused_tok

    with _open(store, prefill_rows=rows, prefix_cache=1 << 20) as engine:
        first, second = _ask(engine, png(1)), _ask(engine, png(2))
        assert first.tokens == second.tokens
        fresh = [answer(engine, prompt, "nothing")[0] for prompt in (first, second)]
        kept = [answer(engine, prompt, "prompt") for prompt in (first, second, first)]
        assert [tokens for tokens, _ in kept] == [fresh[0], fresh[1], fresh[0]]
        answer(engine, first, "history")
        begin = first.images[0].begin
        assert answer(engine, second, "history")[1] <= begin
        assert answer(engine, second, "history")[1] in (0, len(second) - 1)  # 0: layers with a state
