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

from moespeq.types import ExpertKey

__all__ = [
    "PAGE_BYTES",
    "ROW_BYTES",
    "RecordEnds",
    "RecordRow",
    "RecordTable",
    "Span",
    "experts_file_names",
    "file_of",
    "round_up",
    "start_of_record",
]

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
    """One expert: its base in `base.bin` and its record in a file of expert records."""

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


@dataclass(slots=True)
class RecordEnds:
    """Where the files of records end while one record after the other is appended to them.

    Layers are dealt to the files in turn, so that files on several disks are read beside each other. `base` is the end
    of `base.bin`, `experts` those of the files of expert records.
    """

    num_experts: int
    base: int
    experts: list[int]

    @classmethod
    def of_nothing(cls, num_experts: int, num_files: int) -> RecordEnds:
        """Before the first record."""
        return cls(num_experts, 0, [0] * num_files)

    def starts(self, position: int, base_bytes: int, record_bytes: int) -> tuple[int, int]:
        """Where the base and the record of the expert at `position` begin, when they are the next."""
        end = self.experts[file_of(position, self.num_experts, len(self.experts))]
        return start_of_record(self.base, base_bytes), start_of_record(end, record_bytes)

    def is_next(self, position: int, row: RecordRow) -> bool:
        """Whether `row` lies where it was appended, if all before it were."""
        starts = self.starts(position, row.base.num_bytes, row.record.num_bytes)
        return (row.base.offset, row.record.offset) == starts

    def add(self, position: int, row: RecordRow) -> None:
        """Append the expert at `position`."""
        self.base = row.base.end
        self.experts[file_of(position, self.num_experts, len(self.experts))] = row.record.end


def experts_file_names(num_files: int) -> list[str]:
    """The files of expert records of a store that has `num_files` of them."""
    return ["experts.bin", *(f"experts-{i}.bin" for i in range(1, num_files))]


def file_of(position: int, num_experts: int, num_files: int) -> int:
    """Which of the files of expert records holds the expert at `position` in the table."""
    return position // num_experts % num_files


def start_of_record(end: int, num_bytes: int) -> int:
    """Where a record of `num_bytes` begins in a file that ends at `end`."""
    return round_up(end, PACKED_BYTES if num_bytes < PACKED_BELOW_BYTES else PAGE_BYTES)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
