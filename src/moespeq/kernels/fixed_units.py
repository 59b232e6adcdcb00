"""The fast decoder of the fixed layout: blocks of units, weights never leave registers until they are whole.

Shapes: BN rows, BU units of 32 codes in a block. Nothing is waited for where it is loaded. While a block is decoded,
the next one's residual bytes and nibbles are on their way, and the codes of the one behind it: where a block's nibbles
lie, `place` int32 [BN], is known from the codes alone, by counting zero codes.

Nibbles come in three words a unit, enough for 17 zero codes wherever they begin; a block with a unit of more reads them
again when it is decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.packed import count_bits, shift_right
from moespeq.kernels.unit_decode import decode_unit
from moespeq.kernels.units import (
    load_unit_scale,
    load_unit_words,
    load_unit_zero,
    load_vector,
    split4,
    units_of_block,
)

__all__ = ["decode_fixed_units", "nibbles_of", "start_fixed_units"]


@triton.jit
def start_fixed_units(base, plane, nibbles, rows, place, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """State before the first block of rows whose nibbles begin at `place`."""
    codes = _load_codes(base, rows, 0, m)
    octets = _load_octets(plane, rows, 0, m)
    ahead = _load_codes(base, rows, 128, m)
    found, place = _find_nibbles(codes, nibbles, place)
    return codes, octets, found, ahead, place


@triton.jit
def decode_fixed_units(base, plane, nibbles, rows, first_col, state, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sixteen pairs of weights int32 [BU, BN], state after the block)."""
    codes, octets, found, ahead, place = state
    following = first_col + 128
    # Behind the last block nothing is used: its codes are counted once more, its nibbles read where they are.
    next_found, place = _find_nibbles(ahead, nibbles, place if following < m.cols else place * 0)
    next_octets = _load_octets(plane, rows, following, m)
    next_ahead = _load_codes(base, rows, following + 128, m)
    words, scale, zero = codes
    pairs = decode_unit(words, octets, _windows(nibbles, found), found[0], scale, zero)
    return pairs, (ahead, next_octets, next_found, next_ahead, place)


@triton.jit
def _load_codes(base, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(four words of codes, scale, zero code) of each unit; the last block's where there is none."""
    row = rows[None, :]
    units = units_of_block(first_col, m)
    inside = None if m.cols % 128 == 0 else (units < m.cols // 32) & (row >= 0)
    words = nibbles_of(load_unit_words(base, units, row, inside, m), m)
    scale = load_unit_scale(base, units, row, inside, m)
    zero = tl.full((4, rows.shape[0]), m.middle_code, tl.int32)
    if m.has_zeros:
        zero = load_unit_zero(base, units, row, inside, m)
    return words, scale, zero


@triton.jit
def _load_octets(plane, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight int32, the residual bytes of each unit; the last block's where there is none."""
    row = rows[None, :]
    units = units_of_block(first_col, m)
    inside = None if m.cols % 128 == 0 else (units < m.cols // 32) & (row >= 0)
    octets = plane.to(tl.pointer_type(tl.int32)) + row * (m.cols // 4) + units * 8
    return split4(load_vector(octets, inside, 4)) + split4(load_vector(octets + 4, inside, 4))


@triton.jit
def _find_nibbles(codes, nibbles, place):  # type: ignore[no-untyped-def]
    """((four words' marks of zero codes, first nibble, its three words, the longest reach), place after the block)."""
    words, _, zero = codes
    marks = ()
    total = tl.zeros_like(zero)
    for number in tl.static_range(4):
        marks += (_mark_zero_codes(words[number], zero * 0x11111111),)
        total += count_bits(marks[number])
    first = place[None, :] + tl.cumsum(total, axis=0) - total
    plane = nibbles.to(tl.pointer_type(tl.int32)) + first // 8
    stretch = (tl.load(plane), tl.load(plane + 1), tl.load(plane + 2))
    return (marks, first, stretch, tl.max(first % 8 + total)), place + tl.sum(total, axis=0)


@triton.jit
def _mark_zero_codes(word, zeros):  # type: ignore[no-untyped-def]
    """The top bit of each of eight codes that is the zero code, which stands in all places of `zeros`."""
    other = word ^ zeros
    return ~((other & 0x77777777) + 0x77777777 | other) & -0x77777778


@triton.jit
def _windows(nibbles, found):  # type: ignore[no-untyped-def]
    """For each of four words of codes its next eight nibbles or more."""
    marks, first, stretch, reach = found
    used = (count_bits(marks[0]) * 4, count_bits(marks[1]) * 4, count_bits(marks[2]) * 4)
    skipped = first * 4 & 28
    if reach > 24:
        plane = nibbles.to(tl.pointer_type(tl.int32)) + first // 8
        windows = _shift_out(stretch + (tl.load(plane + 3), tl.load(plane + 4)), skipped, used)
    else:
        windows = _shift_out(stretch + (stretch[2], stretch[2]), skipped, used)
    return windows


@triton.jit
def _shift_out(stretch, skipped, used):  # type: ignore[no-untyped-def]
    window0 = shift_right(stretch[0], stretch[1], skipped)
    rest1 = shift_right(stretch[1], stretch[2], skipped)
    rest2 = shift_right(stretch[2], stretch[3], skipped)
    rest3 = shift_right(stretch[3], stretch[4], skipped)
    window1 = shift_right(window0, rest1, used[0])
    rest1 = shift_right(rest1, rest2, used[0])
    rest2 = shift_right(rest2, rest3, used[0])
    window2 = shift_right(window1, rest1, used[1])
    rest1 = shift_right(rest1, rest2, used[1])
    return window0, window1, window2, shift_right(window2, rest1, used[2])


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
