"""Small tables from pinned host memory to the device, by a kernel that reads them over the bus itself.

A copy would do, but copies of all streams share one engine, which carries out what was queued before: a few hundred
bytes, without which no kernel starts, would wait for megabytes of records. What a kernel reads passes between them.
"""

from __future__ import annotations

import torch

__all__ = ["read_from_host"]


def read_from_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source, whole numbers of one dtype and shape, in the order of the current stream. Capturable.

    `source` is pinned where `target` is on a GPU, and must stay as it is until the kernel has run.
    """
    assert (target.dtype, target.shape) == (source.dtype, source.shape), (target.shape, source.shape)
    if not target.is_cuda:
        target.copy_(source)
        return
    from moespeq.kernels.pinned_read import read_pinned

    read_pinned(target, source)
