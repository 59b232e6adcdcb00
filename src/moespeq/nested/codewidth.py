"""The code-width layout: the resident code tells how many bits its residual has. Smaller, slower to decode.

Units of the table are 32-bit words. Sections: table; the tiles' bit streams, each from a word boundary on;
escapes. Fields follow each other in element order, least significant bit first; `code_fields` gives each
one's width from |step|, so a running sum of widths inside a tile finds every field. A far weight's field is a
10-bit distance below a sign bit; distance 1023 is zero, 1022 an escape.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from moespeq.nested.base import Base, dequantize_base, unpack_codes
from moespeq.nested.difference import far_scale_places, find_difference, restore_far, zero_code_positions
from moespeq.nested.format import BaseFormat
from moespeq.nested.sections import Reader, escape_entries, join_sections, read_table, restore_escapes
from moespeq.nested.tiles import TileGrid
from moespeq.nested.widths import ZERO_CODE_BITS, code_fields

__all__ = ["decode_code_width", "encode_code_width"]

_DISTANCE_BITS = ZERO_CODE_BITS - 1


def encode_code_width(weight: Tensor, base: Base, fmt: BaseFormat) -> Tensor:
    """Return one matrix's residual, uint8 [n]."""
    grid = TileGrid(*weight.shape)
    widths, offsets = _element_fields(base, (grid.rows, grid.cols), fmt)
    found = find_difference(
        weight, base, fmt, low=-offsets, high=(1 << widths) - 1 - offsets, distance_bits=_DISTANCE_BITS
    )
    fields = found.residual + offsets
    fields[found.far] = found.distance | found.negative.to(torch.int16) << _DISTANCE_BITS

    ends = grid.to_tiles(widths).cumsum(1, dtype=torch.int32)  # [num_tiles, size] bits
    words = pad((ends[:, -1] + 31 >> 5).cumsum(0), (1, 0))
    assert words[-1] < 1 << 26, words[-1]  # bit positions are int32
    table = torch.stack((words, grid.running_count(found.escapes)), 1).to(torch.int32)
    starts = grid.from_tiles(ends + (table[:-1, :1] << 5)) - widths
    stream = _write_fields(fields, starts, int(words[-1]))
    return join_sections((table, stream, escape_entries(found.bits, found.escapes, grid)))


def decode_code_width(base: Base, reader: Reader, shape: tuple[int, int], fmt: BaseFormat) -> Tensor:
    """Return the bf16 matrix [R, C] whose residual is next in `reader`."""
    grid = TileGrid(*shape)
    table, num_words, num_escapes = read_table(reader, grid)
    stream = reader.take(4 * num_words)
    entries = reader.take(4 * num_escapes)

    widths, offsets = _element_fields(base, shape, fmt)
    ends = grid.to_tiles(widths).cumsum(1, dtype=torch.int32)
    starts = grid.from_tiles(ends + (table[:-1, :1] << 5)) - widths
    fields = _read_fields(stream, starts) & ((1 << widths) - 1)

    centre = dequantize_base(base, shape, fmt).view(-1).view(torch.int16)
    bits = (fields - offsets).to(torch.int16).add_(centre)
    far = zero_code_positions(centre)
    far_fields = fields.index_select(0, far)
    signed = ((far_fields >> _DISTANCE_BITS << 15) - (far_fields & (1 << _DISTANCE_BITS) - 1)).to(torch.int16)
    scale_places = far_scale_places(base, far, shape[1], fmt)
    restore_far(bits, far, signed, scale_places, distance_bits=_DISTANCE_BITS)
    if num_escapes:
        restore_escapes(bits, table, entries.view(torch.int32), grid)
    return bits.view(torch.bfloat16).view(shape)


def _element_fields(base: Base, shape: tuple[int, int], fmt: BaseFormat) -> tuple[Tensor, Tensor]:
    """Width and offset of every element's field, two int16 [R*C]."""
    codes = unpack_codes(base, shape, fmt)
    if base.zeros is None:
        index = codes.to(torch.int32)
    else:
        origins = base.zeros.to(torch.int32).repeat_interleave(fmt.group_width(shape[1]), 1)[:, : shape[1]]
        index = codes + (fmt.max_code - origins)
    entries = _field_table(fmt, base.codes.device).index_select(0, index.view(-1))
    return entries & 0xF, entries >> 4


@lru_cache(maxsize=16)
def _field_table(fmt: BaseFormat, device: torch.device) -> Tensor:
    """Width | offset << 4 for each stored code, or each code - zero + max_code with zero points: int16."""
    fields = code_fields(fmt)
    origin = fmt.max_code if fmt.zero_point else fmt.middle_code
    steps = [min(abs(index - origin), fmt.reach) for index in range(origin + fmt.max_code + 1)]
    entries = [fields[step].bits | fields[step].offset << 4 for step in steps]
    return torch.tensor(entries, dtype=torch.int16, device=device)


def _write_fields(fields: Tensor, starts: Tensor, num_words: int) -> Tensor:
    """Put unsigned fields at disjoint bit positions int32 [N] of int32 [num_words]; a sum is then an or."""
    shifted = fields.to(torch.int64) << (starts & 31)
    word = starts >> 5
    words = torch.zeros(num_words + 1, dtype=torch.int64, device=fields.device)
    words.index_add_(0, word, shifted)
    carry = words >> 32
    return (words & 0xFFFFFFFF)[:num_words].add_(pad(carry, (1, 0))[:num_words]).to(torch.int32)


def _read_fields(stream: Tensor, starts: Tensor) -> Tensor:
    """Return int32 [N]: the bits from each position on. A field of at most 11 bits lies inside 3 bytes."""
    window = pad(stream, (0, 2)).to(torch.int32)
    window = window[:-2] | window[1:-1] << 8 | window[2:] << 16
    return window.index_select(0, starts >> 3) >> (starts & 7)
