"""The kernel of `host_read`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["read_pinned"]

_BLOCK = 1024


def read_pinned(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source, pinned, both contiguous; whole numbers of one dtype and shape."""
    num_items = target.numel()
    _read[(triton.cdiv(num_items, _BLOCK),)](target, source, num_items, block=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["num_items"])
def _read(target, source, num_items, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    is_there = place < num_items
    tl.store(target + place, tl.load(source + place, mask=is_there, volatile=True), mask=is_there)
