"""Escapes: the few weights whose bits stand in a list, put over what was decoded.

Shapes: BN rows, BU units of a block of 128 columns. A row's lists follow each other from tile to tile, each sorted by
position, so a row needs no more than the place of its next entry and the end of its tile's list. Most programs have no
escape at all in their rows; they learn it once and look no further.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["restore_pairs", "start_escapes"]

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def start_escapes(table, rows, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(each row's next entry and the end of its tile's list int32 [BN], escapes of the row that has most of them)."""
    first_tile = table + 2 * m.tiles_per_row * rows
    first = tl.load(first_tile + 1)
    last = tl.load(first_tile + 2 * m.tiles_per_row + 1)
    return first, first, tl.max(last - first)


@triton.jit
def restore_pairs(pairs, table, escapes, state, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the pairs of a block, int32 [BU, BN] each, with the escaped halves replaced; state after the block)."""
    following, end, most = state
    if most > 0:
        if first_col % 1024 == 0:
            end = tl.load(table + 2 * (m.tiles_per_row * rows + first_col // 1024) + 3)
        pairs, following = _restore(pairs, escapes, following, end, first_col)
    return pairs, (following, end, most)


@triton.jit
def _restore(pairs, escapes, following, end, first_col):  # type: ignore[no-untyped-def]
    unit = (first_col % 1024 // 32 + tl.arange(0, 4))[:, None]
    entry, is_here = _next_entry(escapes, following, end, first_col)
    while tl.max(is_here) > 0:
        place = tl.where(is_here > 0, (entry & 0xFFFF) // 2, -1)[None, :] - unit * 16  # 0..15 inside its unit
        is_odd = (entry & 1 == 1)[None, :]
        kept = tl.where(is_odd, 0xFFFF, -65536)
        bits = tl.where(is_odd, (entry & -65536)[None, :], ((entry >> 16) & 0xFFFF)[None, :])
        restored = ()
        for pair in tl.static_range(16):
            restored += (_replace(pairs[pair], place, pair, kept, bits),)
        pairs = restored
        following += is_here
        entry, is_here = _next_entry(escapes, following, end, first_col)
    return pairs, following


@triton.jit
def _next_entry(escapes, following, end, first_col):  # type: ignore[no-untyped-def]
    """(each row's next entry, 1 where it lies in this block) int32 [BN]."""
    is_entry = following < end
    entry = tl.load(escapes + following, mask=is_entry, other=0)
    is_here = is_entry & ((entry & 0xFFFF) // 128 == first_col % 1024 // 128)
    return entry, is_here.to(tl.int32)


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
