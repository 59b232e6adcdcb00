"""DeepSeek-V4: its norms keep their weights in float32 and widen what they return, which no bf16 matrix takes.

Its published weights are FP8, whose matrices take any input; of a bf16 checkpoint transformers' own code runs in
float32 only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["DeepseekV4NormShim"]


class DeepseekV4NormShim(nn.Module):
    """The same norm, its result in the dtype of its input: in float32 the same bits."""

    def __init__(self, own: Any) -> None:
        """Of transformers' own module."""
        super().__init__()
        self.weight, self.variance_epsilon = own.weight, own.variance_epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed: torch.Tensor = (self.weight * wide.to(hidden.dtype)).to(hidden.dtype)
        return normed
