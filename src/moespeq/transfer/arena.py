"""Host memory cut into equal, aligned slots.

Owns one anonymous mapping. Slots for records of 64 KiB and more start at multiples of 4096 and are as long,
so that a direct disk read may land in one and run past the record's end to the next block; smaller ones,
never read directly, only keep to cache lines. The mapping lives as long as any view of it.
"""

from __future__ import annotations

import mmap

from moespeq.errors import BudgetError

__all__ = ["SlotArena", "slot_stride_bytes"]

_PAGED_FROM_BYTES = 64 << 10
_PAGE_BYTES = 4096
_LINE_BYTES = 64


def slot_stride_bytes(record_bytes: int) -> int:
    """What one slot for records of up to `record_bytes` takes."""
    alignment = _PAGE_BYTES if record_bytes >= _PAGED_FROM_BYTES else _LINE_BYTES
    return -(-record_bytes // alignment) * alignment


class SlotArena:
    """`num_slots` writable, zeroed views of at least `slot_bytes`. Raises BudgetError if refused."""

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        assert min(num_slots, slot_bytes) > 0, (num_slots, slot_bytes)
        self.num_slots = num_slots
        self.stride_bytes = slot_stride_bytes(slot_bytes)
        try:
            self._mapping = mmap.mmap(-1, num_slots * self.stride_bytes)
        except (OSError, OverflowError) as error:
            gib = num_slots * self.stride_bytes / 2**30
            raise BudgetError(
                f"{num_slots} expert slots need {gib:.2f} GiB of host memory, which the system refused "
                f"({error}); ask for a smaller memory budget."
            ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the whole mapping."""
        return self.num_slots * self.stride_bytes

    def memory(self) -> memoryview:
        """The whole mapping: slot i begins at i * stride_bytes."""
        return memoryview(self._mapping)

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, `stride_bytes` long."""
        assert 0 <= index < self.num_slots, index
        begin = index * self.stride_bytes
        return self.memory()[begin : begin + self.stride_bytes]

    def slots(self) -> list[memoryview]:
        """All slots in order."""
        return [self.slot(index) for index in range(self.num_slots)]
