"""A RecordSource slowed down to a chosen bandwidth: how a machine without a slow link measures what one would
cost.

All threads share one imaginary link: each read reserves the next free interval on it and returns when that
interval ends, or when the real read does, whichever is later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moespeq.ports import Clock, RecordSource
from moespeq.types import ExpertKey

__all__ = ["PacedSource"]


class PacedSource:
    """`source` at no more than `bytes_per_s` over all threads together; None is as fast as it goes."""

    def __init__(
        self,
        source: RecordSource,
        *,
        bytes_per_s: float | None,
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source = source
        self.pace(bytes_per_s)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = clock.now_s()

    def pace(self, bytes_per_s: float | None) -> None:
        """Go on at this bandwidth, from the next read on."""
        assert bytes_per_s is None or bytes_per_s > 0, bytes_per_s
        self._bytes_per_s = bytes_per_s

    def num_bytes(self, key: ExpertKey) -> int:
        return self._source.num_bytes(key)

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        bytes_per_s = self._bytes_per_s
        if bytes_per_s is None:
            self._source.read_into(key, buffer, skip_bytes=skip_bytes)
            return
        end_s = self._reserve((self._source.num_bytes(key) - skip_bytes) / bytes_per_s)
        self._source.read_into(key, buffer, skip_bytes=skip_bytes)
        remaining_s = end_s - self._clock.now_s()
        if remaining_s > 0:
            self._sleep(remaining_s)

    def _reserve(self, seconds: float) -> float:
        """Take the next interval of the link; returns its end."""
        with self._lock:
            begin_s = max(self._free_at_s, self._clock.now_s())
            self._free_at_s = begin_s + seconds
            return self._free_at_s
