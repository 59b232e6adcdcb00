"""Long-rope: all keys of a text are turned by the factors that its length asks for, in chunks and across the switch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines import noisy_draft, prompts
from families import make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.prepare import prepare_store

SWITCH = 24
PHI = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": SWITCH,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "phimoe",
        tmp_path_factory.mktemp("longrope") / "checkpoint",
        rope_parameters=PHI,
        original_max_position_embeddings=SWITCH,
        num_hidden_layers=2,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="eager"
    )
    return model


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    store = prepare_store(checkpoint, checkpoint.parent / "store")
    options = LoadOptions(device="cpu", ctx_size=128, k=4, prefill_rows=8, prefix_cache=1 << 20)
    with pytest.MonkeyPatch.context() as patch, open_engine(store, options, dtype=torch.float32) as opened:
        noisy_draft(patch, store, 0.0)
        yield opened


@pytest.mark.parametrize("length", [SWITCH - 1, SWITCH, SWITCH + 1, 2 * SWITCH])
def test_a_prompt_in_chunks_has_the_logits_of_transformers_one_pass(
    engine: Engine, own: PreTrainedModel, length: int
) -> None:
    (prompt,) = prompts(1, length=length)
    with torch.inference_mode():
        expected = own(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(engine.prompt_logits(prompt), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_a_text_across_the_switch_is_transformers_own(engine: Engine, own: PreTrainedModel, k: int) -> None:
    engine.retune(k=k)
    for prompt in prompts(3, length=SWITCH - 6):
        text = list(prompt)
        for _ in range(16):  # without a cache: a text's length turns all of its keys
            with torch.inference_mode():
                text.append(int(own(torch.tensor([text])).logits[0, -1].argmax()))
        result = engine.generate(prompt, max_new_tokens=16, ignore_eos=True)
        assert [*prompt, *result.tokens] == text


def test_keys_that_are_turned_otherwise_are_not_reused(engine: Engine) -> None:
    (long,) = prompts(1, length=2 * SWITCH)
    short = long[: SWITCH - 4]

    def text(prompt: list[int], reuse: str) -> tuple[tuple[int, ...], int]:
        stream = engine.stream(prompt, max_new_tokens=3, ignore_eos=True, reuse=reuse)
        for _ in stream:
            pass
        return stream.result.tokens, stream.reused_tok

    fresh = {len(prompt): text(prompt, "nothing")[0] for prompt in (short, long)}
    for reuse in ("history", "prompt"):
        for prompt in (long, short, long, short):
            assert text(prompt, reuse)[0] == fresh[len(prompt)]
            assert text(prompt, reuse)[1] > 0, "its own are"
