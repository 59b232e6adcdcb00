"""The base: bit order, scales, centres and sizes."""

from __future__ import annotations

import pytest
import torch

from moespeq.errors import StoreError, UsageError
from moespeq.nested import (
    Base,
    BaseFormat,
    base_record_bytes,
    dequantize_base,
    encode_base,
    pack_base,
    split_base,
    unpack_codes,
)
from moespeq.nested.codes import look_up_codes, pack_codes

SYMMETRIC = BaseFormat(bits=4, group=64, zero_point=False)


def trained_like(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row_scale = torch.rand(rows, 1, generator=generator) * 0.03 + 0.01
    return (torch.randn(rows, cols, generator=generator) * row_scale).to(torch.bfloat16)


def test_four_bit_codes_are_packed_low_nibble_first() -> None:
    packed = pack_codes(torch.tensor([[1, 2, 15, 0, 9]]), 4)
    assert packed.tolist() == [[0x21, 0x0F, 0x09]]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("cols", [1, 2, 7, 8, 9, 64])
def test_a_row_of_codes_is_one_little_endian_bit_string(bits: int, cols: int) -> None:
    codes = torch.randint(1 << bits, (3, cols), generator=torch.Generator().manual_seed(cols))
    packed = pack_codes(codes, bits)
    for row, row_bytes in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << bits * place for place, code in enumerate(row))
        assert bytes(row_bytes) == number.to_bytes(-(-cols * bits // 8), "little")
    assert torch.equal(look_up_codes(packed, cols, bits, origin=0, dtype=torch.uint8), codes.to(torch.uint8))


def test_symmetric_codes_are_stored_offset_by_the_middle_code() -> None:
    weight = torch.tensor([[-7.0, -1.0, 0.0, 1.0, 3.4, 7.0]]).to(torch.bfloat16)
    base = encode_base(weight, SYMMETRIC)
    assert unpack_codes(base, (1, 6), SYMMETRIC).tolist() == [[1, 7, 8, 9, 11, 15]]
    assert base.zeros is None


def test_scale_is_the_rounded_largest_finite_magnitude_over_the_reach() -> None:
    weight = torch.tensor([[0.5, -3.0, float("inf"), float("nan"), 1.0, 2.0]]).to(torch.bfloat16)
    for bits, reach in ((4, 7), (3, 3), (2, 1)):
        base = encode_base(weight, BaseFormat(bits, 64, zero_point=False))
        assert base.scales.item() == torch.tensor(3.0 / reach).to(torch.bfloat16).item()


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-126, 2.0**-133, float("nan"), float("-inf")])
def test_group_without_a_normal_scale_has_scale_zero_and_zero_codes(value: float, zero_point: bool) -> None:
    fmt = BaseFormat(4, 8, zero_point)
    base = encode_base(torch.full((2, 8), value).to(torch.bfloat16), fmt)
    assert base.scales.count_nonzero() == 0
    assert dequantize_base(base, (2, 8), fmt).count_nonzero() == 0
    zero_code = 0 if zero_point else 8
    assert (unpack_codes(base, (2, 8), fmt) == zero_code).all()


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("cols", [64, 100, 20, 1])
def test_centre_is_the_product_rounded_to_bf16(cols: int, zero_point: bool) -> None:
    fmt = BaseFormat(4, 64, zero_point)
    base = encode_base(trained_like(5, cols), fmt)
    codes = unpack_codes(base, (5, cols), fmt).double()
    groups = torch.arange(cols) // 64
    zeros = base.zeros.double()[:, groups] if base.zeros is not None else 8.0
    expected = ((codes - zeros) * base.scales.double()[:, groups]).to(torch.bfloat16)
    assert torch.equal(dequantize_base(base, (5, cols), fmt), expected)
    assert torch.equal(dequantize_base(base, (5, cols), fmt, torch.float32), expected.float())


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_centre_is_further_than_half_a_step_from_its_weight(bits: int, zero_point: bool) -> None:
    fmt = BaseFormat(bits, 32, zero_point)
    weight = trained_like(16, 128)
    base = encode_base(weight, fmt)
    error = (dequantize_base(base, (16, 128), fmt).float() - weight.float()).abs()
    bound = base.scales.float().repeat_interleave(32, 1) * (1.02 if zero_point else 0.52)
    assert (error <= bound).all()


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero"), [(5.0, 7.5, 0.5, 0), (-7.5, -5.0, 0.5, 15), (-3.0, 12.0, 1.0, 3)]
)
def test_zero_point_scale_spans_the_weights_and_zero(low: float, high: float, scale: float, zero: int) -> None:
    base = encode_base(torch.tensor([[low, high]]).to(torch.bfloat16), BaseFormat(4, 64, zero_point=True))
    assert base.zeros is not None
    assert (base.scales.item(), base.zeros.item()) == (scale, zero)


def test_zero_point_spends_codes_only_where_weights_are() -> None:
    fmt = BaseFormat(4, 64, zero_point=True)
    weight = trained_like(8, 64).abs()
    base = encode_base(weight, fmt)
    assert base.zeros is not None
    assert base.zeros.count_nonzero() == 0
    assert unpack_codes(base, (8, 64), fmt).amax(1).tolist() == [15] * 8


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("shapes", [[(6, 5), (5, 3)], [(64, 128), (128, 32)], [(1, 1)]])
def test_base_record_has_the_promised_length_and_its_parts_are_views(
    shapes: list[tuple[int, int]], zero_point: bool
) -> None:
    fmt = BaseFormat(4, 32, zero_point)
    bases = [encode_base(trained_like(*shape), fmt) for shape in shapes]
    record = pack_base(bases)
    assert record.numel() == base_record_bytes(shapes, fmt)
    for base, view in zip(bases, split_base(record, shapes, fmt), strict=True):
        assert torch.equal(base.codes, view.codes)
        assert torch.equal(base.scales, view.scales)
        assert (view.zeros is None) == (not zero_point)
        assert view.codes.untyped_storage().data_ptr() == record.untyped_storage().data_ptr()
        assert view.scales.data_ptr() % 16 == record.data_ptr() % 16


def test_record_that_ends_early_is_refused_with_both_lengths() -> None:
    record = pack_base([encode_base(trained_like(8, 64), SYMMETRIC)])
    with pytest.raises(StoreError, match="ends at byte 256 but its tables ask for 272"):
        split_base(record[:256], [(8, 64)], SYMMETRIC)


def test_format_survives_its_manifest_entry() -> None:
    fmt = BaseFormat(3, 128, zero_point=True)
    assert BaseFormat.from_json(fmt.to_json()) == fmt


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"bits": 4, "group": 64},
        {"bits": 5, "group": 64, "zero_point": False},
        {"bits": 4, "group": "64", "zero_point": False},
        {"bits": True, "group": 64, "zero_point": False},
        {"bits": 4, "group": 64, "zero_point": False, "permuted": True},
    ],
)
def test_manifest_entry_of_another_kind_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(StoreError, match="base format"):
        BaseFormat.from_json(entry)


@pytest.mark.parametrize(("bits", "group"), [(1, 64), (8, 64), (4, 0)])
def test_impossible_format_is_refused(bits: int, group: int) -> None:
    with pytest.raises(UsageError):
        BaseFormat(bits, group, zero_point=False)


def test_base_holds_nothing_but_codes_scales_and_zeros() -> None:
    assert list(Base.__dataclass_fields__) == ["codes", "scales", "zeros"]
