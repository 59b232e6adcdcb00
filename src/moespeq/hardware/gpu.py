"""Which GPU there is and whether it can carry an engine: CUDA, bf16 in hardware, a Triton that knows our kernels.

Everything asked of torch goes through `GpuDriver`, so that each refusal is tested on machines without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moespeq.errors import UsageError
from moespeq.hardware.pci import link_of, numa_node_of

__all__ = ["OLDEST_TRITON", "Gpu", "GpuDriver", "TorchDriver", "require_gpu"]

_BF16_CAPABILITY = (8, 0)
OLDEST_TRITON = (3, 3)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A usable GPU. free_bytes: as the driver saw it when asked; numa_node and link: None where unknown."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    numa_node: int | None
    link: str | None


class GpuDriver(Protocol):
    """What torch and the packages say of this machine."""

    def torch_version(self) -> str: ...

    def is_cuda_build(self) -> bool: ...

    def num_gpus(self) -> int: ...

    def name(self, index: int) -> str: ...

    def capability(self, index: int) -> tuple[int, int]: ...

    def pci_address(self, index: int) -> str: ...

    def free_and_total_bytes(self, index: int) -> tuple[int, int]: ...

    def triton_version(self) -> str | None: ...


class TorchDriver:
    """The real one. `free_and_total_bytes` creates the CUDA context; nothing before it does."""

    def torch_version(self) -> str:
        return torch.__version__

    def is_cuda_build(self) -> bool:
        return torch.version.cuda is not None

    def num_gpus(self) -> int:
        return torch.cuda.device_count()

    def name(self, index: int) -> str:
        return str(torch.cuda.get_device_name(index))

    def capability(self, index: int) -> tuple[int, int]:
        return torch.cuda.get_device_capability(index)

    def pci_address(self, index: int) -> str:
        card: Any = torch.cuda.get_device_properties(index)  # fields that torch's own stubs leave out
        return f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"

    def free_and_total_bytes(self, index: int) -> tuple[int, int]:
        torch.cuda.empty_cache()  # what torch keeps of an engine that was closed is free
        return torch.cuda.mem_get_info(index)

    def triton_version(self) -> str | None:
        try:
            return importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return None


def require_gpu(driver: GpuDriver | None = None, *, index: int = 0) -> Gpu:
    """The GPU an engine would use. Raises UsageError with what is missing and what to do."""
    driver = driver or TorchDriver()
    if not driver.is_cuda_build():
        raise UsageError(
            f"torch {driver.torch_version()} is built without CUDA; install a CUDA build of torch, or use --device cpu."
        )
    if driver.num_gpus() <= index:
        raise UsageError(
            "No CUDA GPU is visible: there is none, its driver is missing, or CUDA_VISIBLE_DEVICES hides it; "
            "use --device cpu."
        )
    name, capability = driver.name(index), driver.capability(index)
    if capability < _BF16_CAPABILITY:
        raise UsageError(
            f"The GPU {name} has compute capability {capability[0]}.{capability[1]}, which computes no bf16; "
            f"use one of 8.0 or later, or --device cpu."
        )
    _check_triton(driver.triton_version())
    free_bytes, total_bytes = driver.free_and_total_bytes(index)
    address = driver.pci_address(index)
    return Gpu(index, name, capability, total_bytes, free_bytes, numa_node_of(address), link_of(address))


def _check_triton(version: str | None) -> None:
    oldest = ".".join(map(str, OLDEST_TRITON))
    if version is None:
        raise UsageError(f"Triton is not installed; install triton {oldest} or later, or use --device cpu.")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TRITON:
        raise UsageError(
            f"Triton {version} is too old for the kernels; install triton {oldest} or later, or use --device cpu."
        )
