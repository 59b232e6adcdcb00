"""Logits processors as fixed-shape tensor operations, in transformers' order and equal to its own.

Order: repetition penalty, minimum new tokens, then the caller's own processors, then the warpers
(temperature, top-k, top-p, min-p), which act only when sampling. Removed tokens are -inf.

Invariant: row j of a result depends on row j of the input alone, bit for bit, whatever R is. Float sums break
that on a GPU (the kernel, and so the order of addition, follows the shape and the row's alignment), so
nothing here adds floats: top-p adds fixed-point integers, min-p compares with the maximum.

Shapes: R rows, V vocabulary; logits are float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moespeq.decode.params import SamplingParams

__all__ = [
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "merge_custom",
    "penalize_repetition",
    "suppress_before",
    "warp",
]

_FIXED_POINT = float(2**40)  # a vocabulary of 2^22 at full weight still sums below 2^63

_FEW = 1024  # nearly always enough for top-p

# transformers' class, our parameter, and the value at which it is off.
_BUILT_IN: dict[str, tuple[str, float]] = {
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", 1.0),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", 0),
}


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens in `seen` [R, V] bool by `penalty`."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def suppress_before(logits: Tensor, token_ids: Tensor, num_new_tok: Tensor, min_new_tokens: int) -> Tensor:
    """Remove `token_ids` where fewer than `min_new_tokens` new tokens, `num_new_tok` [R], precede the row."""
    allowed = logits.index_fill(-1, token_ids, -math.inf)
    return torch.where((num_new_tok < min_new_tokens)[:, None], allowed, logits)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the `top_k` largest logits, and all that tie with the last of them."""
    smallest_kept = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens whose probabilities sum to `top_p`, at least one; of equals, higher ids.

    A CPU takes 30 ms to sort a row of 150,000, so there a few are sorted first, and the whole row only if the
    edge is beyond them. A GPU sorts the row at once, without waiting for the host to look.
    """
    relative = (logits - logits.amax(dim=-1, keepdim=True)).to(torch.float64)
    mass = (relative.exp_() * _FIXED_POINT).to(torch.int64)  # [R, V], exact in any order of addition
    vocab_size = logits.shape[-1]
    if logits.device.type == "cpu" and vocab_size > _FEW:
        ids = logits.topk(_FEW).indices.sort(dim=-1).values  # in the order of ids, as the whole row is
        is_removed, is_last_removed = _beyond_top_p(logits.gather(-1, ids), mass.gather(-1, ids), mass, top_p)
        if bool(is_last_removed.all()):
            kept = logits.gather(-1, ids).masked_fill(is_removed, -math.inf)
            return torch.full_like(logits, -math.inf).scatter(-1, ids, kept)
    return logits.masked_fill(_beyond_top_p(logits, mass, mass, top_p)[0], -math.inf)


def _beyond_top_p(values: Tensor, mass: Tensor, whole_mass: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Which of the most likely tokens [R, C] top-p removes, and per row whether all equals of the last go."""
    ascending, order = torch.sort(values, dim=-1, stable=True)
    own = mass.gather(-1, order)
    from_here_up = own.flip(-1).cumsum(dim=-1).flip(-1)
    total = whole_mass.sum(dim=-1, keepdim=True)
    up_to_here = total - from_here_up + own
    share = (up_to_here.to(torch.float64) / total).to(torch.float32)
    is_removed = share <= 1 - top_p
    is_removed[:, -1] = False
    is_last_removed = (is_removed | (ascending > ascending[:, :1])).all(dim=-1)
    return torch.zeros_like(is_removed).scatter(-1, order, is_removed), is_last_removed


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens of at least `min_p` times the probability of the most likely one."""
    if min_p == 0:
        return logits
    relative = logits - logits.amax(dim=-1, keepdim=True)  # log of the ratio of probabilities
    return logits.masked_fill(relative < math.log(min_p), -math.inf)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """The warpers that `params` turns on; greedy decoding has none."""
    if params.is_greedy:
        return logits
    if params.temperature != 1:
        logits = logits / params.temperature
    if params.top_k > 0:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    return keep_min_p(logits, params.min_p)


def merge_custom(params: SamplingParams) -> SamplingParams:
    """`params` with the caller's processors in the order they run, and the built-ins they replace turned off.

    As in transformers, a custom processor of a built-in's class replaces that built-in, if it is on, and runs
    in its place, so first; the others keep their order behind it.
    """
    first, others = [], []
    off: dict[str, Any] = {}
    for processor in params.logits_processors:
        name, neutral = _BUILT_IN.get(type(processor).__name__, ("", 0))
        if name and getattr(params, name) != neutral:
            first.append(processor)
            off[name] = neutral
        else:
            others.append(processor)
    return replace(params, logits_processors=(*first, *others), **off)
