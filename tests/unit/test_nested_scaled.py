"""Codes and scales: every code and scale there is, against what transformers makes of them, and damaged heads."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moespeq.errors import StoreError
from moespeq.nested import (
    DEFAULT_FORMAT,
    Layout,
    Scaled,
    ScaleGrid,
    decode_record,
    encode_record,
    exact_weight,
    split_record,
)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, zeros' signs too; any NaN is a NaN: its other bits follow from how wide a product the CPU takes."""
    assert torch.equal(found.isnan(), expected.isnan())
    ours, theirs = (each.nan_to_num(0.0).contiguous().view(torch.int16) for each in (found, expected))
    assert torch.equal(ours, theirs)


def fp8_matrix(rows: int, cols: int, grid: ScaleGrid, *, scales: torch.dtype = torch.float32, seed: int = 0) -> Scaled:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=draw)
    values = torch.rand(grid.shape(rows, cols), generator=draw) * 0.01
    if scales is torch.float8_e8m0fnu:
        values = torch.exp2(values.log2().round())
    return Scaled(codes, values.to(scales), grid)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_every_fp8_code_is_what_transformers_makes_of_it(scales: torch.dtype) -> None:
    matrix = fp8_matrix(64, 128, ScaleGrid(16, 32, 64), scales=scales)
    matrix.codes[:2] = torch.arange(256, dtype=torch.uint8).view(2, 128)
    found = exact_weight(matrix, Layout.FP8)
    theirs = Fp8Dequantize(None)._dequantize_one(matrix.codes.view(torch.float8_e4m3fn), matrix.scales, torch.bfloat16)
    assert_same(found, theirs)


def test_every_mxfp4_byte_and_exponent_is_what_transformers_makes_of_it() -> None:
    """256 exponents, each with every byte: 16 blocks of 16 bytes a row."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    exponents = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    theirs = convert_moe_packed_tensors(blocks, exponents)[0].T
    found = exact_weight(Scaled(blocks.view(256, 256), exponents[0], ScaleGrid(1, 32, 256)), Layout.MXFP4)
    assert_same(found, theirs)


@pytest.mark.parametrize(("rows", "cols", "part"), [(5, 7, 5), (9, 3, 9), (12, 10, 6), (14, 33, 7)])
def test_parts_begin_their_blocks_anew_and_edges_may_be_short(rows: int, cols: int, part: int) -> None:
    grid = ScaleGrid(4, 4, part)
    matrix = fp8_matrix(rows, cols, grid, seed=rows)
    found = exact_weight(matrix, Layout.FP8)
    blocks = -(-part // 4)
    for row in range(rows):
        for col in range(cols):
            scale = matrix.scales[row // part * blocks + row % part // 4, col // 4]
            code = matrix.codes[row, col].view(torch.float8_e4m3fn).float()
            assert_same(found[row, col].view(1), (code * scale).bfloat16().view(1))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_record_gives_codes_and_scales_back(scales: torch.dtype) -> None:
    shapes = [(12, 10), (5, 6)]
    grids = [ScaleGrid(4, 4, 6), ScaleGrid(4, 4, 5)]
    matrices = [fp8_matrix(*shape, grid, scales=scales) for shape, grid in zip(shapes, grids, strict=True)]
    record = encode_record(matrices, [], DEFAULT_FORMAT, Layout.FP8)
    slot = torch.cat([record, torch.full((48,), 255, dtype=torch.uint8)])
    for ours, theirs in zip(split_record(slot, shapes, Layout.FP8), matrices, strict=True):
        assert isinstance(ours, Scaled)
        assert ours.grid == theirs.grid
        assert ours.scales.dtype is scales
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))
    decoded = decode_record(slot, [], shapes, DEFAULT_FORMAT, Layout.FP8)
    for found, matrix in zip(decoded, matrices, strict=True):
        assert_same(found, exact_weight(matrix, Layout.FP8))


@pytest.mark.parametrize(("place", "value"), [(0, 0), (1, -4), (2, 0), (3, 4), (3, -1)])
def test_a_head_that_cannot_be_is_a_damaged_store(place: int, value: int) -> None:
    record = encode_record([fp8_matrix(8, 8, ScaleGrid(4, 4, 8))], [], DEFAULT_FORMAT, Layout.FP8)
    record[:16].view(torch.int32)[place] = value
    with pytest.raises(StoreError, match="scales lie in a way that cannot be"):
        split_record(record, [(8, 8)], Layout.FP8)


def test_a_record_that_ends_early_is_a_damaged_store() -> None:
    record = encode_record([fp8_matrix(8, 8, ScaleGrid(4, 4, 8))], [], DEFAULT_FORMAT, Layout.FP8)
    with pytest.raises(StoreError, match="A record ends at byte"):
        split_record(record[:-16], [(8, 8)], Layout.FP8)
