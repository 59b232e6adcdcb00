"""A prompt's experts on the device: a batch of them is decoded once, then multiplied by all its pairs in large tiles.

Owns a wave's two products and their cut into batches that fit the scratch; how records become matrices is `decode`.
Shapes: T rows, K experts a row, P = T * K routed pairs, H hidden, I intermediate; a program computes BM pairs times BN
weight rows, BK columns at a time.

Why exact: every program of every launch multiplies BM x BN x BK blocks in ascending columns with the same instructions,
and an instruction's sum for one pair reads nothing of the other pairs. The tiles are constants: they follow neither
from the number of an expert's pairs nor from the wave, and behind the last pair its row stands again. So a pair's bits
are a function of its row of x and its expert's weights: not of its place, of who shares the tile, the batch, the wave
or the prompt. Libraries that choose tiles, or split a sum, by the size of the problem do not promise this. Nested and
plain records give equal bits, since decoding is exact and all that differs is where the weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from moespeq.kernels.activations import activate as apply_activation
from moespeq.kernels.activations import gate_and_multiply
from moespeq.kernels.chunk_table import ChunkTable
from moespeq.kernels.decode import decode_groups
from moespeq.kernels.fused import FUSED_ACTIVATIONS
from moespeq.kernels.geometry import ExpertGeometry, MatrixGeometry
from moespeq.kernels.sections import align16, find_base
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT
from moespeq.nested import Layout

__all__ = ["prefill_experts"]

_PAIRS, _ROWS, _COLS = 128, 128, 64  # BM, BN, BK: two warpgroups, 32 KiB of operands a stage
_NUM_WARPS, _NUM_STAGES = 8, 3  # 96 KiB and 128 registers: two programs a multiprocessor, one stores as one multiplies
_GROUPS_AT = tl.constexpr(GROUPS_AT)
_GROUP_INTS = tl.constexpr(GROUP_INTS)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # numpy has no bf16 products


def prefill_experts(
    hidden: torch.Tensor,
    table: ChunkTable,
    slots: torch.Tensor,
    bank: torch.Tensor,
    products: torch.Tensor,
    inner: torch.Tensor,
    scratch: torch.Tensor,
    *,
    geometry: ExpertGeometry,
    layout: Layout,
    top_k: int,
    activation: str,
) -> None:
    """Write the table's pairs of `products` [P, H] from hidden [T, H]; `inner` [P, I] and `scratch` are overwritten.

    The table has one group for each expert. slots uint8 [S, slot bytes] hold residual records, bank uint8
    [rows, base bytes] the bases; scratch, bf16 and flat, holds at least one matrix unless records are plain.
    """
    is_plain, kind = layout is Layout.PLAIN, FUSED_ACTIVATIONS[activation]
    for m, x, out, fused in ((geometry.up, hidden, inner, kind), (geometry.down, inner, products, "none")):
        num_groups = len(table.counts)
        for groups in _batches(num_groups, num_groups if is_plain else scratch.numel() // (m.rows * m.cols)):
            if not is_plain:
                decode_groups(table, groups, slots, bank, scratch, geometry=geometry, m=m, layout=layout)
            _multiply(x, out, table, groups, slots, bank, scratch, geometry, m, layout, top_k, fused)


def _batches(num_groups: int, most: int) -> Iterator[range]:
    """Runs of at most so many groups, as few as can be and about equally long: a run of one fills no device."""
    assert most > 0, "the scratch holds no matrix"
    size = triton.cdiv(num_groups, triton.cdiv(num_groups, most))
    for begin in range(0, num_groups, size):
        yield range(begin, min(begin + size, num_groups))


def _multiply(
    x: torch.Tensor,
    out: torch.Tensor,
    table: ChunkTable,
    groups: range,
    slots: torch.Tensor,
    bank: torch.Tensor,
    scratch: torch.Tensor,
    geometry: ExpertGeometry,
    m: MatrixGeometry,
    layout: Layout,
    top_k: int,
    activation: str,
) -> None:
    assert x.dtype is out.dtype is scratch.dtype is torch.bfloat16, (x.dtype, out.dtype, scratch.dtype)
    assert x.is_contiguous()
    assert out.is_contiguous()
    is_down = m == geometry.down
    most_pairs = max(table.counts[groups.start : groups.stop])
    grid = (triton.cdiv(m.rows, _ROWS), triton.cdiv(most_pairs, _PAIRS), len(groups))
    _multiply_groups[grid](
        x,
        out,
        table.device,
        groups.start,
        scratch,
        slots,
        bank,
        slots.stride(0),
        geometry.base_bytes,
        table.pairs_at,
        geometry.up,
        m,
        is_down,
        1 if is_down else top_k,
        layout is Layout.PLAIN,
        activation,
        activation != "none" and geometry.is_gated,
        tile_pairs=_PAIRS,
        tile_rows=_ROWS,
        tile_cols=_COLS,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


@triton.jit(do_not_specialize=["first_group"])
def _multiply_groups(  # type: ignore[no-untyped-def]
    x,
    out,
    table,
    first_group,
    scratch,
    slots,
    bank,
    slot_bytes,
    base_bytes: tl.constexpr,
    pairs_at: tl.constexpr,
    up: tl.constexpr,
    m: tl.constexpr,
    is_down: tl.constexpr,
    pairs_per_row: tl.constexpr,
    is_plain: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_cols: tl.constexpr,
):
    """One tile: BM pairs of a group, [BN] weight rows."""
    group = first_group + tl.program_id(2)
    if group >= tl.load(table):
        return
    entry = table + _GROUPS_AT + _GROUP_INTS * group
    first_pair = tl.program_id(1) * tile_pairs
    num_pairs = tl.load(entry + 3)
    if first_pair >= num_pairs:
        return
    if is_plain:
        record = slots + tl.load(entry).to(tl.int64) * slot_bytes
        matrix = find_base(record, bank, tl.load(entry + 1), base_bytes)[1]
        if is_down:
            matrix += align16(2 * up.rows * up.cols)
        weights = tl.multiple_of(matrix, 16).to(tl.pointer_type(tl.bfloat16))
    else:
        weights = scratch + tl.program_id(2).to(tl.int64) * (m.rows * m.cols)
    number = first_pair + tl.arange(0, tile_pairs)
    is_live = number < num_pairs
    pair = tl.load(table + pairs_at + tl.load(entry + 2) + tl.minimum(number, num_pairs - 1)).to(tl.int64)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    row = row // 2 + row % 2 * (m.rows // 2) if is_gated else row  # gate and up rows alternate
    inputs = x + (pair // pairs_per_row)[:, None] * m.cols
    weights += tl.minimum(row, m.rows - 1)[:, None] * m.cols
    total = tl.zeros((tile_pairs, tile_rows), tl.float32)
    for first_col in range(0, m.cols, tile_cols):
        block = _load_block(inputs, first_col, m, tile_cols)
        total = _add_product(block, _load_block(weights, first_col, m, tile_cols), total)
    _store(out, total, pair, is_live, m, activation, is_gated, tile_pairs, tile_rows)


@triton.jit
def _load_block(rows, first_col, m: tl.constexpr, tile_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """These columns of rows that begin at the pointers; zeros behind the row's end."""
    cols = first_col + tl.arange(0, tile_cols)[None, :]
    return tl.load(rows + cols) if m.cols % tile_cols == 0 else tl.load(rows + cols, mask=cols < m.cols, other=0.0)


