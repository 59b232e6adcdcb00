"""Policies compared on synthetic traces with locality, on a virtual link: the reasons not to use LRU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moespeq.replay import LinkModel, ReplayResult, RoundTrace, Trace, belady_misses, replay
from moespeq.residency import Eviction, ResidencyOptions
from moespeq.types import Cause, ExpertKey

NUM_LAYERS, NUM_EXPERTS, RECORD_BYTES = 8, 16, 1_000_000
FAST = LinkModel(bytes_per_s=1e10, latency_s=1e-5)
LRU = ResidencyOptions(prefetch=False, eviction=Eviction.LRU)
ON_DEMAND = ResidencyOptions(prefetch=False)


def make_trace(*, num_rounds: int = 12, num_steps: int = 5, agreement: float = 0.99, seed: int = 0) -> Trace:
    """Routes that mostly stay from token to token; the draft names a wrong expert with 1 - agreement."""
    rng = random.Random(seed)
    popularity = [[rng.paretovariate(1.0) for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)]
    routes: list[set[int]] = [set() for _ in range(NUM_LAYERS)]

    def next_token(layer: int) -> set[int]:
        kept = {expert for expert in sorted(routes[layer]) if rng.random() < 0.5}
        while len(kept) < 2:
            kept.add(rng.choices(range(NUM_EXPERTS), popularity[layer])[0])
        return kept

    rounds = []
    for _ in range(num_rounds):
        draft, true = [], [set[int]() for _ in range(NUM_LAYERS)]
        for _ in range(num_steps):
            routes = [next_token(layer) for layer in range(NUM_LAYERS)]
            for layer in range(NUM_LAYERS):
                true[layer] |= routes[layer]
            draft.append(
                [
                    sorted({e if rng.random() < agreement else rng.randrange(NUM_EXPERTS) for e in sorted(layer)})
                    for layer in routes
                ]
            )
        used = [sorted(experts) for experts in true]
        rounds.append(RoundTrace(draft, used, committed=4, draft_step_s=1e-3, verify_layer_s=2e-4))
    return Trace(NUM_LAYERS, NUM_EXPERTS, rounds)


def cyclic_trace(*, num_steps: int) -> Trace:
    """Every round uses the same four experts of every layer: a pure cyclic scan of 32 records."""
    routes = [[0, 1, 2, 3]] * NUM_LAYERS
    one = RoundTrace([routes] * num_steps, routes, committed=1, draft_step_s=1e-3, verify_layer_s=1e-4)
    return Trace(NUM_LAYERS, NUM_EXPERTS, [one] * 20)


def uses_of(trace: Trace) -> list[ExpertKey]:
    return [
        ExpertKey(layer, expert)
        for recorded in trace.rounds
        for layer, experts in enumerate(recorded.true)
        for expert in experts
    ]


def run(trace: Trace, options: ResidencyOptions, *, num_slots: int, link: LinkModel = FAST) -> ReplayResult:
    return replay(trace, num_slots=num_slots, num_bytes=lambda key: RECORD_BYTES, link=link, options=options)


def test_lru_hits_nothing_on_a_cyclic_scan_where_frequency_hits() -> None:
    trace = cyclic_trace(num_steps=0)
    assert run(trace, LRU, num_slots=28).counters.hits == 0
    ours = run(trace, ON_DEMAND, num_slots=28).counters
    assert ours.hits / (ours.hits + ours.misses) > 0.65


def test_predicted_cyclic_scan_moves_at_most_four_tenths_more_than_belady() -> None:
    trace = cyclic_trace(num_steps=2)
    floor_bytes = belady_misses(uses_of(trace), num_slots=28) * RECORD_BYTES
    shallow = ResidencyOptions(link_depth=2)
    assert floor_bytes <= run(trace, shallow, num_slots=28).counters.link_bytes <= 1.4 * floor_bytes


@pytest.mark.parametrize("num_slots", [24, 32])
def test_lru_moves_more_bytes_and_ours_stays_near_belady(num_slots: int) -> None:
    trace = make_trace()
    floor_bytes = belady_misses(uses_of(trace), num_slots=num_slots) * RECORD_BYTES
    lru_bytes = run(trace, LRU, num_slots=num_slots).counters.link_bytes
    on_demand_bytes = run(trace, ON_DEMAND, num_slots=num_slots).counters.link_bytes
    ours_bytes = run(trace, ResidencyOptions(), num_slots=num_slots).counters.link_bytes
    assert floor_bytes <= on_demand_bytes < 1.6 * floor_bytes
    assert ours_bytes < 1.1 * on_demand_bytes, "guessing early costs less than a tenth"
    assert lru_bytes > 1.3 * ours_bytes


def test_prefetching_hides_the_link_behind_the_draft() -> None:
    trace = make_trace()
    ahead = run(trace, ResidencyOptions(), num_slots=64)
    on_demand = run(trace, ON_DEMAND, num_slots=64)
    assert ahead.counters.stall_s < 0.5 * on_demand.counters.stall_s
    assert ahead.seconds < on_demand.seconds
    assert ahead.committed == on_demand.committed


@pytest.mark.parametrize("num_slots", [48, 64])
@pytest.mark.parametrize("bytes_per_s", [1e10, 2e9])
def test_deep_queue_costs_nearly_no_bytes_and_no_time(num_slots: int, bytes_per_s: float) -> None:
    trace, link = make_trace(), LinkModel(bytes_per_s=bytes_per_s)
    shallow, deep = (run(trace, ResidencyOptions(link_depth=d), num_slots=num_slots, link=link) for d in (2, 8))
    assert shallow.counters.taken_back == 0, "the link begins two at once"
    assert deep.counters.link_bytes < 1.05 * shallow.counters.link_bytes
    assert deep.seconds < 1.04 * shallow.seconds


def test_stale_guesses_are_taken_back_where_the_link_is_behind() -> None:
    deep = ResidencyOptions(link_depth=8)
    counters = run(make_trace(agreement=0.7), deep, num_slots=64, link=LinkModel(bytes_per_s=1e9)).counters
    assert counters.taken_back > counters.misses / 2


def test_wrong_predictions_cost_time_and_never_a_record() -> None:
    traces = [make_trace(agreement=agreement) for agreement in (1.0, 0.5)]
    right, wrong = (run(trace, ResidencyOptions(), num_slots=40) for trace in traces)
    assert right.counters.wasted_bytes < wrong.counters.wasted_bytes
    assert right.seconds < wrong.seconds
    for trace, counters in zip(traces, (right.counters, wrong.counters), strict=True):
        assert counters.hits + counters.late + counters.misses == len(uses_of(trace))


def test_slower_link_never_makes_a_generation_faster() -> None:
    trace = make_trace()
    seconds = [
        run(trace, ResidencyOptions(), num_slots=40, link=LinkModel(bytes_per_s=rate)).seconds
        for rate in (1e11, 1e10, 1e9, 1e8)
    ]
    assert all(fast <= slow for fast, slow in pairwise(seconds))


def test_everything_fits_means_every_record_moves_once() -> None:
    trace = make_trace(agreement=1.0)
    result = run(trace, ResidencyOptions(), num_slots=NUM_LAYERS * NUM_EXPERTS)
    assert result.counters.link_bytes == len(set(uses_of(trace))) * RECORD_BYTES
    assert result.counters.wasted_bytes == 0


def test_replay_is_deterministic() -> None:
    assert run(make_trace(), ResidencyOptions(), num_slots=30) == run(make_trace(), ResidencyOptions(), num_slots=30)


def test_rounds_without_a_draft_move_on_demand_only() -> None:
    assert set(run(cyclic_trace(num_steps=0), ResidencyOptions(), num_slots=30).counters.bytes_by_cause) == {
        Cause.DEMAND
    }
