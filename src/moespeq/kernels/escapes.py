"""Escapes: the few weights whose bits stand in a list, put over what was decoded.

Shapes: BN rows, BU units; lists are those of each row's tile, sorted by position. A tile has at most eight blocks, so
its lists are counted once, four bits a block, and a block looks only at its own entries: usually none.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_escapes", "restore_pairs"]


_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def count_escapes(escapes, first_escape, num_escapes, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """(longest list, entries of each block int32 [BN], how many any row has of each block, unary) of the rows' lists.

    The counts mean something only where no list has more than 15 entries; unary 4 means at least 4.
    """
    tl.static_assert(block_cols * 8 >= 1024)
    longest = tl.max(num_escapes)
    counts = tl.zeros_like(first_escape)
    marks = tl.zeros_like(first_escape)
    number = 0
    while number < tl.where(longest <= 15, longest, 0):
        entry = tl.load(escapes + first_escape + number, mask=number < num_escapes, other=0)
        digit = 4 * ((entry & 0xFFFF) // block_cols)
        is_entry = number < num_escapes
        marks |= tl.where(is_entry, 1 << digit + tl.minimum((counts >> digit) & 15, 3), 0)
        counts += tl.where(is_entry, 1 << digit, 0)
        number += 1
    return longest, counts, tl.reduce(marks, 0, _either)


@triton.jit
def _either(first, second):  # type: ignore[no-untyped-def]
    return first | second


@triton.jit
def restore_pairs(pairs, escapes, first_escape, num_escapes, counted, first_col, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs of a block, int32 [BU, BN] each, with the escaped halves replaced."""
    longest, counts, marks = counted
    digit = first_col % 1024 // block_cols * 4
    mark = (marks >> digit) & 15
    sees_all = (longest > 15) | (mark == 15)
    most = tl.where(sees_all, longest, (mark & 1) + (mark >> 1 & 1) + (mark >> 2 & 1))
    skipped = tl.where(sees_all, 0, (counts * 0x11111110 >> digit) & 15)
    unit = (first_col % 1024 // 32 + tl.arange(0, block_cols // 32))[:, None]
    number = 0
    while number < most:
        is_entry = skipped + number < num_escapes
        entry = tl.load(escapes + first_escape + skipped + number, mask=is_entry, other=0)
        place = tl.where(is_entry, (entry & 0xFFFF) // 2, -1)[None, :] - unit * 16  # 0..15 inside its unit
        is_odd = (entry & 1 == 1)[None, :]
        kept = tl.where(is_odd, 0xFFFF, -65536)
        bits = tl.where(is_odd, (entry & -65536)[None, :], ((entry >> 16) & 0xFFFF)[None, :])
        restored = ()
        for pair in tl.static_range(16):
            restored += (_replace(pairs[pair], place, pair, kept, bits),)
        pairs = restored
        number += 1
    return pairs


@triton.jit
def _replace(value, place, pair: tl.constexpr, kept, bits):  # type: ignore[no-untyped-def]
    """value & kept | bits where place is pair, else value: a comparison and one predicated instruction."""
    if _IS_INTERPRETED:
        result = tl.where(place == pair, value & kept | bits, value)
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .pred here; setp.eq.s32 here, $2, $3; mov.b32 $0, $1; @here lop3.b32 $0, $1, $4, $5, 0xea; }",
            "=&r,r,r,r,r,r",
            [value, place, pair, kept, bits],
            tl.int32,
            True,
            1,
        )
    return result
