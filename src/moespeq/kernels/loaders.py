"""How a product gets its block of weights: as it is (plain), decoded element by element, or decoded in units of 32 codes.

Owns the choice between the loaders and the loop state they share: where each row's next variable field lies, and its
tile's escapes. Tiles begin every 1,024 columns of a row; a block of BK columns never crosses one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from moespeq.kernels.elements import decode_elements, first_place, restore_escaped
from moespeq.kernels.fixed_units import decode_fixed_units, load_fixed_units
from moespeq.kernels.geometry import MatrixGeometry
from moespeq.kernels.sections import tile_start
from moespeq.nested import Layout

__all__ = ["Loader", "load_block", "prefetch", "start_rows"]


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader and the launch it is fastest with. All loaders have equal blocks, so that they sum in equal order."""

    kind: str
    num_stages: int
    block_rows: int = 64
    block_cols: int = 128
    num_warps: int = 4
    max_registers: int | None = None

    @classmethod
    def choose(cls, m: MatrixGeometry, layout: Layout) -> Loader:
        """The fastest loader that reads this matrix."""
        if layout is Layout.PLAIN:
            return cls("plain", num_stages=3)
        if layout is Layout.FIXED and m.is_regular:
            return cls("fixed units", num_stages=1, max_registers=128)
        return cls("elements", num_stages=1)


@triton.jit
def start_rows(base, sections, rows, m: tl.constexpr, layout: tl.constexpr, loader: tl.constexpr):  # type: ignore[no-untyped-def]
    """State before the first block: (place, first escape, escapes of each row's tile, the most of them)."""
    if loader == "plain":
        state = (rows, rows, rows, 0)
    else:
        state = _start_tile(base, sections, rows, 0, m, layout)
    return state


@triton.jit
def _start_tile(base, sections, rows, tile_of_row, m: tl.constexpr, layout: tl.constexpr):  # type: ignore[no-untyped-def]
    units, first_escape, num_escapes = tile_start(sections[0], rows, tile_of_row, m)
    place = first_place(base, units, rows, m, layout)
    return place, first_escape, num_escapes, tl.max(num_escapes)


@triton.jit
def prefetch(base, sections, rows, first_col, m: tl.constexpr, loader: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the loader reads one block ahead."""
    if loader == "fixed units":
        last_block: tl.constexpr = (m.cols - 1) // BK * BK  # behind it there is nothing to read: read it again
        ahead = load_fixed_units(base, sections[1], rows, tl.minimum(first_col, last_block), m, BK // 32)
    else:
        ahead = ()
    return ahead


@triton.jit
def load_block(
    base,
    sections,
    rows,
    first_col,
    state,
    ahead,
    m: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    BK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    """(weights bf16 [BN, BK], state after the block); zeros past the row's end."""
    if loader == "plain":
        weights = _load_plain(sections[1], rows, first_col, m, BK)
    else:
        place, first_escape, num_escapes, most = state
        if (first_col % 1024 == 0) & (first_col > 0):
            place, first_escape, num_escapes, most = _start_tile(base, sections, rows, first_col // 1024, m, layout)
        if loader == "fixed units":
            weights, place = decode_fixed_units(
                ahead, sections[2], place, sections[3], first_escape, num_escapes, most, first_col, m, BK
            )
        else:
            bits, place = decode_elements(base, sections[1], sections[2], rows, first_col, place, m, layout, BK)
            bits = restore_escaped(bits, sections[3], first_escape, num_escapes, most, rows, first_col, m, BK)
            weights = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        state = (place, first_escape, num_escapes, most)
    return weights, state


@triton.jit
def _load_plain(matrix, rows, first_col, m: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    cols = first_col + tl.arange(0, BK)
    pointers = matrix.to(tl.pointer_type(tl.bfloat16)) + rows[:, None] * m.cols + cols[None, :]
    if m.cols % BK == 0:
        weights = tl.load(pointers)
    else:
        weights = tl.load(pointers, mask=(cols < m.cols)[None, :], other=0.0)
    return weights
