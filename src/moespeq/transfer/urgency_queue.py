"""Work that waits for a thread, the most urgent first, equals in the order they came.

The queue behind every stage of a record's way: reads from the disk, copies over the link. A token for each entry lies
in a second, plain queue, on which threads sleep outside the interpreter; an entry that was taken back or moved forward
leaves a stale one behind, which is skipped.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["UrgencyQueue"]

T = TypeVar("T", bound=Hashable)


class UrgencyQueue(Generic[T]):
    """Distinct items with an urgency each; smaller is sooner. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._heap: list[tuple[int, int, T]] = []
        self._waiting: dict[T, tuple[int, int]] = {}
        self._num_put = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, urgency: int) -> None:
        """Add `item`; where it waits already, the more urgent of both places is its own."""
        with self._lock:
            self._num_put += 1
            place = (urgency, self._num_put)
            if item in self._waiting and self._waiting[item] < place:
                return
            self._waiting[item] = place
            heapq.heappush(self._heap, (*place, item))
        self._tokens.put(None)

    def take(self) -> T | None:
        """Remove the most urgent item, waiting for one; None when the queue is closed and empty."""
        while True:
            self._tokens.get()
            if (item := self._pop()) is not None:
                return item
            if self._is_closed:
                self._tokens.put(None)  # for the next thread
                return None

    def take_now(self) -> T | None:
        """The same without waiting; None when the queue is empty."""
        while True:
            try:
                self._tokens.get_nowait()
            except queue.Empty:
                return None
            if (item := self._pop()) is not None:
                return item

    def cancel(self, item: T) -> bool:
        """Take `item` back; False when no thread would find it any more."""
        with self._lock:
            return self._waiting.pop(item, None) is not None

    def clear(self) -> list[T]:
        """Take everything back; returns it in no order."""
        with self._lock:
            items = list(self._waiting)
            self._waiting.clear()
            return items

    def close(self) -> None:
        """No more `put`: threads get what is left, then None."""
        self._is_closed = True
        self._tokens.put(None)

    def _pop(self) -> T | None:
        with self._lock:
            while self._heap:
                urgency, number, item = heapq.heappop(self._heap)
                if self._waiting.get(item) == (urgency, number):
                    del self._waiting[item]
                    return item
        return None
