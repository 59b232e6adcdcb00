"""Time and a link that exist only as numbers, so that policy runs in milliseconds and always the same.

The link is serial: records arrive one after another at the bandwidth. Setting a copy up takes `latency_s`, and up to
`depth` copies may be set up or moving at once, so a deeper link hides latency but never adds bandwidth. What is
submitted beyond that is queued and begins, the most urgent cause first, when one of them ends; until then it can be
cancelled.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moespeq.types import Cause, Completion, Fetch

__all__ = ["LinkModel", "VirtualClock", "VirtualMover"]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """What a link can do."""

    bytes_per_s: float
    latency_s: float = 0.0
    depth: int = 2


class VirtualClock:
    """A Clock that moves only when told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Something took this long."""
        assert seconds >= 0.0, seconds
        self._now_s += seconds


class VirtualMover:
    """A Mover over a LinkModel.

    Every call first begins what the link got to since the last one, so a fetch never begins before it was submitted,
    nor ahead of one that was queued and more urgent at the time.
    """

    def __init__(self, clock: VirtualClock, link: LinkModel) -> None:
        assert min(link.bytes_per_s, link.depth) > 0, link
        self._clock = clock
        self._link = link
        self._numbers = itertools.count()
        self._queue: list[tuple[Cause, int, float, Fetch]] = []  # heap of (cause, number, submitted at, fetch)
        self._moving: deque[tuple[float, Completion]] = deque()  # (ends at, completion), not yet returned
        self._ends_s: deque[float] = deque([0.0] * link.depth, maxlen=link.depth)
        self.busy_s = 0.0

    def submit(self, fetch: Fetch) -> None:
        self._begin_due()
        heapq.heappush(self._queue, (fetch.cause, next(self._numbers), self._clock.now_s(), fetch))
        self._begin_due()

    def cancel(self, fetch: Fetch) -> bool:
        self._begin_due()
        remaining = [queued for queued in self._queue if queued[3] is not fetch]
        is_queued = len(remaining) < len(self._queue)
        if is_queued:
            heapq.heapify(remaining)
            self._queue = remaining
        return is_queued

    def wait_on_device(self, fetch: Fetch) -> bool:
        return False

    def begin_ahead(self, num_bytes: int) -> None:
        pass  # only what moves is begun

    def poll(self) -> Sequence[Completion]:
        self._begin_due()
        arrived: list[Completion] = []
        while self._moving and self._moving[0][0] <= self._clock.now_s():
            arrived.append(self._moving.popleft()[1])
        return arrived

    def wait(self) -> Sequence[Completion]:
        self._begin_due()
        if not self._moving:
            return []
        self._clock.advance(max(0.0, self._moving[0][0] - self._clock.now_s()))
        return self.poll()

    def close(self) -> None:
        while self._moving:
            self.wait()

    def _begin_due(self) -> None:
        """Begin queued fetches while the oldest of the last `depth` copies has ended by now."""
        while self._queue and self._ends_s[0] <= self._clock.now_s():
            _, _, submitted_s, fetch = heapq.heappop(self._queue)
            begin_s = max(submitted_s, self._ends_s[0])
            moving_s = fetch.num_bytes / self._link.bytes_per_s
            end_s = max(begin_s + self._link.latency_s, self._ends_s[-1]) + moving_s
            self._ends_s.append(end_s)
            self.busy_s += moving_s
            self._moving.append((end_s, Completion(fetch, end_s - submitted_s, ended_s=end_s)))
