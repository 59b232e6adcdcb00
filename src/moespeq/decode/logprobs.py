"""What the target thought of tokens: log-probabilities of its raw logits, before any processor or temperature.

Owns the arithmetic alone; who keeps the logits decides which rows are asked about. Rows are taken a few at a time,
since a float32 copy of all rows of a prompt would be larger than what the memory plan allows for.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenLogprob", "token_logprobs"]

_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, and the most likely tokens in its place with theirs, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Of `tokens` [n], each chosen from its own row of `logits` [n, V]; `num_top` others are named beside it."""
    assert len(logits) == len(tokens), f"{len(logits)} rows for {len(tokens)} tokens"
    scored: list[TokenLogprob] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        chosen = tokens[start : start + _ROWS_AT_ONCE]
        scored += _few_rows(logits[start : start + _ROWS_AT_ONCE], chosen, min(num_top, logits.shape[-1]))
    return scored


def _few_rows(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    logprobs = logits.to(torch.float32).log_softmax(dim=-1)
    ids = torch.tensor(tokens, device=logits.device)[:, None]
    own = logprobs.gather(-1, ids)[:, 0].tolist()
    top = logprobs.topk(num_top)
    pairs = (zip(*row, strict=True) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return [TokenLogprob(token, value, tuple(pair)) for token, value, pair in zip(tokens, own, pairs, strict=True)]
