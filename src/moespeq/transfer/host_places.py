"""Where records lie in the host arena: one place for each, or places that the often read share.

Owns the tables, not the bytes, and has no lock of its own: `HostRecords` calls it under its lock. Places of records
from 64 KiB on start on pages, so that a direct disk read lands in them.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Protocol

from moespeq.transfer.arena import slot_stride_bytes
from moespeq.transfer.read_counts import ReadCounts
from moespeq.types import ExpertKey

__all__ = ["FixedPlaces", "HostPlaces", "SharedPlaces", "choose_places", "host_arena_bytes"]

_PIECE_BYTES = 128 << 20  # about 20 ms of registration, during which the driver answers nobody else
_SPARE_PER_READER = 2  # one is read into while the other waits for the link


class HostPlaces(Protocol):
    """A record is absent, being read, or there. `find` and a kept reading lease it; `give_back` ends a lease."""

    piece_bytes: Sequence[int]  # of the arena; no place crosses a border
    held_bytes: int  # records that stay until something evicts them

    def __contains__(self, key: object) -> bool: ...

    def find(self, key: ExpertKey) -> int | None:
        """Offset of a record that is there."""
        ...

    def claim(self, key: ExpertKey) -> int | None:
        """Offset to read an absent record into; None while no place is spare."""
        ...

    def keep(self, key: ExpertKey) -> None:
        """The reading of a claimed record succeeded; it is leased."""
        ...

    def abandon(self, key: ExpertKey) -> None:
        """The reading of a claimed record failed."""
        ...

    def give_back(self, key: ExpertKey) -> None: ...


class FixedPlaces(HostPlaces):
    """Every record has its own place, in the order given, in pieces of about `piece_bytes`."""

    def __init__(self, num_bytes: Mapping[ExpertKey, int], *, piece_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._offsets: dict[ExpertKey, int] = {}
        self._there: set[ExpertKey] = set()
        self.held_bytes = 0
        ends, end = [0], 0
        for key, size in num_bytes.items():
            stride = slot_stride_bytes(size)
            if end + stride > ends[-1] + piece_bytes and end > ends[-1]:
                end = whole_pages(end)
                ends.append(end)
            self._offsets[key] = end
            end += stride
        ends.append(whole_pages(end))
        self.piece_bytes = [after - before for before, after in itertools.pairwise(ends)]

    def __contains__(self, key: object) -> bool:
        return key in self._there

    def find(self, key: ExpertKey) -> int | None:
        return self._offsets[key] if key in self._there else None

    def claim(self, key: ExpertKey) -> int | None:
        return self._offsets[key]

    def keep(self, key: ExpertKey) -> None:
        self._there.add(key)
        self.held_bytes += self._num_bytes[key]

    def abandon(self, key: ExpertKey) -> None:
        """Its place stays its own."""

    def give_back(self, key: ExpertKey) -> None:
        """It stays where it is."""


class SharedPlaces(HostPlaces):
    """`num_places` of `stride_bytes`; `num_spare` of them only ever hold a record on its way to the device.

    A record that is read stays while there is room, later only in place of one read less often.
    """

    def __init__(
        self, num_bytes: Mapping[ExpertKey, int], *, num_places: int, num_spare: int, piece_bytes: int
    ) -> None:
        assert num_places > 0, num_places
        self._num_bytes = num_bytes
        stride = whole_pages(max(num_bytes.values()))
        self._most_held = max(0, num_places - num_spare)
        self._counts = ReadCounts()
        self._spare = [index * stride for index in reversed(range(num_places))]
        self._offsets: dict[ExpertKey, int] = {}
        self._claimed: dict[ExpertKey, int] = {}
        self._leases: dict[ExpertKey, int] = {}
        self._held: set[ExpertKey] = set()
        self.held_bytes = 0
        in_piece = max(1, piece_bytes // stride)
        full, rest = divmod(num_places, in_piece)
        self.piece_bytes = [in_piece * stride] * full + ([rest * stride] if rest else [])

    def __contains__(self, key: object) -> bool:
        return key in self._offsets

    def find(self, key: ExpertKey) -> int | None:
        self._counts.count(key)
        offset = self._offsets.get(key)
        if offset is not None:
            self._leases[key] = self._leases.get(key, 0) + 1
        return offset

    def claim(self, key: ExpertKey) -> int | None:
        if not self._spare:
            return None
        self._claimed[key] = self._spare.pop()
        return self._claimed[key]

    def keep(self, key: ExpertKey) -> None:
        self._offsets[key] = self._claimed.pop(key)
        self._leases[key] = 1
        if self._has_room(key):
            self._held.add(key)
            self.held_bytes += self._num_bytes[key]
            self._counts.hold(key)

    def abandon(self, key: ExpertKey) -> None:
        self._spare.append(self._claimed.pop(key))

    def give_back(self, key: ExpertKey) -> None:
        self._leases[key] -= 1
        if self._leases[key] == 0:
            del self._leases[key]
            if key not in self._held:
                self._spare.append(self._offsets.pop(key))

    def _has_room(self, key: ExpertKey) -> bool:
        missing = len(self._held) + 1 - self._most_held
        victims = self._counts.give_up_for(
            key, lambda victims: len(victims) >= missing, can_go=lambda victim: victim not in self._leases
        )
        if victims is None:
            return False
        for victim in victims:
            self._held.remove(victim)
            self.held_bytes -= self._num_bytes[victim]
            self._spare.append(self._offsets.pop(victim))
        return True


def host_arena_bytes(num_bytes: Mapping[ExpertKey, int]) -> int:
    """The budget from which on every one of these records has its own place."""
    return sum(FixedPlaces(num_bytes, piece_bytes=_PIECE_BYTES).piece_bytes)


def choose_places(num_bytes: Mapping[ExpertKey, int], budget_bytes: int, num_readers: int) -> HostPlaces:
    """A place for each record where the budget holds them all, else as many shared ones as it holds, at least one."""
    fixed = FixedPlaces(num_bytes, piece_bytes=_PIECE_BYTES)
    if sum(fixed.piece_bytes) <= budget_bytes:
        return fixed
    num_places = max(1, budget_bytes // whole_pages(max(num_bytes.values())))
    num_spare = min(_SPARE_PER_READER * num_readers, -(-num_places // 2))
    return SharedPlaces(num_bytes, num_places=num_places, num_spare=num_spare, piece_bytes=_PIECE_BYTES)


def whole_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
