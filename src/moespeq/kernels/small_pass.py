"""What the kernels of a small pass compute, in plain torch: the reference for any device.

Shapes: K input columns, N output columns of one weight, M of all together; H hidden; E columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "linears", "rms_norm", "softmax_topk", "topk"]


def linears(
    x: Tensor,
    gates: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """x [K]; gates, weights [N, K] and biases [N] -> [M] in `dtype`, each sum taken in float32.

    With a gate a result is silu(x gate^T) * (x W^T).
    """
    results = []
    for gate, weight, bias in zip(gates, weights, biases, strict=True):
        sums = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
        results.append(sums if gate is None else F.silu(F.linear(x.float(), gate.float()).to(dtype)) * sums)
    return torch.cat(results)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x of H elements, weight [H] -> like x; rounded before the weight and after."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, y of H elements, weight [H] -> x + y and its norm."""
    total = x + y
    return total, rms_norm(total, weight, eps)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """scores [..., E] -> values [..., k] and indices int64 [..., k], largest first, equal ones by index."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def softmax_topk(logits: Tensor, k: int, normalized: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of each row's softmax, in float32; `normalized`: divided by their sum. Cast to `dtype` at last."""
    values, indices = topk(logits.softmax(dim=-1, dtype=torch.float32), k)
    if normalized:
        values = values / values.sum(dim=-1, keepdim=True)
    return values.to(dtype), indices
