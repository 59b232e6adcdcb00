"""base + residual = bf16 for any bit pattern, any shape, any format, any layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moespeq.nested import (
    BF16_LAYOUTS,
    BaseFormat,
    Layout,
    decode,
    decode_record,
    dequantize_base,
    encode_base,
    encode_record,
    encode_residual,
    pack_base,
    split_base,
    unpack_codes,
)

FORMATS = [BaseFormat(b, g, z) for b, g, z in itertools.product((4, 3, 2), (64, 37), (False, True))]
# zeros, subnormals, the smallest normal, the largest, infinities, NaNs, one
EXTREMES = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x3F80)


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def assert_round_trip(weight: Tensor, fmt: BaseFormat) -> None:
    base = encode_base(weight, fmt)
    rows, cols = weight.shape
    for layout in BF16_LAYOUTS:
        residual = encode_residual(weight, base, fmt, layout)
        back = decode(base, residual, (rows, cols), fmt, layout)
        assert torch.equal(back.view(torch.int16), weight.view(torch.int16)), (fmt, layout)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("order", ["ascending", "shuffled", "each in a group of ordinary weights"])
def test_every_bf16_value_survives(fmt: BaseFormat, order: str) -> None:
    bits = torch.arange(65536)
    generator = torch.Generator().manual_seed(7)
    if order == "shuffled":
        bits = bits[torch.randperm(65536, generator=generator)]
    weight = from_bits(bits).view(64, 1024)
    if order.startswith("each"):
        ordinary = (torch.randn(65536, fmt.group - 1, generator=generator) * 0.02).to(torch.bfloat16)
        weight = torch.cat((from_bits(bits).unsqueeze(1), ordinary), 1)[:: 1 if fmt.bits == 4 else 17]
    assert_round_trip(weight.contiguous(), fmt)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Matrices with groups of many kinds: trained-like, all equal, one outlier, extreme bits, any bits."""
    rows = draw(st.integers(1, 9))
    cols = draw(st.one_of(st.integers(1, 200), st.sampled_from([1023, 1024, 1025, 2100])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, cols, generator=generator) * 2.0 ** draw(st.integers(-130, 126))
    weight = weight.to(torch.bfloat16)
    kind = draw(st.sampled_from(["plain", "zero", "constant", "outlier", "one sign", "extremes", "any"]))
    if kind == "zero":
        weight.zero_()
    elif kind == "constant":
        weight[:] = weight[0, 0]
    elif kind == "outlier":
        weight[:, draw(st.integers(0, cols - 1))] = from_bits(torch.tensor(draw(st.integers(0, 65535))))
    elif kind == "one sign":
        weight.abs_()
    elif kind == "extremes":
        choice = torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), (rows, cols), generator=generator)]
        where = torch.rand(rows, cols, generator=generator) < draw(st.sampled_from([0.05, 1.0]))
        weight = torch.where(where, from_bits(choice), weight)
    elif kind == "any":
        weight = from_bits(torch.randint(65536, (rows, cols), generator=generator))
    return weight


@st.composite
def formats(draw: st.DrawFn) -> BaseFormat:
    group = draw(st.one_of(st.sampled_from([32, 64, 128]), st.integers(1, 300)))
    return BaseFormat(draw(st.sampled_from([2, 3, 4])), group, draw(st.booleans()))


@settings(deadline=None, max_examples=120)
@given(matrices(), formats())
def test_any_matrix_survives(weight: Tensor, fmt: BaseFormat) -> None:
    assert_round_trip(weight, fmt)


@settings(deadline=None, max_examples=40)
@given(matrices(), formats(), st.sampled_from(BF16_LAYOUTS), st.sampled_from([1.0, -1.0, 0.6, 2.0]))
def test_matrix_survives_on_the_base_of_another(weight: Tensor, fmt: BaseFormat, layout: Layout, factor: float) -> None:
    rows, cols = weight.shape
    base = encode_base(weight.nan_to_num(1.0, 2.0, 3.0) * factor, fmt)
    back = decode(base, encode_residual(weight, base, fmt, layout), (rows, cols), fmt, layout)
    assert torch.equal(back.view(torch.int16), weight.view(torch.int16))


@settings(deadline=None, max_examples=60)
@given(matrices(), formats())
def test_centre_is_zero_exactly_where_the_code_is_the_zero_code(weight: Tensor, fmt: BaseFormat) -> None:
    rows, cols = weight.shape
    base = encode_base(weight, fmt)
    codes = unpack_codes(base, (rows, cols), fmt)
    zeros = torch.full((rows, cols), fmt.middle_code)
    if base.zeros is not None:
        zeros = base.zeros.repeat_interleave(min(fmt.group, cols), 1)[:, :cols]
    assert torch.equal(dequantize_base(base, (rows, cols), fmt) == 0, codes == zeros)
    assert ((codes.int() - zeros.int()).abs() <= fmt.reach).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(matrices(), min_size=1, max_size=3), formats(), st.sampled_from(BF16_LAYOUTS), st.integers(0, 40))
def test_record_survives_in_a_slot_larger_than_it(
    weights: list[Tensor], fmt: BaseFormat, layout: Layout, slack_bytes: int
) -> None:
    shapes = [(weight.shape[0], weight.shape[1]) for weight in weights]
    base_record = pack_base([encode_base(weight, fmt) for weight in weights])
    bases = split_base(base_record, shapes, fmt)
    record = encode_record(weights, bases, fmt, layout)
    slot = torch.cat((record, torch.full((slack_bytes,), 0xAB, dtype=torch.uint8)))
    for weight, back in zip(weights, decode_record(slot, bases, shapes, fmt, layout), strict=True):
        assert torch.equal(back.view(torch.int16), weight.view(torch.int16))
