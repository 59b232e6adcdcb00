"""A second reader, written from docs/format.md alone with plain integers, reads what the encoder writes."""

from __future__ import annotations

import struct

import pytest
import torch

from moespeq.nested import BaseFormat, Layout, code_fields, encode_base, encode_record, pack_base


class Sections:
    """Cuts a record into sections of 16-byte alignment."""

    def __init__(self, record: torch.Tensor) -> None:
        self.data = bytes(record.tolist())
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        section = self.data[self.offset : self.offset + num_bytes]
        assert len(section) == num_bytes
        self.offset += -(-num_bytes // 16) * 16
        return section


def bf16_value(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def rounded_bits(value: float) -> int:
    """Round a float32-exact value to bf16, half to even."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def tile_of(element: int, cols: int) -> tuple[int, int]:
    """Tile and position inside it."""
    row, col = divmod(element, cols)
    if cols >= 1024:
        return row * -(-cols // 1024) + col // 1024, col % 1024
    per_tile = 1024 // cols
    return row // per_tile, row % per_tile * cols + col


def read_base(sections: Sections, rows: int, cols: int, fmt: BaseFormat) -> list[tuple[int, int]]:
    """Return (step, scale's bits) of each element."""
    row_bytes, groups = -(-cols * fmt.bits // 8), -(-cols // fmt.group)
    codes, scales = sections.take(rows * row_bytes), sections.take(2 * rows * groups)
    zeros = sections.take(rows * groups) if fmt.zero_point else bytes([1 << (fmt.bits - 1)]) * (rows * groups)
    elements = []
    for row in range(rows):
        string = int.from_bytes(codes[row * row_bytes : (row + 1) * row_bytes], "little")
        for col in range(cols):
            group = row * groups + col // fmt.group
            step = (string >> col * fmt.bits) % (1 << fmt.bits) - zeros[group]
            elements.append((step, struct.unpack_from("<H", scales, 2 * group)[0]))
    return elements


def read_matrix(
    sections: Sections, elements: list[tuple[int, int]], cols: int, fmt: BaseFormat, layout: Layout
) -> list[int]:
    """Return the bf16 bits of each element."""
    num_tiles = tile_of(len(elements) - 1, cols)[0] + 1
    rows = list(struct.iter_unpack("<II", sections.take(8 * (num_tiles + 1))))
    if layout is Layout.FIXED:
        plane, nibbles = sections.take(len(elements)), sections.take(-(-rows[-1][0] // 2))
    else:
        stream = int.from_bytes(sections.take(4 * rows[-1][0]), "little")
    escapes = dict(enumerate(struct.iter_unpack("<HH", sections.take(4 * rows[-1][1]))))
    found, num_far, bit, tile = [], 0, 0, -1
    num_escapes = 0
    for element, (step, scale) in enumerate(elements):
        if tile_of(element, cols)[0] != tile:
            tile = tile_of(element, cols)[0]
            assert rows[tile][1] == num_escapes
            assert layout is Layout.CODE_WIDTH or rows[tile][0] == num_far
            bit = 32 * rows[tile][0]
        if layout is Layout.FIXED:
            residual = plane[element] - (256 if plane[element] >= 128 else 0)
            nibble = nibbles[num_far // 2] >> num_far % 2 * 4 & 15 if step == 0 else 0
            distance, sign, zero = plane[element] | (nibble & 7) << 8, nibble >> 3, 2047
        else:
            field = code_fields(fmt)[abs(step)]
            value = (stream >> bit) % (1 << field.bits)
            residual = value - field.offset
            distance, sign, zero = value & 1023, value >> 10, 1023
            bit += field.bits
        if step == 0:
            num_far += 1
            bits = sign << 15 | (0 if distance == zero else (scale & 0x7FFF) - distance)
        else:
            bits = rounded_bits(step * bf16_value(scale)) + residual
        if num_escapes in escapes and tile_of(element, cols) == (tile, escapes[num_escapes][0]):
            is_next = rows[tile + 1][1] > num_escapes
            bits = escapes[num_escapes][1] if is_next else bits
            num_escapes += is_next
        found.append(bits)
    assert num_escapes == len(escapes)
    return found


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.CODE_WIDTH])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_reader_written_from_the_specification_finds_the_weights(bits: int, zero_point: bool, layout: Layout) -> None:
    fmt = BaseFormat(bits, 24, zero_point)
    shapes = [(3, 1100), (41, 50), (2, 1024), (5, 1)]
    generator = torch.Generator().manual_seed(bits)
    weights = []
    for rows, cols in shapes:
        spread = torch.rand(rows, 1, generator=generator) * 0.1 + 0.001
        weight = (torch.randn(rows, cols, generator=generator) * spread).to(torch.bfloat16)
        weight.view(-1)[:: 1 + rows * cols // 7] = torch.inf
        weight.view(-1)[1 :: 1 + rows * cols // 5] = -0.0
        weights.append(weight)
    bases = [encode_base(weight, fmt) for weight in weights]
    base_sections = Sections(pack_base(bases))
    sections = Sections(encode_record(weights, bases, fmt, layout))
    for weight, (rows, cols) in zip(weights, shapes, strict=True):
        elements = read_base(base_sections, rows, cols, fmt)
        expected = (weight.view(torch.int16).int() & 0xFFFF).view(-1).tolist()
        assert read_matrix(sections, elements, cols, fmt, layout) == expected
    assert sections.offset == len(sections.data)
