"""The fixed layout: one byte a weight, and a nibble more for zero codes. Decoding is an addition a weight.

Units of the table are nibbles. Sections: table; byte plane uint8 [R*C]; nibble plane, two a byte, low first,
one nibble per zero code in element order; escapes. A near weight's byte is its residual in two's complement.
A far weight's distance has 11 bits: the low 8 in the byte plane, the high 3 in the nibble, whose top bit is
the sign; 2047 is zero, 2046 an escape.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from moespeq.nested.base import Base, dequantize_base
from moespeq.nested.difference import far_scale_places, find_difference, restore_far, zero_code_positions
from moespeq.nested.format import BaseFormat
from moespeq.nested.sections import Reader, escape_entries, join_sections, read_table, restore_escapes
from moespeq.nested.tiles import TileGrid

__all__ = ["decode_fixed", "encode_fixed"]

_DISTANCE_BITS = 11


def encode_fixed(weight: Tensor, base: Base, fmt: BaseFormat) -> Tensor:
    """Return one matrix's residual, uint8 [n]."""
    grid = TileGrid(*weight.shape)
    found = find_difference(weight, base, fmt, low=-128, high=127, distance_bits=_DISTANCE_BITS)
    plane = found.residual.to(torch.uint8)
    plane[found.far] = (found.distance & 0xFF).to(torch.uint8)
    nibbles = found.distance >> 8 | found.negative.to(torch.int16) << 3
    pairs = pad(nibbles, (0, nibbles.numel() % 2)).view(-1, 2)
    table = torch.stack((grid.running_count(found.far), grid.running_count(found.escapes)), 1)
    return join_sections(
        (
            table.to(torch.int32),
            plane,
            (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8),
            escape_entries(found.bits, found.escapes, grid),
        )
    )


def decode_fixed(base: Base, reader: Reader, shape: tuple[int, int], fmt: BaseFormat) -> Tensor:
    """Return the bf16 matrix [R, C] whose residual is next in `reader`."""
    grid = TileGrid(*shape)
    table, num_nibbles, num_escapes = read_table(reader, grid)
    plane = reader.take(grid.num_elements)
    nibble_plane = reader.take(-(-num_nibbles // 2))
    entries = reader.take(4 * num_escapes)

    centre = dequantize_base(base, shape, fmt).view(-1).view(torch.int16)
    bits = plane.view(torch.int8).to(torch.int16).add_(centre)  # near: the sign stays, the magnitude moves
    far = zero_code_positions(centre)
    pairs = _nibble_table(plane.device).index_select(0, nibble_plane.to(torch.int32))
    signed = pairs.view(torch.int16)[:num_nibbles].sub_(plane.index_select(0, far))
    scale_places = far_scale_places(base, far, shape[1], fmt)
    restore_far(bits, far, signed, scale_places, distance_bits=_DISTANCE_BITS)
    if num_escapes:
        restore_escapes(bits, table, entries.view(torch.int32), grid)
    return bits.view(torch.bfloat16).view(shape)


@lru_cache(maxsize=8)
def _nibble_table(device: torch.device) -> Tensor:
    """Both nibbles of every byte as sign bit minus high distance, modulo 2^16: int16 pairs as int32 [256]."""
    nibbles = (torch.arange(256).unsqueeze(1) >> torch.tensor([0, 4])) & 0xF
    signed = ((nibbles & 8) << 12) - ((nibbles & 7) << 8)
    return signed.to(torch.int16).view(torch.int32).view(-1).to(device)
