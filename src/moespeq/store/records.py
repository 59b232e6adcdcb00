"""The record table: where each expert's base and record lie, and their checksums.

One row an expert, in order (layer, expert), in `records.bin`: as JSON it would be megabytes for 61 x 256
experts. Large records begin on a page, so that the disk can copy them straight into pinned memory; small ones
are packed, because a page each would waste more than they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moespeq.errors import StoreError
from moespeq.types import ExpertKey

__all__ = ["PAGE_BYTES", "ROW_BYTES", "RecordRow", "RecordTable", "Span", "round_up", "start_of_record"]

PAGE_BYTES = 4096
PACKED_BYTES = 64
PACKED_BELOW_BYTES = 65536

_ROW = np.dtype(
    [
        ("base_offset", "<u8"),
        ("base_bytes", "<u4"),
        ("base_crc32", "<u4"),
        ("offset", "<u8"),
        ("num_bytes", "<u4"),
        ("crc32", "<u4"),
    ]
)
ROW_BYTES = _ROW.itemsize


class Span(NamedTuple):
    """Bytes of one record in its file, and their CRC-32."""

    offset: int
    num_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        """First byte after the record."""
        return self.offset + self.num_bytes


class RecordRow(NamedTuple):
    """One expert: its base in `base.bin` and its record in `experts.bin`."""

    base: Span
    record: Span

    def to_bytes(self) -> bytes:
        """The row as it is stored."""
        return np.array([(*self.base, *self.record)], dtype=_ROW).tobytes()


@dataclass(frozen=True, slots=True)
class RecordTable:
    """All rows of a store of `num_experts` experts a layer."""

    rows: tuple[RecordRow, ...]
    num_experts: int

    @classmethod
    def from_bytes(cls, data: bytes, num_experts: int) -> RecordTable:
        """Decode `records.bin`; `data` is a whole number of rows."""
        table: npt.NDArray[np.void] = np.frombuffer(data, dtype=_ROW)
        rows = tuple(RecordRow(Span(*row[:3]), Span(*row[3:])) for row in table.tolist())
        return cls(rows, num_experts)

    def __getitem__(self, key: ExpertKey) -> RecordRow:
        """The row of one expert."""
        assert 0 <= key.expert < self.num_experts, key
        return self.rows[key.layer * self.num_experts + key.expert]

    def check(self, base_file_bytes: int, experts_file_bytes: int) -> None:
        """Raise StoreError when a row points outside its file."""
        for position, row in enumerate(self.rows):
            if row.base.end > base_file_bytes or row.record.end > experts_file_bytes:
                layer, expert = divmod(position, self.num_experts)
                raise StoreError(
                    f"The record table puts expert {expert} of MoE layer {layer} outside its file; "
                    "prepare the store again."
                )


def start_of_record(end: int, num_bytes: int) -> int:
    """Where a record of `num_bytes` begins in a file that ends at `end`."""
    return round_up(end, PACKED_BYTES if num_bytes < PACKED_BELOW_BYTES else PAGE_BYTES)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
