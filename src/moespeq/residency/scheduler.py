"""What to fetch next of what is predicted and missing. Owns the order only: room is eviction's decision, made when the
link is free, and nothing is moved here.

While the draft runs, the most valuable predicted record first: expected uses per byte, then the layer that asks first,
then id. Three phases: *prime*, the first steps, fills free slots and evicts nothing, because the next steps will name
most of what is resident; *prefetch* takes idle records' slots; *saturate*, after the last step, goes on with all that
is predicted and missing. While the target runs, *stage* brings the layers ahead of the compute front in the order they
will ask; inside a layer the most expected, then the most frequent, then by id. Demand, the true routes of the layer
that asks now, goes before all of this and is no plan: `Residency` submits it directly.

A guess takes free slots and idle records only. Evicting a record with a predicted use for another one would move two
records in place of one, so the rule's second half (the farthest next use) is left to demand.

Nothing is planned twice. Expected uses only grow while a draft runs, so each step adds its missing records to a heap,
and an old entry comes out behind the newer one of the same record, where it is skipped. A layer's stage order is made
when the layers before it are on their way.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

__all__ = ["Scheduler", "draft_phase"]

# On recorded routes at k = 32, priming for 0.3 of the draft moves a tenth fewer bytes in the same time.
_PRIME_SHARE = 0.3


def draft_phase(*, steps_done: int, num_steps: int) -> Cause:
    """The phase after `steps_done` of `num_steps` draft steps; unknown lengths (0) count as drafted."""
    if steps_done >= num_steps:
        return Cause.SATURATE
    return Cause.PRIME if steps_done < _PRIME_SHARE * num_steps else Cause.PREFETCH


class Scheduler:
    """Hands out records worth moving, one by one, for the caller to find room."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead, frequency: UseFrequency) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._is_draft = False
        self._num_draft_steps = 0
        self._by_value: list[tuple[float, int]] = []  # heap of (-uses per byte, record)
        self._staged: list[int] = []  # records of one layer, the next one last
        self._next_layer = 0  # the first layer whose stage order was not made

    def begin(self, *, is_draft: bool, num_draft_steps: int) -> None:
        """A pass starts. A draft's order goes by value until the first layer asks; any other by layer."""
        self._is_draft = is_draft
        self._num_draft_steps = num_draft_steps

    @property
    def cause(self) -> Cause:
        """What a speculative fetch is for, right now."""
        if not self._is_draft or self._lookahead.front > 0:
            return Cause.STAGE
        return draft_phase(steps_done=self._lookahead.num_steps, num_steps=self._num_draft_steps)

    def add(self, named: Mapping[int, int]) -> None:
        """A draft step named these records; record -> its expected uses by now."""
        resident, submitted, record_bytes = self._cache.resident, self._cache.submitted, self._cache.record_bytes
        for record, uses in named.items():
            if record not in resident and record not in submitted:
                heapq.heappush(self._by_value, (-uses / record_bytes[record], record))

    def reopen(self, layer: int) -> None:
        """A record of `layer` that is still expected is missing again: it was evicted or taken back."""
        if layer < self._next_layer:
            self._next_layer = layer
            self._staged.clear()

    def clear(self) -> None:
        """The pass is over: nothing is worth moving until the next one."""
        self._by_value.clear()
        self._staged.clear()
        self._next_layer = 0

    def next(self) -> int | None:
        """The next record worth moving; the same one until it is fetched or no longer expected."""
        if self._is_draft and self._lookahead.front == 0:
            return self._most_valuable()
        return self._next_staged()

    def _most_valuable(self) -> int | None:
        while self._by_value:
            record = self._by_value[0][1]
            if self._is_wanted(record):
                return record
            heapq.heappop(self._by_value)
        return None

    def _next_staged(self) -> int | None:
        while True:
            while self._staged:
                record = self._staged[-1]
                if self._is_wanted(record):
                    return record
                self._staged.pop()
            layer = max(self._next_layer, self._lookahead.front)
            if layer == self._lookahead.num_layers:
                return None
            self._staged = self._stage_order(layer)
            self._next_layer = layer + 1

    def _stage_order(self, layer: int) -> list[int]:
        uses, score, holds = self._lookahead.expected_uses(layer), self._frequency.score, self._cache.holds
        missing = [record for record in uses if not holds(record)]
        return sorted(missing, key=lambda record: (-uses[record], -score[record], record), reverse=True)

    def _is_wanted(self, record: int) -> bool:
        return not self._cache.holds(record) and self._lookahead.has_use(record)
