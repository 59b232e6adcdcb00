"""LFU and the count-based chunk plan do what they are compared for, with their weaknesses."""

from __future__ import annotations

import pytest

from moespeq.residency import Eviction, PassKind, ResidencyOptions
from moespeq.types import Cause
from residency_rig import NUM_LAYERS, Rig


def rig(num_slots: int, eviction: Eviction, *, link_depth: int = 100, mover_depth: int = 100) -> Rig:
    return Rig(num_slots, ResidencyOptions(eviction=eviction, link_depth=link_depth), mover_depth=mover_depth)


def resident(rig: Rig) -> set[tuple[int, int]]:
    return {(record // 8, record % 8) for record in rig.residency.cache.resident}


def test_lfu_gives_up_what_was_used_least_and_never_forgets() -> None:
    used = rig(2, Eviction.LFU)
    for _ in range(3):
        used.plain_pass([0])
    used.plain_pass([1], committed_tok=500)
    used.plain_pass([2], committed_tok=500)
    assert resident(used) == {(0, 0), (0, 2)}


def test_lfu_breaks_ties_by_recency() -> None:
    used = rig(2, Eviction.LFU)
    for expert in (0, 1, 2):
        used.plain_pass([expert])
    assert resident(used) == {(0, 1), (0, 2)}


def test_lfu_counts_uses_of_records_that_left() -> None:
    used = rig(2, Eviction.LFU)
    for expert in (0, 0, 1, 2, 1, 3):  # 1 comes back with two uses
        used.plain_pass([expert])
    assert resident(used) == {(0, 1), (0, 3)}, "0 and 1 have two uses each, and 0's are older"


def test_a_chunk_is_fetched_most_counted_first_whatever_asks_first() -> None:
    drafted = rig(8, Eviction.CHUNK, link_depth=1, mover_depth=1)
    drafted.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=2)
    drafted.predict((0, 0), (3, 5), (1, 2))
    drafted.predict((3, 5), (2, 4), (1, 2))
    drafted.use(0, 0)
    while drafted.mover.in_flight or drafted.mover.arrived:
        drafted.mover.finish(len(drafted.mover.in_flight))
        drafted.residency.pump()
    order = [(fetch.key.layer, fetch.key.expert) for fetch in drafted.mover.submitted]
    assert order == [(0, 0), (1, 2), (3, 5), (2, 4)]


def test_a_chunk_counts_from_its_first_step_and_takes_idle_slots_at_once() -> None:
    drafted = rig(1, Eviction.CHUNK)
    drafted.plain_pass([7])
    drafted.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=9)
    drafted.predict((2, 3))
    assert drafted.fetched(Cause.PREFETCH) == [(2, 3)]
    assert drafted.fetched(Cause.PRIME) == []


def test_a_demand_gives_up_the_least_counted_even_where_it_is_newer_and_needed_sooner() -> None:
    drafted = rig(2, Eviction.CHUNK)
    drafted.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=2)
    for named in ([(3, 5)], [(3, 5), (1, 2)]):
        drafted.predict(*named)
        drafted.mover.finish()
        drafted.residency.pump()
    drafted.use(0, 6)
    assert (3, 5) in resident(drafted)
    assert (1, 2) not in resident(drafted)


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.CHUNK])
def test_a_prefill_streams_in_layer_order_under_any_policy(eviction: Eviction) -> None:
    prefill = rig(NUM_LAYERS * 8, eviction, link_depth=1, mover_depth=1)
    prefill.residency.begin_pass(PassKind.PREFILL)
    prefill.residency.expect_all()
    layers = [layer for layer, _ in prefill.fetched(Cause.STAGE)]
    assert layers == [0] * 8 + [1] * 8, "half of the slots, before any layer asks"
