"""The slot state machine: legal transitions, pins, and where every byte went."""

from __future__ import annotations

import pytest

from moespeq.residency.slots import SlotCache
from moespeq.types import ExpertKey

A, B, C = ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(1, 0)


def resident(cache: SlotCache, key: ExpertKey, num_bytes: int = 10) -> None:
    cache.reserve(key, num_bytes)
    cache.complete(key)


def test_record_is_not_resident_before_it_is_complete() -> None:
    cache = SlotCache(1)
    cache.reserve(A, 10)
    assert A in cache.slot_of
    assert not cache.is_resident(A)
    assert not cache.is_evictable(A)
    cache.complete(A)
    assert cache.is_resident(A)
    cache.check()


def test_one_record_never_has_two_slots() -> None:
    cache = SlotCache(2)
    cache.reserve(A, 10)
    with pytest.raises(AssertionError, match="already in the cache"):
        cache.reserve(A, 10)


def test_slots_are_never_more_than_the_budget() -> None:
    cache = SlotCache(2)
    cache.reserve(A, 10)
    cache.reserve(B, 10)
    assert not cache.has_free()
    with pytest.raises(AssertionError, match="no free slot"):
        cache.reserve(C, 10)


def test_pinned_record_is_never_evicted() -> None:
    cache = SlotCache(1)
    resident(cache, A)
    cache.pin(A)
    cache.pin(A)
    cache.unpin(A)
    with pytest.raises(AssertionError, match="pinned"):
        cache.evict(A)
    cache.unpin(A)
    cache.evict(A)
    assert cache.has_free()
    cache.check()


def test_record_in_flight_can_neither_be_pinned_nor_evicted() -> None:
    cache = SlotCache(1)
    cache.reserve(A, 10)
    with pytest.raises(AssertionError, match="not resident"):
        cache.pin(A)
    with pytest.raises(AssertionError, match="not resident"):
        cache.evict(A)


def test_failed_fetch_frees_its_slot_and_delivers_nothing() -> None:
    cache = SlotCache(1)
    cache.reserve(A, 10)
    cache.abandon(A)
    assert (cache.has_free(), cache.num_in_flight, cache.fetched_bytes) == (True, 0, 0)
    assert A not in cache.slot_of
    cache.check()


def test_bytes_evicted_before_their_first_use_are_wasted_and_others_are_not() -> None:
    cache = SlotCache(3)
    for key, num_bytes in ((A, 1), (B, 20), (C, 300)):
        resident(cache, key, num_bytes)
    cache.pin(A)
    cache.unpin(A)
    cache.evict(A)
    cache.evict(B)
    assert (cache.used_bytes, cache.wasted_bytes, cache.unused_bytes) == (1, 20, 300)
    cache.check()


def test_bytes_used_twice_count_once() -> None:
    cache = SlotCache(1)
    resident(cache, A)
    for _ in range(2):
        cache.pin(A)
        cache.unpin(A)
    assert cache.used_bytes == 10
    cache.check()
