"""Residency over a mover driven by hand: who is fetched when, what a wave holds, and what an error leaves
behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moespeq.errors import StorageError
from moespeq.replay import VirtualClock
from moespeq.residency import Eviction, Lease, PassKind, Residency, ResidencyOptions
from moespeq.types import Cause, Completion, ExpertKey, Fetch

NUM_LAYERS, NUM_EXPERTS = 4, 8


class HandMover:
    """Completes fetches when told to; `wait` completes the oldest and takes a second."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.submitted: list[Fetch] = []
        self.in_flight: list[Fetch] = []
        self.arrived: list[Completion] = []
        self.broken: set[ExpertKey] = set()

    def submit(self, fetch: Fetch) -> None:
        self.submitted.append(fetch)
        self.in_flight.append(fetch)

    def finish(self, num_fetches: int = 1) -> None:
        for _ in range(num_fetches):
            fetch = self.in_flight.pop(0)
            error = f"{fetch.key} is gone; check the disk." if fetch.key in self.broken else None
            self.arrived.append(Completion(fetch, 1.0, error))

    def poll(self) -> Sequence[Completion]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self) -> Sequence[Completion]:
        if not self.arrived and self.in_flight:
            self.clock.advance(1.0)
            self.finish()
        return self.poll()

    def close(self) -> None:
        self.in_flight.clear()


class Rig:
    """A residency of `num_slots`, its mover, and short words for what tests do."""

    def __init__(
        self, num_slots: int, options: ResidencyOptions | None = None, *, num_experts: int = NUM_EXPERTS
    ) -> None:
        self.mover = HandMover(VirtualClock())
        self.residency = Residency(
            self.mover,
            self.mover.clock,
            num_slots=num_slots,
            num_layers=NUM_LAYERS,
            num_experts=num_experts,
            num_bytes=lambda key: 100 + key.expert,
            options=options or ResidencyOptions(),
        )

    def predict(self, *keys: tuple[int, int], confidence: float = 1.0) -> None:
        for layer, expert in keys:
            self.residency.predict(0, layer, [expert], [confidence])
        self.residency.pump()

    def use(self, layer: int, *experts: int) -> list[list[int]]:
        """Acquire and give back; the experts of each wave."""
        return [[lease.key.expert for lease in wave] for wave in self.residency.acquire(layer, experts)]

    def plain_pass(self, *experts_by_layer: Sequence[int], committed_tok: int = 1) -> None:
        self.residency.begin_pass(PassKind.PLAIN)
        for layer, experts in enumerate(experts_by_layer):
            self.use(layer, *experts)
        self.residency.end_pass(committed_tok)

    def fetched(self, cause: Cause) -> list[tuple[int, int]]:
        return [(fetch.key.layer, fetch.key.expert) for fetch in self.mover.submitted if fetch.cause is cause]


def test_hits_are_leased_at_once_and_the_rest_as_it_arrives() -> None:
    rig = Rig(num_slots=8)
    rig.plain_pass([1, 2])
    rig.residency.begin_pass(PassKind.PLAIN)
    waves = rig.residency.acquire(0, [3, 1, 4, 2])
    assert [lease.key.expert for lease in next(iter(waves))] == [1, 2]
    assert rig.fetched(Cause.DEMAND)[-2:] == [(0, 3), (0, 4)], "misses are on their way while hits compute"
    assert [[lease.key.expert for lease in wave] for wave in waves] == [[3], [4]]
    assert rig.residency.end_pass(1).misses == 2


def test_records_that_arrived_during_a_wave_share_the_next_one() -> None:
    rig = Rig(num_slots=8)
    rig.plain_pass([1])
    rig.residency.begin_pass(PassKind.PLAIN)
    sizes = []
    for wave in rig.residency.acquire(0, [1, 2, 3, 4]):
        sizes.append(len(wave))
        rig.mover.finish(len(rig.mover.in_flight))
    assert sizes == [1, 3]


def test_lease_names_the_slot_the_record_was_copied_to() -> None:
    rig = Rig(num_slots=3)
    rig.residency.begin_pass(PassKind.PLAIN)
    leases = [lease for wave in rig.residency.acquire(0, [5, 6]) for lease in wave]
    assert leases == [Lease(fetch.key, fetch.slot) for fetch in rig.mover.submitted]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_layer_larger_than_the_slots_comes_in_waves(num_slots: int) -> None:
    rig = Rig(num_slots=num_slots)
    rig.residency.begin_pass(PassKind.PLAIN)
    experts = [expert for wave in rig.use(0, *range(NUM_EXPERTS)) for expert in wave]
    assert sorted(experts) == list(range(NUM_EXPERTS))
    rig.residency.check()


def test_hit_is_resident_late_is_submitted_and_queued_is_a_miss() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=2))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (0, 1), (0, 2))
    rig.mover.finish()
    assert rig.fetched(Cause.SATURATE) == [(0, 0), (0, 1)], "the link is two deep, expert 2 is only queued"
    rig.use(0, 0, 1, 2)
    moved = rig.residency.end_pass(1)
    assert (moved.hits, moved.late, moved.misses) == (1, 1, 1)


def test_speculation_keeps_the_link_no_deeper_than_asked() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=3))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict(*((0, expert) for expert in range(6)))
    assert len(rig.mover.in_flight) == 3
    rig.mover.finish()
    rig.residency.pump()
    assert len(rig.mover.in_flight) == 3


def test_demand_goes_before_staging() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.residency.predict(0, 2, [1], [1.0])
    next(iter(rig.residency.acquire(0, [0])))
    assert [fetch.key for fetch in rig.mover.submitted] == [(0, 0), (2, 1)]


