"""The K largest of each row, of few columns, as one warp a row; with the softmax before it in the same launch.

torch.topk selects and sorts in two launches made for long rows. Here each column becomes one integer that orders as
(value, lower index first), and the largest is taken K times. A row's result depends on that row only.

Shapes: T rows (one or more dimensions), E columns, K chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moespeq.kernels.early_start import release_successor, starts_early, wait_for_predecessor

__all__ = ["softmax_topk", "topk"]

_COLS_A_WARP = 256


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """scores [T, E] -> values [T, K] in their dtype and indices int64 [T, K], largest first, equal ones by index."""
    return _launch(scores, k, scores.dtype, is_softmax=False, is_normalized=False)


def softmax_topk(logits: Tensor, k: int, normalized: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of each row's softmax, in float32; `normalized`: divided by their sum. Cast to `dtype` at last."""
    return _launch(logits, k, dtype, is_softmax=True, is_normalized=normalized)


def _launch(
    scores: Tensor, k: int, dtype: torch.dtype, *, is_softmax: bool, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    *leading, num_cols = scores.shape
    values = scores.new_empty(*leading, k, dtype=dtype)
    indices = scores.new_empty(*leading, k, dtype=torch.int64)
    rows = scores.reshape(-1, num_cols)
    block_cols = triton.next_power_of_2(num_cols)
    early = starts_early(scores.device)
    _topk[(rows.shape[0],)](
        rows,
        values,
        indices,
        rows.stride(0),
        rows.stride(1),
        num_cols,
        k,
        block_cols,
        triton.next_power_of_2(k),
        is_softmax,
        is_normalized,
        early,
        num_warps=max(block_cols // _COLS_A_WARP, 1),
        launch_pdl=early,
    )
    return values, indices


@triton.jit
def _topk(  # type: ignore[no-untyped-def]
    scores,
    values,
    indices,
    row_stride,
    col_stride,
    num_cols: tl.constexpr,
    k: tl.constexpr,
    block_cols: tl.constexpr,
    block_k: tl.constexpr,
    is_softmax: tl.constexpr,
    is_normalized: tl.constexpr,
    early: tl.constexpr,
):
    release_successor(early)
    wait_for_predecessor(early)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, block_cols)
    numbers = tl.load(scores + row * row_stride + cols * col_stride, cols < num_cols, other=float("-inf"))
    numbers = numbers.to(tl.float32)
    if is_softmax:
        numbers = tl.exp(numbers - tl.max(numbers, axis=0))
        numbers = numbers / tl.sum(numbers, axis=0)
    keys = _ordered_keys(numbers, cols, num_cols)
    places = tl.arange(0, block_k)
    top_values = tl.zeros((block_k,), tl.float32)
    top_indices = tl.zeros((block_k,), tl.int64)
    for place in tl.static_range(k):
        largest = tl.max(keys, axis=0)
        is_chosen = keys == largest
        top_values = tl.where(places == place, tl.sum(tl.where(is_chosen, numbers, 0.0), axis=0), top_values)
        top_indices = tl.where(places == place, 0x7FFFFFFF - (largest & 0x7FFFFFFF), top_indices)
        keys = tl.where(is_chosen, -0x8000000000000000, keys)
    if is_normalized:
        top_values = top_values / tl.sum(top_values, axis=0)
    tl.store(values + row * k + places, top_values.to(values.dtype.element_ty), places < k)
    tl.store(indices + row * k + places, top_indices, places < k)


@triton.jit
def _ordered_keys(numbers, cols, num_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64: a float32 in numeric order (NaN above all, as torch has it; both zeros equal), then its index, falling."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(numbers != numbers, 0x7FFFFFFF, order)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)
    return tl.where(cols < num_cols, keys, -0x8000000000000000)
