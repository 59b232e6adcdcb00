"""What a person may ask of a replay, and the policies beside each other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moespeq.errors import UsageError
from moespeq.replay import RoutingTrace
from moespeq.replay.changes import LINK_BYTES_PER_S, Changes, neighbours
from moespeq.replay.policies import POLICIES, ByteBounds, byte_bounds, compare_policies, policy_name
from moespeq.replay.what_if import Setting, recorded_setting, replay_setting, routed
from moespeq.residency import Eviction
from synthetic_trace import PLAIN_BYTES, RECORD_BYTES, synthetic_trace

MIB = 1 << 20


@cache
def trace() -> RoutingTrace:
    made = synthetic_trace(num_layers=6, num_positions=60, stickiness=0.4, skew=1.0, acceptance=0.9, seed=1)
    return replace(made, header=replace(made.header, options=made.header.options | {"device_memory": 2000 * MIB}))


def apply(**changes: Any) -> Setting:
    return Changes(**changes).apply(trace().header, recorded_setting(trace()))


def test_without_changes_the_setting_is_the_recorded_one() -> None:
    assert apply() == recorded_setting(trace())


def test_each_change_changes_its_part_and_no_other() -> None:
    own = recorded_setting(trace())
    assert apply(k=4) == replace(own, k=4)
    assert apply(num_slots=7) == replace(own, num_slots=7)
    assert apply(policy="lfu") == replace(own, options=replace(own.options, eviction=Eviction.LFU))
    assert apply(prefetch=False) == replace(own, options=replace(own.options, prefetch=False))
    for name, bytes_per_s in [*LINK_BYTES_PER_S.items(), ("25GB", 25e9)]:
        assert apply(link=name) == replace(own, link=replace(own.link, bytes_per_s=bytes_per_s))


def test_what_memory_differs_from_the_recorded_is_slots() -> None:
    own = recorded_setting(trace()).num_slots
    assert apply(device_memory="2000MiB").num_slots == own
    assert apply(device_memory="2100MiB").num_slots == own + 100 * MIB // RECORD_BYTES
    assert apply(device_memory="1990MiB").num_slots == own - 2, "a part of a slot holds no record"


def test_plain_records_take_the_memory_of_the_nested_ones() -> None:
    own = recorded_setting(trace())
    plain = apply(records="plain")
    assert set(plain.record_bytes) == {PLAIN_BYTES}
    assert plain.num_slots == own.num_slots * RECORD_BYTES // PLAIN_BYTES
    assert apply(records="plain", num_slots=7).num_slots == 7
    assert apply(records="nested") == own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": -1}, "from 0 to 64, got -1"),
        ({"k": 65}, "from 0 to 64, got 65"),
        ({"num_slots": 0}, "No record would fit"),
        ({"device_memory": "1000MiB"}, r"\d MiB are missing for a first slot"),
        ({"num_slots": 3, "device_memory": "1GiB"}, "give one of them"),
        ({"device_memory": "much"}, "'much' is not a size"),
        (
            {"link": "pcie6"},
            "link 'pcie6' is unknown; use pcie3, pcie4, pcie5, or its bytes a second, such as 25GB. Did you mean",
        ),
        ({"link": "0GB"}, "moves nothing"),
        ({"link": "5 apples"}, "is not a size"),
        ({"policy": "lri"}, "policy 'lri' is unknown.*Did you mean"),
        ({"records": "mixed"}, "records 'mixed' is unknown"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        apply(**changes)


def test_what_the_trace_does_not_know_is_not_guessed() -> None:
    header = trace().header
    own = recorded_setting(trace())
    with pytest.raises(UsageError, match="give --slots"):
        Changes(device_memory="1GiB").apply(replace(header, options={}), own)
    with pytest.raises(UsageError, match="moved plain records"):
        Changes(records="nested").apply(header, replace(own, record_bytes=[PLAIN_BYTES] * header.num_layers))


def test_there_are_never_more_slots_than_experts() -> None:
    header, own = trace().header, recorded_setting(trace())
    most = header.num_layers * header.num_experts
    for changes in ({"num_slots": 10**23}, {"device_memory": "900TiB"}):
        assert apply(**changes).num_slots == most
    assert neighbours(replace(own, num_slots=most), most)["twice the slots"].num_slots == most


def test_neighbours_are_each_link_and_twice_the_slots() -> None:
    own = recorded_setting(trace())
    named = neighbours(own, 10**6)
    assert list(named) == ["pcie3", "pcie4", "pcie5", "twice the slots"]
    assert named["twice the slots"] == replace(own, num_slots=2 * own.num_slots)


def test_each_policy_is_replayed_and_no_one_moves_less_than_belady() -> None:
    own = recorded_setting(trace())
    comparison = compare_policies(trace(), own)
    assert [one.name for one in comparison.outcomes] == [*POLICIES, "ours without prefetch", "lru without prefetch"]
    assert all(one.outcome.bytes_per_tok >= comparison.bounds.belady for one in comparison.outcomes)
    assert comparison.outcomes[0].outcome == replay_setting(trace(), own)
    by_name = {one.name: one.saving_share for one in comparison.outcomes}
    assert by_name["ours"] > by_name["chunk"]
    assert by_name["ours without prefetch"] > by_name["lru without prefetch"]
    without = compare_policies(trace(), apply(prefetch=False)).outcomes
    assert [one.name for one in without] == list(POLICIES), "they are on demand already"


def test_bounds_lie_between_one_fetch_and_one_fetch_a_use() -> None:
    own = recorded_setting(trace())
    rounds = routed(trace(), own)
    uses = sum(len(experts) for one in rounds.rounds for experts in one.true)
    bounds = byte_bounds(rounds, own)
    assert bounds.no_cache == pytest.approx(uses * RECORD_BYTES / 59)
    assert 0.0 < bounds.belady < bounds.no_cache
    roomy = replace(own, num_slots=96)
    assert byte_bounds(routed(trace(), roomy), roomy).belady == 0.0, "the slots hold everything at first"


def test_a_saving_is_a_share_of_what_can_be_saved() -> None:
    bounds = ByteBounds(no_cache=100.0, belady=60.0)
    assert [bounds.saving_share(moved) for moved in (100.0, 80.0, 60.0)] == [0.0, 0.5, 1.0]
    assert ByteBounds(no_cache=5.0, belady=5.0).saving_share(5.0) == 1.0


def test_every_eviction_has_one_name() -> None:
    assert [policy_name(eviction) for eviction in Eviction] == ["ours", "lru", "lfu", "chunk"]
