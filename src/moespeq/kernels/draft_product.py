"""Rows of the base times one x: codes become floats in registers, and a unit's scale is applied to its sum.

Shapes: sums [units, ..., rows], as many units of 32 codes as a program takes at once; base, x and rows are of that
rank and broadcast to it. A code becomes a float without a conversion: its bits are put into the mantissa of 2^23
(marlin's trick), scaled back and 2^23 taken off in one exact step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.elements import load_scales, load_steps
from moespeq.kernels.units import load_unit_scale, load_unit_words, load_unit_zero

__all__ = ["multiply_elements", "multiply_units"]

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def multiply_units(base, x, rows, sums, m: tl.constexpr, block_units: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + partial sums of W[rows] @ x: over axis 0 they are the product. For matrices that have units."""
    per_word: tl.constexpr = 23 // m.bits  # codes whose bits fit a float's mantissa where they stand
    for first_unit in range(0, m.cols // 32, block_units):
        units = first_unit + _along_first(tl.arange(0, block_units), sums)
        inside = None if m.cols % (32 * block_units) == 0 else units < m.cols // 32
        words = load_unit_words(base, units, rows, inside, m)
        scale = (load_unit_scale(base, units, rows, inside, m) << 16).to(tl.float32, bitcast=True)
        zero = m.middle_code
        if m.has_zeros:
            zero = load_unit_zero(base, units, rows, inside, m).to(tl.float32)
        dot = tl.zeros_like(sums)
        x_sum = 0.0
        for octet in tl.static_range(4):
            quads = (x + 32 * units + 8 * octet).to(tl.pointer_type(tl.int64))
            for half in tl.static_range(2):
                quad = tl.load(quads + half) if inside is None else tl.load(quads + half, mask=inside, other=0)
                for lane in tl.static_range(4):
                    place = 4 * half + lane
                    shift = m.bits * (place // per_word * per_word)
                    bit = m.bits * (place % per_word)
                    value = _bf16_at(quad, lane)
                    dot += _code_at(words[octet] >> shift if shift > 0 else words[octet], bit, m.max_code) * value
                    x_sum += value
        sums += scale * (dot - zero * x_sum)
    return sums


@triton.jit
def multiply_elements(base, x, rows, sums, m: tl.constexpr, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same for any matrix, code by code."""
    for first_col in range(0, m.cols, block_cols):
        cols = first_col + _along_first(tl.arange(0, block_cols), sums)
        inside = (cols < m.cols) & (rows < m.rows)
        step = load_steps(base, rows, cols, inside, m).to(tl.float32)
        scale = (load_scales(base, rows, cols, inside, m) << 16).to(tl.float32, bitcast=True)
        sums += step * scale * tl.load(x + cols, mask=cols < m.cols, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _along_first(values, like):  # type: ignore[no-untyped-def]
    """[n] -> [n, 1] or [n, 1, 1], of the rank of `like`."""
    return values[:, None] if len(like.shape) == 2 else values[:, None, None]


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
