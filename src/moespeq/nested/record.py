"""One expert's bytes: its matrices' bases in one record, its matrices' residuals in another.

Matrices follow each other in the order given; sections start on 16 bytes, counted from the record's start,
which must itself be aligned to 16 bytes for the views to be aligned. A base record's size follows from the
shapes; a residual record's does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moespeq.nested.base import Base
from moespeq.nested.format import BaseFormat, Layout
from moespeq.nested.residual import encode_residual, read_residual
from moespeq.nested.scaled import Scaled, dequantize, scaled_sections, take_scaled
from moespeq.nested.sections import Reader, align, join_sections

__all__ = [
    "Written",
    "base_record_bytes",
    "decode_record",
    "encode_record",
    "exact_weight",
    "pack_base",
    "residual_bits",
    "split_base",
    "split_record",
]

Shapes = Sequence[tuple[int, int]]
Written = Tensor | Scaled
"""A matrix as the checkpoint has it: numbers, or codes and scales."""
_DTYPES = {Layout.PLAIN: torch.bfloat16, Layout.FP16: torch.float16}


def base_record_bytes(shapes: Shapes, fmt: BaseFormat) -> int:
    """Exact length of every base record of these matrices [R, C]."""
    total_bytes = 0
    for rows, cols in shapes:
        num_scales = rows * fmt.num_groups(cols)
        total_bytes += align(rows * fmt.code_row_bytes(cols)) + align(2 * num_scales)
        total_bytes += align(num_scales) if fmt.zero_point else 0
    return total_bytes


def pack_base(bases: Sequence[Base]) -> Tensor:
    """Return the base record, uint8 [n]: per matrix codes, scales and, with zero points, zeros."""
    sections: list[Tensor] = []
    for base in bases:
        sections += [base.codes, base.scales] + ([] if base.zeros is None else [base.zeros])
    return join_sections(sections)


def split_base(record: Tensor, shapes: Shapes, fmt: BaseFormat) -> list[Base]:
    """Return a record's bases as views, valid as long as its bytes stay. Raises StoreError when too short."""
    reader = Reader(record)
    return [_take_base(reader, rows, cols, fmt) for rows, cols in shapes]


def _take_base(reader: Reader, rows: int, cols: int, fmt: BaseFormat) -> Base:
    num_groups = fmt.num_groups(cols)
    codes = reader.take(rows * fmt.code_row_bytes(cols)).view(rows, -1)
    scales = reader.take(2 * rows * num_groups).view(torch.bfloat16).view(rows, num_groups)
    zeros = reader.take(rows * num_groups).view(rows, num_groups) if fmt.zero_point else None
    return Base(codes, scales, zeros)


def encode_record(weights: Sequence[Written], bases: Sequence[Base], fmt: BaseFormat, layout: Layout) -> Tensor:
    """Return the record, uint8 [n], of an expert's matrices, in the layout's dtype; a complete one needs no bases."""
    if not layout.needs_base:
        return join_sections([section for weight in weights for section in _sections(weight, layout)])
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    parts = [encode_residual(weight, base, fmt, layout) for weight, base in zip(plain, bases, strict=True)]
    return torch.cat(parts)


def _sections(weight: Written, layout: Layout) -> tuple[Tensor, ...]:
    """A matrix of a complete record."""
    if isinstance(weight, Scaled):
        assert layout.has_scales, layout
        return scaled_sections(weight)
    assert weight.dtype is _DTYPES[layout], (weight.dtype, layout)
    return (weight,)


def decode_record(
    record: Tensor, bases: Sequence[Base], shapes: Shapes, fmt: BaseFormat, layout: Layout
) -> list[Tensor]:
    """Return the matrices that an expert's products take, bit for bit; `record` may have slack at its end.

    Raises StoreError when the record is too short. Plain and fp16 records need no bases and yield views, valid as
    long as the bytes stay; the other layouts yield fresh tensors.
    """
    if not layout.needs_base:
        return [exact_weight(weight, layout) for weight in split_record(record, shapes, layout)]
    reader = Reader(record)
    return [read_residual(base, reader, shape, fmt, layout) for base, shape in zip(bases, shapes, strict=True)]


def split_record(record: Tensor, shapes: Shapes, layout: Layout) -> list[Written]:
    """The matrices of a complete record as the checkpoint has them: views, valid as long as the bytes stay."""
    reader = Reader(record)
    if layout.has_scales:
        return [take_scaled(reader, shape, layout) for shape in shapes]
    return [reader.take(2 * rows * cols).view(_DTYPES[layout]).view(rows, cols) for rows, cols in shapes]


def exact_weight(weight: Written, layout: Layout) -> Tensor:
    """What a matrix of the checkpoint is multiplied as: itself, or the bf16 that codes and scales stand for."""
    return dequantize(weight, layout) if isinstance(weight, Scaled) else weight


def residual_bits(record_bytes: int, shapes: Shapes) -> float:
    """Bits a weight of a residual record, all side data included; above 12, a layer is better kept plain."""
    return 8 * record_bytes / sum(rows * cols for rows, cols in shapes)
