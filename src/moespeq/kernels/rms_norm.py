"""One row's root mean square norm, with the residual addition before it, as one launch that starts early.

Rounds where transformers' modules do: after the addition, after the division by the root, after the weight.

Shapes: H columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moespeq.kernels.early_start import release_successor, starts_early, wait_for_predecessor

__all__ = ["add_rms_norm", "rms_norm"]

_COLS_A_WARP = 512  # 16 columns a thread
_MOST_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x of H elements, weight [H] -> like x."""
    x = x.contiguous()
    normed = x.new_empty(x.shape)
    _launch(x, None, weight, None, normed, eps)
    return normed


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, y of H elements, weight [H] -> x + y and its norm."""
    x, y = x.contiguous(), y.contiguous()
    total, normed = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, y, weight, total, normed, eps)
    return total, normed


def _launch(x: Tensor, y: Tensor | None, weight: Tensor, total: Tensor | None, normed: Tensor, eps: float) -> None:
    num_cols = x.numel()
    block_cols = triton.next_power_of_2(num_cols)
    early = starts_early(x.device)
    num_warps = min(max(block_cols // _COLS_A_WARP, 1), _MOST_WARPS)
    _rms_norm[(1,)](
        x, y, weight, total, normed, eps, num_cols, block_cols, early, num_warps=num_warps, launch_pdl=early
    )


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x, y, weight, total, normed, eps, num_cols: tl.constexpr, block_cols: tl.constexpr, early: tl.constexpr
):
    release_successor(early)
    cols = tl.arange(0, block_cols)
    factors = tl.load(weight + cols, cols < num_cols, other=0).to(tl.float32)
    wait_for_predecessor(early)
    row = tl.load(x + cols, cols < num_cols, other=0).to(tl.float32)
    if y is not None:
        row = (row + tl.load(y + cols, cols < num_cols, other=0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + cols, row, cols < num_cols)
        row = row.to(tl.float32)
    mean_square = tl.sum(row * row, axis=0) / num_cols
    scaled = (row * tl.rsqrt(mean_square + eps)).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + cols, (scaled * factors).to(normed.dtype.element_ty), cols < num_cols)
