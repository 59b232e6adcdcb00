"""Residency: the one object the engine asks for experts. It ties cache, lookahead, scheduler and mover together.

Owns every decision about device slots; the engine's thread owns it, so there is no lock. It never looks inside a
record.

A pass, in the order of calls:

    begin_pass ─> predict, pump     after each draft step: predicted records cross the link
               ─> acquire, pump     once for each layer, in order, while the target runs
               ─> end_pass          (or cancel, after an error or when the client is gone)

A layer whose records are all there costs a few dozen microseconds: `acquire` submits only the first misses before it
hands out the hits, enough to keep the link busy until their kernels are launched; `pump` submits the others, then
guesses. When a layer asks, what has not begun of it and is not asked for is stale and frees its slot. A stage that is
asked for keeps its turn, a less urgent guess goes out again as demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakMethod

from moespeq.errors import StorageError
from moespeq.ports import Clock, Mover
from moespeq.residency.base_rows import BaseRows, ResidentBases
from moespeq.residency.baselines import ChunkScheduler, baseline_eviction
from moespeq.residency.counters import ResidencyCounters
from moespeq.residency.eviction import EvictionPolicy, NextUseEviction
from moespeq.residency.fetches import Fetches
from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.passes import Eviction, PassKind, ResidencyOptions, Wave
from moespeq.residency.scheduler import Scheduler
from moespeq.residency.slots import SlotCache
from moespeq.residency.waves import LayerWaves
from moespeq.types import Cause, ExpertKey, Fetch

__all__ = ["Residency"]

_WAVES_IN_SLOTS = 4


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
        bases: ResidentBases | None = None,
    ) -> None:
        """`num_bytes` of a record counts the base in front of it, where `bases` says that there is one."""
        self._mover = mover
        self._clock = clock
        self._num_slots = num_slots
        self._num_layers = num_layers
        self._num_experts = num_experts
        records = range(num_layers * num_experts)
        record_bytes = [num_bytes(ExpertKey(*divmod(record, num_experts))) for record in records]
        self._base_rows = BaseRows(record_bytes, bases, num_experts=num_experts)
        self._start(options)

    def _start(self, options: ResidencyOptions) -> None:
        self._options = options
        record_bytes = self._base_rows.fetch_bytes
        self._cache = SlotCache(self._num_slots, record_bytes, num_experts=self._num_experts)
        self._lookahead = ExpertLookahead(self._num_layers, self._num_experts, window_tok=options.lookahead_tok)
        self._frequency = frequency = UseFrequency(len(record_bytes))
        self._policy: EvictionPolicy = (
            NextUseEviction(self._cache, self._lookahead, frequency)
            if options.eviction is Eviction.NEXT_USE
            else baseline_eviction(options.eviction, self._cache, self._lookahead)
        )
        scheduler = ChunkScheduler if options.eviction is Eviction.CHUNK else Scheduler
        self._scheduler = scheduler(self._cache, self._lookahead, frequency)
        self._fetches = Fetches(self._mover, self._cache, self._policy, self._scheduler, link_depth=options.link_depth)
        self._waves = LayerWaves(
            self._cache,
            self._lookahead,
            self._policy,
            self._scheduler,
            self._fetches,
            self._mover,
            self._clock,
            self._base_rows,
            take_in=WeakMethod(self._take_in),  # or the slots would wait for the garbage collector
        )
        self._record_bytes = sum(record_bytes) / len(record_bytes)
        self._kind: PassKind | None = None
        self._failed = 0
        self._bytes_by_cause = [0] * len(Cause)
        self._at_begin = self.counters()

    def restart(self, options: ResidencyOptions) -> None:
        """Go on with other options as if new, slots empty, counters at 0. Between passes; waits for the link."""
        assert self._kind is None, f"a {self._kind} pass is still open: end_pass or cancel it first"
        self.settle()
        self._start(options)

    @property
    def cache(self) -> SlotCache:
        """The slots, to read."""
        return self._cache

    @property
    def looks_ahead(self) -> bool:
        """Whether what is predicted or foreseen is fetched."""
        return self._options.prefetch

    @property
    def lookahead(self) -> ExpertLookahead:
        """The ELB of the running pass, to read."""
        return self._lookahead

    def counters(self) -> ResidencyCounters:
        """Totals since the start, as a snapshot."""
        return ResidencyCounters(
            hits=self._waves.hits,
            late=self._waves.late,
            misses=self._waves.misses,
            failed=self._failed,
            taken_back=self._fetches.num_taken_back,
            bytes_by_cause={cause: moved for cause in Cause if (moved := self._bytes_by_cause[cause])},
            used_bytes=self._cache.used_bytes,
            wasted_bytes=self._cache.wasted_bytes,
            stall_s=self._waves.stalls.total_s,
        )

    def standing(self) -> tuple[list[int], list[float]]:
        """Copies: the records in slots, and for every record a number in the order of how often it was used lately."""
        return list(self._cache.resident), self._frequency.score.copy()

    def take_stalls(self) -> list[tuple[float, float]]:
        """From when to when there was only the link to wait for, in the clock's seconds, since the last call."""
        return self._waves.stalls.take()

    def begin_pass(self, kind: PassKind, *, num_draft_steps: int = 0) -> None:
        """A round or a prefill chunk starts at layer 0. `num_draft_steps`, k + 1, sets the phases."""
        assert self._kind is None, f"a {self._kind} pass is still open: end_pass or cancel it first"
        self._kind = kind
        self._at_begin = self.counters()
        is_prefill = kind is PassKind.PREFILL
        self._fetches.begin(is_prefill=is_prefill)
        self._waves.begin(least=self._least_wave(is_prefill))
        self._scheduler.begin(is_draft=kind is PassKind.DRAFT_VERIFY, num_draft_steps=num_draft_steps)
        self.pump()

    def predict(self, routes: Sequence[Sequence[int]]) -> None:
        """The next draft step routed to the experts `routes[layer]`; `pump` follows. Ignored without prefetch."""
        assert self._kind is PassKind.DRAFT_VERIFY, f"no draft in a {self._kind} pass"
        if self._options.prefetch:
            self._lookahead.add(routes)

    def expect(self, layer: int, routes: Sequence[Sequence[int]]) -> None:
        """The rows of a prefill will route to the experts `routes[row]` at `layer`. Ignored without prefetch."""
        assert self._kind is PassKind.PREFILL, f"nothing is foreseen in a {self._kind} pass"
        if self._options.prefetch:
            self._lookahead.expect(layer, routes)
            self._scheduler.reopen(layer)
            self.pump()

    def expect_all(self) -> None:
        """A prefill will use every expert of every layer. Ignored without prefetch."""
        assert self._kind is PassKind.PREFILL, f"nothing is foreseen in a {self._kind} pass"
        if self._options.prefetch:
            self._lookahead.expect_all()
            for layer in range(self._lookahead.front, self._num_layers):
                self._scheduler.reopen(layer)
            self._fetches.is_certain = True
            self.pump()

    def pump(self) -> None:
        """Take in what arrived and keep the link busy. Never blocks; cheap when there is nothing to do."""
        self._take_in(False)
        self._waves.demand()
        if self._kind is not None:
            self._fetches.speculate()

    def approach(self, layer: int) -> None:
        """`layer` is the next to `acquire`: do now what does not need its routes. Only that call may follow."""
        assert self._kind is not None, "approach outside a pass"
        self._waves.close()
        self._waves.approach(layer)

    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[Wave]:
        """Lease the distinct `experts` of `layer` in waves: what is resident at once, then the rest as it arrives.

        A wave's leases hold until the next wave is asked for, or the iterator is closed; kernels that read
        them must be launched by then. Waves are as large as slots and arrivals allow, and one slot is enough
        to finish. Call `pump` inside each wave, once its kernels are launched or before they block: it submits
        the rest of what is missing and looks ahead. Layers are asked in order, once a pass. Raises StorageError
        when a record that is needed could not be read.
        """
        assert self._kind is not None, "acquire outside a pass"
        first = layer * self._num_experts
        records = [first + expert for expert in experts]
        assert len(set(records)) == len(records), f"layer {layer} asks for an expert twice: {list(experts)}"
        return self._waves.open(layer, records)

    def confirm(self) -> None:
        """The last layer has asked: wait for what was handed out ahead of its arrival, before anybody sees a token.

        Raises StorageError when a record that the pass computed with did not arrive.
        """
        failure = self._waves.confirm()
        if failure is not None:
            raise StorageError(failure)

    def end_pass(self, committed_tok: int) -> ResidencyCounters:
        """The pass is over and gave `committed_tok` tokens (1 for a prefill). Returns what happened in it.

        Bases of experts that turned out hot come to the device. Raises StorageError when a record that the pass
        computed with did not arrive.
        """
        assert self._kind is not None, "no pass is open"
        failure = self._waves.confirm()
        self._close_pass(committed_tok)
        if failure is not None:
            raise StorageError(failure)
        self._bytes_by_cause[Cause.BASE] += self._base_rows.learn(self._cache, self._frequency)
        return self.counters().since(self._at_begin)

    def cancel(self) -> None:
        """Drop the running pass, if any: leases back, what has not begun taken back, the rest arrives unneeded."""
        if self._kind is not None:
            self._close_pass(committed_tok=0)
        self._waves.forget()

    def settle(self) -> None:
        """Block until nothing is in flight, e.g. before the mover is closed."""
        while self._cache.submitted:
            self._take_in(True)

    def check(self) -> None:
        """Assert that the state is consistent."""
        self._cache.check()
        self._waves.check()
        self._base_rows.check(self._cache)
        record_bytes = sum(self._bytes_by_cause) - self._bytes_by_cause[Cause.BASE]
        assert record_bytes == self._cache.fetched_bytes, "bytes by cause do not add up"

    def _least_wave(self, is_prefill: bool) -> int:
        """Experts of a wave; a few waves share the slots, so that one computes while the next arrives."""
        wave_bytes = self._options.prefill_wave_bytes if is_prefill else self._options.wave_bytes
        return min(round(wave_bytes / self._record_bytes), self._num_slots // _WAVES_IN_SLOTS)

    def _close_pass(self, committed_tok: int) -> None:
        self._waves.close()
        self._kind = None
        self._fetches.take_back_all()
        self._scheduler.clear()
        self._lookahead.clear()
        self._policy.end_pass(committed_tok)

    def _take_in(self, must_wait: bool) -> None:
        """Take in what the mover finished; records that are asked for are pinned here."""
        bug: Exception | None = None
        for completion in self._mover.wait() if must_wait else self._mover.poll():
            bug = bug or completion.bug
            fetch = completion.fetch
            record = fetch.key.layer * self._num_experts + fetch.key.expert
            if completion.error is not None:
                self._fail(record, fetch, completion.error)
                continue
            self._cache.complete(record)
            self._bytes_by_cause[fetch.cause] += fetch.num_bytes
            if not self._waves.land(record, completion):
                self._policy.arrive(record)
        if bug is not None:
            raise bug

    def _fail(self, record: int, fetch: Fetch, error: str) -> None:
        self._cache.abandon(record)
        self._failed += 1
        self._lookahead.drop(record)
        self._scheduler.reopen(fetch.key.layer)
        self._waves.fail(record, error)