@triton.jit
def _add_product(inputs, weights, total):  # type: ignore[no-untyped-def]
    """total [BM, BN] + inputs [BM, BK] @ weights^T [BK, BN]."""
    if _IS_INTERPRETED:
        total = tl.dot(inputs.to(tl.float32), weights.to(tl.float32).T, total)
    else:
        total = tl.dot(inputs, weights.T, total)
    return total


@triton.jit
def _store(
    out,
    total,
    pair,
    is_live,
    m: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_rows: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Activate total [BM, BN] and write it as the rows of its pairs."""
    width: tl.constexpr = m.rows // 2 if is_gated else m.rows
    tile_width: tl.constexpr = tile_rows // 2 if is_gated else tile_rows
    if is_gated:
        gate, up = tl.split(tl.reshape(total, (tile_pairs, tile_width, 2)))
        result = gate_and_multiply(gate, up, activation)
    elif activation != "none":
        result = apply_activation(total.to(tl.bfloat16).to(tl.float32), activation).to(tl.bfloat16)
    else:
        result = total.to(tl.bfloat16)
    cols = tl.program_id(0) * tile_width + tl.arange(0, tile_width)
    tl.store(out + pair[:, None] * width + cols[None, :], result, mask=is_live[:, None] & (cols < width)[None, :])
