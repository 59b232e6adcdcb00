"""The fast decoder of the fixed layout: blocks of units, weights never leave registers until they are whole.

Shapes: BN rows, BU units of 32 codes in a block of BK columns. What the next block needs from memory besides nibbles is loaded
one block ahead; the nibbles' place follows from the codes, by counting zero codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.units import join_words, load_unit_scale, load_unit_words, load_unit_zero, load_vector, split4
from moespeq.kernels.word_decode import decode_word

__all__ = ["decode_fixed_units", "load_fixed_units"]


@triton.jit
def load_fixed_units(base, plane, rows, first_col, m: tl.constexpr, BU: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a block needs: (four words of codes, vector of residual bytes, scale, zero code)."""
    row = rows[None, :]
    units = first_col // 32 + tl.arange(0, BU)[:, None]
    inside = (units < m.cols // 32) & (row >= 0)
    words = load_unit_words(base, units, row, inside, m)
    residual = plane.to(tl.pointer_type(tl.int32)) + row * (m.cols // 4) + units * 8
    low_bytes = split4(load_vector(residual, inside, 4))
    high_bytes = split4(load_vector(residual + 4, inside, 4))
    scale = load_unit_scale(base, units, row, inside, m)
    zero = tl.full((BU, rows.shape[0]), m.middle_code, tl.int32)
    if m.has_zeros:
        zero = load_unit_zero(base, units, row, inside, m)
    return words, low_bytes, high_bytes, scale, zero


@triton.jit
def decode_fixed_units(  # type: ignore[no-untyped-def]
    loaded,
    nibbles,
    last_nibble,
    place,
    escapes,
    first_escape,
    num_escapes,
    most,
    first_col,
    m: tl.constexpr,
    BK: tl.constexpr,
):
    """(weights bf16 [BN, BK], place after the block) from what `load_fixed_units` returned."""
    words, low, high, scale, zero = loaded
    zeros = zero * 0x11111111
    counts0 = _running_counts(_nibbles_of(words[0], m), zeros)
    counts1 = _running_counts(_nibbles_of(words[1], m), zeros)
    counts2 = _running_counts(_nibbles_of(words[2], m), zeros)
    counts3 = _running_counts(_nibbles_of(words[3], m), zeros)
    place1 = _count(counts0)
    place2 = place1 + _count(counts1)
    place3 = place2 + _count(counts2)
    total = place3 + _count(counts3)
    ends = tl.cumsum(total, axis=0)
    start = place[None, :] + ends - total
    plane = nibbles.to(tl.pointer_type(tl.int32))
    last = last_nibble // 8
    a0, a1, a2, a3 = _decode(words[0], low[0], low[1], plane, last, start, counts0, scale, zero, m)
    b0, b1, b2, b3 = _decode(words[1], low[2], low[3], plane, last, start + place1, counts1, scale, zero, m)
    c0, c1, c2, c3 = _decode(words[2], high[0], high[1], plane, last, start + place2, counts2, scale, zero, m)
    d0, d1, d2, d3 = _decode(words[3], high[2], high[3], plane, last, start + place3, counts3, scale, zero, m)
    unit = (first_col % 1024 // 32 + tl.arange(0, BK // 32))[:, None]
    number = 0
    while number < most:
        entry = tl.load(escapes + first_escape + number, mask=number < num_escapes, other=-1)[None, :]
        pair = tl.where((number < num_escapes)[None, :], (entry & 0xFFFF) // 2 - unit * 16, -1)  # 0..15 inside the unit
        keep = tl.where(entry & 1 == 1, 0xFFFF, -65536)
        bits = tl.where(entry & 1 == 1, entry & -65536, (entry >> 16) & 0xFFFF)
        a0 = tl.where(pair == 0, a0 & keep | bits, a0)
        a1 = tl.where(pair == 1, a1 & keep | bits, a1)
        a2 = tl.where(pair == 2, a2 & keep | bits, a2)
        a3 = tl.where(pair == 3, a3 & keep | bits, a3)
        b0 = tl.where(pair == 4, b0 & keep | bits, b0)
        b1 = tl.where(pair == 5, b1 & keep | bits, b1)
        b2 = tl.where(pair == 6, b2 & keep | bits, b2)
        b3 = tl.where(pair == 7, b3 & keep | bits, b3)
        c0 = tl.where(pair == 8, c0 & keep | bits, c0)
        c1 = tl.where(pair == 9, c1 & keep | bits, c1)
        c2 = tl.where(pair == 10, c2 & keep | bits, c2)
        c3 = tl.where(pair == 11, c3 & keep | bits, c3)
        d0 = tl.where(pair == 12, d0 & keep | bits, d0)
        d1 = tl.where(pair == 13, d1 & keep | bits, d1)
        d2 = tl.where(pair == 14, d2 & keep | bits, d2)
        d3 = tl.where(pair == 15, d3 & keep | bits, d3)
        number += 1
    weights = join_words((a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3), BK)
    return weights, place + tl.sum(total, axis=0)


@triton.jit
def _decode(word, low_bytes, high_bytes, plane, last, first_nibble, counts, scale, zero, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four pairs of weights; the nibbles come from the one or two words of the plane that hold them."""
    nibbles = tl.load(plane + tl.minimum(first_nibble // 8, last))
    next_nibbles = tl.load(plane + tl.minimum(first_nibble // 8 + 1, last))
    return decode_word(
        _nibbles_of(word, m), low_bytes, high_bytes, nibbles, next_nibbles, first_nibble, counts, scale, zero
    )


@triton.jit
def _nibbles_of(word, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight codes of m.bits -> eight codes of 4 bits."""
    if m.bits == 3:
        word = word & 0x000FFF | (word & 0xFFF000) << 4
        word = word & 0x003F003F | (word & 0x0FC00FC0) << 2
        word = word & 0x07070707 | (word & 0x38383838) << 1
    elif m.bits == 2:
        word = word & 0x00FF | (word & 0xFF00) << 8
        word = word & 0x000F000F | (word & 0x00F000F0) << 4
        word = word & 0x03030303 | (word & 0x0C0C0C0C) << 2
    return word


@triton.jit
def _running_counts(word, zeros):  # type: ignore[no-untyped-def]
    """Zero codes up to and with each of eight codes, four bits each, of words whose zero code stands in all places."""
    other = word ^ zeros
    other |= other >> 1
    other |= other >> 2
    return (~other & 0x11111111) * 0x11111111


@triton.jit
def _count(counts):  # type: ignore[no-untyped-def]
    return (counts >> 28) & 0xF
