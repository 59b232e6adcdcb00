"""Records back to bf16 matrices in device memory: for prefill, whose many rows multiply an expert more than once.

A block of rows decodes its row from left to right; blocks are independent. Equal, bit for bit, to nested.decode_record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moespeq.kernels.chunk_table import ChunkTable
from moespeq.kernels.geometry import ExpertGeometry, MatrixGeometry
from moespeq.kernels.loaders import Loader, load_block, start_rows
from moespeq.kernels.sections import find_base, find_sections
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT
from moespeq.nested import Layout

__all__ = ["decode_expert", "decode_groups"]

_GROUPS_AT = tl.constexpr(GROUPS_AT)
_GROUP_INTS = tl.constexpr(GROUP_INTS)


def decode_groups(
    table: ChunkTable,
    groups: range,
    slots: torch.Tensor,
    bank: torch.Tensor,
    out: torch.Tensor,
    *,
    geometry: ExpertGeometry,
    m: MatrixGeometry,
    layout: Layout,
) -> None:
    """Write matrix `m` of these groups' experts to `out`, flat bf16, one behind the other; one launch.

    m: the geometry's up or down. slots and bank as the verify kernels take them; records are not plain.
    """
    loader = Loader.choose(m, layout)
    _decode_groups[triton.cdiv(m.rows, loader.block_rows), len(groups)](
        table.device,
        groups.start,
        slots,
        bank,
        slots.stride(0),
        loader.tables(geometry.fmt, slots),
        out,
        geometry.base_bytes,
        geometry.up,
        m,
        m == geometry.down,
        layout.value,
        loader.kind,
        block_rows=loader.block_rows,
        num_warps=loader.num_warps,
        num_stages=loader.num_stages,
        maxnreg=loader.max_registers,
    )


def decode_expert(
    record: torch.Tensor, base: torch.Tensor, *, geometry: ExpertGeometry, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact up and down matrices, bf16, from a residual record and its base record, both uint8 on the device.

    `record` may have slack at its end, as a slot has. Plain records yield views, valid as long as the bytes stay.
    """
    up, down = geometry.up, geometry.down
    if layout is Layout.PLAIN:
        flat = record[: 2 * (up.rows * up.cols + down.rows * down.cols) + 16]
        second = -(-2 * up.rows * up.cols // 16) * 16
        return (
            flat[: 2 * up.rows * up.cols].view(torch.bfloat16).view(up.rows, up.cols),
            record[second : second + 2 * down.rows * down.cols].view(torch.bfloat16).view(down.rows, down.cols),
        )
    matrices = tuple(torch.empty(shape, dtype=torch.bfloat16, device=record.device) for shape in geometry.shapes)
    for m, out in zip((up, down), matrices, strict=True):
        loader = Loader.choose(m, layout)
        _decode_one[(triton.cdiv(m.rows, loader.block_rows),)](
            record,
            base,
            loader.tables(geometry.fmt, record),
            out,
            up,
            m,
            m == down,
            layout.value,
            loader.kind,
            block_rows=loader.block_rows,
            num_warps=loader.num_warps,
            num_stages=loader.num_stages,
            maxnreg=loader.max_registers,
        )
    return matrices[0], matrices[1]


@triton.jit(do_not_specialize=["first_group"])
def _decode_groups(  # type: ignore[no-untyped-def]
    table,
    first_group,
    slots,
    bank,
    slot_bytes,
    fields,
    out,
    base_bytes: tl.constexpr,
    up: tl.constexpr,
    m: tl.constexpr,
    is_down: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    block_rows: tl.constexpr,
):
    group = first_group + tl.program_id(1)
    if group >= tl.load(table):
        return
    entry = table + _GROUPS_AT + _GROUP_INTS * group
    record = slots + tl.load(entry).to(tl.int64) * slot_bytes
    base, residual = find_base(record, bank, tl.load(entry + 1), base_bytes)
    matrix = out + tl.program_id(1).to(tl.int64) * (m.rows * m.cols)
    _decode_rows(residual, base, fields, matrix, up, m, is_down, layout, loader, block_rows)


@triton.jit
def _decode_one(  # type: ignore[no-untyped-def]
    record,
    base,
    fields,
    out,
    up: tl.constexpr,
    m: tl.constexpr,
    is_down: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    block_rows: tl.constexpr,
):
    _decode_rows(record, base, fields, out, up, m, is_down, layout, loader, block_rows)


@triton.jit
def _decode_rows(  # type: ignore[no-untyped-def]
    residual,
    base,
    fields,
    out,
    up: tl.constexpr,
    m: tl.constexpr,
    is_down: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    block_rows: tl.constexpr,
):
    """This program's block of rows of one matrix, to out [rows, cols]."""
    sections = find_sections(residual, up, layout)
    if is_down:
        sections = find_sections(sections[4], m, layout)
    sections += (fields,)
    rows = tl.minimum(tl.program_id(0) * block_rows + tl.arange(0, block_rows), m.rows - 1)
    state = start_rows(base, sections, rows, m, layout, loader)
    for first_col in range(0, m.cols, 128):
        weights, state = load_block(base, sections, rows, first_col, state, m, layout, loader)
        cols = (first_col + tl.arange(0, 128))[None, :]
        tl.store(out + rows[:, None] * m.cols + cols, weights, mask=cols < m.cols)
