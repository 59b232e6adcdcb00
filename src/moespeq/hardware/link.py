"""How fast bytes move from host memory to the device, by block size: the bandwidth that every floor divides by.

Without a GPU the device is host memory and a copy inside it is what can be measured. Blocks walk through an area larger
than the processor's caches, and many are queued before the clock is read, as the mover does; the median of several
tries is reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "measure_copies"]

BLOCK_BYTES = tuple(1 << power for power in range(16, 27, 2))  # 64 KiB to 64 MiB
_AREA_BYTES = 256 << 20
_MAX_COPIES = 1024
_TRIES = 5


def measure_copies(
    device: torch.device,
    *,
    is_pinned: bool,
    block_bytes: Sequence[int] = BLOCK_BYTES,
    area_bytes: int = _AREA_BYTES,
    now_s: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Bytes a second from host memory to `device` for each block size. Raises RuntimeError where pinning is refused."""
    area_bytes = max(area_bytes, *block_bytes)
    source = torch.ones(area_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    target = torch.empty(area_bytes, dtype=torch.uint8, device=device)
    return {block: _bytes_per_s(source, target, block, now_s) for block in block_bytes}


def _bytes_per_s(source: Tensor, target: Tensor, block_bytes: int, now_s: Callable[[], float]) -> float:
    starts = range(0, source.numel() - block_bytes + 1, block_bytes)[:_MAX_COPIES]
    pairs = [(target[start : start + block_bytes], source[start : start + block_bytes]) for start in starts]

    def copy_all() -> float:
        begin_s = now_s()
        for to, origin in pairs:
            to.copy_(origin, non_blocking=True)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        return now_s() - begin_s

    copy_all()
    return len(pairs) * block_bytes / statistics.median(copy_all() for _ in range(_TRIES))
