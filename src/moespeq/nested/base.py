"""The base: what the draft computes with, and the centre c that every residual is measured from.

Shapes: weight [R rows = out, C columns = in]; groups run along C, N = ceil(C / group) of them, the last may
be short. Invariant: c = bf16(step * scale) is one correctly rounded product of exact inputs, so every device
finds the same c, and c = 0 exactly where the code is the zero code. Scales are normal bf16 numbers or 0; a
group of scale 0 has zero codes only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moespeq.nested.codes import look_up_codes, pack_codes
from moespeq.nested.format import BaseFormat

__all__ = ["Base", "dequantize_base", "encode_base", "group_of", "unpack_codes"]


@dataclass(frozen=True, slots=True)
class Base:
    """One matrix's codes and scales; may be views into a record.

    codes uint8 [R, ceil(C*bits/8)], scales bf16 [R, N], zeros uint8 [R, N] or None without a zero point.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None


def encode_base(weight: Tensor, fmt: BaseFormat) -> Base:
    """Quantize a bf16 or fp16 matrix [R, C], rounding to the nearest step; non-finite weights take the zero code."""
    assert weight.dtype in (torch.bfloat16, torch.float16), weight.dtype
    groups = _as_groups(weight.float().nan_to_num_(0.0, 0.0, 0.0), fmt)  # [R, N, width]
    low, high = groups.aminmax(dim=2)
    if fmt.zero_point:
        low, high = low.clamp_max_(0.0), high.clamp_min_(0.0)
        scales = _normal_or_zero(_share(high, fmt) - _share(low, fmt))
        origin = (-low / _divisor(scales)).round_().clamp_(0, fmt.max_code)
    else:
        scales = _normal_or_zero(_share(high.maximum(-low), fmt))
        origin = torch.full_like(scales, fmt.middle_code, dtype=torch.float32)
    steps = groups.div_(_divisor(scales).unsqueeze(2))
    codes = steps.round_().add_(origin.unsqueeze(2)).clamp_(0, fmt.max_code)
    packed = pack_codes(_from_groups(codes, weight.shape[1]), fmt.bits)
    return Base(packed, scales, origin.to(torch.uint8) if fmt.zero_point else None)


def unpack_codes(base: Base, shape: tuple[int, int], fmt: BaseFormat) -> Tensor:
    """Return the stored, unsigned codes, uint8 [R, C]."""
    return look_up_codes(base.codes, shape[1], fmt.bits, origin=0, dtype=torch.uint8)


def dequantize_base(base: Base, shape: tuple[int, int], fmt: BaseFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return c = bf16(step * scale), [R, C], as `dtype`: the draft's weight. A fresh contiguous tensor."""
    origin = 0 if base.zeros is not None else fmt.middle_code
    steps = look_up_codes(base.codes, shape[1], fmt.bits, origin=origin, dtype=torch.bfloat16)
    groups = _as_groups(steps, fmt)
    if base.zeros is not None:
        groups.sub_(base.zeros.to(torch.bfloat16).unsqueeze(2))
    groups.mul_(base.scales.unsqueeze(2))
    return _from_groups(groups, shape[1]).to(dtype)


def group_of(positions: Tensor, cols: int, fmt: BaseFormat) -> Tensor:
    """Map row-major element positions int64 [n] to positions in `scales.view(-1)`."""
    width = fmt.group_width(cols)
    if cols % width:
        return positions // cols * fmt.num_groups(cols) + positions % cols // width
    if width & (width - 1):
        return positions // width
    return positions >> (width.bit_length() - 1)  # five times faster than the division


def _as_groups(matrix: Tensor, fmt: BaseFormat) -> Tensor:
    """[R, C] -> [R, N, width], zeros after a short last group."""
    rows, cols = matrix.shape
    width = fmt.group_width(cols)
    missing = -cols % width
    return (pad(matrix, (0, missing)) if missing else matrix).reshape(rows, -1, width)


def _from_groups(groups: Tensor, cols: int) -> Tensor:
    """[R, N, width] -> [R, cols]: the inverse of `_as_groups`."""
    return groups.reshape(groups.shape[0], -1)[:, :cols].contiguous()


def _normal_or_zero(scales: Tensor) -> Tensor:
    """Round scales to bf16; one that would be subnormal, hence far from its exact value, becomes 0."""
    rounded = scales.to(torch.bfloat16)
    return rounded.where(rounded >= torch.finfo(torch.bfloat16).tiny, 0.0)


def _share(extent: Tensor, fmt: BaseFormat) -> Tensor:
    """extent / reach, correctly rounded: by a tensor, because torch on CUDA divides by a number as times 1 / number."""
    return extent / torch.full_like(extent, fmt.reach)


def _divisor(scales: Tensor) -> Tensor:
    """Scales as float32, infinity in place of 0: all weights of such a group take the zero code."""
    return scales.float().masked_fill_(scales == 0, torch.inf)
