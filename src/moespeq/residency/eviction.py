"""Who leaves when a record comes in.

Our rule (`NextUseEviction`): first the *idle* records, those with no remaining predicted or true use in the running
pass, lowest frequency first, ties by the farther layer, then id; then, if the newcomer cannot wait, the record with the
farthest next use, and only one that is used later than the newcomer. Pinned and in-flight records never leave. Never
LRU: a verify visits layer after layer, a cyclic scan, and LRU throws out exactly what the scan reaches next. For the
same reason a use counts only when its pass ends: inside the pass it would rank what is behind the front above what is
still ahead of it. So scores are constant within a pass: candidates are ranked once, when a pass first needs a victim,
and later only what became idle since then is added.

`LruEviction` is the published policy of on-demand offloading, kept as the baseline it is.

A policy learns by three calls: `touch` when a pass truly uses records, `arrive` when one came unasked, `offer` when
some may have become idle: they were given back or lost their predicted use. It asks the cache and the lookahead again
when it picks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache

__all__ = ["EvictionPolicy", "LruEviction", "NextUseEviction"]

_Run = tuple[float, int, int, list[int]]  # who leaves first: score, tie, record; then the rest, the next one last


class EvictionPolicy(Protocol):
    """Chooses victims; changes neither the cache nor the lookahead."""

    def touch(self, records: Sequence[int], uses: Mapping[int, int]) -> None:
        """The running pass truly uses these records; once per pass, before they are pinned. `uses`: what was expected
        of them, record -> rows that use it, as far as it was.
        """
        ...

    def end_pass(self, committed_tok: int) -> None:
        """The pass is over and gave this many tokens; nothing is pinned or predicted any more."""
        ...

    def arrive(self, record: int) -> None:
        """A record is there that no layer waits for."""
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
    """Idle records by lowest frequency, then the farthest next use.

    Candidates lie in runs, each sorted once, the first to leave last: what was resident when the pass first needed a
    victim, and since then what became idle between two victims, a layer's records mostly.
    """

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead, frequency: UseFrequency) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._runs: list[_Run] = []  # heap
        self._offered: set[int] = set()
        self._used: list[tuple[Sequence[int], Mapping[int, int]]] = []
        num_experts, num_records = lookahead.num_experts, lookahead.num_layers * lookahead.num_experts
        self._ties = [-(record // num_experts * num_records - record) for record in range(num_records)]

    def touch(self, records: Sequence[int], uses: Mapping[int, int]) -> None:
        self._used.append((records, uses))

    def end_pass(self, committed_tok: int) -> None:
        for records, uses in self._used:
            self._frequency.touch(records, uses)
        self._used.clear()
        self._frequency.advance(committed_tok)
        self._runs.clear()  # every score in it may be old
        self._offered = set(self._cache.resident)

    def arrive(self, record: int) -> None:
        if not self._lookahead.has_use(record):  # else it is offered when it loses it, or is given back
            self._offered.add(record)

    def offer(self, records: Iterable[int]) -> None:
        self._offered.update(records)

    def idle_victim(self) -> int | None:
        if self._offered:
            self._rank_offered()
        runs, resident, pinned = self._runs, self._cache.resident, self._cache.pinned
        passed = self._lookahead.front * self._lookahead.num_experts
        while runs:
            _, _, record, rest = runs[0]
            is_free_to_go = record in resident and record not in pinned
            if is_free_to_go and (record < passed or not self._lookahead.has_use(record)):
                return record
            if rest:  # it is offered again when it becomes idle
                heapq.heapreplace(runs, self._run(rest))
            else:
                heapq.heappop(runs)
        return None

    def last_victim(self, incoming: int) -> int | None:
        resident = self._cache.resident
        soonest = incoming // self._lookahead.num_experts + 1
        for layer in range(self._lookahead.num_layers - 1, soonest - 1, -1):
            predicted = (record for record in self._lookahead.expected_uses(layer) if record in resident)
            farthest = min(filter(self._cache.is_evictable, predicted), default=None)
            if farthest is not None:
                return farthest
        return None

    def _rank_offered(self) -> None:
        run, self._offered = list(self._offered), set()
        if len(run) > 1:
            run.sort(key=self._ties.__getitem__, reverse=True)
            run.sort(key=self._frequency.score.__getitem__, reverse=True)
        heapq.heappush(self._runs, self._run(run))

    def _run(self, records: list[int]) -> _Run:
        record = records.pop()
        return self._frequency.score[record], self._ties[record], record, records


class LruEviction:
    """The least recently used record; one that nobody used yet counts from its arrival."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, records: Sequence[int], uses: Mapping[int, int]) -> None:
        for record in records:
            self._order[record] = None
            self._order.move_to_end(record)

    def end_pass(self, committed_tok: int) -> None:
        """Recency knows no passes."""

    def arrive(self, record: int) -> None:
        self._order.setdefault(record)

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
