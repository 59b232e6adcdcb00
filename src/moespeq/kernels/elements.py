"""The decoder for every format: element by element, plain integer arithmetic. The reference for the fast ones.

Shapes: BN rows, BK columns, a block that lies in one tile of each of its rows. `place` int32 [BN] is where each row's
next variable field lies: a nibble (nested) or a bit (code-width) of the record's stream; every block moves it on.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["centre_bits", "decode_elements", "first_place", "load_scales", "load_steps", "restore_escaped"]


@triton.jit
def load_steps(base, rows, cols, inside, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """step = code - zero, int32 [BN, BK], of rows [BN, 1] and columns [1, BK]; 0 outside."""
    first_bit = cols * m.bits
    codes = base + m.codes_at + rows * m.code_row_bytes + first_bit // 8
    window = tl.load(codes, mask=inside, other=0).to(tl.int32)
    if m.bits == 3:
        crosses = inside & (first_bit % 8 > 5)
        window |= tl.load(codes + 1, mask=crosses, other=0).to(tl.int32) << 8
    code = (window >> first_bit % 8) & m.max_code
    zero = m.middle_code
    if m.has_zeros:
        zero = tl.load(base + m.zeros_at + rows * m.num_groups + cols // m.group, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, code - zero, 0)


@triton.jit
def load_scales(base, rows, cols, inside, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of each weight's scale, int32 [BN, BK]."""
    scales = (base + m.scales_at).to(tl.pointer_type(tl.uint16))
    return tl.load(scales + rows * m.num_groups + cols // m.group, mask=inside, other=0).to(tl.int32)


@triton.jit
def centre_bits(step, scale_bits):  # type: ignore[no-untyped-def]
    """Bits of bf16(step * scale), int32: the float32 product is exact; rounded half to even by integer arithmetic."""
    product = step.to(tl.float32) * (scale_bits << 16).to(tl.float32, bitcast=True)
    bits = product.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def first_place(base, units, rows, m: tl.constexpr, layout: tl.constexpr):  # type: ignore[no-untyped-def]
    """`place` at a tile's begin, moved on over the rows that lie before each row in its tile."""
    place = units
    if layout == "code-width":
        place = units * 32
    if m.rows_per_tile > 1:
        span: tl.constexpr = triton.next_power_of_2(m.cols)
        cols = tl.arange(0, span)[None, :]
        first_row = rows // m.rows_per_tile * m.rows_per_tile
        for skipped in range(m.rows_per_tile - 1):
            row = first_row + skipped
            inside = (cols < m.cols) & (row < rows)[:, None]
            steps = load_steps(base, row[:, None], cols, inside, m)
            place += tl.sum(tl.where(inside, _field_units(steps, m, layout), 0), axis=1)
    return place


@triton.jit
def _field_units(steps, m: tl.constexpr, layout: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nibbles (nested) or bits (code-width) that an element takes of the stream."""
    if layout == "nested":
        return (steps == 0).to(tl.int32)
    packed = tl.full((1, 1), m.packed_widths, tl.int64)
    return ((packed >> (4 * tl.abs(steps)).to(tl.int64)) & 0xF).to(tl.int32)


@triton.jit
def decode_elements(  # type: ignore[no-untyped-def]
    base, plane, nibbles, rows, first_col, place, m: tl.constexpr, layout: tl.constexpr, block_cols: tl.constexpr
):
    """(bf16 bits int32 [BN, BK] without escapes, place after the block); zeros past the row's end."""
    cols = (first_col + tl.arange(0, block_cols))[None, :]
    inside = (cols < m.cols) & (rows < m.rows)[:, None]
    row = rows[:, None]
    steps = load_steps(base, row, cols, inside, m)
    scale = load_scales(base, row, cols, inside, m)
    taken = tl.where(inside, _field_units(steps, m, layout), 0)
    ends = tl.cumsum(taken, axis=1)
    starts = place[:, None] + ends - taken
    is_far = inside & (steps == 0)
    centre = centre_bits(steps, scale)
    if layout == "nested":
        byte = tl.load(plane + row * m.cols + cols, mask=inside, other=0).to(tl.int32)
        nibble = tl.load(nibbles + starts // 2, mask=is_far, other=0).to(tl.int32) >> (starts % 2) * 4
        distance = byte | (nibble & 7) << 8
        sign = (nibble >> 3) & 1
        is_zero = distance == 2047
        near = centre + byte - ((byte & 0x80) << 1)
    else:
        field = _read_fields(plane, starts, taken, inside)
        distance = field & 1023
        sign = field >> 10
        is_zero = distance == 1023
        offset = tl.where(tl.abs(steps) == m.reach, m.last_offset, (1 << taken) >> 1)
        near = centre + field - offset
    far = sign << 15 | tl.where(is_zero, 0, scale - distance)
    bits = tl.where(is_far, far, near) & 0xFFFF
    return tl.where(inside, bits, 0), place + tl.sum(taken, axis=1)


@triton.jit
def _read_fields(stream, starts, widths, inside):  # type: ignore[no-untyped-def]
    """Unsigned fields of at most 11 bits at these bits of the stream, from as many bytes as they touch."""
    byte = stream + starts // 8
    shift = starts % 8
    window = tl.load(byte, mask=inside, other=0).to(tl.int32)
    window |= tl.load(byte + 1, mask=inside & (shift + widths > 8), other=0).to(tl.int32) << 8
    window |= tl.load(byte + 2, mask=inside & (shift + widths > 16), other=0).to(tl.int32) << 16
    return (window >> shift) & ((1 << widths) - 1)


@triton.jit
def restore_escaped(  # type: ignore[no-untyped-def]
    bits, escapes, first_escape, num_escapes, most, rows, first_col, m: tl.constexpr, block_cols: tl.constexpr
):
    """Overwrite what the tile's escape lists name; `most` is the longest list among the rows."""
    in_tile = rows % m.rows_per_tile * m.cols + first_col % 1024
    position = in_tile[:, None] + tl.arange(0, block_cols)[None, :]
    last = in_tile + m.cols - first_col  # a block may reach past a short row into the next row's positions
    number = 0
    while number < most:
        entry = tl.load(escapes + first_escape + number, mask=number < num_escapes, other=-1)
        wanted = tl.where((number < num_escapes) & ((entry & 0xFFFF) < last), entry & 0xFFFF, -1)
        bits = tl.where(position == wanted[:, None], ((entry >> 16) & 0xFFFF)[:, None], bits)
        number += 1
    return bits
