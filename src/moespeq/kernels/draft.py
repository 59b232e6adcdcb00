"""The draft's experts on the device: products with the resident base, one row of x for each routed pair.

Shapes: T rows, K experts a row, P = T * K routed pairs (1 to 64), H hidden, I intermediate, BN weight rows of a program, BU
units of 32 codes a row.

A draft step reads each routed expert once and computes little, so the floor is the bank's bandwidth: bytes of P base
records. Two launches: gate and up rows with the activation; down, weighted and summed over a row's K experts in slot
order in float32. A code becomes a float without a conversion: its bits are put into the mantissa of 2^23 (marlin's
trick), scaled back and 2^23 taken off in one exact step. No host synchronisation; capturable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moespeq.kernels.activations import FUSED_ACTIVATIONS, gate_and_multiply
from moespeq.kernels.activations import activate as apply_activation
from moespeq.kernels.elements import load_scales, load_steps
from moespeq.kernels.geometry import ExpertGeometry, MatrixGeometry
from moespeq.kernels.units import load_unit_scale, load_unit_words, load_unit_zero

__all__ = ["draft_down", "draft_experts", "draft_up"]


def draft_experts(
    hidden: torch.Tensor,
    routes: torch.Tensor,
    weights: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    geometry: ExpertGeometry,
    activation: str,
) -> torch.Tensor:
    """The routed experts' weighted sum: hidden bf16 [T, H], routes int64 and weights [T, K] -> bf16 [T, H].

    bank uint8 [rows, base bytes]; a layer's experts are its rows from `first_row` on. A negative route adds nothing.
    """
    inner = draft_up(hidden, routes, bank, first_row=first_row, geometry=geometry, activation=activation)
    return draft_down(inner, routes, weights, bank, first_row=first_row, geometry=geometry)


def draft_up(
    hidden: torch.Tensor,
    routes: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    geometry: ExpertGeometry,
    activation: str | None,
) -> torch.Tensor:
    """First product and activation: -> bf16 [P, I]; without an activation the plain products [P, 2I]."""
    m = geometry.up
    kind = "none" if activation is None else FUSED_ACTIVATIONS[activation]
    is_gated = activation is not None and geometry.is_gated
    num_pairs, top_k = routes.numel(), routes.shape[1]
    out = hidden.new_empty(num_pairs, m.rows // 2 if is_gated else m.rows)
    block_rows, block_units, num_warps = UP_BLOCK
    grid = (triton.cdiv(m.rows, block_rows), num_pairs)
    _draft_up[grid](
        hidden,
        routes,
        bank,
        out,
        first_row,
        geometry.base_bytes,
        m,
        top_k,
        kind,
        is_gated,
        BN=block_rows,
        BU=block_units,
        num_warps=num_warps,
    )
    return out


def draft_down(
    inner: torch.Tensor,
    routes: torch.Tensor,
    weights: torch.Tensor,
    bank: torch.Tensor,
    *,
    first_row: int,
    geometry: ExpertGeometry,
) -> torch.Tensor:
    """Second product, route weights and the sum over K: inner bf16 [P, I] -> bf16 [T, H]."""
    m = geometry.down
    num_rows, top_k = routes.shape
    out = inner.new_empty(num_rows, m.rows)
    block_rows, block_units, num_warps = DOWN_BLOCK
    grid = (triton.cdiv(m.rows, block_rows), num_rows)
    _draft_down[grid](
        inner,
        routes,
        weights,
        bank,
        out,
        first_row,
        geometry.base_bytes,
        m,
        top_k,
        BN=block_rows,
        BU=block_units,
        num_warps=num_warps,
    )
    return out


_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
UP_BLOCK = (32, 16, 4)  # rows, units a row, warps
DOWN_BLOCK = (16, 16, 8)


@triton.jit
def _draft_up(  # type: ignore[no-untyped-def]
    hidden,
    routes,
    bank,
    out,
    first_row,
    base_bytes: tl.constexpr,
    m: tl.constexpr,
    top_k: tl.constexpr,
    activation: tl.constexpr,
    is_gated: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    pair = tl.program_id(1)
    expert = tl.load(routes + pair)
    if expert < 0:
        return
    base = tl.multiple_of(bank + (first_row + expert) * base_bytes, 16)
    number = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = number // 2 + number % 2 * (m.rows // 2) if is_gated else number  # gate and up rows alternate
    rows = tl.minimum(rows, m.rows - 1)
    x = hidden + pair // top_k * m.cols
    total = tl.sum(_multiply_rows(base, x, rows, 1.0, m, BN, BU), axis=0)  # [BN]
    width: tl.constexpr = m.rows // 2 if is_gated else m.rows
    BW: tl.constexpr = BN // 2 if is_gated else BN
    if is_gated:
        gate, up = tl.split(tl.reshape(total, (BW, 2)))
        result = gate_and_multiply(gate, up, activation)
    elif activation != "none":
        result = apply_activation(total.to(tl.bfloat16).to(tl.float32), activation).to(tl.bfloat16)
    else:
        result = total.to(tl.bfloat16)
    cols = tl.program_id(0) * BW + tl.arange(0, BW)
    tl.store(out + pair * width + cols, result, mask=cols < width)


@triton.jit
def _draft_down(  # type: ignore[no-untyped-def]
    inner,
    routes,
    weights,
    bank,
    out,
    first_row,
    base_bytes: tl.constexpr,
    m: tl.constexpr,
    top_k: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
):
    row_of_pass = tl.program_id(1)
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(cols, m.rows - 1)
    total = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(top_k):
        pair = row_of_pass * top_k + slot
        expert = tl.load(routes + pair)
        weight = tl.load(weights + pair).to(tl.float32)
        if expert >= 0:
            base = tl.multiple_of(bank + (first_row + expert) * base_bytes, 16)
            total += tl.sum(_multiply_rows(base, inner + pair * m.cols, rows, weight, m, BN, BU), axis=0)
    tl.store(out + row_of_pass * m.rows + cols, total.to(tl.bfloat16), mask=cols < m.rows)


@triton.jit
def _multiply_rows(base, x, rows, weight, m: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Partial sums of weight * (W[rows] @ x), float32 [lanes, BN]: their sum over axis 0 is the product."""
    if m.has_units:
        total = _multiply_units(base, x, rows, weight, m, BN, BU)
    else:
        total = _multiply_elements(base, x, rows, weight, m, BN, 4 * BU)
    return total


