"""Who leaves when a record comes in.

Our rule (`NextUseEviction`): first the *idle* records, those with no remaining predicted or true use in the
running pass, lowest frequency first; then, if the newcomer cannot wait, the record with the farthest next
use, and only one that is used later than the newcomer; ties by the farther layer, then id. Pinned and
in-flight records never leave. Never LRU: a verify visits layer after layer, a cyclic scan, and LRU throws out
exactly what the scan reaches next. For the same reason a use counts only when its pass ends: inside the pass
it would rank what is behind the front above what is still ahead of it.

`LruEviction` is the published policy of on-demand offloading, kept as the baseline it is.

A policy learns by two calls: `touch` when a pass truly uses a record, `offer` when a record arrives unasked
and whenever a resident one becomes unpinned and without a use ahead. It keeps them as candidates and asks the
cache and the lookahead again when it picks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache
from moespeq.types import ExpertKey

__all__ = ["EvictionPolicy", "LruEviction", "NextUseEviction"]


class EvictionPolicy(Protocol):
    """Chooses victims; changes neither the cache nor the lookahead."""

    def touch(self, key: ExpertKey) -> None:
        """The running pass truly uses this record; once per pass, before it is pinned."""
        ...

    def end_pass(self, committed_tok: int) -> None:
        """The pass is over and gave this many tokens."""
        ...

    def offer(self, key: ExpertKey) -> None:
        """A resident record may be idle now. Repeated offers are harmless."""
        ...

    def idle_victim(self) -> ExpertKey | None:
        """The record to give up for a guess; None if every record has a use ahead."""
        ...

    def victim_for(self, incoming: ExpertKey) -> ExpertKey | None:
        """The record to give up for one needed now; None if all others are pinned, in flight or sooner."""
        ...


_Candidate = tuple[float, int, ExpertKey]
"""Score, minus the layer, record: the smallest leaves first."""


class NextUseEviction:
    """Idle records by lowest frequency, then the farthest next use."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead, frequency: UseFrequency) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._heap: list[_Candidate] = []
        self._offered: dict[ExpertKey, float] = {}
        self._used: list[ExpertKey] = []

    def touch(self, key: ExpertKey) -> None:
        self._used.append(key)

    def end_pass(self, committed_tok: int) -> None:
        for key in self._used:
            self._frequency.touch(key)
            self.offer(key)
        self._used.clear()
        self._frequency.advance(committed_tok)

    def offer(self, key: ExpertKey) -> None:
        score = self._frequency.score(key)
        if self._offered.get(key) == score:
            return
        self._offered[key] = score
        heapq.heappush(self._heap, (score, -key.layer, key))
        if len(self._heap) > 4 * self._cache.num_slots:
            self._compact()

    def idle_victim(self) -> ExpertKey | None:
        while self._heap:
            score, _, key = self._heap[0]
            if self._offered.get(key) == score and self._is_idle(key):
                return key
            heapq.heappop(self._heap)
            if self._offered.get(key) == score:
                del self._offered[key]
        return None

    def victim_for(self, incoming: ExpertKey) -> ExpertKey | None:
        idle = self.idle_victim()
        if idle is not None:
            return idle
        for layer in range(self._lookahead.num_layers - 1, incoming.layer, -1):
            predicted = self._lookahead.expected_uses(layer)
            farthest = min(filter(self._cache.is_evictable, predicted), default=None)
            if farthest is not None:
                return farthest
        return None

    def _is_idle(self, key: ExpertKey) -> bool:
        return self._cache.is_evictable(key) and not self._lookahead.has_use(key)

    def _compact(self) -> None:
        """Every use leaves an entry with an old score behind; with nothing evicted nobody would pop them."""
        self._offered = {key: score for key, score in self._offered.items() if self._is_idle(key)}
        self._heap = [(score, -key.layer, key) for key, score in self._offered.items()]
        heapq.heapify(self._heap)


class LruEviction:
    """The least recently used record; one that nobody used yet counts from its arrival."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def touch(self, key: ExpertKey) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def end_pass(self, committed_tok: int) -> None:
        """Recency knows no passes."""

    def offer(self, key: ExpertKey) -> None:
        self._order.setdefault(key)

    def idle_victim(self) -> ExpertKey | None:
        """Two predicted records must not push each other out for ever, so here the lookahead counts."""
        return next((key for key in self._oldest_first() if not self._lookahead.has_use(key)), None)

    def victim_for(self, incoming: ExpertKey) -> ExpertKey | None:
        return next(self._oldest_first(), None)

    def _oldest_first(self) -> Iterator[ExpertKey]:
        for key in list(itertools.takewhile(lambda key: key not in self._cache.slot_of, self._order)):
            del self._order[key]
        return filter(self._cache.is_evictable, self._order)
