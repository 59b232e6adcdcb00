"""Units: 32 codes of a row at once, four words of eight codes, under one scale and one zero code.

Shapes: units [BU, 1] counted along the row, rows [1, BN]; every load is one value, or one vector, for each [BU, BN].
Units come first because the compiler lays threads along the first of two axes that are alike to it, and neighbours in
a row are neighbours in memory. `inside` masks units past the row's end, None where there are none. Asks for rows that
are whole units and groups that are too (`MatrixGeometry.has_units`).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "interleave_units",
    "join_words",
    "load_bf16_pairs",
    "load_unit_scale",
    "load_unit_words",
    "load_unit_zero",
    "load_vector",
    "split4",
    "units_of_block",
]


@triton.jit
def units_of_block(first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """The units [BU, 1] of the block that begins at this column, or of the row's last block behind it."""
    last_block: tl.constexpr = (m.cols - 1) // 128 * 128
    return tl.minimum(first_col, last_block) // 32 + tl.arange(0, 4)[:, None]


@triton.jit
def load_unit_words(base, units, rows, inside, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four int32 [BU, BN]: the m.bits-wide codes 0..7, 8..15, 16..23, 24..31 of each unit, from bit 0 on."""
    words = (base + m.codes_at).to(tl.pointer_type(tl.int32)) + rows * (m.code_row_bytes // 4) + units * m.bits
    if m.bits == 4:
        word0, word1, word2, word3 = split4(load_vector(words, inside, 4))
    elif m.bits == 2:
        word0, word2 = tl.split(load_vector(words, inside, 2))
        word1 = (word0 >> 16) & 0xFFFF
        word3 = (word2 >> 16) & 0xFFFF
    else:
        word0 = _load(words, inside, 0)
        second = _load(words + 1, inside, 0)
        third = _load(words + 2, inside, 0)
        word1 = (word0 >> 24) & 0xFF | second << 8
        word2 = (second >> 16) & 0xFFFF | third << 16
        word3 = (third >> 8) & 0xFFFFFF
    return word0, word1, word2, word3


@triton.jit
def load_unit_scale(base, units, rows, inside, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of each unit's scale, int32 [BU, BN]."""
    scales = (base + m.scales_at).to(tl.pointer_type(tl.uint16))
    return _load(scales + rows * m.num_groups + units * 32 // m.group, inside, 0).to(tl.int32)


@triton.jit
def load_unit_zero(base, units, rows, inside, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each unit's zero code, int32 [BU, BN]; 1 outside, so that codes of 0 are none there."""
    return _load(base + m.zeros_at + rows * m.num_groups + units * 32 // m.group, inside, 1).to(tl.int32)


@triton.jit
def load_vector(pointers, inside, length: tl.constexpr):  # type: ignore[no-untyped-def]
    """`length` consecutive values from each pointer [...]: [..., length]."""
    lanes = tl.arange(0, length)[None, None, :]
    if len(pointers.shape) == 3:
        lanes = lanes[None, :, :, :]
    pointers = tl.expand_dims(pointers, -1) + lanes
    return _load(pointers, None if inside is None else tl.expand_dims(inside, -1), 0)


@triton.jit
def _load(pointers, inside, outside: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without a mask where all is inside: a masked load costs a register's reset."""
    return tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=outside)


@triton.jit
def split4(values):  # type: ignore[no-untyped-def]
    """[..., 4] -> four [...], in registers."""
    shape: tl.constexpr = values.shape
    if len(shape) == 3:
        halves = tl.reshape(values, (shape[0], shape[1], 2, 2))
    else:
        halves = tl.reshape(values, (shape[0], shape[1], shape[2], 2, 2))
    low, high = tl.split(halves)  # last bit of the index 0, 1
    value0, value2 = tl.split(low)
    value1, value3 = tl.split(high)
    return value0, value1, value2, value3


@triton.jit
def load_bf16_pairs(matrix, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sixteen int32 [BU, BN], two bf16 each: a block of rows [1, BN] of a matrix [..., m.cols], unit by unit."""
    units = units_of_block(first_col, m)
    inside = None if m.cols % 128 == 0 else (units < m.cols // 32) & (rows >= 0)
    pairs = matrix.to(tl.pointer_type(tl.int32)) + rows * (m.cols // 2) + units * 16
    words = ()
    for octet in tl.static_range(4):
        words += split4(load_vector(pairs + 4 * octet, inside, 4))
    return words


@triton.jit
def _join4(value0, value1, value2, value3):  # type: ignore[no-untyped-def]
    """Four tensors [...] -> [..., 2, 2], in order."""
    return tl.join(tl.join(value0, value2), tl.join(value1, value3))


@triton.jit
def join_words(words):  # type: ignore[no-untyped-def]
    """Sixteen int32 [BU, BN], each two bf16, low half first -> bf16 [BN, BK = 32 BU], in registers."""
    first = _join4(words[0], words[4], words[8], words[12])
    second = _join4(words[1], words[5], words[9], words[13])
    third = _join4(words[2], words[6], words[10], words[14])
    fourth = _join4(words[3], words[7], words[11], words[15])
    pairs = _join4(first, second, third, fourth)  # [block_units, block_rows, 2, 2, 2, 2]
    low = (pairs & 0xFFFF).to(tl.int16)
    high = (pairs >> 16).to(tl.int16)
    weights = tl.permute(tl.join(low, high), (1, 0, 2, 3, 4, 5, 6))
    return tl.reshape(weights, (words[0].shape[1], 128)).to(tl.bfloat16, bitcast=True)


@triton.jit
def interleave_units(block):  # type: ignore[no-untyped-def]
    """[BN, 128] in natural order -> four columns of each of its four units in turn.

    A matrix instruction sums over 16 columns, of which each of a row's four threads holds four. In this order they are
    four neighbours of the thread's own unit, so that decoded units are operands where they stand. Both factors of a
    product are put into it.
    """
    rows: tl.constexpr = block.shape[0]
    return tl.reshape(tl.permute(tl.reshape(block, (rows, 4, 8, 4)), (0, 2, 1, 3)), (rows, 128))
