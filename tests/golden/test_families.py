"""Every supported family, tiny and random, against transformers and against itself.

A tiny random model agrees with its draft always, which would prove nothing; so the draft is made worse until it is
accepted about half of the time, and a schedule of flipped tokens visits every acceptance length.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import draft_noise, flip_schedule, open_tight, perfect_draft, prompts
from families import FAMILIES, make_tiny
from moespeq.prepare import prepare_store

NUM_PROMPTS, NUM_TOKENS = 6, 32
NUM_SLOTS = 9  # of 24 to 48 experts: every pass evicts
DEPTHS = (0, 1, 4, 8)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "checkpoint")


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return prepare_store(checkpoint, checkpoint.parent / "store")


@pytest.fixture(scope="module")
def plain(store: Path) -> list[tuple[int, ...]]:
    return _texts(store, 0)[0]


def _texts(store: Path, k: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Greedy tokens of every prompt, and (k, accepted) of every round."""
    with open_tight(store, NUM_SLOTS, k=k) as engine:
        results = [
            engine.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts(NUM_PROMPTS)
        ]
    rounds = [pair for r in results for pair in zip(r.stats.k_per_round, r.stats.accepted_per_round, strict=True)]
    return [result.tokens for result in results], rounds


def test_target_logits_equal_those_of_transformers(checkpoint: Path, store: Path) -> None:
    """float32, equal row counts: a prefill of the whole prompt, atol 1e-4."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    with open_tight(store, NUM_SLOTS, dtype=torch.float32) as engine:
        for prompt in prompts(2, length=24):
            logits = engine.prompt_logits(prompt)
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_speculative_text_is_plain_text_with_a_draft_that_is_often_wrong(
    store: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = 0.2
    for _ in range(8):
        with monkeypatch.context() as patch:
            draft_noise(patch, scale)
            texts, rounds = _texts(store, 4)
            share = sum(accepted for _, accepted in rounds) / sum(k for k, _ in rounds)
            assert texts == plain
            if 0.3 <= share <= 0.9:
                assert all(_texts(store, k)[0] == plain for k in (1, 8))
                return
        scale *= 1.6 if share > 0.9 else 0.6
    pytest.fail(f"no draft noise gave an acceptance between 0.3 and 0.9, last {share:.2f}")


@pytest.mark.parametrize("k", DEPTHS[1:])
def test_every_acceptance_length_keeps_the_text(
    store: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    perfect_draft(monkeypatch, store)
    flip_schedule(monkeypatch, k)
    texts, rounds = _texts(store, k)
    assert texts == plain
    assert {accepted for depth, accepted in rounds if depth == k} == set(range(k + 1))
