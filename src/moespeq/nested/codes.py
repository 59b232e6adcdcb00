"""Packing of unsigned codes of 2, 3 or 4 bits, and their unpacking through a small table. [R rows, C columns]

Owns the bit order: a row is a little-endian bit string, code j at bits j*b..j*b+b-1, padded with zeros to
whole bytes. Unpacking looks whole bytes up (12 bits at a time for 3-bit codes): one gather yields several
codes already in the wanted dtype, which on a CPU is 2-3 times faster than shifting and masking.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["look_up_codes", "pack_codes"]

_CODES_PER_WORD = {2: 4, 3: 8, 4: 2}
_WIDE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned integer codes [R, C] into uint8 [R, ceil(C*bits/8)]."""
    rows, cols = codes.shape
    per_word = _CODES_PER_WORD[bits]
    word_bytes = per_word * bits // 8
    wide = codes.to(torch.uint8 if word_bytes == 1 else torch.int32)
    lanes = pad(wide, (0, -cols % per_word)).view(rows, -1, per_word).unbind(2)
    words = lanes[0].clone()  # [R, words]
    for place, lane in enumerate(lanes[1:], start=1):
        words |= lane << bits * place
    octets = [(words >> 8 * place & 0xFF).to(torch.uint8) for place in range(word_bytes)]
    return torch.stack(octets, 2).view(rows, -1)[:, : -(-cols * bits // 8)].contiguous()


def look_up_codes(packed: Tensor, cols: int, bits: int, *, origin: int, dtype: torch.dtype) -> Tensor:
    """Return `code - origin` as `dtype` [R, cols] from packed codes [R, bytes]; safe to change in place."""
    table = _code_table(bits, origin, dtype, packed.device)
    index = _twelve_bit_words(packed) if bits == 3 else packed.to(torch.int32)
    found = table.index_select(0, index.view(-1))
    return found.view(dtype).view(packed.shape[0], -1)[:, :cols]


def _twelve_bit_words(packed: Tensor) -> Tensor:
    """Split every 3 bytes into two 12-bit words: [R, bytes] -> int32 [R, words]."""
    rows, width = packed.shape
    first, middle, last = pad(packed, (0, -width % 3)).view(rows, -1, 3).to(torch.int32).unbind(2)
    return torch.stack((first | (middle & 0xF) << 8, middle >> 4 | last << 4), 2).view(rows, -1)


@lru_cache(maxsize=64)
def _code_table(bits: int, origin: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All codes of each possible word side by side, seen as one wide integer per word."""
    index_bits = 12 if bits == 3 else 8
    lanes = index_bits // bits
    words = torch.arange(1 << index_bits).unsqueeze(1)
    codes = (words >> (torch.arange(lanes) * bits)) & ((1 << bits) - 1)
    table = (codes - origin).to(dtype).contiguous()  # [words, lanes]
    return table.view(_WIDE[lanes * table.element_size()]).view(-1).to(device)
