"""Llama-4: its own block gives every expert every row, scaled by the router's score, which is zero for all but one.

Shapes: T rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moespeq.errors import UnsupportedModelError
from moespeq.model.shims.experts import ShimExperts

__all__ = ["Llama4Shim"]


class Llama4Shim(nn.Module):
    """The block's router and shared expert, and experts of ours.

    A row goes into its one expert multiplied by the sigmoid of its score; what comes out is not weighted again.
    """

    def __init__(self, moe: Any) -> None:
        """Of transformers' own block. Raises UnsupportedModelError for several experts a row: each would have an input
        of its own.
        """
        super().__init__()
        if moe.top_k != 1:
            raise UnsupportedModelError(
                f"This llama4 model gives a token {moe.top_k} experts, and only checkpoints with one are supported."
            )
        own = moe.experts
        self.router, self.shared_expert = moe.router, moe.shared_expert
        self.experts = ShimExperts(
            own.num_experts, own.hidden_size, own.expert_dim, own.act_fn, own.down_proj, is_transposed=True
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, H] -> [T, H] and the router's logits."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden)
        score, route = scores.max(dim=1, keepdim=True)  # [T, 1]
        routed = self.experts(hidden * score, route, torch.ones_like(score))
        return self.shared_expert(hidden) + routed, logits
