"""Where the sections of a residual record begin, read on the device from its tables.

A record's variable sections follow from two totals in each table's last row, so a program that needs matrix 1 reads
those of matrix 0 first. Layouts are named by their manifest names ("nested", "code-width", "plain"); m is a
MatrixGeometry, a compile-time constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["align16", "find_base", "find_sections", "tile_start"]


@triton.jit
def align16(num_bytes):  # type: ignore[no-untyped-def]
    return (num_bytes + 15) // 16 * 16


@triton.jit
def find_base(record, bank, bank_row, base_bytes: tl.constexpr):  # type: ignore[no-untyped-def]
    """(base record, residual record) of an expert: in the bank, or both in the slot when its bank row is negative."""
    base = bank + bank_row.to(tl.int64) * base_bytes
    residual = record
    if bank_row < 0:
        base = record
        residual = record + base_bytes
    return tl.multiple_of(base, 16), tl.multiple_of(residual, 16)


@triton.jit
def find_sections(residual, m: tl.constexpr, layout: tl.constexpr):  # type: ignore[no-untyped-def]
    """(table, plane, nibbles, escapes, end) of the matrix whose residual begins here; `end` is where the next begins.

    plane: bytes (nested), the bit stream (code-width) or the matrix itself (plain). All are byte pointers but `table`
    and `escapes`, which are int32.
    """
    table = residual.to(tl.pointer_type(tl.int32))
    plane = residual
    nibbles = residual
    escapes = residual
    if layout == "plain":
        end = residual + align16(2 * m.rows * m.cols)
    else:
        units = tl.load(table + 2 * m.num_tiles)
        num_escapes = tl.load(table + 2 * m.num_tiles + 1)
        plane = tl.multiple_of(residual + align16(8 * (m.num_tiles + 1)), 16)
        if layout == "nested":
            nibbles = plane + align16(m.rows * m.cols)
            escapes = nibbles + align16((units + 1) // 2)
        else:
            nibbles = plane
            escapes = plane + align16(4 * units)
        end = escapes + align16(4 * num_escapes)
    return table, plane, nibbles, escapes.to(tl.pointer_type(tl.int32)), tl.multiple_of(end, 16)


@triton.jit
def tile_start(table, rows, tile_of_row, m: tl.constexpr):  # type: ignore[no-untyped-def]
    """(units before, escapes before, escapes inside) of each row's tile, int32 [BN]."""
    tiles = rows // m.rows_per_tile * m.tiles_per_row + tile_of_row
    units = tl.load(table + 2 * tiles)
    first_escape = tl.load(table + 2 * tiles + 1)
    return units, first_escape, tl.load(table + 2 * tiles + 3) - first_escape
