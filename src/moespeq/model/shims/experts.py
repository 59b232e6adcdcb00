"""A module in the form of transformers' experts interface whose only implementation is ours.

Shapes: T rows, K experts a row, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from moespeq.model.experts import experts_function

__all__ = ["ShimExperts"]


class ShimExperts(nn.Module):
    """Experts with a gate and without biases; gate_up_proj [E, 2I, H] and down_proj [E, H, I], or both transposed."""

    has_gate, has_bias, is_concatenated = True, False, True
    _apply_gate = _default_apply_gate

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        like: torch.Tensor,
        *,
        is_transposed: bool = False,
    ) -> None:
        """like: a tensor of the dtype and device to be."""
        super().__init__()
        self.act_fn, self.is_transposed = act_fn, is_transposed
        up, down = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        if is_transposed:
            up, down = up[::-1], down[::-1]
        self.gate_up_proj = nn.Parameter(like.new_empty(num_experts, *up))
        self.down_proj = nn.Parameter(like.new_empty(num_experts, *down))

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], routes and weights [T, K] -> [T, H]."""
        return experts_function(self, hidden, routes, weights)
