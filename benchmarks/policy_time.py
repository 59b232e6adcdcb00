"""How long does policy hold the engine's thread? Microseconds a call of Residency, on synthetic routes with locality.

    python benchmarks/policy_time.py [--rounds 20] [--share 0.25]

Two published shapes, k = 32, a link of 55 GB/s whose copies cost nothing here: what is timed is policy. `acquire` is
the time to the first wave; "all resident" occurs where every record has a slot. A guess is timed where a pump submitted
some, with its share of the arrivals. Kind: micro; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from moespeq.replay import LinkModel, VirtualClock, VirtualMover
from moespeq.residency import PassKind, Residency, ResidencyOptions

NUM_STEPS, LINK_DEPTH = 33, 24
DRAFT_STEP_S, LAYER_S = 2e-3, 3e-4


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
    """Seconds of calls, by name."""

    def __init__(self) -> None:
        self.samples_s: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        call()
        self.samples_s[name].append(time.perf_counter() - begin_s)


def draft_routes(shape: Shape, rng: random.Random) -> list[list[list[int]]]:
    """[step][layer][K]: popular experts come back, most of a layer's experts change with the token."""
    weights = [[rng.paretovariate(1.5) for _ in range(shape.num_experts)] for _ in range(shape.num_layers)]
    now = [rng.sample(range(shape.num_experts), shape.top_k) for _ in range(shape.num_layers)]
    steps = []
    for _ in range(NUM_STEPS):
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
    print(json.dumps({"kind": "micro", "unit": "us", "results": results}))


if __name__ == "__main__":
    main()
