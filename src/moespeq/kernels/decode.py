"""One expert's record back to bf16 matrices in device memory: for prefill, whose many rows use torch's own products.

A block of rows decodes its row from left to right; blocks are independent. Equal, bit for bit, to nested.decode_record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moespeq.kernels.geometry import ExpertGeometry
from moespeq.kernels.loaders import Loader, load_block, start_rows
from moespeq.kernels.sections import find_sections
from moespeq.nested import Layout

__all__ = ["decode_expert"]


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
        grid = (triton.cdiv(m.rows, loader.block_rows),)
        _decode_matrix[grid](
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


@triton.jit
def _decode_matrix(  # type: ignore[no-untyped-def]
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
    sections = find_sections(record, up, layout)
    if is_down:
        sections = find_sections(sections[4], m, layout)
    sections += (fields,)
    rows = tl.minimum(tl.program_id(0) * block_rows + tl.arange(0, block_rows), m.rows - 1)
    state = start_rows(base, sections, rows, m, layout, loader)
    for first_col in range(0, m.cols, 128):
        weights, state = load_block(base, sections, rows, first_col, state, m, layout, loader)
        cols = (first_col + tl.arange(0, 128))[None, :]
        tl.store(out + rows[:, None] * m.cols + cols, weights, mask=cols < m.cols)
