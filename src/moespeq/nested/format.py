"""What a base looks like, and which layout its residual has: the two choices a store's manifest records.

Owns the names and the sizes that follow from them alone; no tensors. Codes are stored unsigned: without a
zero point a signed step q in -(2^(b-1)-1)..2^(b-1)-1 is stored as q + 2^(b-1) and the lowest code is free;
with one, the stored code minus the group's zero code is the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from moespeq.errors import StoreError, UsageError

__all__ = ["BF16_LAYOUTS", "DEFAULT_FORMAT", "BaseFormat", "Layout"]

SUPPORTED_BITS = (2, 3, 4)


class Layout(Enum):
    """What a record holds: what the base lacks of bf16 weights, or the target's own numbers.

    The values are the names in manifests and options.
    """

    FIXED = "nested"
    CODE_WIDTH = "code-width"
    PLAIN = "plain"
    FP16 = "fp16"
    FP8 = "fp8"
    MXFP4 = "mxfp4"

    @property
    def needs_base(self) -> bool:
        """Whether a record is decoded with its base; the others are complete, and the base is the draft's alone."""
        return self in (Layout.FIXED, Layout.CODE_WIDTH)

    @property
    def has_scales(self) -> bool:
        """Whether a matrix is codes and scales in the checkpoint too, and bf16 only where it is multiplied with."""
        return self in (Layout.FP8, Layout.MXFP4)

    @property
    def is_bf16(self) -> bool:
        """Whether the target's weights are bf16 in the checkpoint, so that the layout is a choice."""
        return self.needs_base or self is Layout.PLAIN


BF16_LAYOUTS = tuple(layout for layout in Layout if layout.is_bf16)


@dataclass(frozen=True, slots=True)
class BaseFormat:
    """Bits a code, weights a group (along the input dimension), and whether a group has its own zero code."""

    bits: int
    group: int
    zero_point: bool

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS:
            raise UsageError(f"A base has 2, 3 or 4 bits a code, not {self.bits}; choose one of these.")
        if self.group < 1:
            raise UsageError(f"A base group holds at least 1 weight, not {self.group}; 64 is usual.")

    @property
    def max_code(self) -> int:
        """Largest stored code."""
        return (1 << self.bits) - 1

    @property
    def middle_code(self) -> int:
        """The stored code of step 0 when there is no zero point."""
        return 1 << (self.bits - 1)

    @property
    def reach(self) -> int:
        """Largest distance of a code from the zero code: c = bf16(step * scale) with |step| <= reach."""
        return self.max_code if self.zero_point else self.middle_code - 1

    def num_groups(self, cols: int) -> int:
        """Groups in a row of `cols` weights; the last may be short."""
        return -(-cols // self.group)

    def group_width(self, cols: int) -> int:
        """Weights in a full group of a row of `cols` weights: a row shorter than a group is one group."""
        return min(self.group, cols)

    def code_row_bytes(self, cols: int) -> int:
        """Bytes of one row's packed codes; every row starts on a byte."""
        return -(-cols * self.bits // 8)

    def to_json(self) -> dict[str, int | bool]:
        """The manifest's entry."""
        return {"bits": self.bits, "group": self.group, "zero_point": self.zero_point}

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> BaseFormat:
        """Read a manifest's entry, which is untrusted input. Raises StoreError."""
        bits, group, zero_point = (entry.get(name) for name in ("bits", "group", "zero_point"))
        if type(bits) is int and type(group) is int and type(zero_point) is bool and len(entry) == 3:
            try:
                return cls(bits=bits, group=group, zero_point=zero_point)
            except UsageError as error:
                raise StoreError(f"The manifest's base format cannot be read: {error}") from error
        raise StoreError(
            f"The manifest's base format {dict(entry)} must hold exactly an integer bits, an integer group "
            "and a boolean zero_point; prepare the store again with this version."
        )


DEFAULT_FORMAT = BaseFormat(bits=4, group=64, zero_point=True)  # chosen by benchmarks/study_base.py
