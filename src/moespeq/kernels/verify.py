"""The target's experts on the device: one grouped product whose weight loader is the parameter.

Shapes: T rows of a pass, K experts a row, P = T * K routed pairs, H hidden, I intermediate, BN weight rows of a
program, BK = 128 columns of a block, 8 pairs of a row tile.

Each program computes out^T[BN, 8] = W[BN, :] @ x^T[:, 8] for one expert and its tiles of pairs, block of columns after
block of columns. The loaders differ in where W comes from and in nothing else: equal weights, equal blocks, equal
matrix instructions, hence equal bits for plain and nested records. A column of the product sees only its own row of x,
and tiles always have 8, so a row's result does not depend on what else is in the batch, on its place, or on how many
tiles there are.

A program is one warp: nothing is shared and nothing waits for another warp. Weights are decoded into the registers
that the matrix instruction reads (see `interleave_units`), and rows of x come from the first-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moespeq.kernels.activations import activate as apply_activation
from moespeq.kernels.activations import gate_and_multiply
from moespeq.kernels.early_start import release_successor, starts_early, wait_for_predecessor
from moespeq.kernels.fused import FUSED_ACTIVATIONS
from moespeq.kernels.geometry import ExpertGeometry, MatrixGeometry
from moespeq.kernels.loaders import Loader, load_block, start_rows
from moespeq.kernels.sections import find_base, find_sections
from moespeq.kernels.units import interleave_units, join_words, load_bf16_pairs
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT, LaunchTable
from moespeq.nested import Layout

__all__ = ["verify_down", "verify_experts", "verify_up"]

ROW_TILE = 8
_ROW_TILE = tl.constexpr(ROW_TILE)
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
    early, is_down = starts_early(x.device), m == geometry.down
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
        is_down,
        pairs_per_row,
        layout.value,
        loader.kind,
        activation,
        is_gated,
        max_tiles=triton.cdiv(table.max_rows, ROW_TILE),
        block_rows=loader.block_rows,
        early=early,
        num_warps=loader.num_warps,
        num_stages=loader.num_stages,
        maxnreg=loader.max_registers,
        launch_pdl=early and is_down,
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
    early: tl.constexpr,
):
    if not is_down:
        release_successor(early)
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
    sections += (fields,)
    number = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    rows = number // 2 + number % 2 * (m.rows // 2) if is_gated else number  # gate and up rows alternate
    rows = tl.minimum(rows, m.rows - 1)
    state = start_rows(base, sections, rows, m, layout, loader)
    if is_down:
        wait_for_predecessor(early)  # for x; table, records and bank were there before the first product began
    sums = ()
    for _ in tl.static_range(max_tiles):
        sums += (tl.zeros((block_rows, _ROW_TILE), tl.float32),)
    for first_col in range(0, m.cols, 128):
        inputs = _load_inputs(x, pairs, num_pairs, 0, first_col, m, pairs_per_row)
        weights, state = load_block(base, sections, rows, first_col, state, m, layout, loader)
        weights = interleave_units(weights)
        first = _multiply(weights, inputs, sums[0])
        others = ()
        for tile in tl.static_range(1, max_tiles):
            others += (sums[tile],)
        if max_tiles > 1:  # noqa: SIM102 -- known when compiled
            if num_pairs > _ROW_TILE:
                others = _multiply_others(weights, x, pairs, num_pairs, first_col, others, m, pairs_per_row)
        sums = (first,) + others
    for tile in tl.static_range(max_tiles):
        if num_pairs > tile * _ROW_TILE:
            _store_tile(out, sums[tile], pairs, num_pairs, tile, m, activation, is_gated, block_rows)


@triton.jit
def _multiply_others(weights, x, pairs, num_pairs, first_col, sums, m: tl.constexpr, pairs_per_row: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of all tiles but the first, which few experts have."""
    added = ()
    for number in tl.static_range(len(sums)):
        added += (_multiply_tile(weights, x, pairs, num_pairs, number + 1, first_col, sums[number], m, pairs_per_row),)
    return added


@triton.jit
def _multiply_tile(
    weights, x, pairs, num_pairs, tile: tl.constexpr, first_col, total, m: tl.constexpr, pairs_per_row: tl.constexpr
):  # type: ignore[no-untyped-def]
    if num_pairs > tile * _ROW_TILE:
        total = _multiply(weights, _load_inputs(x, pairs, num_pairs, tile, first_col, m, pairs_per_row), total)
    return total


@triton.jit
def _multiply(weights, inputs, total):  # type: ignore[no-untyped-def]
    if _IS_INTERPRETED:
        total = tl.dot(weights.to(tl.float32), inputs.to(tl.float32), total)
    else:
        total = tl.dot(weights, inputs, total)
    return total


@triton.jit
def _load_inputs(x, pairs, num_pairs, tile: tl.constexpr, first_col, m: tl.constexpr, pairs_per_row: tl.constexpr):  # type: ignore[no-untyped-def]
    """x^T [BK, 8]: the rows of a tile's pairs; behind the last pair its row again, whose sums nobody reads."""
    number = tl.minimum(tile * _ROW_TILE + tl.arange(0, _ROW_TILE), num_pairs - 1)
    rows = tl.load(pairs + number) // pairs_per_row
    if m.cols % 32 == 0:
        block = join_words(load_bf16_pairs(x, rows[None, :], first_col, m))
    else:  # joined too: by a join among an operand's makers Triton chooses which thread holds which of 16 columns
        cols = first_col + 2 * tl.arange(0, 64)[None, :]
        pointers = x + rows[:, None] * m.cols + cols
        even = tl.load(pointers, mask=cols < m.cols, other=0.0)
        odd = tl.load(pointers + 1, mask=cols + 1 < m.cols, other=0.0)
        block = tl.reshape(tl.join(even, odd), (_ROW_TILE, 128))
    return interleave_units(block).T


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
    """Activate total [BN, 8] and write it as the rows of its pairs."""
    width: tl.constexpr = m.rows // 2 if is_gated else m.rows
    block_width: tl.constexpr = block_rows // 2 if is_gated else block_rows
    if is_gated:
        gate, up = tl.split(tl.permute(tl.reshape(total, (block_width, 2, _ROW_TILE)), (0, 2, 1)))
        result = gate_and_multiply(gate, up, activation)
    elif activation != "none":
        result = apply_activation(total.to(tl.bfloat16).to(tl.float32), activation).to(tl.bfloat16)
    else:
        result = total.to(tl.bfloat16)
    number = tile * _ROW_TILE + tl.arange(0, _ROW_TILE)
    is_live = number < num_pairs
    pair = tl.load(pairs + number, mask=is_live, other=0)
    cols = tl.program_id(0) * block_width + tl.arange(0, block_width)
    tl.store(out + pair[:, None] * width + cols[None, :], result.T, mask=is_live[:, None] & (cols < width)[None, :])