def test_speculation_goes_on_past_one_plan() -> None:
    rig = Rig(num_slots=100, options=ResidencyOptions(link_depth=1), num_experts=25)
    rig.residency.begin_pass(PassKind.PREFILL)
    for _ in range(100):
        rig.mover.finish()
        rig.residency.pump()
    assert len(rig.mover.submitted) == 100


def test_priming_fills_free_slots_and_evicts_nothing() -> None:
    rig = Rig(num_slots=2)
    rig.plain_pass([1])
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=5)
    rig.predict((2, 5), (2, 6))
    assert rig.fetched(Cause.PRIME) == [(2, 5)]
    rig.residency.predict(1, 3, [7], [1.0])
    rig.mover.finish()
    rig.residency.pump()
    assert rig.fetched(Cause.PREFETCH) == [(2, 6)]


def test_layers_ahead_are_staged_while_a_layer_computes() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (2, 1), (1, 1))
    rig.mover.finish()
    for _ in rig.residency.acquire(0, [0]):
        assert rig.fetched(Cause.STAGE) == [(1, 1)]
        rig.mover.finish()
        rig.residency.pump()
        assert rig.fetched(Cause.STAGE) == [(1, 1), (2, 1)]


def test_predicted_record_is_not_evicted_for_another_guess() -> None:
    rig = Rig(num_slots=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((3, 0))
    rig.mover.finish()
    rig.predict((0, 0))
    assert [fetch.key for fetch in rig.mover.submitted] == [(3, 0)]
    assert rig.use(0, 0) == [[0]], "demand takes the slot of the farther use"


def test_prefill_streams_every_layer_in_order() -> None:
    rig = Rig(num_slots=2 * NUM_EXPERTS, options=ResidencyOptions(link_depth=2))
    rig.residency.begin_pass(PassKind.PREFILL)
    for layer in range(NUM_LAYERS):
        rig.use(layer, *range(NUM_EXPERTS))
    moved = rig.residency.end_pass(1)
    assert [fetch.key for fetch in rig.mover.submitted] == [
        (layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)
    ]
    assert (moved.link_bytes, moved.wasted_bytes) == (moved.used_bytes, 0)


@pytest.mark.parametrize("kind", list(PassKind))
def test_without_prefetch_only_demand_crosses_the_link(kind: PassKind) -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(prefetch=False))
    rig.residency.begin_pass(kind)
    if kind is PassKind.DRAFT_VERIFY:
        rig.predict((0, 1), (1, 1))
    rig.use(0, 1)
    assert set(rig.residency.end_pass(1).bytes_by_cause) == {Cause.DEMAND}


def test_stall_is_the_time_the_link_was_waited_for() -> None:
    rig = Rig(num_slots=8)
    rig.residency.begin_pass(PassKind.PLAIN)
    for _ in rig.residency.acquire(0, [0, 1]):
        rig.mover.clock.advance(10.0)
    assert rig.residency.end_pass(1).stall_s == 2.0


def test_failed_guess_is_dropped_and_the_pass_goes_on() -> None:
    rig = Rig(num_slots=1)
    rig.mover.broken.add(ExpertKey(1, 1))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 1))
    rig.mover.finish()
    rig.residency.pump()
    assert len(rig.mover.submitted) == 1, "a record that failed is not guessed again in this pass"
    assert rig.use(0, 0) == [[0]]
    assert rig.residency.end_pass(1).failed == 1
    rig.residency.check()


def test_failed_record_raises_where_it_is_needed_and_the_next_request_is_served() -> None:
    rig = Rig(num_slots=4)
    rig.mover.broken.add(ExpertKey(0, 1))
    rig.residency.begin_pass(PassKind.PLAIN)
    with pytest.raises(StorageError, match="is gone; check the disk"):
        rig.use(0, 0, 1, 2)
    rig.residency.cancel()
    rig.residency.check()
    rig.mover.broken.clear()
    rig.plain_pass([0, 1, 2])
    rig.residency.settle()
    rig.residency.check()
    assert rig.residency.cache.num_in_flight == 0


def test_closing_a_wave_early_gives_its_leases_back() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.PLAIN)
    next(iter(rig.residency.acquire(0, [0, 1])))
    rig.residency.cancel()
    rig.plain_pass([2, 3], [0, 1])
    rig.residency.check()


def test_cancelled_predictions_are_not_fetched() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (1, 0))
    rig.residency.cancel()
    rig.residency.settle()
    rig.residency.pump()
    assert [fetch.key for fetch in rig.mover.submitted] == [(0, 0)]


def test_record_of_a_cancelled_prediction_can_be_evicted() -> None:
    rig = Rig(num_slots=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((3, 0))
    rig.mover.finish()
    rig.predict((2, 0))
    rig.residency.cancel()
    rig.plain_pass([5])
    assert rig.residency.counters().wasted_bytes == 100


def test_lru_with_every_slot_predicted_still_serves_demand() -> None:
    rig = Rig(num_slots=2, options=ResidencyOptions(eviction=Eviction.LRU))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((2, 0), (3, 0))
    rig.mover.finish(2)
    assert rig.use(0, 5) == [[5]]


def test_asking_twice_for_one_expert_is_our_bug() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.PLAIN)
    with pytest.raises(AssertionError, match="twice"):
        rig.residency.acquire(0, [1, 1])


def test_a_layer_is_asked_once_and_in_order() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.PLAIN)
    rig.use(1, 0)
    with pytest.raises(AssertionError, match="out of order"):
        rig.use(0, 0)
