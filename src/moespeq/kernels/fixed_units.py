"""The fast decoder of the fixed layout: blocks of units, weights never leave registers until they are whole.

Shapes: BN rows, BU units of 32 codes in a block. What the next block needs from memory besides nibbles is loaded one
block ahead; the nibbles' place `place` int32 [BN] follows from the codes, by counting zero codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.packed import shift_right
from moespeq.kernels.unit_decode import decode_unit
from moespeq.kernels.units import load_unit_scale, load_unit_words, load_unit_zero, load_vector, split4

__all__ = ["decode_fixed_units", "load_fixed_units", "nibbles_of"]


@triton.jit
def load_fixed_units(base, plane, rows, first_col, m: tl.constexpr, block_units: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a block needs: (four words of codes, vector of residual bytes, scale, zero code)."""
    row = rows[None, :]
    units = first_col // 32 + tl.arange(0, block_units)[:, None]
    inside = None if m.cols % (32 * block_units) == 0 else (units < m.cols // 32) & (row >= 0)
    words = load_unit_words(base, units, row, inside, m)
    residual = plane.to(tl.pointer_type(tl.int32)) + row * (m.cols // 4) + units * 8
    low_bytes = split4(load_vector(residual, inside, 4))
    high_bytes = split4(load_vector(residual + 4, inside, 4))
    scale = load_unit_scale(base, units, row, inside, m)
    zero = tl.full((block_units, rows.shape[0]), m.middle_code, tl.int32)
    if m.has_zeros:
        zero = load_unit_zero(base, units, row, inside, m)
    return words, low_bytes, high_bytes, scale, zero


@triton.jit
def decode_fixed_units(loaded, nibbles, place, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sixteen pairs of weights int32 [BU, BN], place after the block) from what `load_fixed_units` returned."""
    words, low, high, scale, zero = loaded
    words = nibbles_of(words, m)
    zeros = zero * 0x11111111
    counts = ()
    for word in tl.static_range(4):
        counts += (_running_counts(words[word], zeros),)
    total = _last(counts[0]) + _last(counts[1]) + _last(counts[2]) + _last(counts[3])
    ends = tl.cumsum(total, axis=0)
    windows = _load_windows(nibbles, place[None, :] + ends - total, counts)
    pairs = decode_unit(words, low + high, windows, counts, scale, zero)
    return pairs, place + tl.sum(total, axis=0)


@triton.jit
def _load_windows(nibbles, first_nibble, counts):  # type: ignore[no-untyped-def]
    """For each of four words its next eight nibbles or more, from five words of the plane."""
    plane = nibbles.to(tl.pointer_type(tl.int32)) + first_nibble // 8
    skipped = first_nibble * 4 & 28
    word0 = tl.load(plane)
    word1 = tl.load(plane + 1)
    word2 = tl.load(plane + 2)
    word3 = tl.load(plane + 3)
    window0 = shift_right(word0, word1, skipped)
    rest1 = shift_right(word1, word2, skipped)
    rest2 = shift_right(word2, word3, skipped)
    rest3 = shift_right(word3, tl.load(plane + 4), skipped)
    used = _last(counts[0]) * 4
    window1 = shift_right(window0, rest1, used)
    rest1 = shift_right(rest1, rest2, used)
    rest2 = shift_right(rest2, rest3, used)
    used = _last(counts[1]) * 4
    window2 = shift_right(window1, rest1, used)
    rest1 = shift_right(rest1, rest2, used)
    return window0, window1, window2, shift_right(window2, rest1, _last(counts[2]) * 4)


@triton.jit
def nibbles_of(words, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of eight codes of m.bits -> words of eight codes of 4 bits."""
    if m.bits == 4:
        spread = words
    else:
        spread = ()
        for number in tl.static_range(4):
            word = words[number]
            if m.bits == 3:
                word = word & 0x000FFF | (word & 0xFFF000) << 4
                word = word & 0x003F003F | (word & 0x0FC00FC0) << 2
                word = word & 0x07070707 | (word & 0x38383838) << 1
            else:
                word = word & 0x00FF | (word & 0xFF00) << 8
                word = word & 0x000F000F | (word & 0x00F000F0) << 4
                word = word & 0x03030303 | (word & 0x0C0C0C0C) << 2
            spread += (word,)
    return spread


@triton.jit
def _running_counts(word, zeros):  # type: ignore[no-untyped-def]
    """Zero codes up to and with each of eight codes, four bits each, of words whose zero code stands in all places."""
    other = word ^ zeros
    other |= other >> 1
    other |= other >> 2
    return (~other & 0x11111111) * 0x11111111


@triton.jit
def _last(counts):  # type: ignore[no-untyped-def]
    """Zero codes of a whole word."""
    return (counts.to(tl.uint32, bitcast=True) >> 28).to(tl.int32, bitcast=True)
