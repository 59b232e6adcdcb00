"""Order: the layer that asks first, inside it the most expected; prefetch begins just in time; nothing twice."""

from __future__ import annotations

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.scheduler import DraftLead, Scheduler
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

NUM_LAYERS, NUM_EXPERTS = 4, 10
Expert = tuple[int, int]


class Bench:
    """A scheduler whose records are submitted as soon as it names them."""

    def __init__(self, *, num_draft_steps: int = 0, is_draft: bool = True) -> None:
        record_bytes = [10] * NUM_LAYERS * NUM_EXPERTS
        self.cache = SlotCache(len(record_bytes), record_bytes, num_experts=NUM_EXPERTS)
        self.lookahead = ExpertLookahead(NUM_LAYERS, NUM_EXPERTS)
        self.frequency = UseFrequency(len(record_bytes))
        self.scheduler = Scheduler(self.cache, self.lookahead, self.frequency)
        self.scheduler.begin(is_draft=is_draft, num_draft_steps=num_draft_steps)

    def step(self, *experts: Expert) -> None:
        """One draft step that routed to these."""
        routes = [[expert for at, expert in experts if at == layer] for layer in range(NUM_LAYERS)]
        self.lookahead.add(routes)

    def take(self, limit: int = 9) -> list[Expert]:
        """The next records, each submitted."""
        taken: list[Expert] = []
        while len(taken) < limit and (record := self.scheduler.next()) is not None:
            self.cache.reserve(record, self.scheduler.cause)
            taken.append(divmod(record, NUM_EXPERTS))
        return taken


def test_uses_of_several_steps_add_up() -> None:
    bench = Bench()
    bench.step((2, 1), (0, 0))
    bench.step((2, 1))
    bench.step((2, 0))
    assert bench.take() == [(0, 0), (2, 1), (2, 0)]
    assert bench.take() == []


def test_a_later_step_changes_the_order_of_what_is_left() -> None:
    bench = Bench()
    bench.step((0, 0), (1, 0), (1, 1), (2, 0))
    assert bench.take(2) == [(0, 0), (1, 0)]
    bench.step((2, 0), (2, 1), (0, 3), (1, 5), (1, 5))
    assert bench.take() == [(0, 3), (1, 5), (1, 1), (2, 0), (2, 1)]


def test_a_far_layer_waits_however_often_it_is_named() -> None:
    bench = Bench()
    for _ in range(3):
        bench.step((3, 1))
    bench.step((0, 7))
    assert bench.take() == [(0, 7), (3, 1)]


def test_equal_value_is_fetched_by_id() -> None:
    bench = Bench()
    bench.step((2, 0), (1, 3), (1, 2))
    assert bench.take() == [(1, 2), (1, 3), (2, 0)]


def test_what_is_cached_is_not_named() -> None:
    for is_draft in (True, False):
        bench = Bench(is_draft=is_draft)
        bench.cache.reserve(0, Cause.DEMAND)
        bench.step((0, 0), (1, 0))
        assert bench.take() == [(1, 0)]


def test_stage_goes_by_layer_then_by_expected_uses() -> None:
    bench = Bench(is_draft=False)
    bench.step((1, 0), (0, 1), (0, 0))
    bench.step((1, 0), (0, 1))
    assert bench.take() == [(0, 1), (0, 0), (1, 0)]


def test_stage_breaks_ties_inside_a_layer_by_frequency() -> None:
    bench = Bench(is_draft=False)
    bench.frequency.touch([12])
    bench.lookahead.expect_all()
    bench.lookahead.retire(0)
    assert bench.take(2) == [(1, 2), (1, 0)]
    assert bench.scheduler.cause is Cause.STAGE


def test_a_draft_is_staged_from_its_first_layer_on() -> None:
    bench = Bench()
    bench.step((0, 0), (2, 0), (1, 0))
    bench.step((2, 0))
    bench.lookahead.retire(0)
    assert bench.take() == [(1, 0), (2, 0)]


def test_record_that_is_missing_again_is_staged_again() -> None:
    bench = Bench(is_draft=False)
    bench.step((1, 0), (2, 0), (3, 0))
    assert bench.take() == [(1, 0), (2, 0), (3, 0)]
    bench.cache.abandon(20)
    assert bench.take() == []
    bench.scheduler.reopen(2)
    assert bench.take() == [(2, 0)]


