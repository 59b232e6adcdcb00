"""A residency over a mover driven by hand, and short words for what tests of it do."""

from __future__ import annotations

from collections.abc import Sequence

from moespeq.replay import VirtualClock
from moespeq.residency import PassKind, Residency, ResidencyOptions, ResidentBases
from moespeq.types import Cause, Completion, ExpertKey, Fetch

NUM_LAYERS, NUM_EXPERTS = 4, 8


class HandMover:
    """Begins `depth` fetches, the most urgent first, and completes them when told to; `wait` completes one and takes a
    second. `has_device_waits`: the device can wait for what is in flight.
    """

    def __init__(self, clock: VirtualClock, depth: int, *, has_device_waits: bool = False) -> None:
        self.has_device_waits = has_device_waits
        self.clock = clock
        self.depth = depth
        self.submitted: list[Fetch] = []
        self.queued: list[Fetch] = []
        self.in_flight: list[Fetch] = []
        self.arrived: list[Completion] = []
        self.broken: set[ExpertKey] = set()

    def submit(self, fetch: Fetch) -> None:
        self.submitted.append(fetch)
        self.queued.append(fetch)
        self._begin()

    def cancel(self, fetch: Fetch) -> bool:
        if fetch not in self.queued:
            return False
        self.queued.remove(fetch)
        return True

    def _begin(self) -> None:
        while self.queued and len(self.in_flight) < self.depth:
            self.in_flight.append(min(self.queued, key=lambda fetch: fetch.cause))
            self.queued.remove(self.in_flight[-1])

    def finish(self, num_fetches: int = 1) -> None:
        for _ in range(num_fetches):
            fetch = self.in_flight.pop(0)
            error = f"{fetch.key} is gone; check the disk." if fetch.key in self.broken else None
            self.arrived.append(Completion(fetch, 1.0, error))
            self._begin()

    def wait_on_device(self, fetch: Fetch) -> bool:
        return self.has_device_waits and fetch in self.in_flight

    def begin_ahead(self, num_bytes: int) -> None:
        self.ahead_bytes = num_bytes

    def poll(self) -> Sequence[Completion]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self) -> Sequence[Completion]:
        if not self.arrived and self.in_flight:
            self.clock.advance(1.0)
            self.finish()
        return self.poll()

    def close(self) -> None:
        self.finish(len(self.in_flight))


class Rig:
    """A residency of `num_slots`, its mover, and short words for what tests do."""

    def __init__(
        self,
        num_slots: int,
        options: ResidencyOptions | None = None,
        *,
        num_experts: int = NUM_EXPERTS,
        mover_depth: int = 100,
        has_device_waits: bool = False,
        bases: ResidentBases | None = None,
    ) -> None:
        self.mover = HandMover(VirtualClock(), mover_depth, has_device_waits=has_device_waits)
        self.residency = Residency(
            self.mover,
            self.mover.clock,
            num_slots=num_slots,
            num_layers=NUM_LAYERS,
            num_experts=num_experts,
            num_bytes=lambda key: 100 + key.expert,
            options=options or ResidencyOptions(),
            bases=bases,
        )

    def predict(self, *keys: tuple[int, int]) -> None:
        """One draft step."""
        self.residency.predict([[expert for at, expert in keys if at == layer] for layer in range(NUM_LAYERS)])
        self.residency.pump()

    def use(self, layer: int, *experts: int) -> list[list[int]]:
        """Acquire, pump and give back; the experts of each wave."""
        waves = []
        for wave in self.residency.acquire(layer, experts):
            waves.append(list(wave.experts))
            assert wave.is_last == (sum(map(len, waves)) == len(experts))
            self.residency.pump()
        return waves

    def plain_pass(self, *experts_by_layer: Sequence[int], committed_tok: int = 1) -> None:
        self.residency.begin_pass(PassKind.PLAIN)
        for layer, experts in enumerate(experts_by_layer):
            self.use(layer, *experts)
        self.residency.end_pass(committed_tok)

    def fetched(self, cause: Cause) -> list[tuple[int, int]]:
        return [(fetch.key.layer, fetch.key.expert) for fetch in self.mover.submitted if fetch.cause is cause]
