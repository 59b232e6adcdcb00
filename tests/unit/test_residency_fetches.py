"""Guesses and demands at the mover: who is fetched when, for whose slot, and what is taken back."""

from __future__ import annotations

import pytest

from moespeq.residency import PassKind, ResidencyOptions
from moespeq.types import Cause, ExpertKey
from residency_rig import Rig


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
    rig.residency.predict([[], [], [1], []])
    rig.use(0, 0)
    assert [fetch.key for fetch in rig.mover.submitted] == [(0, 0), (2, 1)]


def test_speculation_goes_on_past_one_plan() -> None:
    rig = Rig(num_slots=100, options=ResidencyOptions(link_depth=1), num_experts=25)
    rig.residency.begin_pass(PassKind.PREFILL)
    rig.residency.expect_all()
    for _ in range(100):
        rig.mover.finish()
        rig.residency.pump()
    assert len(rig.mover.submitted) == 100


def test_a_prefill_begins_more_copies_ahead_than_a_round() -> None:
    rig = Rig(num_slots=8)
    rig.residency.begin_pass(PassKind.PREFILL)
    of_a_prefill = rig.mover.ahead_bytes
    rig.residency.end_pass(1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    assert of_a_prefill > rig.mover.ahead_bytes > 0


def test_priming_fills_free_slots_and_evicts_nothing() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=6)
    rig.predict((0, 1), (2, 5))
    rig.mover.finish(2)
    for _ in range(5):
        rig.predict((0, 1), (2, 5))
    rig.use(0, 1)
    rig.residency.end_pass(1)
    rig.residency.settle()
    rig.residency.cache.evict(1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=6)
    rig.predict((0, 5), (0, 6))
    assert rig.fetched(Cause.PRIME) == [(0, 5)]
    rig.mover.finish()
    rig.predict((0, 5))
    assert rig.fetched(Cause.PREFETCH)[2:] == []
    rig.predict((0, 5))
    assert rig.fetched(Cause.PREFETCH)[-1] == (0, 6), "as soon as the draft before needed"


def test_layers_ahead_are_staged_while_a_layer_computes() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=1))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (2, 1), (1, 1))
    rig.mover.finish()
    for _ in rig.residency.acquire(0, [0]):
        rig.residency.pump()
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


def test_hits_do_not_wait_for_more_than_the_first_misses() -> None:
    rig = Rig(num_slots=8)
    rig.plain_pass([0])
    rig.residency.begin_pass(PassKind.PLAIN)
    before = len(rig.mover.submitted)
    wave = next(rig.residency.acquire(0, [0, *range(1, 8)]))
    assert (wave.experts, len(rig.mover.submitted) - before) == ([0], 4)
    rig.residency.pump()
    assert [fetch.key.expert for fetch in rig.mover.submitted[before:]] == [1, 2, 3, 4, 5, 6, 7]


def test_queued_guess_that_is_asked_goes_out_again_as_demand() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (0, 1), (0, 2))
    assert rig.use(0, 0, 2) == [[0], [2]]
    moved = rig.residency.end_pass(1)
    assert (moved.late, moved.misses, moved.taken_back) == (2, 0, 2)
    assert rig.fetched(Cause.DEMAND) == [(0, 2)]
    assert moved.link_bytes == 100 + 102, "expert 1, predicted and not asked, never moved"
    rig.residency.check()


def test_queued_stage_that_is_asked_keeps_its_turn() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.use(0)
    rig.predict((1, 0), (1, 1), (1, 2), (2, 0))
    assert rig.use(1, 0, 2, 5) == [[0], [5], [2]], "demand first, then the stage that was queued"
    moved = rig.residency.end_pass(1)
    assert (moved.late, moved.misses, moved.taken_back) == (2, 1, 1)
    assert (rig.fetched(Cause.STAGE), rig.fetched(Cause.DEMAND)) == ([(1, 0), (1, 1), (1, 2), (2, 0)], [(1, 5)])
    rig.residency.check()


def test_demand_overtakes_queued_guesses_of_later_layers() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 0), (2, 0), (3, 0))
    assert rig.use(0, 5) == [[5]]
    assert [fetch.key for fetch in rig.mover.queued] == [(3, 0)], "it came second, behind what had begun"


