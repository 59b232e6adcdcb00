"""One mapping of exactly the bytes asked for, pinned piece by piece from its start.

Allocators of pinned tensors round each up to a power of two; a mapping that is registered afterwards does not. Pieces
keep one registration short (the driver holds a lock meanwhile), let the first copies start before the last page is
pinned, and make a refusal cost only what follows it: `pinned_bytes` counts from the start. A copy must not cross a
border between pieces, which the driver knows as separate memory.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moespeq.config import format_bytes
from moespeq.errors import BudgetError
from moespeq.transfer.pages import populate, prefer_node
from moespeq.transfer.pinning import HostPinning

__all__ = ["PinnedArena"]

_REFUSAL_COSTS = "copies of the rest go through a small buffer, at about 8 instead of 55 GB/s on a PCIe 5 link"


class PinnedArena:
    """Host memory of `sum(piece_bytes)` bytes. `pin` is for one thread at a time; the rest for any."""

    def __init__(self, piece_bytes: Sequence[int], pinning: HostPinning, *, numa_node: int | None = None) -> None:
        assert all(size % mmap.PAGESIZE == 0 for size in piece_bytes), piece_bytes
        self.num_bytes = sum(piece_bytes)
        self.pinned_bytes = 0
        self._pinning = pinning
        self._unpinned = deque(piece_bytes)
        self._registered: list[int] = []
        try:
            self._mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"The expert records need {format_bytes(self.num_bytes)} of host memory, which the system refused "
                f"({error}); ask for less with --host-memory."
            ) from error
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 4 KiB
        self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        if numa_node is not None:
            prefer_node(self._tensor.data_ptr(), self.num_bytes, numa_node)

    def memory(self) -> memoryview:
        """The whole mapping."""
        return memoryview(self._mapping)

    def tensor(self) -> Tensor:
        """The whole mapping as uint8 [num_bytes]."""
        return self._tensor

    def is_pinned(self, end: int) -> bool:
        """Whether everything before byte `end` is pinned."""
        return end <= self.pinned_bytes

    def pin(self, warn: Callable[[str], None]) -> None:
        """Pin piece after piece, until the driver refuses one: `warn` is told what that costs."""
        while (size := self._next_piece()) is not None:
            address = self._tensor.data_ptr() + self.pinned_bytes
            populate(address, size)
            refusal = self._pinning.register(address, size)
            if refusal is not None:
                self.stop_pinning()
                warn(
                    f"The driver refused to pin host memory beyond {format_bytes(self.pinned_bytes)} of "
                    f"{format_bytes(self.num_bytes)} ({refusal}); {_REFUSAL_COSTS}."
                )
                return
            self._registered.append(address)
            self.pinned_bytes += size

    def stop_pinning(self) -> None:
        """`pin` returns after the piece it is at."""
        self._unpinned.clear()

    def close(self) -> None:
        """Unpin everything, once `pin` has returned; the mapping lives as long as any view of it. Repeatable."""
        self.stop_pinning()
        self.pinned_bytes = 0
        while self._registered:
            self._pinning.unregister(self._registered.pop())

    def _next_piece(self) -> int | None:
        try:
            return self._unpinned.popleft()
        except IndexError:
            return None
