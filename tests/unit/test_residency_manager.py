"""Residency at its border: what a wave holds, what counts as hit, late and miss, and what an error leaves behind."""

from __future__ import annotations

import pytest

from moespeq.errors import StorageError
from moespeq.residency import Eviction, PassKind, ResidencyOptions, Wave
from moespeq.types import Cause, Completion, ExpertKey
from residency_rig import NUM_EXPERTS, NUM_LAYERS, Rig


def test_hits_are_leased_at_once_and_the_rest_as_it_arrives() -> None:
    rig = Rig(num_slots=8)
    rig.plain_pass([1, 2])
    rig.residency.begin_pass(PassKind.PLAIN)
    waves = rig.residency.acquire(0, [3, 1, 4, 2])
    assert list(next(waves).experts) == [1, 2]
    assert rig.fetched(Cause.DEMAND)[-2:] == [(0, 3), (0, 4)], "misses are on their way while hits compute"
    assert [list(wave.experts) for wave in waves] == [[3], [4]]
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


def test_wave_names_the_slot_the_record_was_copied_to() -> None:
    rig = Rig(num_slots=3)
    rig.residency.begin_pass(PassKind.PLAIN)
    waves = list(rig.residency.acquire(0, [5, 6]))
    first, second = rig.mover.submitted
    assert waves == [
        Wave(0, [first.key.expert], [first.slot], [0], is_last=False),
        Wave(0, [second.key.expert], [second.slot], [0], is_last=True),
    ]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_layer_larger_than_the_slots_comes_in_waves(num_slots: int) -> None:
    rig = Rig(num_slots=num_slots)
    rig.residency.begin_pass(PassKind.PLAIN)
    experts = [expert for wave in rig.use(0, *range(NUM_EXPERTS)) for expert in wave]
    assert sorted(experts) == list(range(NUM_EXPERTS))
    rig.residency.check()


def test_hit_is_resident_late_is_foretold_or_on_its_way_and_the_rest_is_a_miss() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=2))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (0, 1), (0, 2))
    rig.mover.finish()
    assert rig.fetched(Cause.SATURATE) == [(0, 0), (0, 1)], "the link is two deep, expert 2 is only planned"
    rig.use(0, 0, 1, 2, 3)
    moved = rig.residency.end_pass(1)
    assert (moved.hits, moved.late, moved.misses) == (1, 2, 1)


def test_prefill_streams_every_layer_in_order() -> None:
    rig = Rig(num_slots=2 * NUM_EXPERTS, options=ResidencyOptions(link_depth=2))
    rig.residency.begin_pass(PassKind.PREFILL)
    rig.residency.expect_all()
    for layer in range(NUM_LAYERS):
        rig.use(layer, *range(NUM_EXPERTS))
    moved = rig.residency.end_pass(1)
    assert [fetch.key for fetch in rig.mover.submitted] == [
        (layer, expert) for layer in range(NUM_LAYERS) for expert in range(NUM_EXPERTS)
    ]
    assert (moved.link_bytes, moved.wasted_bytes) == (moved.used_bytes, 0)


def test_a_prompt_that_streams_all_begins_with_its_first_layer_though_no_slot_is_idle() -> None:
    rig = Rig(num_slots=NUM_EXPERTS + 2, options=ResidencyOptions(link_depth=2))
    rig.plain_pass([], [], range(2), range(NUM_EXPERTS))
    num_before = len(rig.mover.submitted)

    rig.residency.begin_pass(PassKind.PREFILL)
    rig.residency.expect_all()

    begun = [fetch.key for fetch in rig.mover.submitted[num_before:]]
    assert begun == [(0, expert) for expert in range(5)], "the link rests until the first layer asks"
    kept = sorted(record // NUM_EXPERTS for record in rig.residency.cache.resident)
    assert kept == [2, 2, 3, 3, 3], "the farthest use leaves first, as it would for a demand"


def test_what_a_prefill_foresees_is_fetched_in_layer_order_whenever_it_is_told() -> None:
    rig = Rig(8, ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.PREFILL)
    for layer, routes in enumerate([[[3, 1], [3, 2]], [[5, 6], [5, 7]]]):
        rig.residency.expect(layer, routes)
    while rig.mover.in_flight:
        rig.mover.finish()
        rig.residency.pump()
    assert rig.fetched(Cause.STAGE) == [(0, 3), (0, 1), (0, 2), (1, 5), (1, 6), (1, 7)]


@pytest.mark.parametrize("kind", list(PassKind))
def test_without_prefetch_only_demand_crosses_the_link(kind: PassKind) -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(prefetch=False))
    rig.residency.begin_pass(kind)
    if kind is PassKind.DRAFT_VERIFY:
        rig.predict((0, 1), (1, 1))
    rig.use(0, 1)
    assert set(rig.residency.end_pass(1).bytes_by_cause) == {Cause.DEMAND}


