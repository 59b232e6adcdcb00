"""How long does policy hold the engine's thread? Microseconds a call of Residency, on synthetic routes with locality.

    python benchmarks/policy_time.py [--rounds 20] [--share 0.25]

Published shapes, k = 32, a link of 55 GB/s whose copies cost nothing here: what is timed is policy. `acquire` is the
time to the first wave; "all resident" occurs where every record has a slot. A guess is timed where a pump submitted
some, with its share of the arrivals.

Then the share of a round that policy takes, at k = 8 and 32: the best of the rounds, for a busy machine only adds.
`decisions` is what lookahead, scheduler, eviction, the fetches and the governor do; `residency` counts all calls of a
round, leases, waves and the virtual mover included. The round is the virtual clock's: draft steps and layers as long as
they are below, and what the link adds. Most of it is time in which the target waits for the link, and policy with it.
Kind: micro; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moespeq.replay import LinkModel, VirtualClock, VirtualMover
from moespeq.residency import AmortizingDepth, GovernorOptions, PassKind, Residency, ResidencyCounters, ResidencyOptions
from moespeq.types import StepReport

NUM_STEPS, LINK_DEPTH = 33, 24
DRAFT_STEP_S, LAYER_S = 2e-3, 3e-4
DEPTHS = (8, 32)
BEGUN = 3  # copies that a GPU's link begins at once


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's MoE shape; `changed` is the share of a layer's experts that change from token to token."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    record_bytes: int
    changed: float


SHAPES = (
    Shape("qwen1.5-moe", 24, 60, 4, 9_300_000, 0.7),
    Shape("qwen3-30b-half", 24, 128, 8, 5_100_000, 0.7),
    Shape("qwen3-30b", 48, 128, 8, 4_540_000, 0.7),
)


class Stopwatch:
    """Seconds of calls, by name; `decided_s` of the methods it watches, without what they call the mover for."""

    def __init__(self) -> None:
        self.samples_s: dict[str, list[float]] = defaultdict(list)
        self.decided_s = 0.0
        self._is_deciding = False

    def time(self, name: str, call: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        call()
        self.samples_s[name].append(time.perf_counter() - begin_s)

    def watch(self, owner: object, *names: str, is_mover: bool = False) -> None:
        """Count these methods of `owner` as decisions, whoever calls them; a mover's are taken off inside of others."""
        for name in names:
            setattr(owner, name, partial(self._timed, getattr(owner, name), is_mover))

    def _timed(self, method: Callable[..., Any], is_mover: bool, *arguments: Any, **keywords: Any) -> Any:
        if self._is_deciding is not is_mover:
            return method(*arguments, **keywords)
        self._is_deciding = not is_mover
        begin_s = time.perf_counter()
        try:
            return method(*arguments, **keywords)
        finally:
            seconds = time.perf_counter() - begin_s
            self.decided_s += -seconds if is_mover else seconds
            self._is_deciding = is_mover


def draft_routes(shape: Shape, rng: random.Random, num_steps: int = NUM_STEPS) -> list[list[list[int]]]:
    """[step][layer][K]: popular experts come back, most of a layer's experts change with the token."""
    weights = [[rng.paretovariate(1.5) for _ in range(shape.num_experts)] for _ in range(shape.num_layers)]
    now = [rng.sample(range(shape.num_experts), shape.top_k) for _ in range(shape.num_layers)]
    steps = []
    for _ in range(num_steps):
        for layer in range(shape.num_layers):
            kept = {expert for expert in now[layer] if rng.random() > shape.changed}
            while len(kept) < shape.top_k:
                kept.add(rng.choices(range(shape.num_experts), weights[layer])[0])
            now[layer] = sorted(kept)
        steps.append([list(experts) for experts in now])
    return steps


def measure(shape: Shape, *, share: float, num_rounds: int) -> tuple[dict[str, float], float]:
    """Median microseconds by call, and the distinct experts a layer asks for."""
    rng, watch, clock = random.Random(0), Stopwatch(), VirtualClock()
    residency = Residency(
        VirtualMover(clock, LinkModel(bytes_per_s=55e9, latency_s=1e-5)),
        clock,
        num_slots=int(share * shape.num_layers * shape.num_experts),
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        num_bytes=lambda key: shape.record_bytes,
        options=ResidencyOptions(link_depth=LINK_DEPTH),
    )
    distinct: list[int] = []
    for _ in range(num_rounds):
        steps = draft_routes(shape, rng)
        watch.time("begin_pass", lambda: residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=NUM_STEPS))
        for routes in steps:
            clock.advance(DRAFT_STEP_S)
            watch.time("predict, a step", partial(residency.predict, routes))
            _pump(residency, watch)
        for layer in range(shape.num_layers):
            experts = sorted({expert for routes in steps for expert in routes[layer]})
            distinct.append(len(experts))
            _verify_layer(residency, clock, watch, layer, experts)
        watch.time("end_pass", lambda: residency.end_pass(20))
    figures = {name: statistics.median(samples) * 1e6 for name, samples in watch.samples_s.items()}
    return figures, statistics.mean(distinct)


def _pump(residency: Residency, watch: Stopwatch) -> None:
    before = len(residency.cache.submitted)
    arrived_before = residency.cache.fetched_bytes
    begin_s = time.perf_counter()
    residency.pump()
    seconds = time.perf_counter() - begin_s
    num_arrived = (residency.cache.fetched_bytes - arrived_before) // residency.cache.record_bytes[0]
    num_submitted = len(residency.cache.submitted) - before + num_arrived
    if num_submitted:
        watch.samples_s["pump, a guess"].append(seconds / num_submitted)
    watch.time("pump, nothing to do", residency.pump)


