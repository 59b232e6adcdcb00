"""How many bits a residual needs, given its code: the table behind the code-width layout.

The physics: W lies within half a step of c = bf16(step * scale), and bf16 numbers are evenly spaced inside a
power of two, so the number of bf16 numbers that can lie there depends on |step| alone, and shrinks as |step|
grows. The largest step is never exceeded by more than the scale's own rounding, so its range is lopsided and
one bit shorter. The table is found by trying every scale mantissa against every weight; exponents only shift
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moespeq.nested.format import BaseFormat

__all__ = ["ZERO_CODE_BITS", "Field", "code_fields", "measure_ranges"]

ZERO_CODE_BITS = 11
_ONE = 0x3F80  # 1.0; the binade 1.0..2.0 holds every mantissa
_BINADE = 128


@dataclass(frozen=True, slots=True)
class Field:
    """A residual r is stored as the unsigned number r + offset in `bits` bits."""

    bits: int
    offset: int


def code_fields(fmt: BaseFormat) -> tuple[Field, ...]:
    """Return the field of each |step| in 0..reach; the zero code's holds a sign and a 10-bit distance."""
    return _fields(fmt.reach)


@lru_cache(maxsize=8)
def _fields(reach: int) -> tuple[Field, ...]:
    return (Field(ZERO_CODE_BITS, 0), *(_narrowest(low, high) for low, high in measure_ranges(reach)))


def measure_ranges(reach: int) -> list[tuple[int, int]]:
    """Return the least and greatest residual of each |step| in 1..reach, over all scale mantissas."""
    scales = _from_places(torch.arange(_ONE, _ONE + _BINADE)).unsqueeze(1)
    places = torch.arange(_ONE - _BINADE, _ONE + _BINADE * reach.bit_length() + _BINADE)
    weights = _from_places(places)
    steps = (weights / scales).round()  # [scales, weights]
    centres = (steps * scales).to(torch.bfloat16).view(torch.int16).to(torch.int64)
    residuals = places - centres
    reachable = weights <= reach * (1 + 2**-8) * scales  # absmax / reach was rounded to the bf16 scale
    ranges = []
    for step in range(1, reach + 1):
        found = residuals[reachable & (steps == step)]
        ranges.append((int(found.min()), int(found.max())))
    return ranges


def _from_places(places: Tensor) -> Tensor:
    """Positive bf16 numbers at these places in numeric order, as float32."""
    return places.to(torch.int16).view(torch.bfloat16).float()


def _narrowest(low: int, high: int) -> Field:
    """Two's complement where it fits; one bit less, the slack halved, where only a shifted range does."""
    bits = max(high, -low - 1).bit_length() + 1
    shifted_bits = (high - low).bit_length()
    if shifted_bits == bits:
        return Field(bits, 1 << (bits - 1))
    slack = (1 << shifted_bits) - (high - low + 1)
    return Field(shifted_bits, slack // 2 - low)
