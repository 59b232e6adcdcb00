"""A GPU that cannot carry an engine is refused with the reason; what cannot be read is unknown, never an error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fake_driver import GIB, FakeDriver
from moespeq.errors import UsageError
from moespeq.hardware.gpu import GpuDriver, TorchDriver, require_gpu
from moespeq.hardware.gpu_memory import PeakDeviceMemory
from moespeq.hardware.pci import link_of, numa_node_of


def test_a_usable_gpu_is_described() -> None:
    gpu = require_gpu(FakeDriver())
    assert (gpu.index, gpu.name, gpu.capability) == (0, "NVIDIA H200", (9, 0))
    assert (gpu.free_bytes, gpu.total_bytes) == (130 * GIB, 140 * GIB)
    assert (gpu.numa_node, gpu.link) == (None, None)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (
            {"is_cuda_build": False, "torch_version": "2.13.0+cpu"},
            r"^torch 2\.13\.0\+cpu is built without CUDA; install a CUDA build of torch, or use --device cpu\.$",
        ),
        ({"num_gpus": 0}, r"^No CUDA GPU is visible: .* use --device cpu\.$"),
        (
            {"capability": (7, 5), "name": "Tesla T4"},
            r"^The GPU Tesla T4 has compute capability 7\.5, which computes no bf16; use one of 8\.0 or later, or",
        ),
        ({"triton_version": None}, r"^Triton is not installed; install triton 3\.3 or later, or use --device cpu\.$"),
        ({"triton_version": "3.2.1"}, r"^Triton 3\.2\.1 is too old for the kernels; install triton 3\.3 or later"),
        ({"triton_version": "2.9"}, r"^Triton 2\.9 is too old"),
        ({"triton_version": "weekly"}, r"^Triton weekly is too old"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(answers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        require_gpu(FakeDriver(**answers))


@pytest.mark.parametrize("version", ["3.3.0", "3.3.1+git1", "3.10", "4.0"])
def test_every_later_triton_will_do(version: str) -> None:
    require_gpu(FakeDriver(triton_version=version))


def test_the_first_amperes_will_do() -> None:
    assert require_gpu(FakeDriver(capability=(8, 0))).capability == (8, 0)


def test_the_real_driver_answers_without_a_gpu() -> None:
    driver: GpuDriver = TorchDriver()
    assert driver.torch_version()
    assert driver.num_gpus() >= 0
    assert isinstance(driver.is_cuda_build(), bool)


def card(folder: Path, **files: str) -> Path:
    (folder / "0000:1b:00.0").mkdir()
    for name, text in files.items():
        (folder / "0000:1b:00.0" / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(("text", "node"), [("0", 0), ("1", 1), ("-1", None), ("", None), ("x", None)])
def test_the_memory_node_is_read_where_the_system_knows_it(tmp_path: Path, text: str, node: int | None) -> None:
    assert numa_node_of("0000:1b:00.0", card(tmp_path, numa_node=text)) == node
    assert numa_node_of("0000:99:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("speed", "width", "link"),
    [
        ("32.0 GT/s PCIe", "16", "PCIe 5.0 x16"),
        ("16.0 GT/s PCIe", "8", "PCIe 4.0 x8"),
        ("Unknown", "16", None),
        ("8.0 GT/s PCIe", "", None),
    ],
)
def test_the_link_is_named_by_generation_and_width(tmp_path: Path, speed: str, width: str, link: str | None) -> None:
    assert link_of("0000:1b:00.0", card(tmp_path, max_link_speed=speed, max_link_width=width)) == link
    assert link_of("0000:99:00.0", tmp_path) is None


def test_the_peak_is_the_most_ever_in_use_less_what_others_had_before() -> None:
    used = [5]
    with PeakDeviceMemory(before_bytes=3, interval_s=0.001, used_bytes=lambda: used[0]) as memory:
        used[0] = 50
        deadline_s = time.monotonic() + 10
        while memory.peak_bytes != 47:
            assert time.monotonic() < deadline_s
        used[0] = 6
    assert memory.peak_bytes == 47


def test_the_end_of_the_block_is_sampled_too() -> None:
    used = [5]
    with PeakDeviceMemory(interval_s=100.0, used_bytes=lambda: used[0]) as memory:
        used[0] = 70
    assert memory.peak_bytes == 70
