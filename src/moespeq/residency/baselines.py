"""The policies of others, beside which ours is measured: LRU's kin. For replays and ablations, not for speed.

*LFU* gives up what was truly used least often, and never forgets. The *count-based chunk plan* is what was released
with the paper: a draft is a chunk; it counts how often each expert was named and fetches the most counted first, with
no deadlines or order of layers, and gives up what is counted least. It is taken in its best form here: counts are used
from the first step on, and what its layer has passed is not fetched any more.

Ties are broken by recency. A guess never pushes out a record that is still expected: two of them could do that to each
other for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from moespeq.residency.eviction import EvictionPolicy, LruEviction
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.passes import Eviction
from moespeq.residency.scheduler import Scheduler
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

__all__ = ["ChunkScheduler", "LeastCountedEviction", "LfuEviction", "baseline_eviction"]


def baseline_eviction(eviction: Eviction, cache: SlotCache, lookahead: ExpertLookahead) -> EvictionPolicy:
    """The policy of that name; ours, which needs frequencies, is not among them."""
    kinds = {Eviction.LRU: LruEviction, Eviction.LFU: LfuEviction, Eviction.CHUNK: LeastCountedEviction}
    return kinds[eviction](cache, lookahead)


class LfuEviction(LruEviction):
    """The record with the fewest true uses since the start, whether it was resident then or not."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead) -> None:
        super().__init__(cache, lookahead)
        self._num_uses: Counter[int] = Counter()

    def touch(self, records: Sequence[int], uses: Mapping[int, int]) -> None:
        super().touch(records, uses)
        self._num_uses.update(records)

    def idle_victim(self) -> int | None:
        idle = (record for record in self._oldest_first() if not self._lookahead.has_use(record))
        return min(idle, key=self._num_uses.__getitem__, default=None)

    def last_victim(self, incoming: int) -> int | None:
        return min(self._oldest_first(), key=self._num_uses.__getitem__, default=None)


class LeastCountedEviction(LruEviction):
    """The record that the running draft named least often: first those it did not name, which is LRU's idle victim."""

    def last_victim(self, incoming: int) -> int | None:
        return min(self._oldest_first(), key=self._count, default=None)

    def _count(self, record: int) -> int:
        layer = record // self._lookahead.num_experts
        return self._lookahead.expected_uses(layer).get(record, 0)


class ChunkScheduler(Scheduler):
    """The most counted first for as long as the pass lasts; a prefill, which counts nothing, as ever."""

    @property
    def cause(self) -> Cause:
        cause = super().cause
        return Cause.PREFETCH if cause is Cause.PRIME else cause

    def next(self) -> int | None:
        if not self._is_draft:
            return super().next()
        if self._num_planned < self._lookahead.num_named:
            self._num_planned = self._lookahead.num_named
            self._staged = self._by_count()
        while self._staged:
            record = self._staged.pop()
            if self._lookahead.has_use(record) and not self._cache.holds(record):
                return record
        return None

    def _by_count(self) -> list[int]:
        """All that is named and missing, the most uses per byte last."""
        value = {
            record: uses / self._cache.record_bytes[record]
            for layer in range(self._lookahead.front, self._lookahead.num_layers)
            for record, uses in self._lookahead.expected_uses(layer).items()
            if not self._cache.holds(record)
        }
        return sorted(value, key=lambda record: (value[record], -record))
