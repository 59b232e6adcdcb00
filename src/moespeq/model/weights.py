"""Where the matrices of a routed expert come from: the resident base, or base + residual in a slot.

Owns the base bank (every expert's INT4 codes and scales, on the device) and reads slots; it never decides what is in
them. Shapes: an expert's matrices are up [2I, H] and down [H, I], always [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moespeq.nested import Base as BaseMatrix
from moespeq.nested import BaseFormat, Layout, base_record_bytes, decode_record, dequantize_base, split_base
from moespeq.types import ExpertKey

__all__ = ["BaseBank", "ExpertWeights"]

Matrices = tuple[torch.Tensor, torch.Tensor]
Decode = Callable[[torch.Tensor, torch.Tensor, Layout], Matrices]
"""(record, base record, layout) -> the exact bf16 matrices; the record may be followed by slack."""


class BaseBank:
    """The draft's experts: one contiguous allocation, a view for each expert.

    `records` is uint8 [num_layers * num_experts, base record bytes], in layer then expert order.
    """

    def __init__(
        self, records: torch.Tensor, num_experts: int, shapes: Sequence[tuple[int, int]], fmt: BaseFormat
    ) -> None:
        assert records.shape[1] == base_record_bytes(shapes, fmt)
        self._num_experts, self.shapes, self.fmt = num_experts, tuple(shapes), fmt
        self._records = records
        self._bases = [split_base(record, self.shapes, fmt) for record in records]

    def bases(self, layer: int, expert: int) -> Sequence[BaseMatrix]:
        """Views into the bank, one for each matrix."""
        return self._bases[layer * self._num_experts + expert]

    def record(self, layer: int, expert: int) -> torch.Tensor:
        """The base record of one expert, uint8 [n], a view."""
        return self._records[layer * self._num_experts + expert]

    @property
    def num_bytes(self) -> int:
        return self._records.nbytes


@dataclass(slots=True)
class ExpertWeights:
    """Exact and approximate matrices of any expert.

    slots: uint8 [S, slot bytes]; layouts: the record layout of each MoE layer; bank: None when no base is resident, and
    records are plain or have their base in front. decode: a device's own kernel for nested records, None for the
    reference in torch.
    """

    slots: torch.Tensor
    layouts: Sequence[Layout]
    shapes: Sequence[tuple[int, int]]
    fmt: BaseFormat
    bank: BaseBank | None
    decode: Decode | None = None

    def exact(self, key: ExpertKey, slot: int, dtype: torch.dtype) -> Matrices:
        """The target's matrices, bit for bit, from the record in `slot`; valid until the lease ends."""
        layout, record = self.layouts[key.layer], self.slots[slot]
        if layout is Layout.PLAIN:
            up, down = decode_record(record, (), self.shapes, self.fmt, layout)
            return up.to(dtype), down.to(dtype)
        if self.bank is not None:
            base = self.bank.record(*key)
        else:
            base_bytes = base_record_bytes(self.shapes, self.fmt)
            base, record = record[:base_bytes], record[base_bytes:]
        if self.decode is not None:
            return self.decode(record, base, layout)
        up, down = decode_record(record, split_base(base, self.shapes, self.fmt), self.shapes, self.fmt, layout)
        return up.to(dtype), down.to(dtype)

    def base(self, layer: int, expert: int, dtype: torch.dtype) -> Matrices:
        """The draft's matrices: codes times scales."""
        assert self.bank is not None, "a draft pass needs the base bank"
        bases = self.bank.bases(layer, expert)
        up, down = (
            dequantize_base(base, shape, self.fmt, dtype) for base, shape in zip(bases, self.shapes, strict=True)
        )
        return up, down
