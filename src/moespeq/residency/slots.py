"""The device slots as a state machine: which record each one holds, and who may not lose it.

    free --reserve--> submitted --complete--> resident --evict--> free
                      submitted --abandon---> free                      (it failed, or was taken back before it began)

Owns states, pins and the accounting of bytes; does not choose victims (eviction.py) and moves nothing (the Mover does).
A record is a number here and in all of residency: layer * num_experts + expert, the row of its base in the bank. Only a
Fetch carries the ExpertKey. A state is membership: what is in `resident`, in `submitted`, or neither, so that a layer's
experts are classified by set arithmetic. Experts never change, so evicting is forgetting. Every byte that arrived is
used, wasted (evicted before its first use) or still waiting in its slot; `check` proves that sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moespeq.types import Cause, ExpertKey, Fetch

__all__ = ["SlotCache"]


class SlotCache:
    """`num_slots` slots; one method a transition, asserts say when it is legal. One owner thread.

    For others to read only: `resident`, record -> slot, complete; `submitted`, record -> its fetch, queued or in
    flight, whose slot is the mover's; `free`, slots with neither, the next one last; `pinned`, resident records under a
    lease; `unused`, resident records that no pass has used yet; `record_bytes`, record -> what a fetch carries.
    """

    def __init__(self, num_slots: int, record_bytes: Sequence[int], *, num_experts: int) -> None:
        assert num_slots > 0, num_slots
        self.resident: dict[int, int] = {}
        self.submitted: dict[int, Fetch] = {}
        self.pinned: set[int] = set()
        self.unused: set[int] = set()
        self.num_slots = num_slots
        self.fetched_bytes = 0
        self.used_bytes = 0
        self.wasted_bytes = 0
        self.record_bytes = record_bytes
        self._moved_bytes: dict[int, int] = {}  # resident record -> what its fetch carried
        self.num_experts = num_experts
        self._keys = [ExpertKey(*divmod(record, num_experts)) for record in range(len(record_bytes))]
        self.free = list(range(num_slots - 1, -1, -1))

    @property
    def unused_bytes(self) -> int:
        """Bytes that arrived, were never used, and are still resident."""
        return sum(self._moved_bytes[record] for record in self.unused)

    def holds(self, record: int) -> bool:
        """Whether the record is resident or on its way: what must not be fetched again."""
        return record in self.resident or record in self.submitted

    def is_evictable(self, record: int) -> bool:
        """Whether the record is resident and nobody holds a lease on it."""
        return record in self.resident and record not in self.pinned

    def slots_of(self, records: Sequence[int]) -> list[int]:
        """Where held records are, or will be when they have arrived."""
        resident, submitted = self.resident, self.submitted
        return [resident[record] if record in resident else submitted[record].slot for record in records]

    def moved_bytes(self, record: int) -> int:
        """What the fetch of a held record carried, or carries."""
        moved = self._moved_bytes.get(record)
        return self.submitted[record].num_bytes if moved is None else moved

    def reserve(self, record: int, cause: Cause) -> Fetch:
        """Give the record a free slot; the fetch is to be submitted."""
        assert record not in self.resident, f"record {record} is already in the cache"
        assert record not in self.submitted, f"record {record} is already on its way to the cache"
        assert self.free, "no free slot: evict first"
        fetch = self.submitted[record] = Fetch(self._keys[record], self.free.pop(), self.record_bytes[record], cause)
        return fetch

    def complete(self, record: int) -> None:
        """The record arrived whole."""
        fetch = self._land(record)
        self.resident[record] = fetch.slot
        self._moved_bytes[record] = fetch.num_bytes
        self.unused.add(record)
        self.fetched_bytes += fetch.num_bytes

    def abandon(self, record: int) -> None:
        """The fetch failed or never began: nothing arrived, the slot is free."""
        self.free.append(self._land(record).slot)

    def evict(self, record: int) -> None:
        """Forget a resident record that nobody holds."""
        assert record in self.resident, f"record {record} is not resident"
        assert record not in self.pinned, f"record {record} is pinned"
        self.free.append(self.resident.pop(record))
        moved = self._moved_bytes.pop(record)
        if record in self.unused:
            self.unused.remove(record)
            self.wasted_bytes += moved

    def pin(self, records: Collection[int]) -> None:
        """Lease resident records: they are used, and stay until unpinned. A record has one lease at a time."""
        assert all(map(self.resident.__contains__, records)), "pinned, but not resident"
        assert self.pinned.isdisjoint(records), "pinned twice"
        self.pinned.update(records)
        if self.unused:
            for record in self.unused.intersection(records):
                self.unused.remove(record)
                self.used_bytes += self._moved_bytes[record]

    def unpin(self, records: Collection[int]) -> None:
        """Give their leases back."""
        assert self.pinned.issuperset(records), "unpinned, but not pinned"
        self.pinned.difference_update(records)

    def check(self) -> None:
        """Assert that states, free list and the sum of bytes agree."""
        assert self.resident.keys().isdisjoint(self.submitted), "resident and submitted"
        slots = [*self.free, *self.resident.values(), *(fetch.slot for fetch in self.submitted.values())]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert self.resident.keys() >= self.pinned, "pinned, but not resident"
        assert self.resident.keys() >= self.unused, "unused, but not resident"
        accounted_bytes = self.used_bytes + self.wasted_bytes + self.unused_bytes
        assert self.fetched_bytes == accounted_bytes, (
            f"{self.fetched_bytes} bytes came, {accounted_bytes} accounted for"
        )

    def _land(self, record: int) -> Fetch:
        assert record in self.submitted, f"record {record} is not submitted"
        return self.submitted.pop(record)
