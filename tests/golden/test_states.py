"""Layers with a state where a text stops: cancelled within rounds that reject, or at the context's end.

The default run takes two kinds of state; `make exact` all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import flip_schedule, noisy_draft, open_tight, prompts
from families import TEXT_FAMILIES, make_tiny, tiny_config
from moespeq.model import families
from moespeq.prepare import prepare_store

ALWAYS = ("qwen3_next", "nemotron_h")
WITH_STATES = [name for name in TEXT_FAMILIES if families.FAMILIES[tiny_config(name).model_type].mixer]
NUM_SLOTS, NUM_TOKENS = 12, 24
(PROMPT,) = prompts(1, length=20)
CONTEXT = len(PROMPT) + 11


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exact) for name in WITH_STATES],
)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return prepare_store(make_tiny(request.param, folder / "checkpoint"), folder / "store")


def test_every_family_with_a_mixer_is_here() -> None:
    mixing = {name for name, family in families.FAMILIES.items() if family.mixer}
    assert mixing == {tiny_config(name).model_type for name in WITH_STATES}


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_cancelled_text_goes_on_as_if_it_had_not_stopped(
    store: Path, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    with open_tight(store, NUM_SLOTS, k=0) as engine:
        whole = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens
    noisy_draft(monkeypatch, store, 0.0)
    flip_schedule(monkeypatch, k)
    with open_tight(store, NUM_SLOTS, k=k) as engine:
        kept: tuple[int, ...] = ()
        while len(kept) < NUM_TOKENS:
            num_tok = NUM_TOKENS - len(kept)
            stream = engine.stream([*PROMPT, *kept], max_new_tokens=num_tok, ignore_eos=True, reuse="history")
            pieces = (piece for piece in stream if piece.tokens)
            for number, _ in enumerate(pieces):
                if number:  # the first comes of the prefill, the second of a round
                    stream.cancel()
            assert bool(kept) == (stream.reused_tok > 0)
            kept += stream.result.tokens
    assert kept == whole


def test_a_text_ends_where_the_context_is_full_for_every_k(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy_draft(monkeypatch, store, 0.0)
    texts = set()
    for k in (0, 1, 4, 8):
        with pytest.MonkeyPatch.context() as patch, open_tight(store, NUM_SLOTS, k=k, ctx_size=CONTEXT) as engine:
            flip_schedule(patch, k)
            texts.add(engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens)
    (text,) = texts
    assert len(text) == 11
