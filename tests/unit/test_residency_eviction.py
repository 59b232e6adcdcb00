"""Who leaves: idle records by frequency, then the farthest next use; never a pinned or sooner one."""

from __future__ import annotations

import pytest

from moespeq.residency.eviction import EvictionPolicy, LruEviction, NextUseEviction
from moespeq.residency.frequency import DECAY_PER_TOK, UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache
from moespeq.types import ExpertKey


class Bench:
    """A cache full of resident records of layers 0..3, each offered once."""

    def __init__(self, *keys: tuple[int, int], is_lru: bool = False) -> None:
        self.cache = SlotCache(len(keys))
        self.lookahead = ExpertLookahead(4)
        self.frequency = UseFrequency()
        self.policy: EvictionPolicy = (
            LruEviction(self.cache, self.lookahead)
            if is_lru
            else NextUseEviction(self.cache, self.lookahead, self.frequency)
        )
        for key in keys:
            self.add(ExpertKey(*key))

    def add(self, key: ExpertKey) -> None:
        self.cache.reserve(key, 1)
        self.cache.complete(key)
        self.policy.offer(key)

    def use(self, *keys: tuple[int, int], committed_tok: int = 0) -> None:
        """One pass that uses these records."""
        for key in keys:
            self.policy.touch(ExpertKey(*key))
        self.policy.end_pass(committed_tok)

    def predict(self, *keys: tuple[int, int]) -> None:
        for layer, expert in keys:
            self.lookahead.add(0, layer, [(expert, 1.0)])


INCOMING = ExpertKey(1, 99)


def test_least_frequent_idle_record_leaves_first() -> None:
    bench = Bench((0, 0), (0, 1), (0, 2))
    bench.use((0, 0), (0, 1), (0, 2))
    bench.use((0, 0), (0, 2))
    assert bench.policy.idle_victim() == (0, 1)


def test_ties_leave_the_farther_layer_first_then_by_id() -> None:
    bench = Bench((0, 0), (1, 1), (1, 0))
    bench.use((0, 0), (1, 1), (1, 0))
    assert bench.policy.idle_victim() == (1, 0)


def test_a_use_counts_when_its_pass_ends() -> None:
    bench = Bench((0, 0), (1, 0))
    bench.use((0, 0), (1, 0))
    bench.policy.touch(ExpertKey(1, 0))
    assert bench.policy.idle_victim() == (1, 0), "behind the front is no better than ahead of it"
    bench.policy.end_pass(1)
    assert bench.policy.idle_victim() == (0, 0)


def test_old_uses_fade_with_committed_tokens() -> None:
    bench = Bench((0, 0), (0, 1))
    bench.use((0, 0))
    bench.use((0, 0), committed_tok=100)
    bench.use((0, 1))
    assert bench.frequency.of(ExpertKey(0, 0)) == pytest.approx((1 + 1) * DECAY_PER_TOK**100)
    assert bench.frequency.of(ExpertKey(0, 1)) == pytest.approx(1.0)
    assert bench.policy.idle_victim() == (0, 0)


def test_predicted_record_outlives_every_idle_one() -> None:
    bench = Bench((0, 0), (0, 1))
    for _ in range(3):
        bench.use((0, 1))
    bench.predict((0, 0))
    assert bench.policy.victim_for(INCOMING) == (0, 1)


def test_farthest_next_use_leaves_when_nothing_is_idle() -> None:
    bench = Bench((2, 0), (3, 1), (3, 0))
    bench.predict((2, 0), (3, 1), (3, 0))
    assert bench.policy.victim_for(INCOMING) == (3, 0)


def test_sooner_record_never_leaves_for_a_later_one() -> None:
    bench = Bench((0, 0), (1, 1))
    bench.predict((0, 0), (1, 1))
    assert bench.policy.victim_for(INCOMING) is None


@pytest.mark.parametrize("is_lru", [False, True])
def test_a_guess_never_displaces_a_predicted_record(is_lru: bool) -> None:
    bench = Bench((3, 0), is_lru=is_lru)
    bench.predict((3, 0))
    assert bench.policy.idle_victim() is None


def test_record_is_idle_again_once_its_layer_has_asked() -> None:
    bench = Bench((0, 0), (3, 0))
    bench.predict((0, 0), (3, 0))
    for key in bench.lookahead.retire(0):
        bench.policy.offer(key)
    assert bench.policy.victim_for(INCOMING) == (0, 0)


def test_candidates_do_not_pile_up_when_nothing_is_evicted() -> None:
    bench = Bench((0, 0), (0, 1))
    for _ in range(1000):
        bench.use((0, 0), (0, 1), committed_tok=1)
    assert isinstance(bench.policy, NextUseEviction)
    assert len(bench.policy._heap) <= 4 * 2
    assert bench.policy.idle_victim() == (0, 0)


@pytest.mark.parametrize("is_lru", [False, True])
def test_pinned_and_in_flight_records_never_leave(is_lru: bool) -> None:
    bench = Bench((2, 0), (2, 1), is_lru=is_lru)
    bench.cache.pin(ExpertKey(2, 0))
    bench.cache.evict(ExpertKey(2, 1))
    bench.cache.reserve(ExpertKey(2, 2), 1)
    assert bench.policy.idle_victim() is None
    assert bench.policy.victim_for(INCOMING) is None


def test_lru_takes_the_least_recently_used_whatever_is_predicted() -> None:
    bench = Bench((0, 0), (3, 0), is_lru=True)
    bench.use((3, 0), (0, 0))
    bench.predict((3, 0))
    assert bench.policy.victim_for(INCOMING) == (3, 0)


def test_lru_forgets_evicted_records() -> None:
    bench = Bench((0, 0), (0, 1), is_lru=True)
    bench.cache.evict(ExpertKey(0, 0))
    bench.add(ExpertKey(0, 2))
    assert bench.policy.victim_for(INCOMING) == (0, 1)
    bench.cache.evict(ExpertKey(0, 1))
    bench.add(ExpertKey(0, 0))
    assert bench.policy.victim_for(INCOMING) == (0, 2)