def test_what_is_missing_again_keeps_the_order_of_layers() -> None:
    bench = Bench(is_draft=False)
    bench.step((1, 0), (1, 1), (2, 0), (2, 1))
    assert bench.take(3) == [(1, 0), (1, 1), (2, 0)]
    bench.cache.abandon(10)
    bench.scheduler.reopen(1)
    assert bench.take() == [(1, 0), (2, 1)]


def test_failed_record_is_not_named_again() -> None:
    bench = Bench()
    bench.step((0, 0), (0, 0), (1, 0))
    assert bench.take(1) == [(0, 0)]
    bench.cache.abandon(0)
    bench.lookahead.drop(0)
    bench.scheduler.reopen(0)
    assert bench.take() == [(1, 0)]


def test_layers_behind_the_front_are_never_named() -> None:
    bench = Bench(is_draft=False)
    bench.step((0, 0), (1, 0), (2, 0))
    assert set(bench.lookahead.retire(1)) == {0, 10}
    bench.step((0, 5))
    assert bench.take() == [(2, 0)]


def test_nothing_is_named_after_the_pass() -> None:
    bench = Bench(is_draft=False)
    bench.step((0, 0), (2, 0))
    bench.take(1)
    bench.scheduler.clear()
    bench.lookahead.clear()
    assert (bench.take(), bench.lookahead.front, bench.lookahead.num_steps) == ([], 0, 0)


def causes(bench: Bench, num_steps: int) -> list[Cause]:
    """Before the first step, and after each of them."""
    found = [bench.scheduler.cause]
    for _ in range(num_steps):
        bench.step((3, 0))
        found.append(bench.scheduler.cause)
    return found


def finish_draft(bench: Bench) -> None:
    """The first layer asks; then the next draft of as many steps begins."""
    bench.scheduler.end_draft()
    bench.scheduler.clear()
    bench.lookahead.clear()
    bench.scheduler.begin(is_draft=True, num_draft_steps=4)


def test_the_first_draft_prefetches_at_once_and_saturates_at_its_end() -> None:
    assert causes(Bench(num_draft_steps=4), 4) == [Cause.PREFETCH] * 4 + [Cause.SATURATE]


def test_a_draft_of_unknown_length_counts_as_drafted() -> None:
    assert Bench(num_draft_steps=0).scheduler.cause is Cause.SATURATE


def test_a_draft_primes_for_as_long_as_the_one_before_had_time_to_spare() -> None:
    bench = Bench(num_draft_steps=4)
    bench.step((3, 0))
    bench.scheduler.note_full()
    for _ in range(3):
        bench.step((3, 0))
        bench.scheduler.note_full()
    finish_draft(bench)
    assert causes(bench, 4) == [Cause.PRIME] * 2 + [Cause.PREFETCH] * 2 + [Cause.SATURATE]


def test_a_draft_whose_link_worked_to_the_end_leaves_the_lead_as_it_is() -> None:
    bench = Bench(num_draft_steps=4)
    bench.step((3, 0))
    bench.take(1)
    bench.scheduler.note_full()
    for _ in range(3):
        bench.step((3, 0))
    finish_draft(bench)
    assert causes(bench, 4) == [Cause.PREFETCH] * 4 + [Cause.SATURATE]


def test_a_draft_that_left_idle_slots_makes_the_next_one_begin_sooner() -> None:
    lead = DraftLead()
    lead.learn(num_steps=20, is_full=True, done_at=4)
    assert lead.steps == 5
    lead.learn(num_steps=20, is_full=False, done_at=None)
    assert lead.steps == 8.5
    lead.learn(num_steps=20, is_full=True, done_at=None)
    assert lead.steps == 8.5
    lead.learn(num_steps=20, is_full=True, done_at=12)
    assert lead.steps == 1.5


def test_a_short_draft_does_not_shorten_what_a_long_one_has_learned() -> None:
    lead = DraftLead()
    lead.learn(num_steps=33, is_full=True, done_at=16)
    lead.learn(num_steps=3, is_full=False, done_at=None)
    assert lead.steps == 17
