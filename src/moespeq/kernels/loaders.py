"""How a product gets its block of weights: as it is (plain), decoded by element, or decoded in units of 32 codes.

Owns the choice between the loaders and the loop state they share: where each row's next variable field lies, and its
tile's escapes. Shapes: BN rows, BK columns of a block. Tiles begin every 1,024 columns of a row; a block never crosses
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moespeq.kernels.code_width_units import decode_code_width_units, field_tables, load_code_width_units
from moespeq.kernels.elements import decode_elements, first_place, restore_escaped
from moespeq.kernels.escapes import count_escapes, restore_pairs
from moespeq.kernels.fixed_units import decode_fixed_units, load_fixed_units
from moespeq.kernels.geometry import MatrixGeometry
from moespeq.kernels.sections import tile_start
from moespeq.kernels.units import join_words
from moespeq.nested import BaseFormat, Layout

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
        if m.is_regular:
            return cls("code-width units", num_stages=1, max_registers=168)
        return cls("elements", num_stages=1)

    def tables(self, fmt: BaseFormat, unused: torch.Tensor) -> torch.Tensor:
        """The tensor that the loader looks fields up in, or `unused`; made at the first call, before a capture."""
        return field_tables(fmt, unused.device) if self.kind == "code-width units" else unused


@triton.jit
def start_rows(  # type: ignore[no-untyped-def]
    base, sections, rows, m: tl.constexpr, layout: tl.constexpr, loader: tl.constexpr, block_cols: tl.constexpr
):
    """State before the first block: (place, first escape and number of escapes of each row's tile, their counts)."""
    return () if loader == "plain" else _start_tile(base, sections, rows, 0, m, layout, loader, block_cols)


@triton.jit
def _start_tile(  # type: ignore[no-untyped-def]
    base,
    sections,
    rows,
    tile_of_row,
    m: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    block_cols: tl.constexpr,
):
    units, first_escape, num_escapes = tile_start(sections[0], rows, tile_of_row, m)
    place = first_place(base, units, rows, m, layout)
    if loader == "elements":
        counted = (tl.max(num_escapes),)
    else:
        counted = count_escapes(sections[3], first_escape, num_escapes, block_cols)
    return place, first_escape, num_escapes, counted


@triton.jit
def prefetch(base, sections, rows, first_col, m: tl.constexpr, loader: tl.constexpr, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the loader reads one block ahead."""
    last_block: tl.constexpr = (m.cols - 1) // block_cols * block_cols  # behind it is nothing to read: read it again
    if loader == "fixed units":
        ahead = load_fixed_units(base, sections[1], rows, tl.minimum(first_col, last_block), m, block_cols // 32)
    elif loader == "code-width units":
        ahead = load_code_width_units(base, sections[5], rows, tl.minimum(first_col, last_block), m, block_cols // 32)
    else:
        ahead = ()
    return ahead


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    base,
    sections,
    rows,
    first_col,
    state,
    ahead,
    m: tl.constexpr,
    layout: tl.constexpr,
    loader: tl.constexpr,
    block_cols: tl.constexpr,
):
    """(weights bf16 [BN, BK], state after the block); zeros past the row's end."""
    if loader == "plain":
        weights = _load_plain(sections[1], rows, first_col, m, block_cols)
    else:
        if (first_col % 1024 == 0) & (first_col > 0):
            state = _start_tile(base, sections, rows, first_col // 1024, m, layout, loader, block_cols)
        place, first_escape, num_escapes, counted = state
        escapes = sections[3]
        if loader == "elements":
            bits, place = decode_elements(base, sections[1], sections[2], rows, first_col, place, m, layout, block_cols)
            bits = restore_escaped(bits, escapes, first_escape, num_escapes, counted[0], rows, first_col, m, block_cols)
            weights = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            if loader == "fixed units":
                pairs, place = decode_fixed_units(ahead, sections[2], place, m)
            else:
                pairs, place = decode_code_width_units(ahead, sections[1], place, m)
            pairs = restore_pairs(pairs, escapes, first_escape, num_escapes, counted, first_col, block_cols)
            weights = join_words(pairs, block_cols)
        state = (place, first_escape, num_escapes, counted)
    return weights, state


@triton.jit
def _load_plain(matrix, rows, first_col, m: tl.constexpr, block_cols: tl.constexpr):  # type: ignore[no-untyped-def]
    cols = first_col + tl.arange(0, block_cols)
    pointers = matrix.to(tl.pointer_type(tl.bfloat16)) + rows[:, None] * m.cols + cols[None, :]
    if m.cols % block_cols == 0:
        weights = tl.load(pointers)
    else:
        weights = tl.load(pointers, mask=(cols < m.cols)[None, :], other=0.0)
    return weights