def _verify_layer(
    residency: Residency, clock: VirtualClock, watch: Stopwatch, layer: int, experts: Sequence[int]
) -> None:
    before = residency.counters()
    begin_s = time.perf_counter()
    waves = iter(residency.acquire(layer, experts))
    wave = next(waves)
    seconds = time.perf_counter() - begin_s
    is_all_resident = residency.counters().since(before).hits == len(experts)
    watch.samples_s["acquire, all resident" if is_all_resident else "acquire, some missing"].append(seconds)
    while True:
        clock.advance(LAYER_S * len(wave) / len(experts))
        _pump(residency, watch)
        begin_s = time.perf_counter()
        following = next(waves, None)
        watch.samples_s["next wave" if following else "last wave back"].append(time.perf_counter() - begin_s)
        if following is None:
            return
        wave = following


def measure_shares(shape: Shape, k: int, *, share: float, num_rounds: int) -> dict[str, float]:
    """Of a round's time: decisions, and all of residency; the least of the rounds after the first two."""
    rng, watch, clock, governor = (
        random.Random(0),
        Stopwatch(),
        VirtualClock(),
        AmortizingDepth(GovernorOptions(k_max=k)),
    )
    mover = VirtualMover(clock, LinkModel(bytes_per_s=55e9, latency_s=1e-5, depth=BEGUN))
    residency = Residency(
        mover,
        clock,
        num_slots=int(share * shape.num_layers * shape.num_experts),
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        num_bytes=lambda key: shape.record_bytes,
        options=ResidencyOptions(link_depth=LINK_DEPTH),
    )
    watch.watch(mover, "submit", "cancel", is_mover=True)
    watch.watch(residency._fetches, "speculate", "demand", "take_back", "take_back_all")
    watch.watch(residency._policy, "touch", "arrive", "offer", "end_pass")
    watch.watch(residency._lookahead, "add", "retire", "clear")
    watch.watch(residency._scheduler, "end_draft")
    watch.watch(governor, "choose", "observe")
    rounds = []
    for _ in range(num_rounds + 2):
        steps = draft_routes(shape, rng, k + 1)
        watch.decided_s, begin_s = 0.0, clock.now_s()
        governor.choose(k)
        host_s, moved = _round(residency, clock, shape, steps)
        round_s = clock.now_s() - begin_s
        governed = time.perf_counter()
        governor.observe(_report(k, moved, round_s))
        host_s += time.perf_counter() - governed
        rounds.append((watch.decided_s / round_s, host_s / round_s, round_s, moved.link_bytes / shape.record_bytes))
    decided, all_calls, round_s, fetched = min(rounds[2:])
    return {"decisions": decided, "residency": all_calls, "round_ms": round_s * 1e3, "fetched": fetched}


def _round(
    residency: Residency, clock: VirtualClock, shape: Shape, steps: Sequence[Sequence[Sequence[int]]]
) -> tuple[float, ResidencyCounters]:
    """One round; returns the seconds that calls of residency took, and what it counted."""
    host_s = 0.0

    def timed(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        nonlocal host_s
        begin_s = time.perf_counter()
        result = call(*arguments, **keywords)
        host_s += time.perf_counter() - begin_s
        return result

    timed(residency.begin_pass, PassKind.DRAFT_VERIFY, num_draft_steps=len(steps))
    for routes in steps:
        clock.advance(DRAFT_STEP_S)
        timed(residency.predict, routes)
        timed(residency.pump)
    for layer in range(shape.num_layers):
        experts = sorted({expert for routes in steps for expert in routes[layer]})
        timed(residency.approach, layer)
        clock.advance(LAYER_S / 2)
        waves: Iterator[Any] = residency.acquire(layer, experts)
        while (wave := timed(next, waves, None)) is not None:
            timed(residency.pump)
            clock.advance(LAYER_S / 2 * len(wave) / len(experts))
    return host_s, timed(residency.end_pass, len(steps) // 2)


def _report(k: int, moved: ResidencyCounters, round_s: float) -> StepReport:
    draft_s = (k + 1) * DRAFT_STEP_S
    return StepReport(
        k, k // 2, k // 2 + 1, moved.hits, moved.late, moved.misses, draft_s, round_s - draft_s, moved.stall_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.25, help="slots as a share of all records")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        for share in (arguments.share, 1.0):
            figures, distinct = measure(shape, share=share, num_rounds=arguments.rounds)
            print(f"\n{shape.name}, slots for {share:.0%}, {distinct:.1f} distinct experts a layer")
            for name, microseconds in figures.items():
                print(f"  {name:24}{microseconds:9.1f} us")
            results[f"{shape.name} {share:.2f}"] = {"distinct": distinct, **figures}
    print(f"\nShare of a round, slots for {arguments.share:.0%}")
    for shape in SHAPES:
        for k in DEPTHS:
            shares = measure_shares(shape, k, share=arguments.share, num_rounds=arguments.rounds // 2)
            print(
                f"  {shape.name:16}k = {k:2}: decisions {shares['decisions']:.1%}, residency {shares['residency']:.1%} "
                f"of {shares['round_ms']:.0f} ms, {shares['fetched']:.0f} records"
            )
            results[f"{shape.name} k={k}"] = shares
    print(json.dumps({"kind": "micro", "unit": "us", "results": results}))


if __name__ == "__main__":
    main()
