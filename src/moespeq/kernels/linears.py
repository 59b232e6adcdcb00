"""All linear maps of one row as one launch: y = x W^T + b for several W that read the same x.

A row's weights are read once and used once, so the only physics is the memory's: enough bytes must be in flight. A
program takes a few whole rows of one weight, hence no sum depends on which weights share the launch; its first weights
are under way before it waits for x. A gated map (the first half of a gated MLP) has its rows and its gate's in the same
program, and leaves silu(gate) * y.

Shapes: K input columns, N output columns of one weight, M of all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from moespeq.kernels.early_start import release_successor, starts_early, wait_for_predecessor

__all__ = ["linears"]

_NUM_WARPS = 4
_BLOCK_ELEMENTS = 4096  # 64 bytes of 16-bit weights in flight for each thread
_MOST_BLOCK_COLS = 2048


def linears(
    x: Tensor,
    gates: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """x [K]; gates, weights [N, K] and biases [N], all contiguous -> [M] in `dtype`, each sum taken in float32."""
    num_cols = x.numel()
    num_rows = tuple(weight.shape[0] for weight in weights)
    block_cols = min(max(triton.next_power_of_2(num_cols) // 2, 16), _MOST_BLOCK_COLS)
    block_rows = _BLOCK_ELEMENTS // block_cols
    num_blocks = [
        triton.cdiv(rows, block_rows if gate is None else block_rows // 2)
        for rows, gate in zip(num_rows, gates, strict=True)
    ]
    out = x.new_empty(sum(num_rows), dtype=dtype)
    early = starts_early(x.device)
    _linears[(sum(num_blocks),)](
        x,
        tuple(gates),
        tuple(weights),
        tuple(biases),
        out,
        (0, *accumulate(num_blocks)),
        num_rows,
        num_cols,
        block_rows,
        block_cols,
        early,
        num_warps=_NUM_WARPS,
        launch_pdl=early,
    )
    return out


@triton.jit
def _linears(  # type: ignore[no-untyped-def]
    x,
    gates,
    weights,
    biases,
    out,
    first_blocks: tl.constexpr,
    num_rows: tl.constexpr,
    num_cols: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    early: tl.constexpr,
):
    release_successor(early)
    block = tl.program_id(0)
    for i in tl.static_range(len(num_rows)):
        if (block >= first_blocks[i]) & (block < first_blocks[i + 1]):
            if gates[i] is None:
                rows = (block - first_blocks[i]) * block_rows + tl.arange(0, block_rows)
                sums = _dot_rows(x, weights[i], rows, num_rows[i], num_cols, block_cols, early)
                if biases[i] is not None:
                    sums += tl.load(biases[i] + rows, rows < num_rows[i], other=0).to(tl.float32)
                tl.store(out + rows, sums.to(out.dtype.element_ty), rows < num_rows[i])
            else:
                pairs = (block - first_blocks[i]) * (block_rows // 2) + tl.arange(0, block_rows // 2)
                gate, up = _dot_pairs(x, gates[i], weights[i], pairs, num_rows[i], num_cols, block_cols, early)
                gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
                gated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32) * up
                tl.store(out + pairs, gated.to(out.dtype.element_ty), pairs < num_rows[i])
        out += num_rows[i]


@triton.jit
def _dot_rows(  # type: ignore[no-untyped-def]
    x, weight, rows, num_rows: tl.constexpr, num_cols: tl.constexpr, block_cols: tl.constexpr, early: tl.constexpr
):
    """float32 [rows]: the products' sums; columns are taken in blocks from left to right."""
    cols = tl.arange(0, block_cols)
    tile = _load_tile(weight, rows, cols, num_rows, num_cols)
    wait_for_predecessor(early)
    sums = tile * tl.load(x + cols, cols < num_cols, other=0).to(tl.float32)[None, :]
    for _ in tl.static_range((num_cols - 1) // block_cols):
        cols += block_cols
        tile = _load_tile(weight, rows, cols, num_rows, num_cols)
        sums += tile * tl.load(x + cols, cols < num_cols, other=0).to(tl.float32)[None, :]
    return tl.sum(sums, axis=1)


@triton.jit
def _dot_pairs(  # type: ignore[no-untyped-def]
    x, gate, up, rows, num_rows: tl.constexpr, num_cols: tl.constexpr, block_cols: tl.constexpr, early: tl.constexpr
):
    """The same of two weights at once."""
    cols = tl.arange(0, block_cols)
    gate_tile, up_tile = (
        _load_tile(gate, rows, cols, num_rows, num_cols),
        _load_tile(up, rows, cols, num_rows, num_cols),
    )
    wait_for_predecessor(early)
    factors = tl.load(x + cols, cols < num_cols, other=0).to(tl.float32)[None, :]
    gate_sums, up_sums = gate_tile * factors, up_tile * factors
    for _ in tl.static_range((num_cols - 1) // block_cols):
        cols += block_cols
        factors = tl.load(x + cols, cols < num_cols, other=0).to(tl.float32)[None, :]
        gate_sums += _load_tile(gate, rows, cols, num_rows, num_cols) * factors
        up_sums += _load_tile(up, rows, cols, num_rows, num_cols) * factors
    return tl.sum(gate_sums, axis=1), tl.sum(up_sums, axis=1)


@triton.jit
def _load_tile(weight, rows, cols, num_rows: tl.constexpr, num_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    places = weight + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(places, inside, other=0, eviction_policy="evict_first").to(tl.float32)
