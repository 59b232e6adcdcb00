"""The records in host memory, on their way from the disk to the device.

Where all of them fit, each has its place and threads fill the places in layer order; a record that is asked for before
it is there is read next, so that the first token does not wait for the last record, and no record is read twice. Where
they do not fit, the places are a cache of the often read. The link copies straight out of the places in both cases.

Ordering. `request` answers through a callback, at once in the caller's thread when the record is there, else from the
thread that read it. From then on the record is leased: its bytes stay until `give_back`. All tables are under one lock;
disk reads, pinning and callbacks run outside it. A fill that fails leaves the record absent: the next request reads it
again and reports what happens then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moespeq.errors import StorageError
from moespeq.ports import RecordSource
from moespeq.transfer.completions import read_failure
from moespeq.transfer.host_places import FixedPlaces, choose_places
from moespeq.transfer.pinned_arena import PinnedArena
from moespeq.transfer.pinning import HostPinning
from moespeq.transfer.urgency_queue import UrgencyQueue
from moespeq.transfer.verification import check_records, spread
from moespeq.types import Cause, ExpertKey, HostFill

__all__ = ["HostCounters", "HostRecords", "Outcome"]

Outcome = Tensor | Exception  # the record, uint8 [n], leased; or why it is not there
_FILL = max(Cause) + 1  # less urgent than anything asked for


@dataclass(frozen=True, slots=True)
class HostCounters:
    """Totals since the start, and sizes now."""

    hits: int
    disk_reads: int
    disk_bytes: int
    held_bytes: int
    arena_bytes: int
    pinned_bytes: int


class HostRecords:
    """`keys`' records of `source` in at most `budget_bytes` of host memory, or one record's if that is more.

    keys: in layer order, the order of filling. warn takes one sentence when pinning is refused. Safe between threads.
    Raises BudgetError when the system refuses the memory.
    """

    def __init__(
        self,
        source: RecordSource,
        keys: Sequence[ExpertKey],
        *,
        budget_bytes: int,
        pinning: HostPinning,
        warn: Callable[[str], None],
        num_threads: int = 8,
        numa_node: int | None = None,
    ) -> None:
        self._source, self._keys, self._pinning = source, list(keys), pinning
        self._num_bytes = {key: source.num_bytes(key) for key in keys}
        self._places = choose_places(self._num_bytes, budget_bytes, num_threads)
        self.holds_all = isinstance(self._places, FixedPlaces)
        self._arena = PinnedArena(self._places.piece_bytes, pinning, numa_node=numa_node)
        self._memory, self._bytes = self._arena.memory(), self._arena.tensor()
        self._changed = threading.Condition()
        self._reads: UrgencyQueue[ExpertKey] = UrgencyQueue()
        self._reading: set[ExpertKey] = set()
        self._waiting: dict[ExpertKey, Callable[[Outcome], None]] = {}
        self._failures: dict[ExpertKey, Exception] = {}
        self._views: dict[ExpertKey, Tensor] = {}  # a slice takes torch longer than all else that a request does
        self._hits = self._disk_reads = self._disk_bytes = 0
        self._is_filling = self._is_closed = False
        self._threads = [
            threading.Thread(target=self._read, name=f"moespeq-reader-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._threads.append(threading.Thread(target=self._arena.pin, args=(warn,), name="moespeq-pinner", daemon=True))
        for thread in self._threads:
            thread.start()

    def num_bytes(self, key: ExpertKey) -> int:
        return self._num_bytes[key]

    def counters(self) -> HostCounters:
        """A consistent snapshot."""
        with self._changed:
            held_bytes, arena = self._places.held_bytes, self._arena
            return HostCounters(
                self._hits, self._disk_reads, self._disk_bytes, held_bytes, arena.num_bytes, arena.pinned_bytes
            )

    def start_filling(self) -> None:
        """Read every record in the background, where all fit; nothing otherwise."""
        if not self.holds_all:
            return
        with self._changed:
            self._is_filling = True
            for key in self._keys:
                if key not in self._places:
                    self._reads.put(key, _FILL)

    @property
    def fill(self) -> HostFill:
        """How much of the records is there, where all of them will be."""
        if not self.holds_all:
            return HostFill()
        return HostFill(self._places.held_bytes, sum(self._num_bytes.values()))

    def wait_full(self) -> None:
        """Block until the fill ended. Raises what its first failure was, StorageError or StoreError."""
        assert self._is_filling, "start_filling comes first, and only where all records fit"
        with self._changed:
            while not self._is_closed and any(
                key not in self._places and key not in self._failures for key in self._keys
            ):
                self._changed.wait()
            failure = next((self._failures[key] for key in self._keys if key in self._failures), None)
        if failure is not None:
            raise failure

    def request(self, key: ExpertKey, urgency: int, on_ready: Callable[[Outcome], None]) -> None:
        """Ask for a record; at most one request for a record at a time. `on_ready` is called once, from any thread."""
        record = self._views.get(key)
        if record is not None:  # it keeps its place for good
            self._hits += 1
            on_ready(record)
            return
        with self._changed:
            offset = self._places.find(key)
            if offset is None:
                assert key not in self._waiting, f"{key} is asked for twice"
                self._waiting[key] = on_ready
                if key not in self._reading:
                    self._reads.put(key, urgency)
                return
            self._hits += 1
        on_ready(self._record(key, offset))

    def withdraw(self, key: ExpertKey) -> bool:
        """Take a request back; False when its reading has begun or it was answered."""
        with self._changed:
            if key not in self._waiting or not self._reads.cancel(key):
                return False
            del self._waiting[key]
            if self._is_filling:
                self._reads.put(key, _FILL)
            return True

    def borrow(self, key: ExpertKey, urgency: int = Cause.DEMAND) -> Tensor:
        """The record, uint8 [n], read if it must be; valid until `give_back`. Raises what the source raises."""
        answer: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.request(key, urgency, answer.put)
        outcome = answer.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def give_back(self, key: ExpertKey) -> None:
        """End one lease."""
        if self.holds_all:
            return  # every record keeps its place
        with self._changed:
            self._places.give_back(key)
            self._changed.notify_all()

    def is_pinned(self, record: Tensor) -> bool:
        """Whether the copy engine can read a leased record by itself."""
        return self._arena.is_pinned(int(record.storage_offset()) + record.numel())

    def verify_sample(self, num_records: int, crc32_of: Callable[[ExpertKey], int]) -> int:
        """Check records that are there against the store's checksums; returns how many. Raises StorageError."""
        with self._changed:
            there = [key for key in self._keys if key in self._places]
        num_checked = 0
        for key in spread(there, num_records):
            record = self.borrow(key)
            try:
                num_checked += check_records([(key, record)], crc32_of, "host memory")
            finally:
                self.give_back(key)
        return num_checked

    def pinned_buffer(self) -> Tensor:
        """A buffer for one record, pinned if the driver pins anything."""
        return self._pinning.buffer(max(self._num_bytes.values()))

    def close(self) -> None:
        """Let running reads end, then unpin. After the mover's close; requests still waiting get no answer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._reads.clear()
        self._reads.close()
        self._views.clear()
        self._arena.stop_pinning()
        for thread in self._threads:
            thread.join()
        self._arena.close()

    def _record(self, key: ExpertKey, offset: int) -> Tensor:
        record = self._views.get(key)
        if record is None:
            record = self._bytes[offset : offset + self._num_bytes[key]]
            if self.holds_all:
                self._views[key] = record
        return record

    def _read(self) -> None:
        while (key := self._reads.take()) is not None:
            offset = self._claim(key)
            if offset is None:
                continue
            error = self._read_into(key, offset)
            with self._changed:
                on_ready = self._end_reading(key, error)
            if on_ready is not None:
                on_ready(self._record(key, offset) if error is None else error)

    def _claim(self, key: ExpertKey) -> int | None:
        """A place to read into; None when another thread has read or reads the record, or at the end."""
        with self._changed:
            if key in self._reading or key in self._places:
                return None
            self._reading.add(key)
            while (offset := self._places.claim(key)) is None and not self._is_closed:
                self._changed.wait()
            return offset

    def _read_into(self, key: ExpertKey, offset: int) -> Exception | None:
        try:
            self._source.read_into(key, self._memory[offset : offset + self._num_bytes[key]])
        except OSError as error:
            return StorageError(read_failure(key, error))
        except Exception as error:  # the source's sentence, or our bug: raised where the record is wanted
            return error
        return None

    def _end_reading(self, key: ExpertKey, error: Exception | None) -> Callable[[Outcome], None] | None:
        self._reading.remove(key)
        on_ready = self._waiting.pop(key, None)
        if error is None:
            self._disk_reads += 1
            self._disk_bytes += self._num_bytes[key]
            self._failures.pop(key, None)
            self._places.keep(key)
            if on_ready is None:
                self._places.give_back(key)
        else:
            self._failures[key] = error
            self._places.abandon(key)
        self._changed.notify_all()
        return on_ready
