"""The parts of a recording that need no model: windows of a text, a sampler gone back, a draft told what follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moespeq.buckets import LengthBuckets
from moespeq.decode.params import SamplingParams
from moespeq.decode.recording import _draft_along, _windows
from moespeq.decode.sampling import Sampler
from moespeq.model.runner import max_k

VOCAB_SIZE = 40
PROMPT, TEXT = [3, 4, 5], [6, 7, 8, 9, 10]


def runner_of(*, rows: int, context_tok: int) -> Any:
    buckets = LengthBuckets(context_tok)
    return SimpleNamespace(max_k=lambda position: max_k(position, rows, buckets, context_tok))


@pytest.mark.parametrize(
    ("first", "num_tok", "context_tok", "windows"),
    [
        (10, 17, 512, [(0, 17)]),
        (10, 18, 512, [(0, 17), (17, 18)]),
        (250, 40, 512, [(0, 6), (6, 23), (23, 40)]),  # a length bucket ends at 256
        (290, 10, 300, [(0, 10)]),
        (299, 1, 300, [(0, 1)]),
    ],
)
def test_windows_are_as_deep_as_a_round_may_be_and_cover_the_text(
    first: int, num_tok: int, context_tok: int, windows: list[tuple[int, int]]
) -> None:
    assert _windows(runner_of(rows=17, context_tok=context_tok), first, num_tok) == windows


def test_a_rewound_sampler_chooses_as_it_did_then() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, min_new_tokens=4, eos_token_ids=(1,), seed=3)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    sampler, then = Sampler(params, VOCAB_SIZE, PROMPT, choice_index=2), {}
    for token in TEXT:
        then[sampler.num_tok] = sampler.target_tokens(logits, sampler.num_tok, [])
        sampler.commit([token])
    for num_tok, chosen in then.items():
        assert sampler.rewound(num_tok).target_tokens(logits, num_tok, []) == chosen
    assert sampler.num_tok == len(PROMPT) + len(TEXT)


def test_a_draft_is_told_the_text_and_its_own_proposals_are_kept() -> None:
    """Proposals are 20, 21, ... with a probability that falls, and one is NaN."""
    told: list[int] = []

    class Proposing:
        device = torch.device("cpu")

        def draft(
            self,
            token: int,
            position: int,
            num_steps: int,
            choose: Callable[[torch.Tensor, int], torch.Tensor],
            on_step: Callable[[int, Sequence[Sequence[int]]], None],
            *,
            num_chosen: int,
        ) -> None:
            assert (token, position, num_steps, num_chosen) == (TEXT[0], 3, 4, 4)
            for step in range(num_steps):
                logits = torch.zeros(1, VOCAB_SIZE)
                logits[0, 20 + step] = torch.nan if step == 3 else 9.0 - step
                on_step(step, [[step]])
                told.append(int(choose(logits, step)))

    sampler = Sampler(SamplingParams(), VOCAB_SIZE, [*PROMPT, TEXT[0]])
    said = _draft_along(Proposing(), sampler, TEXT)  # type: ignore[arg-type]
    assert told == TEXT[1:]
    assert [row.token for row in said] == [20, 21, 22, 23]
    assert [row.step for row in said] == [0, 1, 2, 3]
    assert [row.routes for row in said] == [[[0]], [[1]], [[2]], [[3]]]
    assert 1 > said[0].confidence > said[1].confidence > said[2].confidence > said[3].confidence == 0
