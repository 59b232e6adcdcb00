"""The two layouts byte by byte, the widths they rest on, and their sizes."""

from __future__ import annotations

import pytest
import torch

from moespeq.errors import StoreError
from moespeq.nested import (
    BF16_LAYOUTS,
    Base,
    BaseFormat,
    Field,
    Layout,
    TileGrid,
    code_fields,
    decode,
    decode_record,
    dequantize_base,
    encode_base,
    encode_record,
    encode_residual,
    residual_bits,
    unpack_codes,
)
from moespeq.nested.widths import measure_ranges

SYMMETRIC = BaseFormat(bits=4, group=64, zero_point=False)


def trained_like(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator) * 0.02).to(torch.bfloat16)


def one_group(*values: float) -> tuple[torch.Tensor, Base]:
    """A row whose scale is exactly 1.0."""
    weight = torch.tensor([[7.0, *values]]).to(torch.bfloat16)
    base = encode_base(weight, SYMMETRIC)
    assert base.scales.tolist() == [[1.0]]
    return weight, base


def sections(residual: torch.Tensor, *lengths: int) -> list[list[int]]:
    """Cut a residual into sections of these lengths, 16-byte aligned, and check that nothing follows."""
    offset, parts = 0, []
    for length in lengths:
        parts.append(residual[offset : offset + length].tolist())
        offset += -(-length // 16) * 16
    assert offset == residual.numel()
    return parts


# Places: 0.25 lies 256 below the scale 1.0, 2^-20 lies 2,560 below it, out of reach of either layout.
ROW = (3.25, -2.984375, 0.25, -0.25, 0.0, -0.0, 2.0**-20, float("inf"))


def test_fixed_layout_is_what_the_format_says_byte_by_byte() -> None:
    weight, base = one_group(*ROW)
    residual = encode_residual(weight, base, SYMMETRIC, Layout.FIXED)
    table, plane, nibbles, escapes = sections(residual, 16, 9, 3, 8)
    assert as_int32(table) == [0, 0, 6, 2]
    assert plane == [0, 16, 0xFF, 0x00, 0x00, 0xFF, 0xFF, 0xFE, 0xFE]
    assert nibbles == [0x91, 0xF7, 0x77]
    assert as_int32(escapes) == escape_words(weight, 7, 8)


def test_code_width_layout_is_what_the_format_says_bit_by_bit() -> None:
    weight, base = one_group(*ROW)
    residual = encode_residual(weight, base, SYMMETRIC, Layout.CODE_WIDTH)
    table, stream, escapes = sections(residual, 16, 12, 8)
    assert as_int32(table) == [0, 0, 3, 2]
    far = [256, 256 | 1 << 10, 1023, 1023 | 1 << 10, 1022, 1022]
    fields = [(5, 24), (7, 64 + 16), (7, 64 - 1), *((11, value) for value in far)]
    number, place = 0, 0
    for bits, value in fields:
        number |= value << place
        place += bits
    assert bytes(stream) == number.to_bytes(12, "little")
    assert as_int32(escapes) == escape_words(weight, 7, 8)


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.CODE_WIDTH])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_residual_is_exact_on_both_sides_of_every_limit(layout: Layout, sign: int) -> None:
    # One row per step 1..7, all of whose weights are replaced by the numbers up to 300 places off the centre.
    codes = (torch.arange(9, 16).view(7, 1) * 0x11).expand(7, 301)
    base = Base(codes.to(torch.uint8), torch.ones(7, 10, dtype=torch.bfloat16), None)
    centres = dequantize_base(base, (7, 601), SYMMETRIC)
    assert centres[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    bits = centres.view(torch.int16).int() + torch.arange(-300, 301) | sign
    weight = bits.to(torch.int16).view(torch.bfloat16)
    back = decode(base, encode_residual(weight, base, SYMMETRIC, layout), (7, 601), SYMMETRIC, layout)
    assert torch.equal(back.view(torch.int16), weight.view(torch.int16))


def as_int32(octets: list[int]) -> list[int]:
    values: list[int] = torch.tensor(octets, dtype=torch.uint8).view(torch.int32).tolist()
    return values


def escape_words(weight: torch.Tensor, *positions: int) -> list[int]:
    """Position inside the only tile, and the plain bits above it."""
    bits = weight.view(torch.int16).view(-1)
    return [position | int(bits[position]) << 16 for position in positions]


def test_plain_layout_is_the_matrix_itself_and_decodes_to_a_view() -> None:
    weight = trained_like(4, 9)
    record = encode_record([weight, weight], [], SYMMETRIC, Layout.PLAIN)
    assert record.numel() == 2 * 80
    assert record[:72].tolist() == weight.view(-1).view(torch.uint8).tolist()
    first, second = decode_record(record, [], [(4, 9), (4, 9)], SYMMETRIC, Layout.PLAIN)
    assert torch.equal(first, weight)
    assert second.data_ptr() == record.data_ptr() + 80


@pytest.mark.parametrize(("rows", "cols"), [(3, 2816), (2, 1024), (37, 100), (5, 1), (1, 1), (2, 1023), (70, 16)])
def test_tiles_partition_the_elements_in_row_major_order(rows: int, cols: int) -> None:
    grid = TileGrid(rows, cols)
    tiles = grid.tile_of(torch.arange(rows * cols))
    starts = grid.first_element(torch.arange(grid.num_tiles + 1))
    for tile in range(grid.num_tiles):
        inside = (tiles == tile).nonzero().view(-1)
        assert inside.tolist() == list(range(int(starts[tile]), int(starts[tile + 1])))
        assert len(inside) <= grid.size <= 1024
        assert cols < 1024 or inside[0] // cols == inside[-1] // cols
        assert cols >= 1024 or inside[0] % cols == 0
    elements = torch.arange(rows * cols)
    assert torch.equal(grid.from_tiles(grid.to_tiles(elements)), elements)


def test_table_counts_what_lies_before_each_tile() -> None:
    weight = trained_like(3, 2816)
    weight[1, 5] = float("nan")
    base = encode_base(weight, SYMMETRIC)
    far = unpack_codes(base, (3, 2816), SYMMETRIC) == 8
    residual = encode_residual(weight, base, SYMMETRIC, Layout.FIXED)
    table = residual[: 8 * 10].view(torch.int32).view(10, 2)
    pieces = [far[row, start : start + 1024].sum() for row in range(3) for start in (0, 1024, 2048)]
    assert table[:, 0].tolist() == [0, *torch.stack(pieces).cumsum(0).tolist()]
    assert table[:, 1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


def test_widths_of_four_bit_codes_are_the_published_ones() -> None:
    fields = code_fields(SYMMETRIC)
    assert [field.bits for field in fields] == [11, 8, 7, 7, 6, 6, 6, 5]
    assert [field.offset for field in fields] == [0, 128, 64, 64, 32, 32, 32, 24]


def test_widths_of_other_formats() -> None:
    assert code_fields(BaseFormat(2, 64, zero_point=False)) == (Field(11, 0), Field(7, 127))
    assert [field.bits for field in code_fields(BaseFormat(3, 64, zero_point=False))] == [11, 8, 7, 6]
    with_zero = [field.bits for field in code_fields(BaseFormat(4, 64, zero_point=True))]
    assert with_zero == [11, 8, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 5, 5, 5, 4]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("zero_point", [False, True])
def test_fields_hold_every_residual_that_encoding_trained_weights_yields(bits: int, zero_point: bool) -> None:
    fmt = BaseFormat(bits, 64, zero_point)
    weight = trained_like(64, 1024)
    base = encode_base(weight, fmt)
    centre = dequantize_base(base, (64, 1024), fmt)
    codes = unpack_codes(base, (64, 1024), fmt).int()
    zeros = fmt.middle_code if base.zeros is None else base.zeros.int().repeat_interleave(64, 1)
    places = (weight.view(torch.int16) & 0x7FFF).int() - (centre.view(torch.int16) & 0x7FFF).int()
    outside = 0
    for step, field in enumerate(code_fields(fmt)[1:], start=1):
        stored = places[(codes - zeros).abs() == step] + field.offset
        outside += int(((stored < 0) | (stored >= 1 << field.bits)).sum())
    clamped_ends = 64 * 16 * 2 if zero_point else 0  # a rounded zero point clamps some of a group's ends
    assert outside <= clamped_ends


def test_ranges_agree_with_a_search_over_whole_groups() -> None:
    # Every largest magnitude A in one binade gives a scale; every W up to A gives a residual.
    largest = torch.arange(0x3F80, 0x4000)
    places = torch.arange(0x3F80 - 6 * 128, 0x4000)
    scales = (as_bf16(largest).float() / 7).to(torch.bfloat16).float().unsqueeze(1)
    weights = as_bf16(places).float()
    steps = (weights / scales).round()
    residuals = places - (steps * scales).to(torch.bfloat16).view(torch.int16).long()
    real = places <= largest.unsqueeze(1)
    for step, (low, high) in enumerate(measure_ranges(7), start=1):
        found = residuals[real & (steps == step)]
        assert low <= found.min()
        assert found.max() <= high
        assert found.max() - found.min() >= high - low - 1


def as_bf16(places: torch.Tensor) -> torch.Tensor:
    return places.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("bits", "layout", "bound"),
    [
        (4, Layout.FIXED, 9.0),
        (3, Layout.FIXED, 9.6),
        (2, Layout.FIXED, 11.4),
        (4, Layout.CODE_WIDTH, 8.0),
        (4, Layout.PLAIN, 16.0),
    ],
)
def test_trained_like_expert_stays_below_the_promised_bits(bits: int, layout: Layout, bound: float) -> None:
    fmt = BaseFormat(bits, 64, zero_point=False)
    weights = [trained_like(64, 128), trained_like(128, 32)]
    bases = [encode_base(weight, fmt) for weight in weights]
    record = encode_record(weights, bases, fmt, layout)
    assert residual_bits(record.numel(), [(64, 128), (128, 32)]) <= bound


def test_weights_that_are_nothing_but_noise_ask_for_the_plain_record() -> None:
    bits = torch.randint(-(2**15), 2**15, (64, 64), generator=torch.Generator().manual_seed(1))
    weight = bits.to(torch.int16).view(torch.bfloat16)
    record = encode_residual(weight, encode_base(weight, SYMMETRIC), SYMMETRIC, Layout.FIXED)
    assert residual_bits(record.numel(), [(64, 64)]) > 12


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_residual_that_ends_early_is_refused(layout: Layout) -> None:
    weight = trained_like(8, 64)
    base = encode_base(weight, SYMMETRIC)
    residual = encode_residual(weight, base, SYMMETRIC, layout)
    with pytest.raises(StoreError, match="prepare it again"):
        decode(base, residual[:-64], (8, 64), SYMMETRIC, layout)
