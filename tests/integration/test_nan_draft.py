"""A draft that is no number costs time and nothing else: the text is plain decoding's, whatever the sampling.

NaN comes from damaged base weights, or from a draft that overflows where the target does not. What it left in the
key/value cache is written again by the verify pass; what a failed answer left there is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import flip_schedule, open_tight
from moespeq.decode.engine import Engine
from moespeq.decode.sampling import DraftToken, Sampler
from moespeq.errors import MoespeqError
from moespeq.model.weights import ExpertWeights

PROMPT = [5, 9, 6, 7, 200, 31]
NUM_TOK = 24


def odd_only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A grammar of odd tokens, which cannot go on behind an even one of its own."""
    if any(token % 2 == 0 for token in ids[0, len(PROMPT) :].tolist()):
        raise ZeroDivisionError("an even token was let through")
    return scores + torch.where(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf, 0.0)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 0.9, "seed": 3},
    "warped": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "grammar": {"logits_processors": odd_only},
    "sampled grammar": {"logits_processors": odd_only, "temperature": 0.9, "seed": 3},
}


@pytest.fixture
def nan_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every INT4 weight of the draft is NaN."""
    honest = ExpertWeights.base

    def base(self: ExpertWeights, layer: int, expert: int, dtype: torch.dtype) -> Any:
        return [torch.full_like(matrix, torch.nan) for matrix in honest(self, layer, expert, dtype)]

    monkeypatch.setattr(ExpertWeights, "base", base)


def text(engine: Engine, **sampling: Any) -> tuple[int, ...]:
    return engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True, **sampling).tokens


@pytest.mark.usefixtures("nan_base")
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_the_text_is_that_of_plain_decoding(tiny_store: Path, sampling: dict[str, Any]) -> None:
    with open_tight(tiny_store, 12, k=0) as engine:
        plain = text(engine, **sampling)
    with open_tight(tiny_store, 12, k=4) as engine:
        for _ in range(2):
            assert text(engine, **sampling) == plain
        engine._parts.residency.check()


@pytest.mark.usefixtures("nan_base")
@pytest.mark.parametrize("processors", [(), (odd_only,)])
def test_rejection_sampling_goes_on_with_the_targets_distribution(tiny_store: Path, processors: tuple[Any]) -> None:
    with open_tight(tiny_store, 12, k=4) as engine:
        result = engine.generate(
            PROMPT,
            max_new_tokens=NUM_TOK,
            ignore_eos=True,
            temperature=1.0,
            acceptance="rejection",
            seed=3,
            logits_processors=processors,
        )
    assert len(result.tokens) == NUM_TOK
    assert result.stats.acceptance == 0


@pytest.mark.usefixtures("nan_base")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_answer_that_fails_while_drafting_leaves_no_nan_behind(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    honest = Sampler.draft_token

    def breaking(self: Sampler, logits: torch.Tensor, position: int, drafted: Sequence[torch.Tensor]) -> DraftToken:
        if position == len(PROMPT) + 8:
            raise error
        return honest(self, logits, position, drafted)

    with open_tight(tiny_store, 12, k=4) as engine:
        before = engine.generate(PROMPT[:2], max_new_tokens=4).tokens
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "draft_token", breaking)
            with pytest.raises(error):
                text(engine)
        assert engine.generate(PROMPT[:2], max_new_tokens=4).tokens == before


def nan_behind(patch: pytest.MonkeyPatch, engine: Engine, token: int) -> None:
    """The target's logits are NaN in every row behind `token`."""
    runner = engine._parts.runner
    honest = runner.verify

    def verify(tokens: Sequence[int], position: int, on_layer: Any) -> torch.Tensor:
        logits = honest(tokens, position, on_layer).clone()
        rows = torch.tensor([own == token for own in tokens])
        return logits.masked_fill(rows[:, None], torch.nan)

    patch.setattr(runner, "verify", verify)


def test_a_target_that_is_no_number_behind_a_rejected_token_is_never_seen(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tight(tiny_store, 12, k=0) as engine:
        plain = text(engine)
    unused = next(token for token in range(3, 300) if token not in plain)

    def draft(self: Sampler, logits: torch.Tensor, position: int, drafted: Sequence[torch.Tensor]) -> DraftToken:
        probs = torch.full_like(logits[0], 1 / logits.shape[1], dtype=torch.float32)
        return DraftToken(torch.tensor([unused]), probs if self.uses_rejection else None)

    monkeypatch.setattr(Sampler, "draft_token", draft)
    with open_tight(tiny_store, 12, k=4) as engine, monkeypatch.context() as patch:
        nan_behind(patch, engine, unused)
        assert text(engine) == plain


def test_a_target_that_is_no_number_in_a_live_row_is_an_error_with_its_position(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tight(tiny_store, 12, k=0) as engine:
        plain = text(engine)
    at = next(index for index in range(8, NUM_TOK) if plain[index] not in plain[:index])
    flip_schedule(monkeypatch, 4)
    for k in (0, 4):
        with open_tight(tiny_store, 12, k=k) as engine, monkeypatch.context() as patch:
            nan_behind(patch, engine, plain[at])
            with pytest.raises(MoespeqError, match=f"NaN at position {len(PROMPT) + at + 1}"):
                text(engine)
