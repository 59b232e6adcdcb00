"""The fixed layout's assembly on a machine of our own, against the format's rules."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_assembly import run_assembly

pytest.importorskip("triton")

from moespeq.kernels.unit_decode import ASSEMBLY


def weights_by_the_rules(codes: list[int], octets: list[int], nibbles: list[int], scale: int, zero: int) -> list[int]:
    """Bits of a word's eight weights; scale is bf16 bits."""
    remaining, found = iter(nibbles), []
    for code, octet in zip(codes, octets, strict=True):
        if code != zero:
            centre = torch.tensor([scale], dtype=torch.int16).view(torch.bfloat16) * (code - zero)
            bits = centre.view(torch.int16).item() + (octet ^ 0x80) - 0x80
        else:
            nibble = next(remaining)
            distance = octet | (nibble & 7) << 8
            bits = (nibble >> 3 << 15) + (0 if distance == 2047 else scale - distance)
        found.append(bits & 0xFFFF)
    return found


def packed(values: list[int], bits: int) -> int:
    return sum(value << bits * place for place, value in enumerate(values))


@pytest.mark.parametrize("high_distances", [range(7), (7,), range(8)], ids=["no zeros", "many zeros", "any"])
@pytest.mark.parametrize("share_of_zero_codes", [0.15, 0.9])
def test_a_unit_is_decoded_by_the_rules(high_distances: range, share_of_zero_codes: float) -> None:
    source = random.Random(0)
    for _ in range(40):
        zero, scale = source.randrange(16), source.randrange(0x0880, 0x7000)
        words, octets, windows, counts, wanted = [], [], [], [], []
        for _ in range(4):
            codes = [zero if source.random() < share_of_zero_codes else source.randrange(16) for _ in range(8)]
            bytes_of = [source.choice((0xFF, source.randrange(256))) for _ in range(8)]
            nibbles = [source.choice(high_distances) | source.choice((0, 8)) for _ in range(8)]
            before = [sum(code == zero for code in codes[:place]) for place in range(8)]
            words.append(packed(codes, 4))
            octets += [packed(bytes_of[:4], 8), packed(bytes_of[4:], 8)]
            windows.append(packed(nibbles, 4))
            counts.append(packed(before, 4))
            wanted += weights_by_the_rules(codes, bytes_of, nibbles, scale, zero)
        arguments = words + octets + windows + counts + [scale * 0x10001, zero * 0x10001 + 0x43004300]
        pairs, took_exact_form = run_assembly(ASSEMBLY, arguments, num_results=16)
        assert pairs == [low | high << 16 for low, high in zip(wanted[::2], wanted[1::2], strict=True)]
        assert took_exact_form == (7 in high_distances) or high_distances == range(8)
