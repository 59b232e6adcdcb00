"""A disk, a driver and a device for the transfer layer's tests: real threads, no hardware, faults on request.

Records are 64 bytes unless said otherwise, filled with their expert's id.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moespeq.transfer import HostRecords
from moespeq.types import ExpertKey

RECORD_BYTES = 64
WAIT_S = 10.0


class FakeDisk:
    """A RecordSource. Reads wait for `gate` and raise what `errors` holds; `held` keys wait for their own event."""

    def __init__(self, record_bytes: int = RECORD_BYTES) -> None:
        self.record_bytes = record_bytes
        self.gate = threading.Event()
        self.gate.set()
        self.held: dict[ExpertKey, threading.Event] = {}
        self.errors: dict[ExpertKey, Exception] = {}
        self.order: list[ExpertKey] = []

    def num_bytes(self, key: ExpertKey) -> int:
        return self.record_bytes

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        assert len(buffer) == self.record_bytes
        self.order.append(key)
        assert self.gate.wait(WAIT_S)
        assert key not in self.held or self.held[key].wait(WAIT_S)
        if key in self.errors:
            raise self.errors[key]
        buffer[:] = bytes([key.expert % 256]) * self.record_bytes


class FakePinning:
    """A driver that pins `num_allowed` ranges and refuses the next."""

    def __init__(self, num_allowed: int = 1 << 30) -> None:
        self.num_allowed = num_allowed
        self.ranges: dict[int, int] = {}
        self.gate = threading.Event()
        self.gate.set()

    def register(self, address: int, num_bytes: int) -> str | None:
        assert self.gate.wait(WAIT_S)
        if len(self.ranges) >= self.num_allowed:
            return "out of memory"
        self.ranges[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class FakeDevice:
    """A CopyStream. Copies end in order, each when `let` allows it, and move their bytes only then.

    begun: (slot, fence waited for) in order; sources: where each copy read from; waited_for: by kernels.
    """

    def __init__(self, num_slots: int = 8, slot_bytes: int = RECORD_BYTES, *, is_free: bool = True) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.slots = torch.zeros(num_slots, slot_bytes, dtype=torch.uint8)  # [S, stride]
        self.begun: list[tuple[int, object | None]] = []
        self.sources: list[Tensor] = []
        self.begin_errors: dict[int, Exception] = {}
        self.end_errors: dict[int, Exception] = {}
        self.seconds = 0.5
        self.waited_for: list[object] = []
        self._num_fences = 0
        self._num_allowed = 1 << 30 if is_free else 0
        self._allowed = threading.Condition()

    def let(self, num_copies: int) -> None:
        """Let so many more copies end."""
        with self._allowed:
            self._num_allowed += num_copies
            self._allowed.notify_all()

    def fence(self) -> object:
        self._num_fences += 1
        return self._num_fences

    def begin(self, record: Tensor, slot: int, after: object | None) -> object:
        if slot in self.begin_errors:
            raise self.begin_errors[slot]
        self.sources.append(record)
        self.begun.append((slot, after))
        return len(self.begun) - 1

    def order_behind(self, copy: object) -> None:
        self.waited_for.append(copy)

    def has_ended(self, copy: object) -> bool:
        assert isinstance(copy, int)
        slot = self.begun[copy][0]
        if slot in self.end_errors:
            raise self.end_errors[slot]
        return copy < self._num_allowed

    def wait_busily(self, copy: object) -> None:
        with self._allowed:
            assert self._allowed.wait_for(lambda: self.has_ended(copy), WAIT_S)

    def moved_s(self, copy: object) -> float:
        assert isinstance(copy, int)
        assert self.has_ended(copy)
        record = self.sources[copy]
        self.slots[self.begun[copy][0], : len(record)] = record
        return self.seconds


def host_records(
    disk: FakeDisk, num_experts: int, *, num_places: int | None = None, num_threads: int = 2, num_layers: int = 1
) -> HostRecords:
    """Records of `num_experts` a layer: all of them, or `num_places` for records of whole pages."""
    keys = [ExpertKey(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]
    budget_bytes = 1 << 30 if num_places is None else num_places * disk.record_bytes
    return HostRecords(
        disk, keys, budget_bytes=budget_bytes, pinning=FakePinning(), warn=lambda _: None, num_threads=num_threads
    )


def eventually(is_true: Callable[[], bool]) -> None:
    """Wait until another thread made it so."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, "it never became so"
        time.sleep(0.0005)