@triton.jit
def _multiply_elements(base, x, rows, weight, m: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """For any format."""
    total = tl.zeros((BK, BN), tl.float32)
    row = rows[None, :]
    for first_col in range(0, m.cols, BK):
        cols = (first_col + tl.arange(0, BK))[:, None]
        inside = (cols < m.cols) & (row >= 0)
        step = load_steps(base, row, cols, inside, m).to(tl.float32)
        scale = (load_scales(base, row, cols, inside, m) << 16).to(tl.float32, bitcast=True)
        total += step * scale * tl.load(x + cols, mask=cols < m.cols, other=0.0).to(tl.float32)
    return total * weight


@triton.jit
def _multiply_units(base, x, rows, weight, m: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr):  # type: ignore[no-untyped-def]
    """For units of 32 codes, whose scale is loaded once and applied to their sum."""
    per_word: tl.constexpr = 23 // m.bits  # codes whose bits fit a float's mantissa where they stand
    total = tl.zeros((BU, BN), tl.float32)
    for first_unit in range(0, m.cols // 32, BU):
        units = (first_unit + tl.arange(0, BU))[:, None]
        inside = units < m.cols // 32  # [BU, 1]
        words = load_unit_words(base, units, rows[None, :], inside, m)
        scale = (load_unit_scale(base, units, rows[None, :], inside, m) << 16).to(tl.float32, bitcast=True)
        dot = tl.zeros((BU, BN), tl.float32)
        x_sum = tl.zeros((BU, 1), tl.float32)
        for octet in tl.static_range(4):
            word = words[octet]
            quads = (x + 32 * units + 8 * octet).to(tl.pointer_type(tl.int64))
            for half in tl.static_range(2):
                quad = tl.load(quads + half, mask=inside, other=0)
                for lane in tl.static_range(4):
                    place = 4 * half + lane
                    shift = m.bits * (place // per_word * per_word)
                    bit = m.bits * (place % per_word)
                    value = _bf16_at(quad, lane)
                    dot += _code_at(word >> shift if shift > 0 else word, bit, m.max_code) * value
                    x_sum += value
        zero = m.middle_code
        if m.has_zeros:
            zero = load_unit_zero(base, units, rows[None, :], inside, m).to(tl.float32)
        total += scale * (dot - zero * x_sum)
    return total * weight


@triton.jit
def _code_at(word, bit: tl.constexpr, max_code: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code at a bit of the word, as float32: (2^23 + code * 2^bit) / 2^bit - 2^23 / 2^bit, all exact."""
    if _IS_INTERPRETED:
        mantissa = word & (max_code << bit) | 0x4B000000
    else:  # the compiler makes two instructions of this one
        mantissa = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r", [word, max_code << bit, 0x4B000000], tl.int32, True, 1
        )
    return mantissa.to(tl.float32, bitcast=True) * (1.0 / (1 << bit)) - 8388608.0 / (1 << bit)


@triton.jit
def _bf16_at(quad, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    """The lane-th of four bf16 in an int64, as float32."""
    half = (quad >> 32).to(tl.int32) if lane >= 2 else quad.to(tl.int32)
    bits = half & -65536 if lane % 2 == 1 else half << 16
    return bits.to(tl.float32, bitcast=True)
