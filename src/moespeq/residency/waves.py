"""One layer's records on their way to the kernels: asked for, leased in waves, given back.

A wave is what is resident at once, then what has arrived since; while more is on its way, only as much as is worth a
launch. Where the device can wait for a copy by itself, a record is handed out ahead of its arrival: its kernels are
queued behind the copy and the host need not wake up in between. Such a record counts as used when it lands, the pass
is not over before it did, and one that fails fails it.

Leases pin records; an awaited record is pinned the moment it arrives, so no decision made in between evicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from weakref import WeakMethod

from moespeq.errors import StorageError
from moespeq.ports import Clock, Mover
from moespeq.residency.base_rows import BaseRows
from moespeq.residency.eviction import EvictionPolicy
from moespeq.residency.fetches import Fetches
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.passes import Wave
from moespeq.residency.scheduler import Scheduler
from moespeq.residency.slots import SlotCache
from moespeq.residency.stalls import Stalls
from moespeq.types import Completion

__all__ = ["LayerWaves"]

_DEMANDS_BEFORE_HITS = 4  # the link needs longer for these than the host for launching the hits


class LayerWaves:
    """The waves of the layer that asks now, and the counts of all that asked.

    take_in: hands over what the mover finished, all of it or, blocking, at least one, through `land` and `fail`.
    """

    def __init__(
        self,
        cache: SlotCache,
        lookahead: ExpertLookahead,
        policy: EvictionPolicy,
        scheduler: Scheduler,
        fetches: Fetches,
        mover: Mover,
        clock: Clock,
        base_rows: BaseRows,
        *,
        take_in: WeakMethod[Callable[[bool], None]],
    ) -> None:
        self._cache, self._lookahead, self._policy = cache, lookahead, policy
        self._scheduler, self._fetches = scheduler, fetches
        self._mover, self._clock, self._base_rows, self._owner = mover, clock, base_rows, take_in
        self._running: Generator[Wave, None, None] | None = None
        self._awaited: set[int] = set()  # asked and not yet here
        self._missing: list[int] = []  # awaited and not yet submitted, the next one last
        self._coming: tuple[list[int], ...] = ()  # awaited guesses; demands: as their copies begin, the next one last
        self._arrived: list[int] = []  # awaited until now, pinned for the next wave
        self._ahead: dict[int, float] = {}  # handed out and not yet here, since when
        self._ahead_leases: list[int] = []  # which of them the running wave holds
        self._approached: int | None = None  # a layer that is about to ask
        self._least = 1  # experts of a wave while more are on their way
        self._foretold: Mapping[int, int] = {}  # what was expected of it, record -> rows
        self._failure: str | None = None  # of a record that is awaited
        self._loss: str | None = None  # of one that was handed out
        self.hits = self.late = self.misses = 0
        self.stalls = Stalls()

    def begin(self, *, least: int) -> None:
        """A pass starts: a wave has at least `least` experts while others of its layer are on their way."""
        self._least = least

    def open(self, layer: int, records: list[int]) -> Generator[Wave, None, None]:
        """The waves of `layer`, which truly uses `records`."""
        self.close()
        self._running = self._waves(layer, records)
        return self._running

    def close(self) -> None:
        """Give leases back; what is still awaited arrives unneeded."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def demand(self) -> None:
        """Submit all that the layer misses, as far as there is room."""
        if self._missing:
            self._fetches.demand(self._missing, at_most=len(self._missing))

    def confirm(self) -> str | None:
        """Wait for what was handed out ahead. Returns why it did not arrive, if it did not."""
        while self._ahead:
            self._take_in(True)
        self._approached = None
        loss, self._loss = self._loss, None
        return loss

    def forget(self) -> None:
        """The pass is dropped: nobody asks any more what came of its records."""
        self._ahead.clear()
        self._approached = self._loss = None

    def land(self, record: int, completion: Completion) -> bool:
        """A record arrived; True when the layer asked for it."""
        if record in self._awaited:
            self._awaited.remove(record)
            self._cache.pin((record,))
            self._arrived.append(record)
            return True
        if record not in self._ahead:
            return False
        end_s = self._clock.now_s() if completion.ended_s is None else completion.ended_s
        self.stalls.add(self._ahead.pop(record), end_s)
        self._cache.pin((record,))
        if record not in self._ahead_leases:
            self._give_back([record])
        return True

    def fail(self, record: int, error: str) -> None:
        """A record did not arrive: an error where it is needed, nothing where it was only a guess."""
        if record in self._awaited:
            self._failure = self._failure or error
        elif self._ahead.pop(record, None) is not None:
            self._loss = self._loss or error

    def check(self) -> None:
        """Assert that the state is consistent."""
        assert self._awaited.isdisjoint(self._arrived), "arrived and still awaited"
        assert self._cache.submitted.keys() >= self._ahead.keys(), "ahead of its arrival, but not on its way"
        assert self._awaited.isdisjoint(self._ahead), "handed out and still awaited"
        assert self._running is not None or not (self._awaited or self._arrived), "awaited by nobody"
        assert self._awaited.issuperset(self._missing), "missing, but not awaited"
        assert not any(map(self._cache.holds, self._missing)), "missing, but in the cache"

    def _waves(self, layer: int, records: list[int]) -> Generator[Wave, None, None]:
        held = self._ask(layer, records)
        try:
            self._raise_failure()
            self._fetches.demand(self._missing, at_most=_DEMANDS_BEFORE_HITS)
            if not held:
                self._begin_ahead()
            while held or self._ahead_leases or self._awaited:
                if self._is_wave(len(held) + len(self._ahead_leases)):
                    yield self._wave(layer, [*held, *self._ahead_leases])
                    self._give_back(held)
                    self._end_ahead()
                else:
                    self._wait()
                self._raise_failure()
                self.demand()
                held += self._arrived
                self._arrived = []
                self._begin_ahead()
        finally:
            self._awaited, self._missing, self._coming = set(), [], ()
            self._end_ahead()
            self._give_back(held)
            self._give_back(self._arrived)
            self._failure = None

    def approach(self, layer: int) -> None:
        """`layer` asks next: no more guesses for it. Until it does nothing may be evicted."""
        self._take_in(False)
        if self._lookahead.front == 0:
            self._scheduler.end_draft()
        self._foretold = self._lookahead.retire(layer)
        self._approached = layer

    def _ask(self, layer: int, records: list[int]) -> list[int]:
        """Count the records and note what is missing; returns the hits, pinned."""
        if self._approached != layer:
            self.approach(layer)
        self._approached = None
        resident, submitted, foretold = self._cache.resident, self._cache.submitted, self._foretold
        hits, asked = [record for record in records if record in resident], set(records)
        self._awaited = asked.difference(hits)
        self.hits += len(hits)
        late = sum(1 for record in self._awaited if record in foretold or record in submitted)
        self.late += late
        self.misses += len(self._awaited) - late
        self._fetches.take_back(layer, self._awaited)
        self._missing = [record for record in reversed(records) if record in self._awaited and record not in submitted]
        self._coming = [record for record in reversed(submitted) if record in self._awaited], list(self._missing)
        self._policy.touch(records, foretold)
        self._cache.pin(hits)
        self._policy.offer(foretold.keys() - asked)
        return hits

    def _take_in(self, must_wait: bool) -> None:
        take_in = self._owner()
        assert take_in is not None, "waves without their residency"
        take_in(must_wait)

    def _wave(self, layer: int, held: Sequence[int]) -> Wave:
        first, cache = layer * self._cache.num_experts, self._cache
        experts = [record - first for record in held]
        base_rows = self._base_rows.rows_of(held, cache)
        return Wave(layer, experts, cache.slots_of(held), base_rows, is_last=not self._awaited)

    def _is_wave(self, num_experts: int) -> bool:
        """Whether so many are worth a launch, or all that can be had: what finds no room waits for their slots."""
        are_more_coming = len(self._awaited) > len(self._missing)
        return num_experts > 0 and (num_experts >= self._least or not are_more_coming)

    def _begin_ahead(self) -> None:
        """Lease the awaited records for whose copies the device waits by itself.

        Copies of one cause begin in the order they were submitted: behind one that has not begun none is asked for.
        """
        submitted, awaited = self._cache.submitted, self._awaited
        for coming in self._coming:
            while coming:
                record = coming[-1]
                if record in awaited:
                    fetch = submitted.get(record)
                    if fetch is None or not self._mover.wait_on_device(fetch):
                        break
                    awaited.remove(record)
                    self._ahead[record] = self._clock.now_s()
                    self._ahead_leases.append(record)
                coming.pop()

    def _end_ahead(self) -> None:
        """Their wave is over; those that landed meanwhile were pinned."""
        if not self._ahead_leases:
            return
        landed = [record for record in self._ahead_leases if record in self._cache.pinned]
        self._ahead_leases.clear()
        self._give_back(landed)

    def _give_back(self, held: list[int]) -> None:
        """Unpin and empty `held`."""
        if not held:
            return
        self._cache.unpin(held)
        self._policy.offer(held)
        held.clear()

    def _wait(self) -> None:
        """Nothing is there that is worth a launch: look ahead, then block until something arrives."""
        self._fetches.speculate()
        assert self._cache.submitted, "waiting for the link with nothing in flight"
        begin_s = self._clock.now_s()
        self._take_in(True)
        self.stalls.add(begin_s, self._clock.now_s())

    def _raise_failure(self) -> None:
        failure = self._failure or self._loss
        if failure is not None:
            raise StorageError(failure)
