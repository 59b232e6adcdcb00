"""The target's experts on the device: one grouped product whose weight loader is the parameter.

Shapes: T rows of a pass, K experts a row, P = T * K routed pairs, H hidden, I intermediate, BN weight rows of a
program, BK columns of a block, 16 pairs of a row tile.

Each program computes out^T[BN, 16] = W[BN, :] @ x^T[:, 16] for one expert, block of columns after block of columns. The
loaders differ in where W comes from and in nothing else: equal weights, equal blocks, equal matrix instructions, hence
equal bits for plain and nested records. A column of the product sees only its own row of x, and tiles always have 16,
so a row's result does not depend on what else is in the batch, on its place, or on how many tiles there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moespeq.kernels.activations import activate as apply_activation
from moespeq.kernels.activations import gate_and_multiply
from moespeq.kernels.fused import FUSED_ACTIVATIONS
from moespeq.kernels.geometry import ExpertGeometry, MatrixGeometry
from moespeq.kernels.loaders import Loader, load_block, prefetch, start_rows
from moespeq.kernels.sections import find_base, find_sections
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT, LaunchTable
from moespeq.nested import Layout

__all__ = ["verify_down", "verify_experts", "verify_up"]

ROW_TILE = 16
_GROUPS_AT = tl.constexpr(GROUPS_AT)
_GROUP_INTS = tl.constexpr(GROUP_INTS)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # numpy has no bf16 products


def verify_experts(
    hidden: torch.Tensor,
    table: LaunchTable,
    slots: torch.Tensor,
    bank: torch.Tensor,
    products: torch.Tensor,
    inner: torch.Tensor,
    *,
    geometry: ExpertGeometry,
    layout: Layout,
    top_k: int,
    activation: str,
) -> None:
    """Write the table's pairs of `products` [P, H] from hidden [T, H]; `inner` [P, I] is scratch. Capturable.

    slots uint8 [S, slot bytes] hold residual records, bank uint8 [rows, base bytes] the bases. All bf16.
    """
    verify_up(hidden, table, slots, bank, inner, geometry=geometry, layout=layout, top_k=top_k, activation=activation)
    verify_down(inner, table, slots, bank, products, geometry=geometry, layout=layout)


def verify_up(
    hidden: torch.Tensor,
    table: LaunchTable,
    slots: torch.Tensor,
    bank: torch.Tensor,
    out: torch.Tensor,
    *,
    geometry: ExpertGeometry,
    layout: Layout,
    top_k: int,
    activation: str | None,
) -> None:
    """First product and activation: hidden [T, H] -> out [P, I]; without an activation the plain products [P, 2I]."""
    kind = "none" if activation is None else FUSED_ACTIVATIONS[activation]
    _launch(hidden, table, slots, bank, out, geometry, geometry.up, layout, top_k, kind)


def verify_down(
    inner: torch.Tensor,
    table: LaunchTable,
    slots: torch.Tensor,
    bank: torch.Tensor,
    products: torch.Tensor,
    *,
    geometry: ExpertGeometry,
    layout: Layout,
) -> None:
    """Second product: inner [P, I] -> products [P, H]."""
    _launch(inner, table, slots, bank, products, geometry, geometry.down, layout, 1, "none")


def _launch(
    x: torch.Tensor,
    table: LaunchTable,
    slots: torch.Tensor,
    bank: torch.Tensor,
    out: torch.Tensor,
    geometry: ExpertGeometry,
    m: MatrixGeometry,
    layout: Layout,
    pairs_per_row: int,
    activation: str,
) -> None:
    assert x.dtype is out.dtype is torch.bfloat16, (x.dtype, out.dtype)
    assert x.is_contiguous()
    assert out.is_contiguous()
    is_gated = activation != "none" and geometry.is_gated
    loader = Loader.choose(m, layout)
    grid = (triton.cdiv(m.rows, loader.block_rows), table.max_groups)
    _grouped_product[grid](
        x,
        out,
        table.device,
        loader.tables(geometry.fmt, table.device),
        slots,
        bank,
        slots.stride(0),
        geometry.base_bytes,
        table.pairs_at,
        geometry.up,
        m,
        m == geometry.down,
        pairs_per_row,
        layout.value,
        loader.kind,
        activation,
        is_gated,
        max_tiles=triton.cdiv(table.max_rows, ROW_TILE),
        block_rows=loader.block_rows,
        block_cols=loader.block_cols,
        num_warps=loader.num_warps,
        num_stages=loader.num_stages,
        maxnreg=loader.max_registers,
    )


@triton.jit
def _grouped_product(  # type: ignore[no-untyped-def]
    x,
    out,
    table,
    fields,
    slots,
    bank,
    slot_bytes,
    base_bytes: tl.constexpr,
    pairs_at: tl.constexpr,
    up: tl.constexpr,
    m: tl.constexpr,
    is_down: tl.constexpr,
    pairs_per_row: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    max_tiles: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    group = tl.program_id(1)
    if group >= tl.load(table):
        return
    entry = table + _GROUPS_AT + _GROUP_INTS * group
    record = slots + tl.load(entry).to(tl.int64) * slot_bytes
    base, residual = find_base(record, bank, tl.load(entry + 1), base_bytes)
    pairs = table + pairs_at + tl.load(entry + 2)
    num_pairs = tl.load(entry + 3)
    sections = find_sections(residual, up, layout)
    if is_down:
        sections = find_sections(sections[4], m, layout)
    args = (x, out, base, sections + (fields,), pairs, num_pairs)
    if max_tiles == 1:  # noqa: SIM114 -- known when compiled: one body instead of two
        _product_tiles(args, m, pairs_per_row, layout, loader, activation, is_gated, 1, block_rows, block_cols)
    elif num_pairs <= 16:
        _product_tiles(args, m, pairs_per_row, layout, loader, activation, is_gated, 1, block_rows, block_cols)
    else:
        _product_tiles(args, m, pairs_per_row, layout, loader, activation, is_gated, max_tiles, block_rows, block_cols)


@triton.jit
def _product_tiles(  # type: ignore[no-untyped-def]
    args,
    m: tl.constexpr,
    pairs_per_row: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    max_tiles: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    x, out, base, sections, pairs, num_pairs = args
    number = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    rows = number // 2 + number % 2 * (m.rows // 2) if is_gated else number  # gate and up rows alternate
    rows = tl.minimum(rows, m.rows - 1)
    state = start_rows(base, sections, rows, m, layout, loader, block_cols)
    ahead = prefetch(base, sections, rows, 0, m, loader, block_cols)
    sums = ()
    for _ in tl.static_range(max_tiles):
        sums += (tl.zeros((block_rows, 16), tl.float32),)
    for first_col in range(0, m.cols, block_cols):
        inputs = ()
        for tile in tl.static_range(max_tiles):
            inputs += (_load_inputs(x, pairs, num_pairs, tile, first_col, m, pairs_per_row, block_cols),)
        weights, state = load_block(base, sections, rows, first_col, state, ahead, m, layout, loader, block_cols)
        ahead = prefetch(base, sections, rows, first_col + block_cols, m, loader, block_cols)
        added = ()
        for tile in tl.static_range(max_tiles):
            added += (_multiply(weights, inputs[tile], sums[tile]),)
        sums = added
    for tile in tl.static_range(max_tiles):
        _store_tile(out, sums[tile], pairs, num_pairs, tile, m, activation, is_gated, block_rows)


@triton.jit
def _multiply(weights, inputs, total):  # type: ignore[no-untyped-def]
    if _IS_INTERPRETED:
        total = tl.dot(weights.to(tl.float32), inputs.to(tl.float32), total)
    else:
        total = tl.dot(weights, inputs, total)
    return total


@triton.jit
def _load_inputs(
    x,
    pairs,
    num_pairs,
    tile: tl.constexpr,
    first_col,
    m: tl.constexpr,
    pairs_per_row: tl.constexpr,
    block_cols: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """x^T [BK, 16]: the rows of a tile's pairs, zeros for missing ones."""
    number = tile * 16 + tl.arange(0, 16)
    is_live = number < num_pairs
    rows = tl.load(pairs + number, mask=is_live, other=0) // pairs_per_row
    cols = first_col + tl.arange(0, block_cols)
    inside = is_live[:, None] if m.cols % block_cols == 0 else is_live[:, None] & (cols < m.cols)[None, :]
    return tl.load(x + rows[:, None] * m.cols + cols[None, :], mask=inside, other=0.0).T


@triton.jit
def _store_tile(
    out,
    total,
    pairs,
    num_pairs,
    tile: tl.constexpr,
    m: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    block_rows: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """Activate total [BN, 16] and write it as the rows of its pairs."""
    width: tl.constexpr = m.rows // 2 if is_gated else m.rows
    block_width: tl.constexpr = block_rows // 2 if is_gated else block_rows
    if is_gated:
        gate, up = tl.split(tl.permute(tl.reshape(total, (block_width, 2, 16)), (0, 2, 1)))
        result = gate_and_multiply(gate, up, activation)
    elif activation != "none":
        result = apply_activation(total.to(tl.bfloat16).to(tl.float32), activation).to(tl.bfloat16)
    else:
        result = total.to(tl.bfloat16)
    number = tile * 16 + tl.arange(0, 16)
    is_live = number < num_pairs
    pair = tl.load(pairs + number, mask=is_live, other=0)
    cols = tl.program_id(0) * block_width + tl.arange(0, block_width)
    tl.store(out + pair[:, None] * width + cols[None, :], result.T, mask=is_live[:, None] & (cols < width)[None, :])
