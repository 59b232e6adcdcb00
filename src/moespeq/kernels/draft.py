"""The draft's experts on the device: products with the resident base, one row of x for each routed pair.

Shapes: T rows, K experts a row, P = T * K routed pairs (1 to 64), H hidden, I intermediate.

A draft step reads each routed expert once and computes little, so the floor is the bank's bandwidth: bytes of P base
records. Two launches: gate and up rows with the activation; down, weighted and summed over a row's K experts in
float32, in a fixed order. A program asks for all it reads at once. No host synchronisation; capturable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moespeq.kernels.activations import activate as apply_activation
from moespeq.kernels.activations import gate_and_multiply
from moespeq.kernels.draft_product import multiply_elements, multiply_units
from moespeq.kernels.fused import FUSED_ACTIVATIONS
from moespeq.kernels.geometry import UNIT, ExpertGeometry, MatrixGeometry

__all__ = ["draft_down", "draft_experts", "draft_up"]


def draft_experts(
    hidden: torch.Tensor,
    routes: torch.Tensor,
    weights: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    rows: torch.Tensor | None = None,
    geometry: ExpertGeometry,
    activation: str,
) -> torch.Tensor:
    """The routed experts' weighted sum: hidden bf16 [T, H], routes int64 and weights [T, K] -> bf16 [T, H].

    bank uint8 [rows, base bytes]; a layer's experts are its rows from `first_row` on, or where `rows` int32 [E] says,
    which is read when the kernels run. A negative route, or an expert without a row (-1), adds nothing.
    """
    inner = draft_up(hidden, routes, bank, first_row=first_row, rows=rows, geometry=geometry, activation=activation)
    return draft_down(inner, routes, weights, bank, first_row=first_row, rows=rows, geometry=geometry)


def draft_up(
    hidden: torch.Tensor,
    routes: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    rows: torch.Tensor | None = None,
    geometry: ExpertGeometry,
    activation: str | None,
) -> torch.Tensor:
    """First product and activation: -> bf16 [P, I]; without an activation the plain products [P, 2I]."""
    m = geometry.up
    kind = "none" if activation is None else FUSED_ACTIVATIONS[activation]
    is_gated = activation is not None and geometry.is_gated
    num_pairs, top_k = routes.numel(), routes.shape[1]
    out = hidden.new_empty(num_pairs, m.rows // 2 if is_gated else m.rows)
    block = _Block.of_up(m)
    grid = (triton.cdiv(m.rows, block.rows), num_pairs)
    _draft_up[grid](
        hidden,
        routes,
        bank,
        out,
        first_row,
        rows,
        geometry.base_bytes,
        m,
        top_k,
        kind,
        is_gated,
        block_rows=block.rows,
        block_units=block.units,
        num_warps=block.num_warps,
    )
    return out


def draft_down(
    inner: torch.Tensor,
    routes: torch.Tensor,
    weights: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    rows: torch.Tensor | None = None,
    geometry: ExpertGeometry,
) -> torch.Tensor:
    """Second product, route weights and the sum over K: inner bf16 [P, I] -> bf16 [T, H]."""
    m = geometry.down
    num_rows, top_k = routes.shape
    out = inner.new_empty(num_rows, m.rows)
    num_slots = triton.next_power_of_2(top_k)
    block = _Block.of_down(m, num_slots)
    grid = (triton.cdiv(m.rows, block.rows), num_rows)
    _draft_down[grid](
        inner,
        routes,
        weights,
        bank,
        out,
        first_row,
        rows,
        geometry.base_bytes,
        m,
        top_k,
        num_slots,
        block_rows=block.rows,
        block_units=block.units,
        num_warps=block.num_warps,
    )
    return out


@dataclass(frozen=True, slots=True)
class _Block:
    """A program: `rows` weight rows, `units` of 32 codes of each at once. A warp takes 32 units: its rows share x."""

    rows: int
    units: int
    num_warps: int

    @classmethod
    def of_up(cls, m: MatrixGeometry) -> _Block:
        """One expert: a row of up to 4,096 weights at once."""
        units = min(max(triton.next_power_of_2(m.cols // UNIT), 64), 128)
        return cls(16, units, units // 32)

    @classmethod
    def of_down(cls, m: MatrixGeometry, num_slots: int) -> _Block:
        """All experts of a row of the pass side by side."""
        units = min(max(triton.next_power_of_2(m.cols // UNIT), 32), 64)
        return cls(8, units, min(max(units // 32 * num_slots, 4), 8))


@triton.jit
def _bank_row(expert, first_row, bank_rows):  # type: ignore[no-untyped-def]
    """int64: where an expert's base lies; negative: nowhere."""
    if bank_rows is None:
        row = tl.where(expert < 0, -1, first_row + expert)
    else:
        row = tl.load(bank_rows + expert, mask=expert >= 0, other=-1).to(tl.int64)
    return row


