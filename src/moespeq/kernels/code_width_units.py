"""The fast decoder of the code-width layout: the codes of a unit tell the widths of its fields, eight at a time.

Shapes: BU units of 32 codes of a row in a block, BN rows; `place` int32 [BN] is the bit at which a row's next field
begins. Codes are loaded one block ahead, the stream where it is read. A word's eight widths come from byte permutations
of its zero code's table, where every field lies from their running sum, and a field from a stretch of the stream that
is shifted on by what was read. Fields are then, two at a time, residuals or far distances as the format says
(docs/format.md); a far weight is the complement of ~scale + (sign << 15 | distance).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moespeq.kernels.fixed_units import nibbles_of
from moespeq.kernels.packed import add_halves, centre_pair, equal_halves, low_bits, permute_bytes, shift_right_modulo
from moespeq.kernels.units import (
    load_unit_scale,
    load_unit_words,
    load_unit_zero,
    load_vector,
    split4,
    units_of_block,
)
from moespeq.nested import BaseFormat, code_fields

__all__ = ["decode_code_width_units", "field_tables", "start_code_width_units"]


@lru_cache(maxsize=8)
def field_tables(fmt: BaseFormat, device: torch.device) -> torch.Tensor:
    """For each zero code 0..15 the fields of codes 0..15: 16 widths, then 16 offsets, a byte each; int32 [16, 8]."""
    fields = code_fields(fmt)
    rows = [[fields[min(abs(code - zero), fmt.reach)] for code in range(16)] for zero in range(16)]
    octets = [[field.bits for field in row] + [field.offset for field in row] for row in rows]
    return torch.tensor(octets, dtype=torch.uint8).view(torch.int32).to(device)


@triton.jit
def start_code_width_units(base, tables, rows, place, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """State before the first block of rows whose fields begin at `place`."""
    return _load_codes(base, tables, rows, 0, m), place


@triton.jit
def decode_code_width_units(base, tables, stream, rows, first_col, state, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sixteen pairs of weights int32 [BU, BN], state after the block)."""
    codes, place = state
    words, scale, zero, width_table, offset_table = codes
    place = (place + 31) // 32 * 32 if first_col % 1024 == 0 else place  # a tile begins on a word
    words = nibbles_of(words, m)
    widths = ()
    before = ()
    total = tl.zeros_like(zero)
    for number in tl.static_range(4):
        both = _look_up(width_table, words[number])
        widths += (both,)
        before += (total,)
        total += (both[0] * 0x01010101 >> 24) + (both[1] * 0x01010101 >> 24)  # at most 44 each
    start = place[None, :] + tl.cumsum(total, axis=0) - total
    zeros = zero * 0x10001 + 0x43004300
    scales = scale * 0x10001
    pairs = ()
    for number in tl.static_range(4):
        offsets = _look_up(offset_table, words[number])
        fields = _read_fields(stream, start + before[number], widths[number])
        pairs += _weights(words[number], fields, offsets, zeros, scales)
    following = _load_codes(base, tables, rows, first_col + 128, m)
    return pairs, (following, place + tl.sum(total, axis=0))


@triton.jit
def _load_codes(base, tables, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a block needs besides its stream: (words of codes, scale, zero code, widths and offsets of codes)."""
    row = rows[None, :]
    units = units_of_block(first_col, m)
    inside = None if m.cols % 128 == 0 else (units < m.cols // 32) & (row >= 0)
    words = load_unit_words(base, units, row, inside, m)
    scale = load_unit_scale(base, units, row, inside, m)
    zero = tl.full((4, rows.shape[0]), m.middle_code, tl.int32)
    if m.has_zeros:
        zero = load_unit_zero(base, units, row, inside, m)
    # Past the row's end fields have no width: nothing is read there, and the weights are zeros.
    widths = split4(load_vector(tables + zero * 8, inside, 4))
    offsets = split4(load_vector(tables + zero * 8 + 4, inside, 4))
    return words, scale, zero, widths, offsets


@triton.jit
def _look_up(table, word):  # type: ignore[no-untyped-def]
    """Entries of a word's eight codes, a byte each: two int32."""
    index = word & 0x77777777
    is_high = (word >> 3) & 0x11111111
    ones = tl.full(word.shape, 0xFF00, tl.int32)  # byte 0 is 0, byte 1 all ones
    high = permute_bytes(ones, ones, is_high)
    first = permute_bytes(table[0], table[1], index) & ~high | permute_bytes(table[2], table[3], index) & high
    index = index >> 16
    high = permute_bytes(ones, ones, is_high >> 16)
    second = permute_bytes(table[0], table[1], index) & ~high | permute_bytes(table[2], table[3], index) & high
    return first, second


@triton.jit
def _read_fields(stream, first_bit, widths):  # type: ignore[no-untyped-def]
    """Eight unsigned fields, which follow each other from this bit on: at most 88 bits, out of four words."""
    words = stream.to(tl.pointer_type(tl.int32)) + first_bit // 32
    word0 = tl.load(words)
    word1 = tl.load(words + 1)
    word2 = tl.load(words + 2)
    low = shift_right_modulo(word0, word1, first_bit)
    middle = shift_right_modulo(word1, word2, first_bit)
    high = shift_right_modulo(word2, tl.load(words + 3), first_bit)
    nothing = tl.zeros_like(low)
    fields = ()
    for lane in tl.static_range(8):
        width = widths[lane // 4] >> 8 * (lane % 4)  # its low five bits
        fields += (low_bits(low, width),)
        low = shift_right_modulo(low, middle if lane < 6 else nothing, width)
        if lane < 5:
            middle = shift_right_modulo(middle, high if lane < 3 else nothing, width)
        if lane < 2:
            high = shift_right_modulo(high, nothing, width)
    return fields


@triton.jit
def _weights(word, fields, offsets, zeros, scales):  # type: ignore[no-untyped-def]
    """Four pairs of weights."""
    odd_codes = word >> 4
    pairs = ()
    for number in tl.static_range(4):
        codes = permute_bytes(word, odd_codes, 0x4400 + 0x1111 * number) & 0x000F000F | 0x43004300
        field = permute_bytes(fields[2 * number], fields[2 * number + 1], 0x5410)
        offset = permute_bytes(offsets[number // 2], zeros * 0, 0x4140 + 0x0202 * (number % 2))
        near = centre_pair(codes, zeros, scales) + field - offset  # no half of it leaves its range
        distance = field & 0x03FF03FF
        is_zero = equal_halves(distance, tl.full(word.shape, 0x03FF03FF, tl.int32))
        below = is_zero & 0x03FF03FF | ~is_zero & scales
        far = ~add_halves(distance | (field << 5) & -0x7FFF8000, ~below)
        is_far = equal_halves(codes, zeros)
        pairs += (is_far & far | ~is_far & near,)
    return pairs
