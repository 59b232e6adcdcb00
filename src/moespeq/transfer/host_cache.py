"""Host memory as a cache in front of the disk: a RecordSource before another one.

Owns copies of records up to an exact byte budget. A record gets in while there is room, and later only in
place of records read less often (`ReadCounts`).

Thread safety. One lock guards the tables; disk reads and copies run outside it. A stored record is immutable,
so a reader that found one may copy it after another thread evicted it. While a record is being read, others
who ask for it wait, and find it held afterwards or read it themselves: no record is read twice at the same
time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from moespeq.ports import RecordSource
from moespeq.transfer.read_counts import ReadCounts
from moespeq.types import ExpertKey

__all__ = ["HostCache", "HostCacheCounters"]


@dataclass(frozen=True, slots=True)
class HostCacheCounters:
    """Totals since the start, and the bytes held now."""

    hits: int
    disk_reads: int
    disk_bytes: int
    held_bytes: int


class HostCache:
    """`source`, with up to `budget_bytes` of its records kept in host memory; a budget of 0 passes everything
    through.
    """

    def __init__(self, source: RecordSource, *, budget_bytes: int) -> None:
        assert budget_bytes >= 0, budget_bytes
        self._source = source
        self._budget_bytes = budget_bytes
        self._load_ended = threading.Condition()
        self._loading: set[ExpertKey] = set()
        self._held: dict[ExpertKey, bytes] = {}
        self._held_bytes = 0
        self._counts = ReadCounts()
        self._hits = self._disk_reads = self._disk_bytes = 0

    def num_bytes(self, key: ExpertKey) -> int:
        return self._source.num_bytes(key)

    def counters(self) -> HostCacheCounters:
        """A consistent snapshot."""
        with self._load_ended:
            return HostCacheCounters(self._hits, self._disk_reads, self._disk_bytes, self._held_bytes)

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        """Fill `buffer` from host memory, or from the source; raises what the source raises.

        Whole records are kept, so one of which only a part is wanted is read whole.
        """
        data: bytes | memoryview | None = self._find_or_claim(key)
        if data is None:
            data = self._read(key, buffer if skip_bytes == 0 else memoryview(bytearray(self.num_bytes(key))))
        if data is not buffer:
            wanted = memoryview(data)[skip_bytes:]
            buffer[: len(wanted)] = wanted

    def _read(self, key: ExpertKey, buffer: memoryview) -> memoryview:
        """Fill `buffer` from the source, and hold a copy if it earns its place."""
        try:
            self._source.read_into(key, buffer)
            self._keep(key, buffer)
            return buffer
        finally:
            with self._load_ended:
                self._loading.remove(key)
                self._load_ended.notify_all()

    def _find_or_claim(self, key: ExpertKey) -> bytes | None:
        """The held record; or None, and this thread is the one that reads it."""
        with self._load_ended:
            while key in self._loading:
                self._load_ended.wait()
            self._counts.count(key)
            data = self._held.get(key)
            if data is None:
                self._loading.add(key)
            else:
                self._hits += 1
            return data

    def _keep(self, key: ExpertKey, buffer: memoryview) -> None:
        """Hold a copy of the record just read, if it earns its place."""
        num_bytes = self._source.num_bytes(key)
        with self._load_ended:
            self._disk_reads += 1
            self._disk_bytes += num_bytes
            if not self._make_room(key, num_bytes):
                return
            self._held_bytes += num_bytes
        data = bytes(buffer[:num_bytes])
        with self._load_ended:
            self._held[key] = data
            self._counts.hold(key)

    def _make_room(self, key: ExpertKey, num_bytes: int) -> bool:
        """Evict records read less often than `key` until it fits; evicts nothing when that is not enough."""
        missing_bytes = self._held_bytes + num_bytes - self._budget_bytes

        def is_enough(victims: list[ExpertKey]) -> bool:
            return sum(len(self._held[victim]) for victim in victims) >= missing_bytes

        victims = self._counts.give_up_for(key, is_enough, can_go=lambda _: True)
        if victims is None:
            return False
        for victim in victims:
            self._held_bytes -= len(self._held.pop(victim))
        return True
