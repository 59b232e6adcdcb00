"""Programmatic dependent launch: a kernel may start while its predecessor still runs, then waits for it.

Small kernels of a decode step last about as long as starting one takes; what a kernel needs that no predecessor writes
(weights) it can load before it waits. The rule that keeps this correct: a kernel launched early calls
`wait_for_predecessor` before it touches anything that another kernel writes or reads for the last time, and so is
ordered after everything before it, for its predecessor ended only after its own wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["release_successor", "starts_early", "wait_for_predecessor"]


def starts_early(device: torch.device) -> bool:
    """Whether the device knows the launch attribute."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def wait_for_predecessor(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """Everything the kernels before wrote is visible from here on."""
    if early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_successor(early: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may take this one's free multiprocessors; what it may read it decides by its own wait."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
