"""Device memory as the driver sees it: what one engine takes of a card that others of this process use too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moespeq.hardware.gpu_memory import PeakDeviceMemory, used_bytes, used_bytes_before_context


def measure_context_bytes() -> int:
    """What CUDA itself takes: the rise of the driver's figure when this process first uses the card. 0 without a GPU.

    Call it before anything else touches the GPU, or the rise is not seen.
    """
    if not torch.cuda.is_available():
        return 0
    before_bytes = used_bytes_before_context()
    torch.zeros(1, device="cuda")
    return max(0, used_bytes() - before_bytes)


@contextmanager
def device_peak(context_bytes: int) -> Iterator[Callable[[], int | None]]:
    """The most that the block takes on top of what is taken now, and the context; ask after the block."""
    if not torch.cuda.is_available():
        yield lambda: None
        return
    torch.cuda.empty_cache()
    with PeakDeviceMemory(before_bytes=used_bytes() - context_bytes) as peak:
        yield lambda: peak.peak_bytes