@pytest.mark.parametrize(("wave_bytes", "sizes"), [(0, [2, 1, 1, 1, 1]), (300, [3, 3])])
def test_a_prefill_wave_waits_until_it_is_large_enough(wave_bytes: int, sizes: list[int]) -> None:
    rig = Rig(num_slots=12, options=ResidencyOptions(prefill_wave_bytes=wave_bytes))
    rig.plain_pass([1, 2])
    rig.residency.begin_pass(PassKind.PREFILL)
    assert [len(wave) for wave in rig.residency.acquire(0, [1, 2, 3, 4, 5, 6])] == sizes


@pytest.mark.parametrize(("num_slots", "sizes"), [(1, [1] * 6), (4, [1] * 6), (8, [2, 2, 2])])
def test_a_prefill_wave_takes_no_more_than_a_quarter_of_the_slots(num_slots: int, sizes: list[int]) -> None:
    rig = Rig(num_slots, ResidencyOptions(prefill_wave_bytes=800))
    rig.residency.begin_pass(PassKind.PREFILL)
    assert [len(wave) for wave in rig.residency.acquire(0, [1, 2, 3, 4, 5, 6])] == sizes


def test_what_a_prefill_asks_stays_where_it_is_queued() -> None:
    rig = Rig(8, ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.PREFILL)
    rig.residency.expect(0, [[1, 2, 3, 4]])
    rig.use(0, 2, 4)
    moved = rig.residency.end_pass(1)
    assert (moved.late, moved.misses, moved.taken_back) == (2, 0, 1), "3 is taken back, 1 has begun"
    assert Cause.DEMAND not in moved.bytes_by_cause


def test_a_record_in_flight_is_handed_out_where_the_device_waits_for_it() -> None:
    rig = Rig(num_slots=4, has_device_waits=True)
    rig.residency.begin_pass(PassKind.PLAIN)
    waves = [list(wave.experts) for wave in rig.residency.acquire(0, [1, 2])]
    assert waves == [[1, 2]]
    assert len(rig.mover.in_flight) == 2  # nothing has arrived yet
    moved = rig.residency.end_pass(1)
    assert not rig.mover.in_flight
    assert (moved.misses, moved.used_bytes, moved.stall_s) == (2, 203, 2.0)


def test_a_record_handed_out_and_then_lost_fails_its_pass() -> None:
    rig = Rig(num_slots=4, has_device_waits=True)
    rig.mover.broken = {ExpertKey(3, 1)}
    rig.residency.begin_pass(PassKind.PLAIN)
    assert rig.use(3, 1) == [[1]]
    with pytest.raises(StorageError, match="is gone"):
        rig.residency.end_pass(1)
    rig.mover.broken = set()
    rig.plain_pass([], [], [], [1])


def test_a_record_handed_out_stays_while_its_wave_is_open() -> None:
    rig = Rig(num_slots=1, has_device_waits=True)
    rig.residency.begin_pass(PassKind.PLAIN)
    waves = rig.residency.acquire(0, [1, 2])
    slot = next(waves).slots[0]
    rig.mover.finish()
    rig.residency.pump()
    assert rig.residency.cache.pinned
    assert next(waves).slots[0] == slot
    assert not rig.residency.cache.pinned


def test_stall_is_the_time_the_link_was_waited_for() -> None:
    rig = Rig(num_slots=8)
    rig.residency.begin_pass(PassKind.PLAIN)
    for _ in rig.residency.acquire(0, [0, 1]):
        rig.mover.clock.advance(10.0)
    assert rig.residency.end_pass(1).stall_s == 2.0
    assert rig.residency.take_stalls() == [(0.0, 1.0), (11.0, 12.0)]
    assert rig.residency.take_stalls() == []


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
    assert not rig.residency.cache.submitted


def test_an_error_that_nobody_put_into_words_is_raised_and_its_slot_is_free_again() -> None:
    rig = Rig(1, ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.PREFILL)
    rig.residency.expect_all()
    (fetch,) = rig.mover.submitted
    rig.mover.in_flight.clear()
    rig.mover.arrived.append(Completion(fetch, 0.0, "gone", bug=ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        rig.residency.pump()
    rig.residency.cancel()
    rig.residency.settle()
    rig.plain_pass([1])
    rig.residency.check()


def test_closing_a_wave_early_gives_its_leases_back() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.PLAIN)
    next(rig.residency.acquire(0, [0, 1]))
    rig.residency.cancel()
    rig.plain_pass([2, 3], [0, 1])
    rig.residency.check()


def test_restart_empties_the_slots_and_goes_by_the_new_options() -> None:
    rig = Rig(num_slots=4)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 0))
    rig.use(0, 0)
    rig.residency.cancel()
    rig.residency.restart(ResidencyOptions(prefetch=False))
    assert (rig.residency.cache.resident, rig.residency.cache.submitted, rig.mover.in_flight) == ({}, {}, [])
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 0))
    rig.use(0, 0)
    assert (rig.residency.counters().misses, set(rig.residency.counters().bytes_by_cause)) == (1, {Cause.DEMAND})
    rig.residency.check()


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
