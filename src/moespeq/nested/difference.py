"""Where each weight lies as seen from its base: near the centre, at a distance below the scale, or neither.

Physics: the magnitude bits of a bf16 are its place in numeric order, so the difference of two places counts
the bf16 numbers between them. A weight whose code is not the zero code has the centre's sign and lies few
places from it: that signed count is its residual ("near"). A weight of the zero code is smaller than half a
step: its sign, and the places from the scale down to it, are kept ("far"). What fits neither field is an
escape and travels as plain bits.

All tensors are flat in row-major order, [N = R*C]; bf16 bits are int16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moespeq.nested.base import Base, dequantize_base, group_of
from moespeq.nested.format import BaseFormat

__all__ = ["Difference", "far_scale_places", "find_difference", "restore_far", "zero_code_positions"]

_MAGNITUDE = 0x7FFF


@dataclass(frozen=True, slots=True)
class Difference:
    """A matrix as seen from its base. Escaped elements hold residual 0 or the far distance's escape mark.

    far int64 [Z]: positions of zero codes; distance int16 [Z] and negative bool [Z]: theirs; residual int16
    [N]: that of all other elements, meaningless at zero codes; escapes int64 [X]: positions.
    """

    bits: Tensor
    far: Tensor
    distance: Tensor
    negative: Tensor
    residual: Tensor
    escapes: Tensor


def find_difference(
    weight: Tensor, base: Base, fmt: BaseFormat, *, low: Tensor | int, high: Tensor | int, distance_bits: int
) -> Difference:
    """Compare a weight [R, C] with its base; residuals outside low..high (scalars or [N]) are escapes."""
    rows, cols = weight.shape
    bits = weight.contiguous().view(-1).view(torch.int16)
    centre = dequantize_base(base, (rows, cols), fmt).view(-1).view(torch.int16)
    place = bits & _MAGNITUDE
    residual = place - (centre & _MAGNITUDE)
    fits = (residual >= low) & (residual <= high) & ((bits ^ centre) >= 0)

    far = _true_positions(centre == 0)
    zero_mark = (1 << distance_bits) - 1
    far_places = place.index_select(0, far)
    distance = far_scale_places(base, far, cols, fmt) - far_places
    reached = (distance >= 0) & (distance < zero_mark - 1)
    distance = distance.where(reached, zero_mark - 1).masked_fill_(far_places == 0, zero_mark)
    fits[far] = distance != zero_mark - 1
    escapes = _true_positions(fits.logical_not_())
    return Difference(
        bits=bits,
        far=far,
        distance=distance,
        negative=bits.index_select(0, far) < 0,
        residual=residual.index_fill_(0, escapes, 0),
        escapes=escapes,
    )


def restore_far(bits: Tensor, far: Tensor, signed: Tensor, scale_places: Tensor, *, distance_bits: int) -> None:
    """Write the bf16 bits of far weights at their positions `far` int64 [Z] of `bits` int16 [N].

    signed int16 [Z]: the sign in bit 15, minus the distance, modulo 2^16; scale_places int16 [Z]. The sum of
    the two is the sign and the place at once. A distance of all ones is a zero: its scale is replaced so that
    only the sign remains. Both are used up.
    """
    zero_mark = (1 << distance_bits) - 1
    is_zero = (signed & _MAGNITUDE) == _MAGNITUDE + 1 - zero_mark
    bits.scatter_(0, far, signed.add_(scale_places.masked_fill_(is_zero, zero_mark)))


def far_scale_places(base: Base, far: Tensor, cols: int, fmt: BaseFormat) -> Tensor:
    """Return the place of each far weight's scale, int16 [Z]."""
    return base.scales.view(torch.int16).view(-1).index_select(0, group_of(far, cols, fmt))


def zero_code_positions(centre: Tensor) -> Tensor:
    """Positions of the zero codes, int64 [Z], from the centre's bits int16 [N]."""
    return _true_positions(centre.logical_not())


def _true_positions(mask: Tensor) -> Tensor:
    """Ascending positions of true elements, int64. numpy's scan is four times as fast as torch's."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)
