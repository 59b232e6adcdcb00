"""Copies into slots on a stream of the device: the only code of the transfer layer that speaks to CUDA.

One stream, because a link carries one record after another anyway and CUDA's stream priorities do not apply to copies:
order is made before a copy is begun, by keeping few of them begun. Each copy lies between two timing events, so that
the time the link moved is the device's own measure and the wait for a fence is not part of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moespeq.transfer.cuda_driver import CudaDriver, EventHandle

__all__ = ["CopyStream", "CudaCopyStream", "Point"]

_NUM_SPARE = 16  # events rest before they are used again: a thread may still wait for the copy that ended


class Point(Protocol):
    """A place in the order of launched kernels."""

    def synchronize(self) -> None:
        """Block until all before it has run."""
        ...


class CopyStream(Protocol):
    """Copies in the order begun, each at most once between two calls of `begin`; a mover calls under its own lock.

    Raises RuntimeError where the driver refuses a copy, or finds that one failed.
    """

    num_slots: int
    slot_bytes: int

    def fence(self) -> Point:
        """A point after every kernel launched so far on the stream that was current where this was made."""
        ...

    def begin(self, record: Tensor, slot: int, after: Point | None) -> object:
        """Queue a copy that waits on the device for `after`."""
        ...

    def order_behind(self, copy: object) -> None:
        """Kernels launched from here on wait on the device for the copy."""
        ...

    def has_ended(self, copy: object) -> bool: ...

    def wait_busily(self, copy: object) -> None:
        """Block until it has ended, and know it at once: takes a processor core."""
        ...

    def moved_s(self, copy: object) -> float:
        """How long an ended copy was on the link."""
        ...


@dataclass(frozen=True, slots=True)
class _Copy:
    begin: EventHandle
    end: EventHandle


class CudaCopyStream:
    """Copies into `slots`, uint8 [S, stride] in GPU memory. Events are made as needed and used again."""

    def __init__(self, slots: Tensor) -> None:
        self.num_slots, self.slot_bytes = slots.shape
        self._slots = slots  # kept: copies go to its addresses
        self._address = slots.data_ptr()
        self._stream = torch.cuda.Stream(slots.device)
        self._compute = torch.cuda.current_stream(slots.device)
        self._driver = CudaDriver()
        self._spare: deque[_Copy] = deque()

    def fence(self) -> Point:
        event = torch.cuda.Event()
        event.record(self._compute)
        return event

    def begin(self, record: Tensor, slot: int, after: Point | None) -> object:
        driver, stream = self._driver, self._stream.cuda_stream
        driver.bind()
        copy = self._spare.popleft() if len(self._spare) > _NUM_SPARE else self._new_copy()
        if isinstance(after, torch.cuda.Event):
            driver.wait_on_stream(stream, after.cuda_event)
        driver.record(copy.begin, stream)
        target = self._address + slot * self.slot_bytes
        driver.copy_to_device(target, record.data_ptr(), record.numel(), stream)
        driver.record(copy.end, stream)
        return copy

    def order_behind(self, copy: object) -> None:
        self._driver.bind()
        self._driver.wait_on_stream(self._compute.cuda_stream, _own(copy).end)

    def has_ended(self, copy: object) -> bool:
        self._driver.bind()
        return self._driver.has_happened(_own(copy).end)

    def wait_busily(self, copy: object) -> None:
        self._driver.bind()
        self._driver.synchronize(_own(copy).end)

    def moved_s(self, copy: object) -> float:
        own = _own(copy)
        seconds = self._driver.elapsed_s(own.begin, own.end)
        self._spare.append(own)
        return seconds

    def _new_copy(self) -> _Copy:
        return _Copy(self._driver.create_event(), self._driver.create_event())


def _own(copy: object) -> _Copy:
    assert isinstance(copy, _Copy), copy
    return copy
