"""The device slots as a state machine: which record each one holds, and who may not lose it.

    free --reserve--> in flight --complete--> resident --evict--> free
                      in flight --abandon---> free

Owns states, pins and the accounting of bytes; does not choose victims (eviction.py) and moves nothing (the
Mover does). Experts never change, so evicting is forgetting. Every byte that arrived is used, wasted (evicted
before its first use) or still waiting in its slot; `check` proves that sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from moespeq.types import ExpertKey

__all__ = ["SlotCache", "SlotState"]


class SlotState(Enum):
    """What a slot holds. A slot in flight belongs to the mover."""

    FREE = "free"
    IN_FLIGHT = "in flight"
    RESIDENT = "resident"


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    key: ExpertKey | None = None
    num_bytes: int = 0
    pins: int = 0
    is_used: bool = False


class SlotCache:
    """`num_slots` slots; one method a transition, asserts say when it is legal. Not thread-safe: one owner
    thread.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, num_slots
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of: dict[ExpertKey, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self.num_in_flight = 0
        self.fetched_bytes = 0
        self.used_bytes = 0
        self.wasted_bytes = 0

    @property
    def num_slots(self) -> int:
        """Room, in records."""
        return len(self._slots)

    @property
    def unused_bytes(self) -> int:
        """Bytes that arrived, were never used, and are still resident."""
        return sum(slot.num_bytes for slot in self._slots if slot.state is SlotState.RESIDENT and not slot.is_used)

    @property
    def slot_of(self) -> Mapping[ExpertKey, int]:
        """Resident and in-flight records -> their slots: what must not be fetched again. A live view."""
        return self._slot_of

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether the complete record is in its slot."""
        slot = self._slot_of.get(key)
        return slot is not None and self._slots[slot].state is SlotState.RESIDENT

    def is_evictable(self, key: ExpertKey) -> bool:
        """Whether the record is resident and nobody holds a lease on it."""
        slot = self._slot_of.get(key)
        return slot is not None and self._slots[slot].state is SlotState.RESIDENT and self._slots[slot].pins == 0

    def has_free(self) -> bool:
        """Whether a record can come in without an eviction."""
        return bool(self._free)

    def resident(self) -> Iterator[ExpertKey]:
        """Every resident record, in slot order."""
        for slot in self._slots:
            if slot.state is SlotState.RESIDENT:
                assert slot.key is not None
                yield slot.key

    def reserve(self, key: ExpertKey, num_bytes: int) -> int:
        """A fetch is about to be submitted: give it a free slot."""
        assert key not in self._slot_of, f"{key} is already in the cache"
        assert self._free, "no free slot: evict first"
        index = self._free.pop()
        slot = self._slots[index]
        slot.state, slot.key, slot.num_bytes, slot.is_used = SlotState.IN_FLIGHT, key, num_bytes, False
        self._slot_of[key] = index
        self.num_in_flight += 1
        return index

    def complete(self, key: ExpertKey) -> None:
        """The record arrived whole."""
        slot = self._in_flight(key)
        slot.state = SlotState.RESIDENT
        self.num_in_flight -= 1
        self.fetched_bytes += slot.num_bytes

    def abandon(self, key: ExpertKey) -> None:
        """The fetch failed or was cancelled: nothing arrived, the slot is free."""
        slot = self._in_flight(key)
        self.num_in_flight -= 1
        self._release(slot, key)

    def evict(self, key: ExpertKey) -> None:
        """Forget a resident record that nobody holds."""
        slot = self._resident(key)
        assert slot.pins == 0, f"{key} is pinned"
        if not slot.is_used:
            self.wasted_bytes += slot.num_bytes
        self._release(slot, key)

    def pin(self, key: ExpertKey) -> int:
        """Lease a resident record: it is used, and stays until unpinned as often. Returns its slot."""
        slot = self._resident(key)
        slot.pins += 1
        if not slot.is_used:
            slot.is_used = True
            self.used_bytes += slot.num_bytes
        return self._slot_of[key]

    def unpin(self, key: ExpertKey) -> None:
        """Give one lease back."""
        slot = self._resident(key)
        assert slot.pins > 0, f"{key} is not pinned"
        slot.pins -= 1

    def check(self) -> None:
        """Assert that states, index, free list and the sum of bytes agree."""
        held = {slot.key: index for index, slot in enumerate(self._slots) if slot.key is not None}
        assert held == self._slot_of, "the index and the slots disagree"
        free = {index for index, slot in enumerate(self._slots) if slot.state is SlotState.FREE}
        assert sorted(self._free) == sorted(free), "the free list is wrong"
        assert all((slot.key is None) == (slot.state is SlotState.FREE) for slot in self._slots)
        assert all(slot.pins == 0 or slot.state is SlotState.RESIDENT for slot in self._slots), "pinned, not resident"
        in_flight = sum(slot.state is SlotState.IN_FLIGHT for slot in self._slots)
        assert in_flight == self.num_in_flight, "the number in flight is wrong"
        accounted_bytes = self.used_bytes + self.wasted_bytes + self.unused_bytes
        assert self.fetched_bytes == accounted_bytes, (
            f"{self.fetched_bytes} bytes came, {accounted_bytes} accounted for"
        )

    def _in_flight(self, key: ExpertKey) -> _Slot:
        slot = self._slots[self._slot_of[key]]
        assert slot.state is SlotState.IN_FLIGHT, f"{key} is {slot.state.value}, not in flight"
        return slot

    def _resident(self, key: ExpertKey) -> _Slot:
        slot = self._slots[self._slot_of[key]]
        assert slot.state is SlotState.RESIDENT, f"{key} is {slot.state.value}, not resident"
        return slot

    def _release(self, slot: _Slot, key: ExpertKey) -> None:
        self._free.append(self._slot_of.pop(key))
        slot.state, slot.key, slot.num_bytes, slot.is_used = SlotState.FREE, None, 0, False
