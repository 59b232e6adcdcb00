"""Which experts have their base on the device, each in a row of the base bank, and which expert takes over whose row.

An expert without a row carries its base in front of its record whenever that crosses the link, and the draft takes its
output as zero. So rows belong to the experts that are used most, which the engine learns: between two passes a few cold
rows go to experts that are clearly hotter. Owns the numbers; the bytes are the bank's, which `replace` writes.

Invariant: a record that crossed the link without its base is completed from its row for as long as it is in a slot. So
the row of an expert whose record lies in a slot, or is on its way there, without its base is never given away; a record
that brought its base keeps it, whoever gets a row meanwhile.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moespeq.errors import StorageError, StoreError
from moespeq.residency.frequency import UseFrequency
from moespeq.residency.slots import SlotCache
from moespeq.types import ExpertKey

__all__ = ["NO_ROW", "BaseRows", "ResidentBases", "first_rows", "row_changes"]

NO_ROW = -1
_CHANGED_PART = 0.01  # of all experts at most, in a pass: their bases take the link a few hundredths of it
_LEAD_FACTOR, _LEAD_USES = 1.5, 1.0  # how much hotter than the coldest an expert must be


@dataclass(frozen=True, slots=True)
class ResidentBases:
    """What an engine starts with. rows: record -> the row of its base, or NO_ROW.

    front_bytes: length of the base in front of an expert's record, by which it is shorter on the link where the expert
    has a row. replace: puts the base of an expert into the row that another one leaves (row, leaves, comes), for all
    that is launched later; None where rows never change hands.
    """

    rows: Sequence[int]
    front_bytes: Callable[[ExpertKey], int]
    replace: Callable[[int, ExpertKey, ExpertKey], None] | None = None


def first_rows(num_rows: int, *, num_layers: int, num_experts: int) -> list[int]:
    """Record -> row, before anything is known: the same number of experts of every layer, the first ones."""
    per_layer, rest = divmod(num_rows, num_layers)
    rows = [NO_ROW] * (num_layers * num_experts)
    row = 0
    for layer in range(num_layers):
        for expert in range(per_layer + (layer < rest)):
            rows[layer * num_experts + expert] = row
            row += 1
    return rows


def row_changes(
    outside: Iterable[int], inside: Iterable[int], frequency: UseFrequency, *, at_most: int
) -> list[tuple[int, int]]:
    """Pairs (leaves, comes): the coldest `inside`, the hottest `outside`, while the one is clearly hotter."""
    score = frequency.score.__getitem__
    coldest, hottest = heapq.nsmallest(at_most, inside, key=score), heapq.nlargest(at_most, outside, key=score)

    def is_clearly_hotter(leaves: int, comes: int) -> bool:
        return frequency.of(comes) > _LEAD_FACTOR * frequency.of(leaves) + _LEAD_USES

    pairs = zip(coldest, hottest, strict=False)
    return [(leaves, comes) for leaves, comes in pairs if is_clearly_hotter(leaves, comes)]


class BaseRows:
    """The rows of all experts. `fetch_bytes`, to read: record -> what the link would carry for it now."""

    def __init__(self, record_bytes: Sequence[int], bases: ResidentBases | None, *, num_experts: int) -> None:
        """`record_bytes`: of whole records. Without `bases` no record has one in front."""
        records = range(len(record_bytes))
        self._num_experts = num_experts
        self._rows = [0] * len(records) if bases is None else list(bases.rows)
        self._front_bytes = [0 if bases is None else bases.front_bytes(self._key(record)) for record in records]
        self._has_fronts = any(self._front_bytes)
        self._replace = None if bases is None else bases.replace
        self._unreadable: set[int] = set()
        self._tail_bytes = [whole - front for whole, front in zip(record_bytes, self._front_bytes, strict=True)]
        self.fetch_bytes = [
            self._tail_bytes[record] + (self._front_bytes[record] if self._rows[record] == NO_ROW else 0)
            for record in records
        ]

    def rows_of(self, records: Sequence[int], cache: SlotCache) -> list[int]:
        """Where the bases of held records are: a row, NO_ROW where it came with the record, 0 where none is needed."""
        rows = [max(self._rows[record], 0) for record in records]
        if not self._has_fronts:
            return rows
        came_whole = (cache.moved_bytes(record) > self._tail_bytes[record] for record in records)
        return [NO_ROW if whole else row for row, whole in zip(rows, came_whole, strict=True)]

    def learn(self, cache: SlotCache, frequency: UseFrequency) -> int:
        """Between two passes, rows of cold experts go to clearly hotter ones, a few at a time; returns the bytes moved.

        A base that cannot be read is a guess that failed: its expert gets no row any more.
        """
        if self._replace is None:
            return 0
        rows, held = self._rows, cache.holds
        absent = self._unreadable | cache.submitted.keys()  # a record on its way may be asked for only once
        outside = (record for record, row in enumerate(rows) if row == NO_ROW and record not in absent)
        inside = (
            record
            for record, row in enumerate(rows)
            if row != NO_ROW and not (held(record) and cache.moved_bytes(record) == self._tail_bytes[record])
        )
        moved_bytes = 0
        for leaves, comes in row_changes(outside, inside, frequency, at_most=math.ceil(_CHANGED_PART * len(rows))):
            if self._give_row(leaves, comes):
                moved_bytes += self._front_bytes[comes]
        return moved_bytes

    def _give_row(self, leaves: int, comes: int) -> bool:
        """False where the base that comes cannot be read.

        Cut anywhere, by an interrupt, this leaves records that carry their base without need, or a row of nobody; never
        a record that is completed with another one's base.
        """
        assert self._replace is not None
        row = self._rows[leaves]
        self.fetch_bytes[leaves] += self._front_bytes[leaves]
        self._rows[leaves] = NO_ROW
        try:
            self._replace(row, self._key(leaves), self._key(comes))
        except (StorageError, StoreError):
            self._unreadable.add(comes)
            self._rows[leaves] = row
            self.fetch_bytes[leaves] -= self._front_bytes[leaves]
            return False
        self._rows[comes] = row
        self.fetch_bytes[comes] -= self._front_bytes[comes]
        return True

    def check(self, cache: SlotCache) -> None:
        """Assert that every row is one expert's, and that no record in a slot lacks its base."""
        rows = [row for row in self._rows if row != NO_ROW]
        assert self._replace is None or len(set(rows)) == len(rows), "two experts in one row"
        for record in (*cache.resident, *cache.submitted):
            needs_row = self._front_bytes[record] > 0 and cache.moved_bytes(record) == self._tail_bytes[record]
            assert not needs_row or self._rows[record] != NO_ROW, f"record {record} has lost its base"

    def _key(self, record: int) -> ExpertKey:
        return ExpertKey(*divmod(record, self._num_experts))
