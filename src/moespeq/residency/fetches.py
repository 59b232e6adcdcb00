"""Fetches from submission to arrival: room is made, the mover gets them, those that have not begun are taken back.

Owns the depth of the queue at the mover. A guess is submitted while fewer than `link_depth` fetches are under way, so
that the link stays busy between two pumps; the mover begins the most urgent first and can take back what has not begun,
so a deep queue neither delays a demand nor moves what nobody needs any more. A prefill uses what is foreseen once, in
the order it is fetched, and leaves the queue alone for as long as a layer takes: it may fill half of the slots, more of
it may be begun, and what is asked stays where it is queued.
"""

from __future__ import annotations

from collections.abc import Collection

from moespeq.ports import Mover
from moespeq.residency.eviction import EvictionPolicy
from moespeq.residency.scheduler import Scheduler
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

__all__ = ["Fetches"]

_BATCHES = 6  # the queue is filled up in so many goes: a decision for several guesses costs little more than for one

# What 50 GB/s move while the engine thread is elsewhere: in a layer's launches, or in a prompt's layer.
_AHEAD_BYTES, _PREFILL_AHEAD_BYTES = 40_000_000, 160_000_000


class Fetches:
    """Submits and cancels; `num_taken_back` counts cancelled fetches since the start."""

    def __init__(
        self,
        mover: Mover,
        cache: SlotCache,
        policy: EvictionPolicy,
        scheduler: Scheduler,
        *,
        link_depth: int,
    ) -> None:
        assert link_depth > 0, link_depth
        self._mover = mover
        self._cache = cache
        self._policy = policy
        self._scheduler = scheduler
        self._num_experts = cache.num_experts
        self._link_depth = self._depth = link_depth
        self._least = 1
        self.is_certain = False
        """Whether every record of the pass is certain to be used."""
        self.num_taken_back = 0

    def begin(self, *, is_prefill: bool) -> None:
        """A pass starts."""
        self.is_certain = False
        self._depth = max(self._link_depth, self._cache.num_slots // 2) if is_prefill else self._link_depth
        self._least = max(1, self._depth // _BATCHES)
        self._mover.begin_ahead(_PREFILL_AHEAD_BYTES if is_prefill else _AHEAD_BYTES)

    def speculate(self) -> None:
        """Submit guesses until the link is deep enough or one finds no room."""
        cache, scheduler = self._cache, self._scheduler
        num_wanted = self._depth - len(cache.submitted)
        if num_wanted < self._least:
            return
        cause = scheduler.cause
        may_evict = cause is not Cause.PRIME
        for _ in range(num_wanted):
            victim = None
            if not cache.free:
                if not may_evict:
                    return
                victim = self._policy.idle_victim()
                if victim is None and self.is_certain:
                    victim = self._victim_of_first_layer()
                if victim is None:
                    scheduler.note_full()
                    return
            record = scheduler.next()
            if record is None:
                return
            if victim is not None:
                cache.evict(victim)
            self._mover.submit(cache.reserve(record, cause))

    def demand(self, missing: list[int], *, at_most: int) -> None:
        """Submit what a layer asked for, the last of `missing` first, and take it off, until there is no room."""
        cache, cause = self._cache, Cause.DEMAND
        for _ in range(min(at_most, len(missing))):
            if not (cache.free or self._make_room(missing[-1])):
                return
            self._mover.submit(cache.reserve(missing.pop(), cause))

    def take_back(self, layer: int, asked: Collection[int]) -> None:
        """`layer` asked: cancel what has not begun of it and the layers before, as far as it does not come in time.

        What was asked for and queues as a stage is next in turn; a less urgent guess is to go out again as demand.
        """
        end = (layer + 1) * self._num_experts
        for record, fetch in [(record, fetch) for record, fetch in self._cache.submitted.items() if record < end]:
            if fetch.cause > Cause.STAGE or record not in asked:
                self._cancel(record)

    def take_back_all(self) -> None:
        """Cancel what has not begun."""
        for record in list(self._cache.submitted):
            self._cancel(record)

    def _make_room(self, record: int) -> bool:
        """Free one slot for a demand: an idle record's, else that of a guess that has not begun, else of a record that
        is there, each time the one with the farthest use behind its own layer.
        """
        victim = self._policy.idle_victim()
        if victim is None:
            if self._take_back_farthest(behind=record // self._num_experts):
                return True
            victim = self._policy.last_victim(record)
            if victim is None:
                return False
            self._scheduler.reopen(victim // self._num_experts)
        self._cache.evict(victim)
        return True

    def _victim_of_first_layer(self) -> int | None:
        """Of a later layer, for a record of the first: its demand would push that one out too, but only then."""
        record, end = self._scheduler.peek(), self._num_experts
        if record is None or record >= end:
            return None
        victim = self._policy.last_victim(record)
        if victim is None or victim < end:
            return None
        self._scheduler.reopen(victim // self._num_experts)
        return victim

    def _take_back_farthest(self, *, behind: int) -> bool:
        end = (behind + 1) * self._num_experts
        for record in sorted((record for record in self._cache.submitted if record >= end), reverse=True):
            if self._cancel(record):
                self._scheduler.reopen(record // self._num_experts)
                return True
        return False

    def _cancel(self, record: int) -> bool:
        if not self._mover.cancel(self._cache.submitted[record]):
            return False
        self._cache.abandon(record)
        self.num_taken_back += 1
        return True
