"""Step-3.5 and Step-3.7: their own module computes experts by itself, and clamps those of the last layers.

Shapes: N rows of an expert, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch

from moespeq.model.shims.experts import ShimExperts

__all__ = ["Step3p7Shim"]


class Step3p7Shim(ShimExperts):
    """The experts of a block; router and shared expert stay where they are, outside."""

    def __init__(self, own: Any) -> None:
        """Of transformers' own module."""
        super().__init__(own.num_experts, own.hidden_dim, own.intermediate_dim, own.act_fn, own.down_proj)
        self._limit = own.limit

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2I] -> [N, I]; the gate is clamped behind its activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate).clamp(max=self._limit) * up.clamp(min=-self._limit, max=self._limit)
