"""Textbook caches: the fast forms count what the definitions count, and no policy misses less than Belady's MIN."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from moespeq.replay import belady_misses
from moespeq.replay.cache_study import lfu_misses, lru_misses

USES = st.lists(st.integers(0, 12), max_size=120)
SLOTS = st.integers(1, 14)


def plain_belady_misses(uses: Sequence[Hashable], num_slots: int) -> int:
    """By the definition: who is used farthest ahead leaves."""
    resident: set[Hashable] = set()
    misses = 0
    for place, key in enumerate(uses):
        if key in resident:
            continue
        misses += 1
        if len(resident) == num_slots:
            ahead = uses[place:]
            resident.remove(max(resident, key=lambda held: ahead.index(held) if held in ahead else math.inf))
        resident.add(key)
    return misses


def plain_lfu_misses(uses: Sequence[int], num_slots: int) -> int:
    """By the definition: fewest uses so far, of equal ones the least recently used."""
    resident: set[int] = set()
    misses = 0
    for place, key in enumerate(uses):
        if key in resident:
            continue
        misses += 1
        past = list(uses[:place])
        if len(resident) == num_slots:
            resident.remove(min(resident, key=lambda held: (past.count(held), -past[::-1].index(held))))
        resident.add(key)
    return misses


def plain_lru_misses(uses: Sequence[int], num_slots: int) -> int:
    """By the definition: a use hits if fewer than num_slots others were used since the last one."""
    hits = 0
    for place, key in enumerate(uses):
        since = list(uses[:place])[::-1]
        hits += key in since and len(set(since[: since.index(key)])) < num_slots
    return len(uses) - hits


@given(USES, SLOTS)
def test_belady_counts_what_its_definition_counts(uses: list[int], num_slots: int) -> None:
    assert belady_misses(uses, num_slots=num_slots) == plain_belady_misses(uses, num_slots)


@given(USES, SLOTS)
def test_lfu_and_lru_count_what_their_definitions_count(uses: list[int], num_slots: int) -> None:
    assert lfu_misses(uses, num_slots=num_slots) == plain_lfu_misses(uses, num_slots)
    assert lru_misses(uses, num_slots=num_slots) == plain_lru_misses(uses, num_slots)


@given(USES, SLOTS)
def test_no_policy_misses_less_than_belady_nor_fewer_than_the_first_uses(uses: list[int], num_slots: int) -> None:
    floor = belady_misses(uses, num_slots=num_slots)
    first_uses = len(set(uses))
    assert floor >= first_uses
    for misses in (lru_misses, lfu_misses):
        assert misses(uses, num_slots=num_slots) >= floor
        assert misses(uses, num_slots=13) == first_uses, "all fit"


@given(USES, SLOTS)
def test_more_slots_never_cost_belady_or_lru_a_miss(uses: list[int], num_slots: int) -> None:
    for misses in (belady_misses, lru_misses):
        assert misses(uses, num_slots=num_slots + 1) <= misses(uses, num_slots=num_slots)