def test_demand_takes_the_slot_of_the_farthest_queued_guess_before_a_predicted_record() -> None:
    rig = Rig(num_slots=3, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 0), (2, 0), (3, 0))
    rig.mover.finish()
    assert rig.use(0, 5) == [[5]]
    assert rig.use(1, 0) == [[0]]
    assert rig.residency.counters().wasted_bytes == 0
    assert rig.fetched(Cause.STAGE) == [(3, 0)], "taken back, then staged again when a slot was idle"
    rig.residency.check()


def test_guess_that_lost_its_slot_to_a_demand_is_staged_again() -> None:
    rig = Rig(num_slots=3, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((1, 0), (2, 0), (3, 0))
    rig.use(0, 5)
    rig.residency.pump()
    assert [fetch.key for fetch in rig.mover.queued] == [(3, 0)]
    assert rig.use(1, 0, 6) == [[0], [6]]
    rig.residency.pump()
    assert rig.fetched(Cause.STAGE) == [(3, 0), (3, 0)]
    rig.residency.check()


def test_predicted_record_that_left_for_a_demand_is_staged_again() -> None:
    rig = Rig(num_slots=2)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((2, 0), (3, 0))
    rig.mover.finish(2)
    rig.use(0)
    rig.residency.pump()
    rig.use(1, 5)
    rig.residency.pump()
    assert rig.fetched(Cause.STAGE) == [(3, 0)]


def test_record_predicted_in_vain_gives_its_slot_to_the_next_layers() -> None:
    rig = Rig(num_slots=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (1, 1))
    rig.mover.finish()
    rig.residency.pump()
    rig.use(0)
    rig.residency.pump()
    assert rig.fetched(Cause.STAGE) == [(1, 1)]


def test_guess_that_has_begun_is_not_taken_back() -> None:
    rig = Rig(num_slots=1, mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((3, 0))
    assert rig.use(0, 5) == [[5]], "it waited for the guess to arrive and took its slot"
    moved = rig.residency.end_pass(1)
    assert (moved.taken_back, moved.wasted_bytes) == (0, 100)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_has_not_begun_ends_with_its_pass(is_cancelled: bool) -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(link_depth=4), mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((0, 0), (1, 0), (2, 0))
    if is_cancelled:
        rig.residency.cancel()
    else:
        rig.residency.end_pass(1)
    assert (len(rig.residency.cache.submitted), rig.residency.counters().taken_back) == (1, 2)
    assert rig.mover.queued == []
    rig.residency.settle()
    rig.residency.check()


def test_what_lies_beyond_the_lookahead_is_not_fetched_for_and_is_a_miss() -> None:
    rig = Rig(num_slots=8, options=ResidencyOptions(lookahead_tok=2))
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=3)
    for expert in (0, 1, 2):
        rig.predict((1, expert))
    assert rig.fetched(Cause.PREFETCH) == [(1, 0), (1, 1)]
    rig.use(1, 0, 1, 2)
    moved = rig.residency.end_pass(1)
    assert (moved.late, moved.misses) == (2, 1)


def test_a_deep_queue_is_filled_up_in_batches() -> None:
    rig = Rig(num_slots=30, options=ResidencyOptions(link_depth=12), num_experts=30, mover_depth=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict(*((3, expert) for expert in range(30)))
    assert len(rig.mover.submitted) == 12
    rig.mover.finish()
    rig.residency.pump()
    assert len(rig.mover.submitted) == 12, "one less is deep enough"
    rig.mover.finish()
    rig.residency.pump()
    assert len(rig.mover.submitted) == 14


def test_a_guess_that_arrives_after_its_pass_can_leave_in_the_next() -> None:
    rig = Rig(num_slots=1)
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY)
    rig.predict((3, 0))
    rig.residency.end_pass(1)
    rig.residency.begin_pass(PassKind.PLAIN)
    rig.mover.finish()
    assert rig.use(0, 5) == [[5]], "or a demand would wait for ever"
    rig.residency.check()
