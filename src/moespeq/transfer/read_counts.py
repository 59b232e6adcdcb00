"""How often records are read, and which held one is read least: who may take whose place in host memory.

By frequency, never by recency, because a pass scans the layers in a cycle and the least recent record is the next one
needed. Counts are halved now and then so that yesterday's favourites can lose their place. No lock of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from moespeq.types import ExpertKey

__all__ = ["ReadCounts"]

_READS_PER_RECORD_BEFORE_AGING = 16


class ReadCounts:
    """Reads of every record, and the held ones in order of theirs."""

    def __init__(self) -> None:
        self._num_reads: dict[ExpertKey, int] = {}
        self._reads_since_aging = 0
        self._coldest: list[tuple[int, ExpertKey]] = []

    def count(self, key: ExpertKey) -> None:
        """`key` was asked for."""
        self._num_reads[key] = self._num_reads.get(key, 0) + 1
        self._reads_since_aging += 1
        if self._reads_since_aging >= _READS_PER_RECORD_BEFORE_AGING * len(self._num_reads):
            self._reads_since_aging = 0
            self._num_reads = {each: num_reads // 2 for each, num_reads in self._num_reads.items()}
            self._coldest = [(self._num_reads[each], each) for _, each in self._coldest]
            heapq.heapify(self._coldest)

    def hold(self, key: ExpertKey) -> None:
        """`key` is held from now on."""
        heapq.heappush(self._coldest, (self._num_reads[key], key))

    def give_up_for(
        self, key: ExpertKey, is_enough: Callable[[list[ExpertKey]], bool], *, can_go: Callable[[ExpertKey], bool]
    ) -> list[ExpertKey] | None:
        """Held records, coldest first, that make room for `key`; None when those read less often are not enough.

        `is_enough` judges the victims so far; records that `can_go` refuses stay. Victims count as held no longer.
        """
        victims: list[ExpertKey] = []
        kept: list[ExpertKey] = []
        while not is_enough(victims) and (coldest := self._pop_coldest()) is not None:
            num_reads, victim = coldest
            if num_reads >= self._num_reads[key]:
                kept.append(victim)
                break
            (victims if can_go(victim) else kept).append(victim)
        if not is_enough(victims):
            kept += victims
            victims = []
        for each in kept:
            self.hold(each)
        return victims if is_enough(victims) else None

    def _pop_coldest(self) -> tuple[int, ExpertKey] | None:
        """Take the least read record off the heap, whose counts may be older than the table's."""
        while self._coldest:
            num_reads, key = heapq.heappop(self._coldest)
            if num_reads == self._num_reads[key]:
                return num_reads, key
            heapq.heappush(self._coldest, (self._num_reads[key], key))
        return None
