"""Accept: which drafted tokens the target keeps, and where a generation ends. Pure functions, no state.

Glossary: *accepted* are the drafted tokens the target agrees with; *recovered* is the token sampled after a
rejection; *bonus* is the extra token when all k were accepted; *committed* = accepted + 1, cut after EOS or
the limit (a stop text is found by `text`).

Shapes: k drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq.types import FinishReason

__all__ = ["Accepted", "Cut", "accept_coupled", "accept_rejection", "cut"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The tokens a round emits: `accepted` drafted ones, then the recovered or bonus token."""

    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Committed tokens after the cut, and why the generation ended, or None when it goes on."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


def accept_coupled(drafted: Sequence[int], target: Sequence[int]) -> Accepted:
    """Keep the drafted tokens [k] up to the first that differs from the target's own choices [k + 1].

    Every emitted token is the target's, so the draft can change how many are emitted and never which.
    """
    assert len(target) == len(drafted) + 1, f"{len(drafted)} drafted tokens, but {len(target)} target rows"
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == target[accepted]:
        accepted += 1
    return Accepted(accepted, tuple(target[: accepted + 1]))


def accept_rejection(
    drafted: Sequence[int], draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, noise: Tensor
) -> Accepted:
    """Speculative sampling (Leviathan et al. 2023): emits the target's distribution whatever the draft's is.

    Token x of the draft's q [k, V] is accepted with probability min(1, p(x) / q(x)), p [k + 1, V]; after a
    rejection the recovered token is drawn from max(p - q, 0), and after k acceptances the bonus token from p.
    `uniforms` [k] and Gumbel `noise` [k + 1, V] must be independent of what drew the draft. A q of NaN, of a draft that
    was no distribution, accepts nothing and takes nothing away from p.
    """
    k = len(drafted)
    accepted = 0
    if k:
        chosen = torch.tensor(drafted, device=target_probs.device)[:, None]  # [k, 1]
        p = target_probs[:k].gather(-1, chosen)[:, 0]
        q = draft_probs.gather(-1, chosen)[:, 0]
        is_kept = uniforms * q < p
        accepted = int(is_kept.long().cumprod(0).sum())
    weights = target_probs[accepted]  # [V]
    if accepted < k:
        residual = (weights - draft_probs[accepted]).clamp(min=0)
        # p and q may be equal but for rounding, or q NaN: a rejection then leaves nothing to draw from but p.
        weights = torch.where(residual.sum() > 0, residual, weights)
    last = int((weights.log() + noise[accepted]).argmax())
    return Accepted(accepted, (*drafted[:accepted], last))


def cut(tokens: Sequence[int], *, eos_token_ids: Collection[int], limit_tok: int, ignore_eos: bool = False) -> Cut:
    """Cut `tokens` behind the first EOS, which stays, and to `limit_tok`, the tokens still allowed."""
    assert limit_tok >= 1, f"nothing may be emitted any more, limit_tok is {limit_tok}"
    for index, token in enumerate(tokens[:limit_tok]):
        if token in eos_token_ids and not ignore_eos:
            return Cut(tuple(tokens[: index + 1]), FinishReason.STOP)
    return Cut(tuple(tokens[:limit_tok]), FinishReason.LENGTH if len(tokens) >= limit_tok else None)