@triton.jit
def _draft_up(  # type: ignore[no-untyped-def]
    hidden,
    routes,
    bank,
    out,
    first_row,
    bank_rows,
    base_bytes: tl.constexpr,
    m: tl.constexpr,
    top_k: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    block_rows: tl.constexpr,
    block_units: tl.constexpr,
):
    pair = tl.program_id(1)
    bank_row = _bank_row(tl.load(routes + pair), first_row, bank_rows)
    if bank_row < 0:
        return
    base = tl.multiple_of(bank + bank_row * base_bytes, 16)
    number = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    rows = number // 2 + number % 2 * (m.rows // 2) if is_gated else number  # gate and up rows alternate
    rows = tl.minimum(rows, m.rows - 1)
    x = hidden + pair // top_k * m.cols
    if m.has_units:
        sums = multiply_units(base, x, rows[None, :], tl.zeros((block_units, block_rows), tl.float32), m, block_units)
    else:
        sums = multiply_elements(
            base, x, rows[None, :], tl.zeros((block_units, block_rows), tl.float32), m, block_units
        )
    total = tl.sum(sums, axis=0)  # [rows]
    width: tl.constexpr = m.rows // 2 if is_gated else m.rows
    block_width: tl.constexpr = block_rows // 2 if is_gated else block_rows
    if is_gated:
        gate, up = tl.split(tl.reshape(total, (block_width, 2)))
        result = gate_and_multiply(gate, up, activation)
    elif activation != "none":
        result = apply_activation(total.to(tl.bfloat16).to(tl.float32), activation).to(tl.bfloat16)
    else:
        result = total.to(tl.bfloat16)
    cols = tl.program_id(0) * block_width + tl.arange(0, block_width)
    tl.store(out + pair * width + cols, result, mask=cols < width)


@triton.jit
def _draft_down(  # type: ignore[no-untyped-def]
    inner,
    routes,
    weights,
    bank,
    out,
    first_row,
    bank_rows,
    base_bytes: tl.constexpr,
    m: tl.constexpr,
    top_k: tl.constexpr,
    num_slots: tl.constexpr,
    block_rows: tl.constexpr,
    block_units: tl.constexpr,
):
    row_of_pass = tl.program_id(1)
    slots = tl.arange(0, num_slots)  # a power of two: those past K repeat the last one and count for nothing
    pairs = row_of_pass * top_k + tl.minimum(slots, top_k - 1)
    bank_row = _bank_row(tl.load(routes + pairs), first_row, bank_rows)
    weight = tl.load(weights + pairs).to(tl.float32)
    counts = (slots < top_k) & (bank_row >= 0)
    bases = bank + tl.maximum(bank_row, 0) * base_bytes
    bases = tl.multiple_of(bases, 16)[None, :, None]
    cols = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    rows = tl.minimum(cols, m.rows - 1)[None, None, :]
    x = (inner + pairs * m.cols)[None, :, None]
    sums = tl.zeros((block_units, num_slots, block_rows), tl.float32)
    if m.has_units:
        sums = multiply_units(bases, x, rows, sums, m, block_units)
    else:
        sums = multiply_elements(bases, x, rows, sums, m, block_units)
    products = tl.where(counts[:, None], tl.sum(sums, axis=0) * weight[:, None], 0.0)  # [slots, rows]
    total = tl.sum(products, axis=0)
    tl.store(out + row_of_pass * m.rows + cols, total.to(tl.bfloat16), mask=cols < m.rows)
