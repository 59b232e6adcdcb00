"""An engine on the CPU whose link is the GPU's: HostRecords, CudaMover, and fakes where the driver would be.

Slots are the arena of the CPU's tier, so texts are those of any CPU engine; faults are asked of the fakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import open_tight
from moespeq.decode import tier_cpu
from moespeq.decode.engine import Engine
from moespeq.ports import Clock, RecordSource
from moespeq.store import Store
from moespeq.transfer import CudaMover, HostRecords
from moespeq.types import Fetch
from transfer_fakes import FakeDevice, FakePinning

__all__ = ["FaultEngine", "fault_engine"]


class HostDevice(FakeDevice):
    """Copies into slots of host memory."""

    def __init__(self, slots: Tensor) -> None:
        super().__init__(*slots.shape)
        self.slots = slots
        self.seconds = 1e-4


@dataclass
class FaultEngine:
    """An open engine and the fakes behind it."""

    engine: Engine
    device: HostDevice
    pinning: FakePinning
    records: HostRecords
    warnings: list[str] = field(default_factory=list)

    def fail_copies(self, when: str, error: Exception) -> None:
        """From now on every copy fails, when it is begun or when it ends."""
        errors = self.device.begin_errors if when == "begin" else self.device.end_errors
        errors.update(dict.fromkeys(range(self.device.num_slots), error))

    def mend(self) -> None:
        """Copies work again."""
        self.device.begin_errors.clear()
        self.device.end_errors.clear()

    def check_nothing_is_held(self) -> None:
        """Between two requests no slot is pinned, no record in host memory leased, and all books agree."""
        residency = self.engine._parts.residency
        residency.settle()
        residency.check()
        assert not residency._cache.pinned
        assert not getattr(self.records._places, "_leases", {})


@contextmanager
def fault_engine(
    patch: pytest.MonkeyPatch,
    store: Path,
    num_slots: int,
    *,
    num_pinned: int = 1 << 30,
    host_bytes: int = 1 << 30,
    **options: Any,
) -> Iterator[FaultEngine]:
    """An engine with `num_slots`, `num_pinned` pieces of host memory that the driver pins, and `host_bytes` of it."""
    made: dict[str, Any] = {"warnings": []}
    with Store.open(store) as opened:
        keys = list(opened.keys())

    def mover(source: RecordSource, slots: Sequence[memoryview], *, num_threads: int, clock: Clock) -> CudaMover:
        memory = torch.frombuffer(slots[0].obj, dtype=torch.uint8).view(len(slots), -1)  # type: ignore[arg-type]
        made["device"], made["pinning"] = HostDevice(memory), FakePinning(num_pinned)
        records = made["records"] = HostRecords(
            source, keys, budget_bytes=host_bytes, pinning=made["pinning"], warn=made["warnings"].append, num_threads=2
        )
        records.start_filling()
        return _OwningMover(records, made["device"], clock=clock)

    with patch.context() as during:
        during.setattr(tier_cpu, "ThreadMover", mover)
        engine = open_tight(store, num_slots, device="cpu", **options)
    with engine:
        yield FaultEngine(engine, **made)


class _OwningMover(CudaMover):
    """Closes the records behind it, as a tier on a GPU does; a processor cannot wait for a copy by itself."""

    def wait_on_device(self, fetch: Fetch) -> bool:
        return False

    def close(self) -> None:
        super().close()
        self._records.close()
