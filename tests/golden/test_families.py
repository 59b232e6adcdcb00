"""Every supported family, tiny and random, against transformers and against itself.

The long tests run for a family of each kind; for all of them under `make exact`.

A tiny random model agrees with its draft always or hardly ever, which would prove nothing; so noise on the draft's
weights is tuned until about half of its tokens are accepted, and a schedule of flipped tokens visits every length.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from engines import flip_schedule, noisy_draft, open_tight, prompts
from families import FAMILIES, auto_class, make_tiny
from moespeq.model.checkpoint_map import map_checkpoint, outline_model
from moespeq.prepare import prepare_store
from moespeq.store import Store, open_checkpoint

ALWAYS = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
MANY = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exact) for name in FAMILIES]
NUM_PROMPTS, NUM_TOKENS = 6, 32
NUM_SLOTS = 9  # of 24 to 48 experts: every pass evicts
DEPTHS = (0, 1, 4, 8)
CHUNK_ROWS, LONG_TOK = 48, 150  # linear attention takes 64 rows at once, and some of these chunks end between


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "checkpoint")


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return prepare_store(checkpoint, checkpoint.parent / "store")


@pytest.fixture(scope="module")
def plain(store: Path) -> list[tuple[int, ...]]:
    return _texts(store, 0)[0]


def _texts(
    store: Path, k: int, count: int = NUM_PROMPTS, *, length: int = 12
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Greedy tokens of `count` prompts, and (k, accepted) of every round."""
    asked = prompts(count, length=length)
    with open_tight(store, NUM_SLOTS, k=k, prefill_rows=CHUNK_ROWS) as engine:
        results = [engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True) for prompt in asked]
    rounds = [pair for r in results for pair in zip(r.stats.k_per_round, r.stats.accepted_per_round, strict=True)]
    return [result.tokens for result in results], rounds


def _acceptance(rounds: list[tuple[int, int]]) -> float:
    return sum(accepted for _, accepted in rounds) / sum(k for k, _ in rounds)


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Of transformers in one pass. MiniMax's stored decays of a block are rounded, so it goes on where ours does."""
    is_minimax = model.config.model_type == "minimax"
    cache, num_rows = (MiniMaxCache(), CHUNK_ROWS) if is_minimax else (None, len(prompt))
    return torch.cat(
        [
            model(input_ids=torch.tensor([prompt[begin : begin + num_rows]]), past_key_values=cache).logits[0]
            for begin in range(0, len(prompt), num_rows)
        ]
    )


def _find_noise(store: Path) -> float:
    """Noise at which about half of the drafted tokens are accepted, by bisection over its size."""
    low, high = 0.0, 1.0
    for _ in range(12):
        noise = (low + high) / 2
        with pytest.MonkeyPatch.context() as patch:
            noisy_draft(patch, store, noise)
            share = _acceptance(_texts(store, 4, count=2)[1])
        if 0.4 <= share <= 0.8:
            break
        low, high = (noise, high) if share > 0.8 else (low, noise)
    return noise


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True, scope="module")
def test_target_logits_equal_those_of_transformers(checkpoint: Path, store: Path) -> None:
    """float32, atol 1e-4: a prefill of the whole prompt, and one in chunks past every window, block and state."""
    auto = auto_class(AutoConfig.from_pretrained(checkpoint))
    reference = auto.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    with open_tight(store, NUM_SLOTS, dtype=torch.float32, prefill_rows=CHUNK_ROWS) as engine:
        for prompt in (*prompts(2, length=24), *prompts(1, length=LONG_TOK)):
            logits = engine.prompt_logits(prompt)
            torch.testing.assert_close(logits, _own_logits(reference, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True, scope="module")
def test_keys_values_and_states_take_what_the_plan_says(store: Path) -> None:
    with open_tight(store, NUM_SLOTS, k=4) as engine:
        engine.generate(prompts(1)[0], max_new_tokens=6, ignore_eos=True)
        assert engine._parts.runner.kv_bytes == engine.plan.kv_bytes


@pytest.mark.parametrize("checkpoint", MANY, indirect=True, scope="module")
def test_no_expert_is_loaded_with_the_rest(checkpoint: Path, store: Path) -> None:
    """What transformers is given holds none of them, and there is no parameter that could."""
    with Store.open(store) as opened:
        given = {entry.name for entry, _ in opened.dense_tensors()}
    assert given == set(map_checkpoint(open_checkpoint(checkpoint)).dense)
    with open_tight(store, NUM_SLOTS) as engine:
        loaded = sum(map(torch.numel, engine.model.parameters()))
    assert loaded == outline_model(checkpoint).dense_weights


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True, scope="module")
def test_rejected_tokens_leave_no_trace(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt in several chunks, longer than what any state, window or block holds."""
    texts, _ = _texts(store, 0, count=1, length=LONG_TOK)
    flip_schedule(monkeypatch, 4)
    assert _texts(store, 4, count=1, length=LONG_TOK)[0] == texts


@pytest.mark.parametrize("checkpoint", MANY, indirect=True, scope="module")
def test_speculative_text_is_plain_text_with_a_draft_that_is_often_wrong(
    store: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy_draft(monkeypatch, store, _find_noise(store))
    for k in DEPTHS[1:]:
        texts, rounds = _texts(store, k)
        assert texts == plain
        if k == 4:
            assert 0.3 <= _acceptance(rounds) <= 0.9


@pytest.mark.parametrize("checkpoint", MANY, indirect=True, scope="module")
@pytest.mark.parametrize("k", DEPTHS[1:])
def test_every_acceptance_length_keeps_the_text(
    store: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    noisy_draft(monkeypatch, store, 0.0)
    flip_schedule(monkeypatch, k)
    texts, rounds = _texts(store, k)
    assert texts == plain
    assert {accepted for depth, accepted in rounds if depth == k} == set(range(k + 1))
