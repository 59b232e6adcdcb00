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
        self._is_prefill = False
        self.num_taken_back = 0

    def begin(self, *, is_prefill: bool) -> None:
        """A pass starts."""
        self._is_prefill = is_prefill
        self._depth = max(self._link_depth, self._cache.num_slots // 2) if is_prefill else self._link_depth
        self._mover.begin_ahead(_PREFILL_AHEAD_BYTES if is_prefill else _AHEAD_BYTES)

    def speculate(self) -> None:
        """Submit guesses until the link is deep enough or one finds no room."""
        submitted, depth = self._cache.submitted, self._depth
        while len(submitted) < depth and (record := self._scheduler.next()) is not None:
            if not self.submit(record, self._scheduler.cause):
                return

    def submit(self, record: int, cause: Cause) -> bool:
        """Make room and submit; False when there is no room that this cause may take."""
        if not (self._cache.has_free() or self._make_room(record, cause)):
            return False
        self._mover.submit(self._cache.reserve(record, cause))
        return True

    def take_back(self, *, num_layers: int, asked: Collection[int] = ()) -> None:
        """Cancel what has not begun of the first `num_layers` layers; a prefill leaves what is `asked` in the queue."""
        end, kept = num_layers * self._num_experts, frozenset(asked if self._is_prefill else ())
        for record in [record for record in self._cache.submitted if record < end and record not in kept]:
            self._cancel(record)

    def _make_room(self, record: int, cause: Cause) -> bool:
        """Free one slot. Prime takes nobody's, a guess an idle record's. A demand goes on: a guess that has not begun,
        then a record that is there, each time the one with the farthest use behind its own layer.
        """
        if cause is Cause.PRIME:
            return False
        victim = self._policy.idle_victim()
        if victim is None and cause is Cause.DEMAND:
            if self._take_back_farthest(behind=record // self._num_experts):
                return True
            victim = self._policy.last_victim(record)
            if victim is not None:
                self._scheduler.reopen(victim // self._num_experts)
        if victim is None:
            return False
        self._cache.evict(victim)
        return True

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
