"""What the device and the link did while something ran, from a profiler's trace of one call.

    device busy share = time at least one kernel ran / wall time
    link utilisation  = time at least one host-to-device copy ran / wall time

Overlapping intervals count once. The profiler slows the host down, so shares come from a run of their own and are never
mixed with timed ones. The trace's times are microseconds; sizes are the driver's.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

Interval = tuple[float, float]
_US = 1e-6
_TO_DEVICE = "HtoD"


@dataclass(frozen=True, slots=True)
class Activity:
    """One profiled call. both_s: a kernel and a copy at once; idle_s: neither."""

    wall_s: float
    kernel_s: float
    copy_s: float
    both_s: float
    copied_bytes: int

    @property
    def device_busy_share(self) -> float:
        return self.kernel_s / self.wall_s

    @property
    def link_utilisation(self) -> float:
        return self.copy_s / self.wall_s

    @property
    def idle_s(self) -> float:
        return max(0.0, self.wall_s - self.kernel_s - self.copy_s + self.both_s)

    def to_json(self) -> dict[str, float]:
        shares = {"device_busy_share": self.device_busy_share, "link_utilisation": self.link_utilisation}
        return {**asdict(self), "idle_s": self.idle_s, **shares}


def profile(call: Callable[[], object]) -> Activity:
    """Run `call` once under the profiler. Needs a CUDA device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        begin_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - begin_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarize_trace(json.loads(path.read_text())["traceEvents"], wall_s)


def summarize_trace(events: Iterable[Mapping[str, Any]], wall_s: float) -> Activity:
    """Sum a Chrome trace's kernels and host-to-device copies."""
    kernels: list[Interval] = []
    copies: list[Interval] = []
    copied_bytes = 0
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(interval_of(event))
        elif event.get("cat") == "gpu_memcpy" and _TO_DEVICE in event["name"]:
            copies.append(interval_of(event))
            copied_bytes += int(event["args"]["bytes"])
    kernel_s, copy_s = covered_s(kernels), covered_s(copies)
    both_s = kernel_s + copy_s - covered_s(kernels + copies)
    return Activity(wall_s, kernel_s, copy_s, both_s, copied_bytes)


def interval_of(event: Mapping[str, Any]) -> Interval:
    return event["ts"] * _US, (event["ts"] + event["dur"]) * _US


def covered_s(intervals: list[Interval]) -> float:
    """Length of the union."""
    total_s, end_s = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total_s += max(0.0, end - max(begin, end_s))
        end_s = max(end_s, end)
    return total_s
