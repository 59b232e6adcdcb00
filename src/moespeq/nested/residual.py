"""One matrix and its residual, whatever the layout: the choice between the layouts is made here and nowhere
else.

A plain residual is the matrix itself; it ignores the base, which only the draft then needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moespeq.nested.base import Base
from moespeq.nested.codewidth import decode_code_width, encode_code_width
from moespeq.nested.fixed import decode_fixed, encode_fixed
from moespeq.nested.format import BaseFormat, Layout
from moespeq.nested.sections import Reader, join_sections

__all__ = ["decode", "encode_residual", "read_residual"]


def encode_residual(weight: Tensor, base: Base, fmt: BaseFormat, layout: Layout) -> Tensor:
    """Return what `base` lacks of a bf16 matrix [R, C], uint8 [n], n a multiple of 16. Any bits are kept."""
    assert weight.dtype is torch.bfloat16, weight.dtype
    if layout is Layout.FIXED:
        return encode_fixed(weight, base, fmt)
    if layout is Layout.CODE_WIDTH:
        return encode_code_width(weight, base, fmt)
    return join_sections((weight,))


def decode(base: Base, residual: Tensor, shape: tuple[int, int], fmt: BaseFormat, layout: Layout) -> Tensor:
    """Return the bf16 matrix [R, C], bit for bit; `residual` may be longer. Raises StoreError when it is too
    short.

    A fresh tensor, except for a plain residual: then a view, valid as long as the bytes stay.
    """
    return read_residual(base, Reader(residual), shape, fmt, layout)


def read_residual(base: Base, reader: Reader, shape: tuple[int, int], fmt: BaseFormat, layout: Layout) -> Tensor:
    """Decode the residual that is next in `reader`, leaving the reader after it."""
    if layout is Layout.FIXED:
        return decode_fixed(base, reader, shape, fmt)
    if layout is Layout.CODE_WIDTH:
        return decode_code_width(base, reader, shape, fmt)
    rows, cols = shape
    return reader.take(2 * rows * cols).view(torch.bfloat16).view(shape)
