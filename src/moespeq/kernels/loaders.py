"""How a product gets its block of weights: as it is (plain), decoded by element, or decoded in units of 32 codes.

Owns the choice between the loaders and what a loop over a row's blocks carries for them: where each row's next variable
field lies, what was loaded ahead, the escapes to come. Shapes: BN rows, BK = 128 columns of a block. Tiles begin every
1,024 columns of a row; a block never crosses one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moespeq.kernels.code_width_units import decode_code_width_units, field_tables, start_code_width_units
from moespeq.kernels.elements import decode_elements, first_place, restore_escaped
from moespeq.kernels.escapes import restore_pairs, start_escapes
from moespeq.kernels.fixed_units import decode_fixed_units, start_fixed_units
from moespeq.kernels.geometry import MatrixGeometry
from moespeq.kernels.sections import tile_start
from moespeq.kernels.units import join_words, load_bf16_pairs
from moespeq.nested import BaseFormat, Layout

__all__ = ["Loader", "load_block", "start_rows"]


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader and the launch it is fastest with. All have equal blocks of columns, so that they sum in equal order."""

    kind: str
    num_stages: int = 1
    block_rows: int = 16
    num_warps: int = 1
    max_registers: int | None = None

    @classmethod
    def choose(cls, m: MatrixGeometry, layout: Layout) -> Loader:
        """The fastest loader that reads this matrix."""
        if layout is Layout.PLAIN:
            return cls("plain units", max_registers=168) if m.is_regular else cls("plain")
        if layout is Layout.FIXED and m.is_regular:
            return cls("fixed units", max_registers=168)
        if m.is_regular:
            return cls("code-width units", max_registers=168)
        return cls("elements", block_rows=32, num_warps=4)

    def tables(self, fmt: BaseFormat, unused: torch.Tensor) -> torch.Tensor:
        """The tensor that the loader looks fields up in, or `unused`; made at the first call, before a capture."""
        return field_tables(fmt, unused.device) if self.kind == "code-width units" else unused


@triton.jit
def start_rows(base, sections, rows, m: tl.constexpr, layout: tl.constexpr, loader: tl.constexpr):  # type: ignore[no-untyped-def]
    """State before the first block."""
    if loader == "plain":
        state = ()
    elif loader == "plain units":
        state = (
            load_bf16_pairs(sections[1], rows[None, :], 0, m),
            load_bf16_pairs(sections[1], rows[None, :], 128, m),
        )
    elif loader == "elements":
        state = _start_tile(base, sections, rows, 0, m, layout)
    else:
        units = tl.load(sections[0] + 2 * m.tiles_per_row * rows)  # every row begins a tile
        if loader == "fixed units":
            decoder = start_fixed_units(base, sections[1], sections[2], rows, units, m)
        else:
            decoder = start_code_width_units(base, sections[5], rows, units * 32, m)
        state = (decoder, start_escapes(sections[0], rows, m))
    return state


@triton.jit
def _start_tile(base, sections, rows, tile_of_row, m: tl.constexpr, layout: tl.constexpr):  # type: ignore[no-untyped-def]
    """For the loader by element: (place, first escape and number of escapes of each row's tile, the longest list)."""
    units, first_escape, num_escapes = tile_start(sections[0], rows, tile_of_row, m)
    return first_place(base, units, rows, m, layout), first_escape, num_escapes, tl.max(num_escapes)


@triton.jit
def load_block(  # type: ignore[no-untyped-def]
    base, sections, rows, first_col, state, m: tl.constexpr, layout: tl.constexpr, loader: tl.constexpr
):
    """(weights bf16 [BN, BK], state after the block); zeros past the row's end."""
    if loader == "plain":
        weights = _load_plain(sections[1], rows, first_col, m)
    elif loader == "plain units":
        weights = join_words(state[0])
        state = (state[1], load_bf16_pairs(sections[1], rows[None, :], first_col + 256, m))
    elif loader == "elements":
        if (first_col % 1024 == 0) & (first_col > 0):
            state = _start_tile(base, sections, rows, first_col // 1024, m, layout)
        place, first_escape, num_escapes, most = state
        bits, place = decode_elements(base, sections[1], sections[2], rows, first_col, place, m, layout, 128)
        bits = restore_escaped(bits, sections[3], first_escape, num_escapes, most, rows, first_col, m, 128)
        weights = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        state = (place, first_escape, num_escapes, most)
    else:
        decoder, escapes = state
        if loader == "fixed units":
            pairs, decoder = decode_fixed_units(base, sections[1], sections[2], rows, first_col, decoder, m)
        else:
            pairs, decoder = decode_code_width_units(base, sections[5], sections[1], rows, first_col, decoder, m)
        pairs, escapes = restore_pairs(pairs, sections[0], sections[3], escapes, rows, first_col, m)
        weights = join_words(pairs)
        state = (decoder, escapes)
    return weights, state


@triton.jit
def _load_plain(matrix, rows, first_col, m: tl.constexpr):  # type: ignore[no-untyped-def]
    cols = first_col + tl.arange(0, 128)
    pointers = matrix.to(tl.pointer_type(tl.bfloat16)) + rows[:, None] * m.cols + cols[None, :]
    return tl.load(pointers) if m.cols % 128 == 0 else tl.load(pointers, mask=(cols < m.cols)[None, :], other=0.0)
