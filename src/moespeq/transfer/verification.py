"""Spot checks of records at rest: what lies in host memory or in slots must still match the store's checksum.

Records are checked once when they are read; this looks at what happened to them since, on the way and in place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from moespeq.errors import StorageError
from moespeq.types import ExpertKey

__all__ = ["check_records", "spread"]

T = TypeVar("T")


def check_records(samples: Iterable[tuple[ExpertKey, Tensor]], crc32_of: Callable[[ExpertKey], int], place: str) -> int:
    """Compare records, uint8 [n] on any device, with the checksums of their store; returns how many there were.

    Raises StorageError naming the first that differs and `place`, where it lies.
    """
    num_checked = 0
    for key, record in samples:
        if zlib.crc32(record.cpu().numpy().data) != crc32_of(key):
            raise StorageError(
                f"Expert {key.expert} of MoE layer {key.layer} is damaged in {place}: its {record.numel()} bytes do "
                f"not match the store's checksum; load the model again, and check the memory if it repeats."
            )
        num_checked += 1
    return num_checked


def spread(items: Sequence[T], num_samples: int) -> list[T]:
    """`num_samples` of `items`, evenly spaced, or all of them."""
    num_samples = min(num_samples, len(items))
    return [items[index * len(items) // num_samples] for index in range(num_samples)]
