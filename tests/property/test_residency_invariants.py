"""Residency under any order of calls, predictions, arrivals and failures: the invariants that make it safe.

The mover below knows what is in every slot and checks each submission against a naive reading of the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moespeq.errors import StorageError
from moespeq.replay import VirtualClock
from moespeq.residency import Eviction, PassKind, Residency, ResidencyOptions
from moespeq.residency.eviction import NextUseEviction
from moespeq.types import Cause, Completion, ExpertKey, Fetch

NUM_LAYERS, NUM_EXPERTS = 3, 5
KEYS = [ExpertKey(layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)]


class CheckingMover:
    """Begins and finishes fetches when told or waited for, the most urgent first; `broken` records fail."""

    def __init__(self, num_slots: int, *, has_device_waits: bool) -> None:
        self.has_device_waits = has_device_waits
        self.promised: set[ExpertKey] = set()
        self.has_broken_promise = False
        self.holds: list[ExpertKey | None] = [None] * num_slots
        self.queued: list[Fetch] = []
        self.in_flight: list[Fetch] = []
        self.arrived: list[Completion] = []
        self.broken: frozenset[ExpertKey] = frozenset()
        self.leased: set[ExpertKey] = set()
        self.delivered_bytes = 0
        self.num_cancelled = 0
        self.residency: Residency | None = None

    def submit(self, fetch: Fetch) -> None:
        others = [*self.queued, *self.in_flight, *(completion.fetch for completion in self.arrived)]
        assert fetch.key not in self.holds, "fetched while resident"
        assert all(fetch.key != other.key for other in others), "fetched while submitted"
        assert all(fetch.slot != other.slot for other in others), "two fetches into one slot"
        leaving = self.holds[fetch.slot]
        if leaving is not None:
            assert leaving not in self.leased, "a pinned record was evicted"
            self.check_victim(leaving, fetch)
        self.holds[fetch.slot] = None
        self.queued.append(fetch)

    def cancel(self, fetch: Fetch) -> bool:
        if fetch not in self.queued:
            others = [*self.in_flight, *(completion.fetch for completion in self.arrived)]
            assert fetch in others, "cancelled, but never submitted"
            return False
        self.queued.remove(fetch)
        self.num_cancelled += 1
        return True

    def check_victim(self, leaving: ExpertKey, incoming: Fetch) -> None:
        assert self.residency is not None
        cache, lookahead = self.residency.cache, self.residency.lookahead
        assert not cache.free, "evicted while a slot was free"
        if not isinstance(self.residency._policy, NextUseEviction):
            return
        score = self.residency._policy._frequency.score
        others = [record for record in range(len(KEYS)) if cache.is_evictable(record)]
        idle = [record for record in others if not lookahead.has_use(record)]
        record = KEYS.index(leaving)
        if not lookahead.has_use(record):
            rank = (score[record], -leaving.layer, record)
            assert all(rank < (score[other], -KEYS[other].layer, other) for other in idle), "not the least frequent"
            return
        assert incoming.cause is Cause.DEMAND, "a guess displaced a predicted record"
        assert not idle, "a predicted record left before an idle one"
        assert leaving.layer > incoming.key.layer, "a sooner record left"
        assert all(KEYS[other].layer <= leaving.layer for other in others), "not the farthest next use"
        farther = [fetch for fetch in self.queued if fetch.key.layer > incoming.key.layer]
        assert not farther, "a predicted record left before a guess that had not begun"

    def begin(self, num_fetches: int) -> None:
        for _ in range(min(num_fetches, len(self.queued))):
            fetch = min(self.queued, key=lambda queued: queued.cause)
            self.queued.remove(fetch)
            self.in_flight.append(fetch)

    def finish(self, num_fetches: int) -> None:
        self.begin(num_fetches - len(self.in_flight))
        for fetch in self.in_flight[:num_fetches]:
            assert self.holds[fetch.slot] is None, "a fetch overwrote a record"
            is_broken = fetch.key in self.broken
            self.has_broken_promise |= is_broken and fetch.key in self.promised
            self.promised.discard(fetch.key)
            if not is_broken:
                self.holds[fetch.slot] = fetch.key
                self.delivered_bytes += fetch.num_bytes
            self.arrived.append(Completion(fetch, 0.0, "broken" if is_broken else None))
        del self.in_flight[:num_fetches]

    def wait_on_device(self, fetch: Fetch) -> bool:
        if self.has_device_waits and fetch in self.in_flight:
            self.promised.add(fetch.key)
            return True
        return False

    def begin_ahead(self, num_bytes: int) -> None:
        pass

    def is_coming(self, key: ExpertKey, slot: int) -> bool:
        return self.has_device_waits and any((fetch.key, fetch.slot) == (key, slot) for fetch in self.in_flight)

    def poll(self) -> Sequence[Completion]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self) -> Sequence[Completion]:
        if not self.arrived:
            self.finish(1)
        return self.poll()

    def close(self) -> None:
        self.finish(len(self.in_flight) + len(self.queued))


class ResidencyMachine(RuleBasedStateMachine):
    """Calls in any order the engine may make them."""

    @initialize(
        num_slots=st.integers(1, 9),
        link_depth=st.integers(1, 5),
        prefetch=st.booleans(),
        eviction=st.sampled_from(Eviction),
        has_device_waits=st.booleans(),
    )
    def start(
        self, num_slots: int, link_depth: int, prefetch: bool, eviction: Eviction, has_device_waits: bool
    ) -> None:
        self.mover = CheckingMover(num_slots, has_device_waits=has_device_waits)
        self.residency = Residency(
            self.mover,
            VirtualClock(),
            num_slots=num_slots,
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            num_bytes=lambda key: 10 + key.expert,
            options=ResidencyOptions(prefetch=prefetch, link_depth=link_depth, eviction=eviction),
        )
        self.mover.residency = self.residency
        self.kind: PassKind | None = None

    @precondition(lambda self: self.kind is None)
    @rule(kind=st.sampled_from(PassKind), num_draft_steps=st.integers(0, 4))
    def begin_pass(self, kind: PassKind, num_draft_steps: int) -> None:
        self.kind, self.front = kind, 0
        self.residency.begin_pass(kind, num_draft_steps=num_draft_steps)

    @precondition(lambda self: self.kind is PassKind.DRAFT_VERIFY)
    @rule(
        routes=st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1), max_size=3), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
    )
    def predict(self, routes: tuple[set[int], ...]) -> None:
        self.residency.predict([sorted(experts) for experts in routes])

    @precondition(lambda self: self.kind is PassKind.PREFILL and self.front < NUM_LAYERS)
    @rule(experts=st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True), has_all=st.booleans())
    def foresee(self, experts: list[int], has_all: bool) -> None:
        if has_all:
            self.residency.expect_all()
        else:
            self.residency.expect(self.front, [experts])

    @rule()
    def pump(self) -> None:
        self.residency.pump()

    @rule(num_fetches=st.integers(1, 3))
    def link_begins(self, num_fetches: int) -> None:
        self.mover.begin(num_fetches)

    @rule(num_fetches=st.integers(1, 3))
    def link_delivers(self, num_fetches: int) -> None:
        self.mover.finish(num_fetches)

    @precondition(lambda self: self.kind is not None and self.front < NUM_LAYERS)
    @rule(
        experts=st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=NUM_EXPERTS),
        broken=st.sets(st.sampled_from(KEYS), max_size=1),
        pauses=st.lists(st.integers(0, 3), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS),
        is_closed_early=st.booleans(),
        is_approached=st.booleans(),
    )
    def acquire(
        self,
        experts: list[int],
        broken: set[ExpertKey],
        pauses: list[int],
        is_closed_early: bool,
        is_approached: bool,
    ) -> None:
        layer, self.front = self.front, self.front + 1
        if is_approached:
            self.residency.approach(layer)
        self.mover.broken = frozenset(broken)
        served: list[int] = []
        try:
            for wave, pause in zip(self.residency.acquire(layer, experts), pauses, strict=False):
                assert (wave.layer, len(wave.experts)) == (layer, len(wave.slots))
                self.mover.leased = {ExpertKey(layer, expert) for expert in wave.experts}
                for expert, slot in zip(wave.experts, wave.slots, strict=True):
                    key = ExpertKey(layer, expert)
                    assert self.mover.holds[slot] == key or self.mover.is_coming(key, slot), "a lease of nothing"
                served.extend(wave.experts)
                self.mover.finish(pause)
                if pause:
                    self.residency.pump()
                self.mover.leased = set()
                if is_closed_early:
                    break
            else:
                assert sorted(served) == sorted(experts), "not every expert was leased exactly once"
        except StorageError:
            assert broken or self.mover.has_broken_promise, "an error from nowhere"
            self.cancel()

    @precondition(lambda self: self.kind is not None)
    @rule(committed_tok=st.integers(0, 5))
    def end_pass(self, committed_tok: int) -> None:
        self.kind = None
        try:
            self.residency.end_pass(committed_tok)
            assert not self.mover.has_broken_promise, "a pass that computed with a lost record ended well"
        except StorageError:
            assert self.mover.has_broken_promise, "an error from nowhere"
        self.mover.has_broken_promise = False

    @rule()
    def cancel(self) -> None:
        self.kind = None
        self.residency.cancel()
        self.mover.promised.clear()
        self.mover.has_broken_promise = False

    @invariant()
    def state_is_consistent(self) -> None:
        self.residency.check()
        submitted = self.residency.cache.submitted
        owned = [*self.mover.queued, *self.mover.in_flight, *(completion.fetch for completion in self.mover.arrived)]
        assert {fetch.key for fetch in submitted.values()} == {fetch.key for fetch in owned}
        assert {fetch.slot for fetch in submitted.values()} == {fetch.slot for fetch in owned}
        assert self.kind is not None or not self.mover.queued, "queued, but no pass needs it"

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        self.residency.cancel()
        self.residency.settle()
        counters, cache = self.residency.counters(), self.residency.cache
        assert counters.link_bytes == self.mover.delivered_bytes
        assert counters.taken_back == self.mover.num_cancelled
        assert counters.link_bytes == counters.used_bytes + counters.wasted_bytes + cache.unused_bytes
        assert {key for key in self.mover.holds if key is not None} == {KEYS[record] for record in cache.resident}


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestResidencyMachine = pytest.mark.timeout(120)(TestResidencyMachine)
