"""Counter-based noise: Philox4x32-10 in torch integers, and Gumbel and uniform variates made of it.

Owns the map (seed, stream, choice index, absolute position, vocabulary id) -> variate. It has no state, so
any row can be drawn again, in any order, by the draft and by the verify pass, on CPU or GPU, and a row never
depends on its neighbours. That is what makes sampled text independent of k. Philox: Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3".

One call yields four words, so four neighbouring vocabulary ids share a counter: the id's upper bits are the
counter's first word and its lowest two choose the output word. Logarithms are taken in float64 and rounded
once to float32, so that the last bit of a platform's `log` does not show.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Stream", "gumbel", "philox4x32", "uniform"]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_CHOICE_BITS = 28  # the counter's fourth word: 4 bits of stream, 28 of choice index

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(IntEnum):
    """Independent noise for one emitted position."""

    TARGET = 0
    """Samples the target, and in coupled mode the draft too."""
    DRAFT = 1
    """Samples the draft under rejection sampling, where it must not share noise with the recovered token."""
    ACCEPT = 2
    """Decides acceptance under rejection sampling."""


def gumbel(
    seed: int, choice_index: int, positions: Tensor, vocab_size: int, *, stream: Stream = Stream.TARGET
) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], for the absolute `positions` [R] int64 of the emitted tokens."""
    blocks = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=positions.device)
    words = _words(seed, choice_index, positions[:, None], blocks, stream)
    fraction = _fraction(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])  # [R, V]
    return fraction.log_().neg_().log_().neg_().to(torch.float32)


def uniform(seed: int, choice_index: int, positions: Tensor, *, stream: Stream = Stream.ACCEPT) -> Tensor:
    """Uniform variates in the open interval (0, 1), float64 [R], one for each of `positions` [R] int64."""
    words = _words(seed, choice_index, positions, torch.zeros_like(positions), stream)
    return _fraction(words[0])


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox on 32-bit words held in int64 tensors that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = (high1 ^ c1).bitwise_xor_(k0), low1, (high0 ^ c3).bitwise_xor_(k1), low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product: int64 wraps modulo 2^64, the mask undoes the shift's sign."""
    product = word * factor
    return (product >> 32).bitwise_and_(_WORD), product.bitwise_and_(_WORD)


def _words(seed: int, choice_index: int, positions: Tensor, blocks: Tensor, stream: Stream) -> Words:
    assert 0 <= choice_index < 1 << _CHOICE_BITS, f"choice index {choice_index} is not of {_CHOICE_BITS} bits"
    tag = torch.full_like(blocks[:1], stream << _CHOICE_BITS | choice_index)
    return philox4x32((blocks, positions & _WORD, positions >> 32, tag), (seed & _WORD, seed >> 32))


def _fraction(word: Tensor) -> Tensor:
    """(word + 1/2) / 2^32, float64: exact, and neither 0 nor 1."""
    return word.to(torch.float64).add_(0.5).mul_(2.0**-32)
