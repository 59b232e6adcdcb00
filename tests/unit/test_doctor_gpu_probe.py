"""The GPU's facts through a driver that is not there: what it says, what it refuses, and what it does not know."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fake_driver import GIB, FakeDriver
from moespeq.doctor import gpu_probe
from moespeq.doctor.gpu_probe import probe_gpu, read_card, try_pinning


class FakeNvmlError(Exception):
    """As pynvml raises it."""


class FakeNvml:
    """One card; a question in `refused` has no answer."""

    NVMLError = FakeNvmlError

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.was_shut_down = False

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's own name
        self.was_shut_down = True

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByPciBusId": "card",
            "nvmlDeviceGetHandleByIndex": "first card",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * GIB, free=30 * GIB),
            "nvmlSystemGetCudaDriverVersion": 13010,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=None)],
            "nvmlSystemGetProcessName": "/usr/bin/python serve",
        }

        def answer(*_: object) -> Any:
            if name in self.refused:
                raise FakeNvmlError
            return answers[name]

        return answer


def use(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    return nvml


def test_a_card_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = use(monkeypatch, FakeNvml())
    card = read_card("0000:1b:00.0")
    assert card is not None
    assert (card.driver, card.cuda, card.free_bytes) == ("580.1", "13.1", 30 * GIB)
    assert (card.generation, card.max_generation, card.width, card.max_width) == (4, 5, 8, 16)
    assert [(one.pid, one.name, one.num_bytes) for one in card.processes] == [(7, "python", None)]
    assert nvml.was_shut_down


def test_what_the_driver_does_not_know_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvml("nvmlDeviceGetCurrPcieLinkWidth", "nvmlSystemGetProcessName"))
    card = read_card(None)
    assert card is not None
    assert (card.width, card.max_width, card.processes[0].name) == (None, 16, "process")


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
def test_without_nvml_there_is_no_card(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    use(monkeypatch, FakeNvml(refused))
    assert read_card(None) is None


class Pinning:
    """Registers, or refuses with a reason."""

    def __init__(self, refusal: str | None) -> None:
        self.refusal, self.num_pinned = refusal, 0

    def register(self, address: int, num_bytes: int) -> str | None:
        self.num_pinned += self.refusal is None
        return self.refusal

    def unregister(self, address: int) -> None:
        self.num_pinned -= 1

    def buffer(self, num_bytes: int) -> Any:
        raise AssertionError


@pytest.mark.parametrize("refusal", [None, "operation not permitted"])
def test_a_piece_is_pinned_and_let_go(refusal: str | None) -> None:
    pinning = Pinning(refusal)
    pin = try_pinning(pinning, num_bytes=4096)
    assert (pin.num_bytes, pin.refusal, pinning.num_pinned) == (4096, refusal, 0)


def test_a_usable_gpu_is_described_with_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvml())
    monkeypatch.setattr(gpu_probe, "CudaPinning", lambda: Pinning(None))
    monkeypatch.setattr(gpu_probe, "_copy_bytes_per_s", lambda index: 55e9)
    monkeypatch.setattr(gpu_probe, "_copy_engines", lambda index: 3)
    gpu = probe_gpu(FakeDriver())
    assert (gpu.refusal, gpu.name, gpu.capability, gpu.copy_engines) == (None, "NVIDIA H200", (9, 0), 3)
    assert gpu.pin is not None
    assert gpu.pin.copy_bytes_per_s == 55e9
    assert gpu.card is not None


def test_a_gpu_that_torch_cannot_use_is_refused_beside_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvml())
    gpu = probe_gpu(FakeDriver(is_cuda_build=False))
    assert gpu.refusal is not None
    assert gpu.card is not None


def test_copy_engines_are_unknown_without_a_driver() -> None:
    assert gpu_probe._copy_engines(0) in (None, *range(1, 9))
