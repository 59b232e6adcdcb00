"""Plain records decoded from a nested store are byte for byte those of a plain store."""

from __future__ import annotations

import pytest
import torch

from moespeq.nested import BF16_LAYOUTS, BaseFormat, Layout, encode_base, encode_record, pack_base
from moespeq.transfer import PlainSource, plain_record_bytes
from moespeq.types import ExpertKey

SHAPES = ((24, 40), (40, 9))
FORMAT = BaseFormat(bits=4, group=16, zero_point=True)


class FakeStore:
    """One expert of random weights, in the layout asked for."""

    def __init__(self, layout: Layout) -> None:
        generator = torch.Generator().manual_seed(5)
        self.matrices = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
        bases = [encode_base(matrix, FORMAT) for matrix in self.matrices]
        self._base = pack_base(bases)
        self._record = encode_record(self.matrices, bases, FORMAT, layout)
        self._layout = layout

    def layout(self, key: ExpertKey) -> Layout:
        return self._layout

    def base_bytes(self, key: ExpertKey) -> int:
        return len(self._base)

    def read_base_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
        assert verify
        buffer[:] = self._base.numpy().data

    def record_bytes(self, key: ExpertKey) -> int:
        return len(self._record)

    def read_record_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
        assert verify
        buffer[:] = self._record.numpy().data


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_a_decoded_record_is_the_plain_record(layout: Layout) -> None:
    store, key = FakeStore(layout), ExpertKey(0, 0)
    source = PlainSource(store, SHAPES, FORMAT)
    assert source.num_bytes(key) == plain_record_bytes(SHAPES)
    buffer = bytearray(b"\xaa" * (source.num_bytes(key) + 32))
    source.read_into(key, memoryview(buffer))
    plain = encode_record(store.matrices, [], FORMAT, Layout.PLAIN)
    assert bytes(buffer[: len(plain)]) == plain.numpy().tobytes()
    assert buffer[len(plain) :] == b"\xaa" * 32, "nothing past the record"
