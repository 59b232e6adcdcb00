"""Noise: the generator is Philox4x32-10 as published, and a row is a function of its own coordinates only."""

from __future__ import annotations

import math

import pytest
import torch

from moespeq.decode import noise
from moespeq.decode.noise import Stream, gumbel, philox4x32, uniform

# (counter, key, output) of the Random123 distribution's known-answer file for philox4x32-10.
KNOWN_ANSWERS = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = tuple(torch.tensor([word]) for word in counter)
    assert [int(word) for word in philox4x32(words, key)] == expected


def test_vocabulary_ids_read_the_four_words_of_their_block():
    positions, blocks = torch.tensor([2**33 + 7]), torch.arange(3)
    counter = (blocks, torch.tensor([7]), torch.tensor([2]), torch.tensor([(1 << 28) | 5]))
    words = torch.stack(philox4x32(counter, (9, 1)), dim=-1).flatten()
    expected = -(-((words.double() + 0.5) / 2**32).log()).log()
    row = gumbel(2**32 + 9, 5, positions, 12, stream=Stream.DRAFT)[0]
    assert torch.equal(row, expected.float())


def test_fractions_of_the_extreme_words_are_strictly_inside_0_and_1():
    low, high = noise._fraction(torch.tensor([0, 2**32 - 1])).tolist()
    assert low == 2.0**-33
    assert high == 1 - 2.0**-33
    assert math.isfinite(-math.log(-math.log(low)))
    assert math.isfinite(-math.log(-math.log(high)))


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1001])
def test_a_row_does_not_depend_on_the_rows_beside_it(vocab_size):
    positions = torch.tensor([0, 3, 2**31, 2**32, 2**40 + 1])
    together = gumbel(11, 2, positions, vocab_size)
    assert together.shape == (5, vocab_size)
    assert together.dtype == torch.float32
    for row in range(5):
        assert torch.equal(gumbel(11, 2, positions[row : row + 1], vocab_size)[0], together[row])
    assert torch.equal(gumbel(11, 2, positions.flip(0), vocab_size).flip(0), together)


def test_a_larger_vocabulary_extends_a_row_and_keeps_its_beginning():
    positions = torch.arange(3)
    assert torch.equal(gumbel(5, 0, positions, 100)[:, :37], gumbel(5, 0, positions, 37))


def test_every_coordinate_changes_the_noise():
    base = gumbel(1, 0, torch.tensor([4]), 64)
    others = [
        gumbel(2, 0, torch.tensor([4]), 64),
        gumbel(1 + 2**32, 0, torch.tensor([4]), 64),
        gumbel(1, 1, torch.tensor([4]), 64),
        gumbel(1, 0, torch.tensor([5]), 64),
        gumbel(1, 0, torch.tensor([4 + 2**32]), 64),
        gumbel(1, 0, torch.tensor([4]), 64, stream=Stream.DRAFT),
        gumbel(1, 0, torch.tensor([4]), 64, stream=Stream.ACCEPT),
    ]
    assert not any((base == other).any() for other in others)


def test_gumbel_noise_has_the_mean_and_variance_of_a_standard_gumbel():
    """Mean and variance of 10^6 values within 5 standard errors: false alarm below 2e-6, fixed seed."""
    values = gumbel(3, 0, torch.arange(100), 10_000).double()
    assert abs(values.mean() - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / 1e6)
    assert abs(values.var() - math.pi**2 / 6) < 5 * math.sqrt((5.4 - 1) * (math.pi**2 / 6) ** 2 / 1e6)


def test_uniforms_fill_the_unit_interval_evenly():
    """Chi-square over 64 bins of 64,000 values below its 1 - 1e-6 quantile, 130.1; the seed is fixed."""
    values = uniform(3, 0, torch.arange(64_000))
    assert values.dtype == torch.float64
    counts = torch.histc(values, bins=64, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 130.1
