"""Who leaves when a record comes in.

Our rule (`NextUseEviction`): first the *idle* records, those with no remaining predicted or true use in the running
pass, lowest frequency first, ties by the farther layer, then id; then, if the newcomer cannot wait, the record with the
farthest next use, and only one that is used later than the newcomer. Pinned and in-flight records never leave. Never
LRU: a verify visits layer after layer, a cyclic scan, and LRU throws out exactly what the scan reaches next. For the
same reason a use counts only when its pass ends: inside the pass it would rank what is behind the front above what is
still ahead of it. So scores are constant within a pass: candidates are ranked once, when a pass first needs a victim,
and later only what became idle since then is added.

`LruEviction` is the published policy of on-demand offloading, kept as the baseline it is.

A policy learns by two calls: `touch` when a pass truly uses records, `offer` when records may have become idle: they
arrived unasked, were given back or lost their predicted use. It asks the cache and the lookahead again when it picks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache

__all__ = ["EvictionPolicy", "LruEviction", "NextUseEviction"]


class EvictionPolicy(Protocol):
    """Chooses victims; changes neither the cache nor the lookahead."""

    def touch(self, records: Iterable[int]) -> None:
        """The running pass truly uses these records; once per pass, before they are pinned."""
        ...

    def end_pass(self, committed_tok: int) -> None:
        """The pass is over and gave this many tokens; nothing is pinned or predicted any more."""
        ...

    def offer(self, records: Iterable[int]) -> None:
        """These records may be idle now. Repeated and mistaken offers are harmless."""
        ...

    def idle_victim(self) -> int | None:
        """The record to give up for any newcomer; None if every record has a use ahead."""
        ...

    def last_victim(self, incoming: int) -> int | None:
        """The record to give up for one needed now when none is idle; None if all others are pinned, in flight or
        sooner.
        """
        ...


class NextUseEviction:
    """Idle records by lowest frequency, then the farthest next use."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead, frequency: UseFrequency) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._ranked: list[tuple[float, int, int]] = []  # heap of (score, -layer, record): the smallest leaves first
        self._offered: set[int] = set()
        self._used: list[int] = []

    def touch(self, records: Iterable[int]) -> None:
        self._used.extend(records)

    def end_pass(self, committed_tok: int) -> None:
        self._frequency.touch(self._used)
        self._used.clear()
        self._frequency.advance(committed_tok)
        self._ranked.clear()  # every score in it may be old
        self._offered = set(self._cache.resident)

    def offer(self, records: Iterable[int]) -> None:
        self._offered.update(records)

    def idle_victim(self) -> int | None:
        if self._offered:
            self._rank_offered()
        while self._ranked:
            record = self._ranked[0][2]
            if self._is_idle(record):
                return record
            heapq.heappop(self._ranked)  # it is offered again when it becomes idle
        return None

    def last_victim(self, incoming: int) -> int | None:
        resident = self._cache.resident.keys()
        soonest = incoming // self._lookahead.num_experts + 1
        for layer in range(self._lookahead.num_layers - 1, soonest - 1, -1):
            predicted = resident & self._lookahead.expected_uses(layer).keys()
            farthest = min(filter(self._cache.is_evictable, predicted), default=None)
            if farthest is not None:
                return farthest
        return None

    def _rank_offered(self) -> None:
        score, num_experts = self._frequency.score, self._lookahead.num_experts
        ranks = [(score[record], -(record // num_experts), record) for record in self._offered if self._is_idle(record)]
        self._offered.clear()
        if len(ranks) > len(self._ranked):
            self._ranked += ranks
            heapq.heapify(self._ranked)
            return
        for rank in ranks:
            heapq.heappush(self._ranked, rank)

    def _is_idle(self, record: int) -> bool:
        return self._cache.is_evictable(record) and not self._lookahead.has_use(record)


class LruEviction:
    """The least recently used record; one that nobody used yet counts from its arrival."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, records: Iterable[int]) -> None:
        for record in records:
            self._order[record] = None
            self._order.move_to_end(record)

    def end_pass(self, committed_tok: int) -> None:
        """Recency knows no passes."""

    def offer(self, records: Iterable[int]) -> None:
        for record in records:
            self._order.setdefault(record)

    def idle_victim(self) -> int | None:
        """Two predicted records must not push each other out for ever, so here the lookahead counts."""
        return next((record for record in self._oldest_first() if not self._lookahead.has_use(record)), None)

    def last_victim(self, incoming: int) -> int | None:
        return next(self._oldest_first(), None)

    def _oldest_first(self) -> Iterator[int]:
        while self._order and not self._cache.holds(oldest := next(iter(self._order))):
            del self._order[oldest]
        return filter(self._cache.is_evictable, self._order)
