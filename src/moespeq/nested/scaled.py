"""Matrices that a checkpoint holds as codes and scales: FP8 in blocks, and MXFP4. The target is what they stand for.

Shapes: R rows, C columns; a block of rows and columns shares a scale, and one at an edge may be short. A matrix joined
from several source tensors (gate above up) begins its blocks anew in each part of `part_rows` rows.

The weight is w = bf16(code * scale): both exact in float32, one product there, one rounding to bf16. That is how
transformers dequantises, so the target is the model that it would run.

In a record each matrix has three sections: u32 [4] (block rows, block columns, rows of a part, kind of scales); the
codes as they lie in the checkpoint; the scales as they lie there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from moespeq.errors import StoreError
from moespeq.nested.format import Layout
from moespeq.nested.sections import Reader

__all__ = ["ScaleGrid", "Scaled", "dequantize", "scaled_sections", "take_scaled"]

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)  # by kind; uint8: 2^(x - 127)
_CODE_BITS = {Layout.FP8: 8, Layout.MXFP4: 4}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """How scales lie over a matrix."""

    block_rows: int
    block_cols: int
    part_rows: int

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix, or of one of its parts."""
        parts, rest = divmod(rows, self.part_rows)
        blocks = parts * -(-self.part_rows // self.block_rows) + -(-rest // self.block_rows)
        return blocks, -(-cols // self.block_cols)

    def row_of(self, rows: Tensor) -> Tensor:
        """The scales' row for each row of the matrix, int64."""
        blocks = -(-self.part_rows // self.block_rows)
        return rows // self.part_rows * blocks + rows % self.part_rows // self.block_rows


@dataclass(frozen=True, slots=True)
class Scaled:
    """One matrix; may be views into a record.

    codes uint8 [R, C] (FP8, e4m3) or [R, C / 2] (MXFP4, e2m1, the first of two in the low half); scales [grid rows,
    grid columns] in one of SCALE_DTYPES.
    """

    codes: Tensor
    scales: Tensor
    grid: ScaleGrid

    def to(self, device: torch.device) -> Scaled:
        """On another device."""
        return Scaled(self.codes.to(device), self.scales.to(device), self.grid)


def scaled_sections(matrix: Scaled) -> tuple[Tensor, Tensor, Tensor]:
    """The sections of a matrix in a record."""
    grid, kind = matrix.grid, SCALE_DTYPES.index(matrix.scales.dtype)
    head = torch.tensor([grid.block_rows, grid.block_cols, grid.part_rows, kind], dtype=torch.int32)
    return head.to(matrix.codes.device), matrix.codes, matrix.scales


def take_scaled(reader: Reader, shape: tuple[int, int], layout: Layout) -> Scaled:
    """The matrix [R, C] that is next in a record, as views. Raises StoreError for a head that cannot be."""
    rows, cols = shape
    block_rows, block_cols, part_rows, kind = reader.take(16).view(torch.int32).tolist()
    if min(block_rows, block_cols, part_rows) < 1 or not 0 <= kind < len(SCALE_DTYPES):
        raise StoreError("A record's scales lie in a way that cannot be; the store is damaged, prepare it again.")
    grid, dtype = ScaleGrid(block_rows, block_cols, part_rows), SCALE_DTYPES[kind]
    codes = reader.take(rows * cols * _CODE_BITS[layout] // 8).view(rows, -1)
    grid_rows, grid_cols = grid.shape(rows, cols)
    scales = reader.take(grid_rows * grid_cols * dtype.itemsize).view(dtype).view(grid_rows, grid_cols)
    return Scaled(codes, scales, grid)


def dequantize(matrix: Scaled, layout: Layout) -> Tensor:
    """The bf16 weights [R, C] that the target multiplies with. A fresh contiguous tensor."""
    values = _values(matrix.codes, layout)  # float32 [R, C]; of MXFP4 twice the numbers, and scales are half
    rows, cols = values.shape
    width = matrix.grid.block_cols
    row_of = matrix.grid.row_of(torch.arange(rows, device=values.device))
    scales = _widened(matrix.scales)[row_of].unsqueeze(2)  # [R, N, 1]
    blocks = (pad(values, (0, -cols % width)) if cols % width else values).view(rows, -1, width)
    return blocks.mul_(scales).to(torch.bfloat16).view(rows, -1)[:, :cols].contiguous()


def _values(codes: Tensor, layout: Layout) -> Tensor:
    """What the codes stand for, of MXFP4 twice that, float32 [R, C]."""
    flat = codes.reshape(-1)
    if layout is Layout.MXFP4:
        pairs = _fp4_pairs(codes.device).index_select(0, flat.to(torch.int32))
        return pairs.view(torch.float32).view(codes.shape[0], -1)
    num_codes = flat.numel()
    if num_codes % 2 or flat.storage_offset() % 2:
        flat = pad(flat, (0, num_codes % 2))  # a copy
    index = flat.view(torch.int16).to(torch.int32) & 0xFFFF
    pairs = _fp8_pairs(codes.device).index_select(0, index)  # on a CPU twenty times as fast as torch's own conversion
    return pairs.view(torch.float32)[:num_codes].view(codes.shape)


def _widened(scales: Tensor) -> Tensor:
    """Scales as float32; of exponents the half, since 2^128 is no float where a product with it is one."""
    if scales.dtype is torch.uint8:
        return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.to(torch.int32) - 128)
    return scales.float()


@lru_cache(maxsize=8)
def _fp8_pairs(device: torch.device) -> Tensor:
    """Both numbers of every two bytes, two floats seen as one integer: int64 [65536]."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = (torch.arange(1 << 16).unsqueeze(1) >> torch.tensor([0, 8])) & 0xFF
    return numbers[codes].view(torch.int64).view(-1).to(device)


@lru_cache(maxsize=8)
def _fp4_pairs(device: torch.device) -> Tensor:
    """Twice both numbers of every byte, the low half's first, seen as one integer: int64 [256]."""
    codes = (torch.arange(256).unsqueeze(1) >> torch.tensor([0, 4])) & 0xF
    return torch.tensor(_FP4)[codes].mul(2).view(torch.int64).view(-1).to(device)
