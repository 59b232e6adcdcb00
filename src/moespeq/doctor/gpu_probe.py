"""Asks the driver for facts of the GPU: through torch what an engine would use, through NVML how the card is now.

A trial pins a small piece and copies from it, because an idle card runs its link at a lower generation: the state of
the link is read right behind the copies.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from moespeq.doctor.machine import CardState, GpuFacts, PinFacts, Process
from moespeq.errors import UsageError
from moespeq.hardware.gpu import GpuDriver, TorchDriver, require_gpu
from moespeq.hardware.link import measure_copies
from moespeq.transfer import CudaPinning, HostPinning

__all__ = ["probe_gpu", "read_card", "try_pinning"]

_PIECE_BYTES = 128 << 20
_BLOCK_BYTES = 16 << 20
_ASYNC_ENGINE_COUNT = 40  # CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT


def probe_gpu(driver: GpuDriver | None = None) -> GpuFacts:
    """The GPU that an engine would use, or why there is none."""
    driver = driver or TorchDriver()
    try:
        gpu = require_gpu(driver)
    except UsageError as error:
        return GpuFacts(str(error), card=read_card(None))
    pin = try_pinning(CudaPinning())
    if pin.refusal is None:
        pin = replace(pin, copy_bytes_per_s=_copy_bytes_per_s(gpu.index))
    return GpuFacts(
        None,
        name=gpu.name,
        capability=gpu.capability,
        numa_node=gpu.numa_node,
        copy_engines=_copy_engines(gpu.index),
        pin=pin,
        card=read_card(driver.pci_address(gpu.index)),
    )


def try_pinning(pinning: HostPinning, num_bytes: int = _PIECE_BYTES) -> PinFacts:
    """Pin a piece of memory and let it go again."""
    piece = np.ones(num_bytes, dtype=np.uint8)  # written to: its pages are there
    begin_s = time.perf_counter()
    refusal = pinning.register(piece.ctypes.data, num_bytes)
    seconds = time.perf_counter() - begin_s
    if refusal is None:
        pinning.unregister(piece.ctypes.data)
    return PinFacts(num_bytes, seconds, refusal)


def _copy_bytes_per_s(index: int) -> float | None:
    device = torch.device("cuda", index)
    try:
        return measure_copies(device, is_pinned=True, block_bytes=(_BLOCK_BYTES,), area_bytes=_PIECE_BYTES)[
            _BLOCK_BYTES
        ]
    except RuntimeError:  # no such memory is left, on the host or the device
        return None


def _copy_engines(index: int) -> int | None:
    count = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(count), _ASYNC_ENGINE_COUNT, index)
    except OSError:
        return None
    return count.value if code == 0 else None


def read_card(pci_address: str | None) -> CardState | None:
    """How the card at `pci_address` is now, or the first one; None where NVML does not answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        card = nvml.nvmlDeviceGetHandleByPciBusId(pci_address) if pci_address else nvml.nvmlDeviceGetHandleByIndex(0)
        return _card_state(nvml, card)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _card_state(nvml: Any, card: Any) -> CardState:
    memory, cuda = nvml.nvmlDeviceGetMemoryInfo(card), nvml.nvmlSystemGetCudaDriverVersion()
    return CardState(
        name=nvml.nvmlDeviceGetName(card),
        driver=nvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        total_bytes=memory.total,
        free_bytes=memory.free,
        generation=_asked(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, card),
        max_generation=_asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, card),
        width=_asked(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, card),
        max_width=_asked(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, card),
        processes=tuple(_processes(nvml, card)),
    )


def _processes(nvml: Any, card: Any) -> list[Process]:
    running = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, card) or []
    others = [one for one in running if one.pid != os.getpid()]
    return [Process(one.pid, _name_of(nvml, one.pid), one.usedGpuMemory) for one in others]


def _name_of(nvml: Any, pid: int) -> str:
    name = _asked(nvml, nvml.nvmlSystemGetProcessName, pid)
    return str(name).rpartition("/")[2].split(" ")[0] if name else "process"


def _asked(nvml: Any, question: Any, subject: Any) -> Any:
    """The answer, or None where this card, driver or machine has none."""
    try:
        return question(subject)
    except nvml.NVMLError:
        return None
