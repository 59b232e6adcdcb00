"""How much of the GPU's memory this process takes, as the driver sees it: allocators do not count the context, graphs
and what other libraries take.

The driver counts the whole card, other processes included; what was in use before this process began is taken off where
that can be known: NVML (package nvidia-ml-py) answers without a context, CUDA's own call creates one first. The two do
not count the same, so both figures come from one of them.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Self

import torch

__all__ = ["PeakDeviceMemory", "used_bytes", "used_bytes_before_context"]


def used_bytes(index: int = 0) -> int:
    """Bytes of the card that are taken, by whomever."""
    if _has_nvml():
        return torch.cuda.device_memory_used(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return total_bytes - free_bytes


def used_bytes_before_context(index: int = 0) -> int:
    """The same, asked before this process has a context; 0 without NVML, which counts others' memory as ours."""
    return used_bytes(index) if _has_nvml() else 0


def _has_nvml() -> bool:
    return importlib.util.find_spec("pynvml") is not None


class PeakDeviceMemory:
    """The most that was in use inside the `with` block, sampled by a thread, less `before_bytes`.

    Allocators keep what they took, so a sample every few milliseconds misses no lasting peak.
    """

    def __init__(
        self, *, before_bytes: int = 0, interval_s: float = 0.01, used_bytes: Callable[[], int] = used_bytes
    ) -> None:
        self._before_bytes, self._interval_s, self._used_bytes = before_bytes, interval_s, used_bytes
        self._peak_bytes = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_end, name="moespeq-memory", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The peak so far."""
        return self._peak_bytes

    def sample(self) -> None:
        """Look once more, now."""
        self._peak_bytes = max(self._peak_bytes, self._used_bytes() - self._before_bytes)

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self.sample()

    def _sample_until_end(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            self.sample()
