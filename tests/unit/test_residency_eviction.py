"""Who leaves: idle records by frequency, then the farthest next use; never a pinned or sooner one."""

from __future__ import annotations

import pytest

from moespeq.residency.eviction import EvictionPolicy, LruEviction, NextUseEviction
from moespeq.residency.frequency import DECAY_PER_TOK, UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

NUM_LAYERS, NUM_EXPERTS = 4, 10
Expert = tuple[int, int]


def number(expert: Expert) -> int:
    return expert[0] * NUM_EXPERTS + expert[1]


class Bench:
    """A cache full of resident records of layers 0..3, each offered once."""

    def __init__(self, *experts: Expert, is_lru: bool = False) -> None:
        self.cache = SlotCache(len(experts), [1] * NUM_LAYERS * NUM_EXPERTS, num_experts=NUM_EXPERTS)
        self.lookahead = ExpertLookahead(NUM_LAYERS, NUM_EXPERTS)
        self.frequency = UseFrequency(NUM_LAYERS * NUM_EXPERTS)
        self.policy: EvictionPolicy = (
            LruEviction(self.cache, self.lookahead)
            if is_lru
            else NextUseEviction(self.cache, self.lookahead, self.frequency)
        )
        for expert in experts:
            self.add(expert)

    def add(self, expert: Expert) -> None:
        self.cache.reserve(number(expert), Cause.DEMAND)
        self.cache.complete(number(expert))
        self.policy.arrive(number(expert))
        self.policy.offer([number(expert)])

    def use(self, *experts: Expert, committed_tok: int = 0) -> None:
        """One pass that uses these records."""
        self.policy.touch([number(expert) for expert in experts], {})
        self.policy.end_pass(committed_tok)

    def predict(self, *experts: Expert) -> None:
        self.lookahead.add([[expert for at, expert in experts if at == layer] for layer in range(NUM_LAYERS)])

    def idle_victim(self) -> Expert | None:
        victim = self.policy.idle_victim()
        return None if victim is None else divmod(victim, NUM_EXPERTS)

    def last_victim(self) -> Expert | None:
        """For a record of layer 1."""
        victim = self.policy.last_victim(number((1, 9)))
        return None if victim is None else divmod(victim, NUM_EXPERTS)


def test_least_frequent_idle_record_leaves_first() -> None:
    bench = Bench((0, 0), (0, 1), (0, 2))
    bench.use((0, 0), (0, 1), (0, 2))
    bench.use((0, 0), (0, 2))
    assert bench.idle_victim() == (0, 1)


def test_ties_leave_the_farther_layer_first_then_by_id() -> None:
    bench = Bench((0, 0), (1, 1), (1, 0))
    bench.use((0, 0), (1, 1), (1, 0))
    assert bench.idle_victim() == (1, 0)


def test_a_use_counts_when_its_pass_ends() -> None:
    bench = Bench((0, 0), (1, 0))
    bench.use((0, 0), (1, 0))
    bench.policy.touch([10], {})
    assert bench.idle_victim() == (1, 0), "behind the front is no better than ahead of it"
    bench.policy.end_pass(1)
    assert bench.idle_victim() == (0, 0)


def test_old_uses_fade_with_committed_tokens() -> None:
    bench = Bench((0, 0), (0, 1))
    bench.use((0, 0))
    bench.use((0, 0), committed_tok=100)
    bench.use((0, 1))
    assert bench.frequency.of(0) == pytest.approx((1 + 1) * DECAY_PER_TOK**100)
    assert bench.frequency.of(1) == pytest.approx(1.0)
    assert bench.idle_victim() == (0, 0)


def test_order_survives_any_number_of_tokens() -> None:
    bench = Bench((0, 0), (0, 1))
    for _ in range(400):
        bench.use((0, 0), (0, 1), committed_tok=64)
    bench.use((0, 1))
    fading = DECAY_PER_TOK**64
    assert bench.frequency.of(0) == pytest.approx(fading / (1 - fading))
    assert bench.frequency.of(1) == pytest.approx(fading / (1 - fading) + 1)
    assert bench.idle_victim() == (0, 0)


def test_predicted_record_outlives_every_idle_one() -> None:
    bench = Bench((0, 0), (0, 1))
    for _ in range(3):
        bench.use((0, 1))
    bench.predict((0, 0))
    assert bench.idle_victim() == (0, 1)


def test_farthest_next_use_leaves_when_nothing_is_idle() -> None:
    bench = Bench((2, 0), (3, 1), (3, 0))
    bench.predict((2, 0), (3, 1), (3, 0))
    assert bench.last_victim() == (3, 0)


def test_sooner_record_never_leaves_for_a_later_one() -> None:
    bench = Bench((0, 0), (1, 1))
    bench.predict((0, 0), (1, 1))
    assert bench.last_victim() is None


@pytest.mark.parametrize("is_lru", [False, True])
def test_a_guess_never_displaces_a_predicted_record(is_lru: bool) -> None:
    bench = Bench((3, 0), is_lru=is_lru)
    bench.predict((3, 0))
    assert bench.idle_victim() is None


def test_record_is_idle_again_once_its_layer_has_asked() -> None:
    bench = Bench((0, 0), (3, 0))
    bench.predict((0, 0), (3, 0))
    assert bench.idle_victim() is None
    bench.policy.offer(bench.lookahead.retire(0))
    assert bench.idle_victim() == (0, 0)


def test_candidates_do_not_pile_up_when_nothing_is_evicted() -> None:
    bench = Bench((0, 0), (0, 1))
    for _ in range(1000):
        bench.use((0, 0), (0, 1), committed_tok=1)
    assert isinstance(bench.policy, NextUseEviction)
    assert bench.idle_victim() == (0, 0)
    assert [len(rest) for *_, rest in bench.policy._runs] == [1]


@pytest.mark.parametrize("is_lru", [False, True])
def test_pinned_and_in_flight_records_never_leave(is_lru: bool) -> None:
    bench = Bench((2, 0), (2, 1), is_lru=is_lru)
    bench.cache.pin([20])
    bench.cache.evict(21)
    bench.cache.reserve(22, Cause.DEMAND)
    assert bench.idle_victim() is None
    assert bench.last_victim() is None


def test_lru_takes_the_least_recently_used_whatever_is_predicted() -> None:
    bench = Bench((0, 0), (3, 0), is_lru=True)
    bench.use((3, 0), (0, 0))
    bench.predict((3, 0))
    assert bench.last_victim() == (3, 0)


def test_lru_forgets_evicted_records() -> None:
    bench = Bench((0, 0), (0, 1), is_lru=True)
    bench.cache.evict(0)
    bench.add((0, 2))
    assert bench.last_victim() == (0, 1)
    bench.cache.evict(1)
    bench.add((0, 0))
    assert bench.last_victim() == (0, 2)
