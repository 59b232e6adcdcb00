"""Where the matrices of a routed expert come from: the resident base, or base + residual in a slot.

Owns the base bank (INT4 codes and scales of all experts, or of some, on the device) and reads slots; it never decides
what is in them. Shapes: an expert's matrices are up [2I, H] and down [H, I], always [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moespeq.nested import Base as BaseMatrix
from moespeq.nested import BaseFormat, Layout, base_record_bytes, decode_record, dequantize_base, split_base
from moespeq.residency import NO_ROW
from moespeq.types import ExpertKey

__all__ = ["BaseBank", "ExpertWeights"]

Matrices = tuple[torch.Tensor, torch.Tensor]
Decode = Callable[[torch.Tensor, torch.Tensor, Layout], Matrices]
"""(record, base record, layout) -> the exact bf16 matrices; the record may be followed by slack."""


class BaseBank:
    """The draft's experts: one contiguous allocation, a row for each expert whose base is resident.

    records: uint8 [N, base record bytes]; rows: layer * num_experts + expert -> its row, or NO_ROW.
    row_map: the same as int32 [L, E] beside the records, for kernels; None where none asks.
    """

    def __init__(
        self,
        records: torch.Tensor,
        rows: Sequence[int],
        num_experts: int,
        shapes: Sequence[tuple[int, int]],
        fmt: BaseFormat,
        *,
        row_map: torch.Tensor | None = None,
    ) -> None:
        assert records.shape[1] == base_record_bytes(shapes, fmt)
        self._num_experts, self.shapes, self.fmt = num_experts, tuple(shapes), fmt
        self.records, self.row_map = records, row_map
        self._rows = list(rows)
        self._bases = [split_base(record, self.shapes, fmt) for record in records]

    def has(self, layer: int, expert: int) -> bool:
        """Whether the base of an expert is here."""
        return self._rows[layer * self._num_experts + expert] != NO_ROW

    def bases(self, layer: int, expert: int) -> Sequence[BaseMatrix]:
        """Views into the bank, one for each matrix."""
        return self._bases[self._rows[layer * self._num_experts + expert]]

    def replace(self, row: int, leaves: ExpertKey, comes: ExpertKey, base: torch.Tensor) -> None:
        """Write the base record of one expert over that of another.

        In the order of the current stream, as all that reads the bank: what was launched before finds the old base.
        """
        self._set_row(leaves, NO_ROW)  # first: who is cut here has a row of nobody
        self.records[row].copy_(base)
        self._set_row(comes, row)

    def _set_row(self, key: ExpertKey, row: int) -> None:
        self._rows[key.layer * self._num_experts + key.expert] = row
        if self.row_map is not None:
            self.row_map[key] = row

    @property
    def num_bytes(self) -> int:
        return self.records.nbytes


@dataclass(slots=True)
class ExpertWeights:
    """Exact and approximate matrices of any expert.

    slots: uint8 [S, slot bytes]; layouts: the record layout of each MoE layer; bank: None when no base is resident.
    decode: a device's own kernel for nested records, None for the
    reference in torch.
    """

    slots: torch.Tensor
    layouts: Sequence[Layout]
    shapes: Sequence[tuple[int, int]]
    fmt: BaseFormat
    bank: BaseBank | None
    decode: Decode | None = None

    def exact(self, layer: int, slot: int, base_row: int, dtype: torch.dtype) -> Matrices:
        """The target's matrices, bit for bit, from the record in `slot`; valid until the lease ends.

        base_row: the row of its base in the bank, or NO_ROW: the base lies in front of it in the slot.
        """
        layout, record = self.layouts[layer], self.slots[slot]
        if not layout.needs_base:
            up, down = decode_record(record, (), self.shapes, self.fmt, layout)
            return up.to(dtype), down.to(dtype)
        if base_row != NO_ROW:
            assert self.bank is not None, "a record without its base, and no bank"
            base = self.bank.records[base_row]
        else:
            base_bytes = base_record_bytes(self.shapes, self.fmt)
            base, record = record[:base_bytes], record[base_bytes:]
        if self.decode is not None:
            return self.decode(record, base, layout)
        up, down = decode_record(record, split_base(base, self.shapes, self.fmt), self.shapes, self.fmt, layout)
        return up.to(dtype), down.to(dtype)

    def has_base(self, layer: int, expert: int) -> bool:
        """Whether `base` may be asked for this expert."""
        return self.bank is not None and self.bank.has(layer, expert)

    def base(self, layer: int, expert: int, dtype: torch.dtype) -> Matrices:
        """The draft's matrices: codes times scales."""
        assert self.bank is not None, "a draft pass needs the base bank"
        bases = self.bank.bases(layer, expert)
        up, down = (
            dequantize_base(base, shape, self.fmt, dtype) for base, shape in zip(bases, self.shapes, strict=True)
        )
        return up, down
