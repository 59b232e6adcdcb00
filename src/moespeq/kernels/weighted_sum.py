"""The weighted sum of a row's experts in one launch: float32, in slot order, like its reference `experts.combine`.

Shapes: T rows, K experts a row, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["weighted_sum"]

_BLOCK = 1024


def weighted_sum(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """products bf16 [T, K, H], weights [T, K] -> bf16 [T, H]. Capturable."""
    num_rows, top_k, width = products.shape
    out = products.new_empty(num_rows, width)
    _weighted_sum[(num_rows, triton.cdiv(width, _BLOCK))](
        products, weights, out, width, weights.stride(0), weights.stride(1), K=top_k, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _weighted_sum(  # type: ignore[no-untyped-def]
    products, weights, out, width, row_stride, slot_stride, K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        weight = tl.load(weights + row * row_stride + slot * slot_stride).to(tl.float32)
        product = tl.load(products + (row * K + slot) * width + cols, mask=inside, other=0.0).to(tl.float32)
        total += product * weight
    tl.store(out + row * width + cols, total.to(tl.bfloat16), mask=inside)
