"""Routed experts in plain torch: group rows by expert, multiply in fixed row tiles, sum in slot order.

Shapes: T rows of a pass, K experts a row, P = T * K routed pairs, H hidden, I intermediate, N rows of one expert.

Why tiles: a bf16 product's rounding depends on the number of rows it is computed with, so each expert multiplies
exactly `row_tile` rows at a time, zero rows added. A row's result is then the same whatever else is in the batch. Why
slot order: floating point sums depend on their order, and records arrive in any order; so the K results of a row are
kept apart until all are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["ExpertMath", "combine", "expert_products", "group_by_expert"]


@dataclass(frozen=True, slots=True)
class ExpertMath:
    """What one model family does between and after the two products of an expert.

    activate: [N, 2I] -> [N, I] (gated) or [N, I] -> [N, I]. The biases are [E, 2I] and [E, H], or None.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def group_by_expert(routes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Routed pairs of each expert: `routes` [T, K] -> {expert: flat pair indices t * K + slot, ascending}."""
    flat = routes.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    return dict(zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True))


def expert_products(
    rows: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    math: ExpertMath,
    expert: int,
    *,
    row_tile: int | None,
) -> torch.Tensor:
    """One expert on its rows: [N, H] -> [N, H]. `matrices` are up [2I or I, H] and down [H, I] in the rows' dtype.

    row_tile: rows of every product, zero rows added; None multiplies all rows at once (prefill, draft).
    """
    if row_tile is None:
        return _product(rows, matrices, math, expert)
    tiles = [
        _product(_pad(tile, row_tile), matrices, math, expert)[: len(tile)] for tile in torch.split(rows, row_tile)
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _product(
    rows: torch.Tensor, matrices: tuple[torch.Tensor, torch.Tensor], math: ExpertMath, expert: int
) -> torch.Tensor:
    up, down = matrices
    inner = F.linear(rows, up, None if math.up_bias is None else math.up_bias[expert])
    return F.linear(math.activate(inner), down, None if math.down_bias is None else math.down_bias[expert])


def _pad(rows: torch.Tensor, row_tile: int) -> torch.Tensor:
    if len(rows) == row_tile:
        return rows
    return F.pad(rows, (0, 0, 0, row_tile - len(rows)))


def combine(products: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weighted sum of a row's experts in slot order, in float32: products [T, K, H], weights [T, K] -> [T, H]."""
    total = products[:, 0].float() * weights[:, 0, None].float()
    for slot in range(1, products.shape[1]):
        total.addcmul_(products[:, slot].float(), weights[:, slot, None].float())
    return total.to(dtype)
