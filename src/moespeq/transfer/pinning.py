"""Pinned host memory, as the CUDA driver gives it: what the copy engine can read by itself, at the link's full rate.

From pageable memory the driver copies through a buffer of its own: 7.8 GB/s instead of 55 on a PCIe 5 machine. The
driver may refuse (a container's limit, a locked-memory limit): that is an answer here, not an error.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaPinning", "HostPinning"]

_PORTABLE = 1  # pinned for every CUDA context, not only the calling one


class HostPinning(Protocol):
    """Registers ranges of host memory. Safe to call from several threads."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin a range; None, or the driver's reason for refusing."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped."""
        ...

    def buffer(self, num_bytes: int) -> Tensor:
        """A small buffer, uint8 [num_bytes], pinned if the driver gives any such memory at all."""
        ...


class CudaPinning:
    """The CUDA runtime's own calls.

    Call `register` from a thread that launches no kernels: a refusal stays behind as that thread's last CUDA error,
    which the next launch would report as its own.
    """

    def register(self, address: int, num_bytes: int) -> str | None:
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
        return None if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def buffer(self, num_bytes: int) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return torch.empty(num_bytes, dtype=torch.uint8)
