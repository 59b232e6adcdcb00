"""Where every section of a base and of a residual record begins, as numbers a kernel is compiled with.

Owns the offsets of docs/format.md that follow from shapes and format alone; those that follow from a record's contents
(its counts of zero codes and escapes) are read on the device. No torch, no triton: a value of either class is a
compile-time constant of a kernel, so equal geometries share one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moespeq.nested import TILE, BaseFormat, base_record_bytes, code_fields

__all__ = ["READ_AHEAD_BYTES", "UNIT", "ExpertGeometry", "MatrixGeometry"]

READ_AHEAD_BYTES = 32  # how far past a record's end the fast decoders may read: what slots keep free there
UNIT = 32  # codes that the fast kernels take at once: one scale, 16 bytes of 4-bit codes


@dataclass(frozen=True)
class MatrixGeometry:
    """One matrix [rows, cols]; offsets count from the base record's start."""

    rows: int
    cols: int
    bits: int
    group: int
    has_zeros: bool
    codes_at: int
    scales_at: int
    zeros_at: int

    @property
    def code_row_bytes(self) -> int:
        return -(-self.cols * self.bits // 8)

    @property
    def num_groups(self) -> int:
        """Groups in a row."""
        return -(-self.cols // self.group)

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle_code(self) -> int:
        """The zero code without zero points."""
        return 1 << (self.bits - 1)

    @property
    def is_wide(self) -> bool:
        """Rows are cut into tiles; otherwise a tile is `rows_per_tile` whole rows."""
        return self.cols >= TILE

    @property
    def tiles_per_row(self) -> int:
        return -(-self.cols // TILE) if self.is_wide else 1

    @property
    def rows_per_tile(self) -> int:
        return 1 if self.is_wide else TILE // self.cols

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // self.rows_per_tile) * self.tiles_per_row

    @property
    def has_units(self) -> bool:
        """Rows are whole units of 32 codes, and a unit has one scale: what the fast draft kernel asks for."""
        return self.cols % UNIT == 0 and self.group % UNIT == 0

    @property
    def is_regular(self) -> bool:
        """Besides, every row begins a tile: what the fast decoders ask for."""
        return self.has_units and self.rows_per_tile == 1

    @cached_property
    def packed_widths(self) -> int:
        """The code-width layout's field widths, 4 bits for each |step| from the lowest on."""
        return sum(field.bits << 4 * step for step, field in enumerate(code_fields(self._format)))

    @cached_property
    def reach(self) -> int:
        """The largest |step|: the one step whose field's offset is not half its range."""
        return self._format.reach

    @cached_property
    def last_offset(self) -> int:
        """The offset of the largest step's field; all others hold two's complement."""
        fields = code_fields(self._format)
        assert all(field.offset == 1 << (field.bits - 1) for field in fields[1:-1]), fields
        return fields[-1].offset

    @property
    def _format(self) -> BaseFormat:
        return BaseFormat(self.bits, self.group, self.has_zeros)


class ExpertGeometry:
    """An expert's two matrices, up [2I or I, H] and down [H, I], in one base record of `base_bytes`."""

    def __init__(self, shapes: tuple[tuple[int, int], tuple[int, int]], fmt: BaseFormat) -> None:
        self.shapes, self.fmt = shapes, fmt
        self.base_bytes = base_record_bytes(shapes, fmt)
        self.up = _matrix(shapes[0], fmt, 0)
        self.down = _matrix(shapes[1], fmt, base_record_bytes(shapes[:1], fmt))

    @property
    def hidden(self) -> int:
        """H."""
        return self.up.cols

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down.cols

    @property
    def bf16_bytes(self) -> int:
        """Of both matrices."""
        return 2 * sum(rows * cols for rows, cols in self.shapes)

    @property
    def is_gated(self) -> bool:
        """`up` holds the gate's rows, then the up projection's."""
        return self.up.rows == 2 * self.down.cols


def _matrix(shape: tuple[int, int], fmt: BaseFormat, begin: int) -> MatrixGeometry:
    rows, cols = shape
    scales_at = begin + _align(rows * fmt.code_row_bytes(cols))
    zeros_at = scales_at + _align(2 * rows * fmt.num_groups(cols))
    return MatrixGeometry(rows, cols, fmt.bits, fmt.group, fmt.zero_point, begin, scales_at, zeros_at)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
