"""The nested format: an expert's INT4 base, and the residual that turns it back into the exact bf16 weights.

Owns the bytes of one expert and the arithmetic between them; knows no model, file or slot. docs/format.md is
the specification, byte by byte. The identity it promises: `decode_record(encode_record(W)) == W` for every
bf16 bit pattern.
"""

from __future__ import annotations

from moespeq.nested.base import Base, dequantize_base, encode_base, unpack_codes
from moespeq.nested.format import BF16_LAYOUTS, DEFAULT_FORMAT, BaseFormat, Layout
from moespeq.nested.record import (
    Written,
    base_record_bytes,
    decode_record,
    encode_record,
    exact_weight,
    pack_base,
    residual_bits,
    split_base,
    split_record,
)
from moespeq.nested.residual import decode, encode_residual
from moespeq.nested.scaled import Scaled, ScaleGrid
from moespeq.nested.tiles import TILE, TileGrid
from moespeq.nested.widths import Field, code_fields

__all__ = [
    "BF16_LAYOUTS",
    "DEFAULT_FORMAT",
    "TILE",
    "Base",
    "BaseFormat",
    "Field",
    "Layout",
    "ScaleGrid",
    "Scaled",
    "TileGrid",
    "Written",
    "base_record_bytes",
    "code_fields",
    "decode",
    "decode_record",
    "dequantize_base",
    "encode_base",
    "encode_record",
    "encode_residual",
    "exact_weight",
    "pack_base",
    "residual_bits",
    "split_base",
    "split_record",
    "unpack_codes",
]
