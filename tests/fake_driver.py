"""What a driver and the installed packages say of a GPU, for machines without one."""

from __future__ import annotations

from typing import Any

__all__ = ["GIB", "FakeDriver"]

GIB = 2**30


class FakeDriver:
    """An H200 on a machine that has everything, but for what a test takes away."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "torch_version": "2.11.0+cu130",
            "is_cuda_build": True,
            "num_gpus": 1,
            "name": "NVIDIA H200",
            "capability": (9, 0),
            "pci_address": "ffff:ff:ff.0",
            "free_and_total_bytes": (130 * GIB, 140 * GIB),
            "triton_version": "3.6.0",
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.answers[name]
