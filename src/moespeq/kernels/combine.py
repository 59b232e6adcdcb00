"""A row's K expert products into one: weighted, summed in slot order in float32. The reference is experts.combine.

Shapes: T rows, K experts a row, H hidden. Padding rows have products of 0, whatever their weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["combine"]

BLOCK = 1024


def combine(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """products bf16 [T, K, H], weights [T, K] -> bf16 [T, H]. Capturable."""
    num_rows, top_k, hidden = products.shape
    assert products.is_contiguous() and weights.is_contiguous()
    out = products.new_empty(num_rows, hidden)
    _combine[(num_rows, triton.cdiv(hidden, BLOCK))](products, weights, out, hidden, top_k, BLOCK=BLOCK)
    return out


@triton.jit
def _combine(products, weights, out, hidden, top_k: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(top_k):
        pair = row * top_k + slot
        product = tl.load(products + pair * hidden + cols, mask=inside, other=0.0).to(tl.float32)
        total += product * tl.load(weights + pair).to(tl.float32)
    tl.store(out + row * hidden + cols, total.to(tl.bfloat16), mask=inside)
