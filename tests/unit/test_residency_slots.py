"""The slot state machine: legal transitions, pins, and where every byte went."""

from __future__ import annotations

import pytest

from moespeq.residency.slots import SlotCache
from moespeq.types import Cause, ExpertKey

A, B, C = 0, 1, 2


def cache_of(num_slots: int) -> SlotCache:
    """Records of 1, 20, 300 and 4,000 bytes, two experts a layer."""
    return SlotCache(num_slots, [1, 20, 300, 4_000], num_experts=2)


def resident(cache: SlotCache, *records: int) -> None:
    for record in records:
        cache.reserve(record, Cause.DEMAND)
        cache.complete(record)


def test_fetch_names_expert_slot_bytes_and_cause() -> None:
    cache = cache_of(2)
    resident(cache, A)
    fetch = cache.reserve(3, Cause.STAGE)
    assert (fetch.key, fetch.num_bytes, fetch.cause) == (ExpertKey(1, 1), 4_000, Cause.STAGE)
    assert fetch.slot not in cache.resident.values()


def test_record_is_not_resident_before_it_is_complete() -> None:
    cache = cache_of(1)
    cache.reserve(A, Cause.DEMAND)
    assert cache.holds(A)
    assert A not in cache.resident
    assert not cache.is_evictable(A)
    cache.complete(A)
    assert A in cache.resident
    assert A not in cache.submitted
    cache.check()


def test_one_record_never_has_two_slots() -> None:
    cache = cache_of(2)
    cache.reserve(A, Cause.DEMAND)
    with pytest.raises(AssertionError, match="already"):
        cache.reserve(A, Cause.DEMAND)


def test_slots_are_never_more_than_the_budget() -> None:
    cache = cache_of(2)
    cache.reserve(A, Cause.DEMAND)
    cache.reserve(B, Cause.DEMAND)
    assert not cache.free
    with pytest.raises(AssertionError, match="no free slot"):
        cache.reserve(C, Cause.DEMAND)


def test_pinned_record_is_never_evicted() -> None:
    cache = cache_of(1)
    resident(cache, A)
    cache.pin([A])
    assert not cache.is_evictable(A)
    with pytest.raises(AssertionError, match="pinned"):
        cache.evict(A)
    cache.unpin([A])
    cache.evict(A)
    assert cache.free == [0]
    cache.check()


def test_record_is_leased_once_at_a_time() -> None:
    cache = cache_of(1)
    resident(cache, A)
    cache.pin([A])
    with pytest.raises(AssertionError, match="twice"):
        cache.pin([A])
    cache.unpin([A])
    with pytest.raises(AssertionError, match="not pinned"):
        cache.unpin([A])


def test_submitted_record_can_neither_be_pinned_nor_evicted() -> None:
    cache = cache_of(1)
    cache.reserve(A, Cause.DEMAND)
    with pytest.raises(AssertionError, match="not resident"):
        cache.pin([A])
    with pytest.raises(AssertionError, match="not resident"):
        cache.evict(A)


def test_abandoned_fetch_frees_its_slot_and_delivers_nothing() -> None:
    cache = cache_of(1)
    cache.reserve(A, Cause.DEMAND)
    cache.abandon(A)
    assert (cache.free, cache.holds(A), cache.fetched_bytes) == ([0], False, 0)
    with pytest.raises(AssertionError, match="not submitted"):
        cache.complete(A)
    cache.check()


def test_bytes_evicted_before_their_first_use_are_wasted_and_others_are_not() -> None:
    cache = cache_of(3)
    resident(cache, A, B, C)
    cache.pin([A])
    cache.unpin([A])
    cache.evict(A)
    cache.evict(B)
    assert (cache.used_bytes, cache.wasted_bytes, cache.unused_bytes) == (1, 20, 300)
    cache.check()


def test_bytes_used_twice_count_once() -> None:
    cache = cache_of(1)
    resident(cache, B)
    for _ in range(2):
        cache.pin([B])
        cache.unpin([B])
    assert cache.used_bytes == 20
    cache.check()
