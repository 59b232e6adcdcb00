"""Time and a link that exist only as numbers, so that policy runs in milliseconds and always the same.

The link is serial: records arrive one after another at the bandwidth. Setting a copy up takes `latency_s`,
and up to `depth` copies may be set up or moving at once, so a deeper queue hides latency but never adds
bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moespeq.types import Completion, Fetch

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
    """A Mover over a LinkModel: copies end at computed times, in the order of submission."""

    def __init__(self, clock: VirtualClock, link: LinkModel) -> None:
        assert min(link.bytes_per_s, link.depth) > 0, link
        self._clock = clock
        self._link = link
        self._pending: deque[tuple[float, Completion]] = deque()
        self._ends_s: deque[float] = deque([0.0] * link.depth, maxlen=link.depth)
        self.busy_s = 0.0

    def submit(self, fetch: Fetch) -> None:
        submit_s = self._clock.now_s()
        start_s = max(submit_s, self._ends_s[0])
        moving_s = fetch.num_bytes / self._link.bytes_per_s
        end_s = max(start_s + self._link.latency_s, self._ends_s[-1]) + moving_s
        self._ends_s.append(end_s)
        self.busy_s += moving_s
        self._pending.append((end_s, Completion(fetch, end_s - submit_s)))

    def poll(self) -> Sequence[Completion]:
        arrived: list[Completion] = []
        while self._pending and self._pending[0][0] <= self._clock.now_s():
            arrived.append(self._pending.popleft()[1])
        return arrived

    def wait(self) -> Sequence[Completion]:
        if not self._pending:
            return []
        self._clock.advance(max(0.0, self._pending[0][0] - self._clock.now_s()))
        return self.poll()

    def close(self) -> None:
        while self._pending:
            self.wait()
