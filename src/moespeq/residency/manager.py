"""Residency: the one object the engine asks for experts. It ties cache, lookahead, scheduler and mover
together.

Owns every decision about device slots; the engine's thread owns it, so there is no lock. It never looks
inside a record.

A pass, in the order of calls:

    begin_pass ─> predict*, pump*   while the draft runs: predicted records cross the link
               ─> acquire, pump*    once for each layer, in order, while the target runs
               ─> end_pass          (or cancel, after an error or when the client is gone)

A fetch is *queued* while it is only a plan of the scheduler, and *in flight* from `Mover.submit` on, when
nothing can take it back. So speculation keeps at most `link_depth` fetches in flight, the most a demand ever
waits behind, while demand goes out at once. Leases pin records; an awaited record is pinned the moment it
arrives, so no decision made in between evicts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from moespeq.errors import StorageError
from moespeq.ports import Clock, Mover
from moespeq.residency.counters import ResidencyCounters
from moespeq.residency.eviction import EvictionPolicy, LruEviction, NextUseEviction
from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.passes import Eviction, Lease, PassKind, ResidencyOptions
from moespeq.residency.prefetcher import Prefetcher
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause, Completion, ExpertKey, Fetch

__all__ = ["Residency"]


class Residency:
    """Experts on the device: predicted ahead of time, leased when their layer asks."""

    def __init__(
        self,
        mover: Mover,
        clock: Clock,
        *,
        num_slots: int,
        num_layers: int,
        num_experts: int,
        num_bytes: Callable[[ExpertKey], int],
        options: ResidencyOptions,
    ) -> None:
        assert options.link_depth > 0, options.link_depth
        self._mover = mover
        self._clock = clock
        self._num_experts = num_experts
        self._num_bytes = num_bytes
        self._options = options
        self._cache = SlotCache(num_slots)
        self._lookahead = ExpertLookahead(num_layers)
        self._frequency = UseFrequency()
        self._policy: EvictionPolicy = (
            LruEviction(self._cache, self._lookahead)
            if options.eviction is Eviction.LRU
            else NextUseEviction(self._cache, self._lookahead, self._frequency)
        )
        self._kind: PassKind | None = None
        self._prefetcher = Prefetcher(self._cache, self._lookahead, self._frequency, num_bytes)
        self._waves: Generator[Sequence[Lease], None, None] | None = None
        self._awaited: set[ExpertKey] = set()
        self._arrived: list[ExpertKey] = []
        self._failure: str | None = None
        self._hits = self._late = self._misses = self._failed = 0
        self._bytes_by_cause = dict.fromkeys(Cause, 0)
        self._stall_s = 0.0
        self._at_begin = self.counters()

    @property
    def cache(self) -> SlotCache:
        """The slots, to read."""
        return self._cache

    @property
    def lookahead(self) -> ExpertLookahead:
        """The ELB of the running pass, to read."""
        return self._lookahead

    def counters(self) -> ResidencyCounters:
        """Totals since the start, as a snapshot."""
        return ResidencyCounters(
            hits=self._hits,
            late=self._late,
            misses=self._misses,
            failed=self._failed,
            bytes_by_cause={cause: moved for cause, moved in self._bytes_by_cause.items() if moved},
            used_bytes=self._cache.used_bytes,
            wasted_bytes=self._cache.wasted_bytes,
            stall_s=self._stall_s,
        )

    def begin_pass(self, kind: PassKind, *, num_draft_steps: int = 0) -> None:
        """A round or a prefill chunk starts at layer 0. `num_draft_steps`, k + 1, sets the phases."""
        assert self._kind is None, f"a {self._kind} pass is still open: end_pass or cancel it first"
        self._kind = kind
        self._at_begin = self.counters()
        if kind is PassKind.PREFILL and self._options.prefetch:
            self._lookahead.expect_all(self._num_experts)
        self._prefetcher.begin(is_draft=kind is PassKind.DRAFT_VERIFY, num_draft_steps=num_draft_steps)
        self.pump()

    def predict(self, step: int, layer: int, experts: Sequence[int], confidence: Sequence[float]) -> None:
        """Draft step `step` routed to `experts` at `layer`; call `pump` after a step's layers. Ignored
        without prefetch.
        """
        assert self._kind is PassKind.DRAFT_VERIFY, f"no draft in a {self._kind} pass"
        if not self._options.prefetch:
            return
        self._lookahead.add(step, layer, list(zip(experts, confidence, strict=True)))
        self._prefetcher.invalidate()

    def pump(self) -> None:
        """Take in what arrived and keep the link busy. Never blocks; cheap when there is nothing to do."""
        self._settle(self._mover.poll())
        self._speculate()

    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[Sequence[Lease]]:
        """Lease the distinct `experts` of `layer` in waves: what is resident at once, then the rest as it
        arrives.

        A wave's leases hold until the next wave is asked for, or the iterator is closed; kernels that read
        them must be launched by then. Waves are as large as slots and arrivals allow, and one slot is enough
        to finish. Layers are asked in order, once a pass. Raises StorageError when a record that is needed
        could not be read.
        """
        assert self._kind is not None, "acquire outside a pass"
        keys = [ExpertKey(layer, expert) for expert in experts]
        assert len(set(keys)) == len(keys), f"layer {layer} asks for an expert twice: {list(experts)}"
        self._close_waves()
        self._waves = self._lease_waves(layer, keys)
        return self._waves

    def end_pass(self, committed_tok: int) -> ResidencyCounters:
        """The pass is over and `committed_tok` tokens came of it (1 for a prefill). Returns what happened
        since begin_pass.
        """
        assert self._kind is not None, "no pass is open"
        self._close_pass(committed_tok)
        return self.counters().since(self._at_begin)

    def cancel(self) -> None:
        """Drop the running pass, if any: leases back, plan and predictions forgotten. What is in flight
        arrives unneeded.
        """
        if self._kind is not None:
            self._close_pass(committed_tok=0)

    def settle(self) -> None:
        """Block until nothing is in flight, e.g. before the mover is closed."""
        while self._cache.num_in_flight:
            self._settle(self._mover.wait())

    def check(self) -> None:
        """Assert that the state is consistent."""
        self._cache.check()
        assert not (set(self._arrived) & self._awaited), "arrived and still awaited"
        assert self._waves is not None or not (self._awaited or self._arrived), "awaited by nobody"
        assert sum(self._bytes_by_cause.values()) == self._cache.fetched_bytes, "bytes by cause do not add up"

    def _lease_waves(self, layer: int, keys: list[ExpertKey]) -> Generator[Sequence[Lease], None, None]:
        self._settle(self._mover.poll())
        held = self._classify(keys)
        missing = deque(key for key in keys if key not in self._cache.slot_of)
        self._awaited = set(keys).difference(held)
        self._offer(self._lookahead.retire(layer))
        self._prefetcher.invalidate()
        try:
            while held or self._awaited:
                while missing and self._fetch(missing[0], Cause.DEMAND):
                    missing.popleft()
                self._speculate()
                if held:
                    yield [Lease(key, self._cache.slot_of[key]) for key in held]
                    self._give_back(held)
                else:
                    self._wait()
                held, self._arrived = self._arrived, []
                if self._failure is not None:
                    raise StorageError(self._failure)
        finally:
            self._awaited = set()
            self._give_back(held)
            self._give_back(self._arrived)
            self._failure = None

    def _classify(self, keys: list[ExpertKey]) -> list[ExpertKey]:
        """Count and touch what the layer truly uses; returns the hits, pinned."""
        hits = [key for key in keys if self._cache.is_resident(key)]
        num_late = sum(key in self._cache.slot_of for key in keys) - len(hits)
        self._hits += len(hits)
        self._late += num_late
        self._misses += len(keys) - len(hits) - num_late
        for key in keys:
            self._policy.touch(key)
        for key in hits:
            self._cache.pin(key)
        return hits

    def _give_back(self, held: list[ExpertKey]) -> None:
        """Unpin and empty `held`."""
        while held:
            key = held.pop()
            self._cache.unpin(key)
            self._offer([key])

    def _close_pass(self, committed_tok: int) -> None:
        self._close_waves()
        self._kind = None
        self._prefetcher.clear()
        self._offer(self._lookahead.clear())
        self._policy.end_pass(committed_tok)

    def _close_waves(self) -> None:
        if self._waves is not None:
            self._waves.close()
            self._waves = None

    def _offer(self, keys: Sequence[ExpertKey]) -> None:
        for key in keys:
            if self._cache.is_evictable(key) and not self._lookahead.has_use(key):
                self._policy.offer(key)

    def _wait(self) -> None:
        assert self._cache.num_in_flight, "waiting for the link with nothing in flight"
        begin_s = self._clock.now_s()
        self._settle(self._mover.wait())
        self._stall_s += self._clock.now_s() - begin_s

    def _settle(self, completions: Sequence[Completion]) -> None:
        """Take in what the mover finished; awaited records are pinned here."""
        for completion in completions:
            key = completion.fetch.key
            if completion.error is not None:
                self._fail(key, completion.error)
                continue
            self._cache.complete(key)
            self._bytes_by_cause[completion.fetch.cause] += completion.fetch.num_bytes
            if key in self._awaited:
                self._awaited.remove(key)
                self._cache.pin(key)
                self._arrived.append(key)
            else:
                self._policy.offer(key)

    def _fail(self, key: ExpertKey, error: str) -> None:
        """Nothing arrived: an error where the record is awaited now, forgotten where it was only a guess."""
        self._cache.abandon(key)
        self._failed += 1
        self._lookahead.drop(key)
        if key in self._awaited:
            self._failure = self._failure or error

    def _speculate(self) -> None:
        """Submit planned fetches until the link is deep enough or a guess finds no room."""
        while self._cache.num_in_flight < self._options.link_depth and self._has_room_for_a_guess():
            intent = self._prefetcher.next()
            if intent is None:
                return
            self._fetch(intent.key, intent.cause)

    def _has_room_for_a_guess(self) -> bool:
        """Asked before planning: a plan costs a scan of the lookahead."""
        if self._cache.has_free():
            return True
        return self._prefetcher.cause is not Cause.PRIME and self._policy.idle_victim() is not None

    def _fetch(self, key: ExpertKey, cause: Cause) -> bool:
        """Make room and submit; False when there is no room that this cause may take."""
        if not self._cache.has_free():
            victim = self._policy.victim_for(key) if cause is Cause.DEMAND else self._policy.idle_victim()
            if victim is None:
                return False
            self._cache.evict(victim)
        num_bytes = self._num_bytes(key)
        slot = self._cache.reserve(key, num_bytes)
        self._mover.submit(Fetch(key, slot, num_bytes, cause))
        return True
