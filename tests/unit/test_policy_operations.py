"""What policy costs, in function calls and not in seconds: by steps, layers and fetches, never by guesses."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from moespeq.replay import LinkModel, VirtualClock, VirtualMover
from moespeq.residency import PassKind, Residency, ResidencyOptions

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, RECORD_BYTES = 12, 64, 192, 1_000_000


def num_calls(work: Callable[[], object]) -> int:
    """Python functions and built-in ones that were called."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


class Engine:
    """A residency whose slots are full of what earlier rounds left, on a link that moves one record in 0.1 ms."""

    def __init__(self, *, num_steps: int, top_k: int = 8) -> None:
        self.rng, self.clock = random.Random(0), VirtualClock()
        self.num_steps, self.top_k = num_steps, top_k
        self.residency = Residency(
            VirtualMover(self.clock, LinkModel(bytes_per_s=1e10, depth=3)),
            self.clock,
            num_slots=NUM_SLOTS,
            num_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            num_bytes=lambda key: RECORD_BYTES,
            options=ResidencyOptions(link_depth=16),
        )
        for _ in range(4):
            self.round()

    def step(self) -> list[list[int]]:
        return [self.rng.sample(range(NUM_EXPERTS), self.top_k) for _ in range(NUM_LAYERS)]

    def round(self) -> None:
        steps = [self.step() for _ in range(self.num_steps)]
        self.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=self.num_steps)
        for routes in steps:
            self.clock.advance(1e-3)
            self.residency.predict(routes)
            self.residency.pump()
        for layer in range(NUM_LAYERS):
            experts = sorted({expert for routes in steps for expert in routes[layer]})
            for _ in self.residency.acquire(layer, experts):
                self.residency.pump()
        self.residency.end_pass(self.num_steps)


def test_a_step_that_nobody_acts_upon_costs_a_dozen_calls_however_many_experts_it_names() -> None:
    for top_k in (2, 16):
        engine = Engine(num_steps=40, top_k=top_k)
        engine.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=400)
        routes = engine.step()

        engine.residency.predict(routes)
        engine.residency.pump()
        assert num_calls(lambda: (engine.residency.predict(routes), engine.residency.pump())) <= 20  # noqa: B023


def test_a_round_costs_calls_by_fetches_and_not_by_guesses() -> None:
    for num_steps in (9, 33):  # 864 and 3,168 guesses
        engine = Engine(num_steps=num_steps)
        before = engine.residency.counters().link_bytes
        calls = num_calls(engine.round) - num_calls(lambda: [engine.step() for _ in range(num_steps)])  # noqa: B023
        num_fetches = (engine.residency.counters().link_bytes - before) // RECORD_BYTES
        assert 400 < num_fetches < 700
        assert calls < 140 * num_fetches, "waves, leases and the virtual link included"
