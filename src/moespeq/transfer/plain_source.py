"""Plain records out of a nested store: what an engine without the format would move, decoded once, when read.

For the ablation and for the on-demand baseline, which then need no second store of the checkpoint's full size. Decoding
needs several times an expert's size, so one record at a time is decoded.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moespeq.nested import BaseFormat, Layout, decode_record, encode_record, split_base
from moespeq.nested.sections import align
from moespeq.types import ExpertKey

__all__ = ["NestedStore", "PlainSource", "plain_record_bytes"]

_BF16_BYTES = 2


class NestedStore(Protocol):
    """What a store offers for it. Reads raise StorageError or StoreError."""

    def layout(self, key: ExpertKey) -> Layout: ...

    def base_bytes(self, key: ExpertKey) -> int: ...

    def read_base_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None: ...

    def record_bytes(self, key: ExpertKey) -> int: ...

    def read_record_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None: ...


class PlainSource:
    """A RecordSource of layout `plain`, decoded on `device`; safe to use from several threads."""

    def __init__(
        self,
        store: NestedStore,
        shapes: Sequence[tuple[int, int]],
        fmt: BaseFormat,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._store, self._shapes, self._fmt, self._device = store, tuple(shapes), fmt, torch.device(device)
        self._decoding = threading.Lock()
        self._record_bytes = plain_record_bytes(shapes)

    def num_bytes(self, key: ExpertKey) -> int:
        return self._record_bytes

    def front_bytes(self, key: ExpertKey) -> int:
        """Length of the base in front of a record: plain records need none."""
        return 0

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        """Fill the first `num_bytes(key)` bytes of `buffer`; both records of the store are checked."""
        assert skip_bytes == 0, "a plain record has no base in front"
        base, record = _pages(self._store.base_bytes(key)), _pages(self._store.record_bytes(key))
        self._store.read_base_into(key, base.numpy().data, verify=True)
        self._store.read_record_into(key, record.numpy().data, verify=True)
        with self._decoding:
            plain = self._decode(key, base, record)
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(plain)], plain.numpy())

    def _decode(self, key: ExpertKey, base: Tensor, record: Tensor) -> Tensor:
        bases = split_base(base.to(self._device), self._shapes, self._fmt)
        matrices = decode_record(record.to(self._device), bases, self._shapes, self._fmt, self._store.layout(key))
        return encode_record(matrices, [], self._fmt, Layout.PLAIN).cpu()


def plain_record_bytes(shapes: Sequence[tuple[int, int]]) -> int:
    """Length of the plain record of an expert with these matrices."""
    return sum(align(_BF16_BYTES * rows * cols) for rows, cols in shapes)


def _pages(num_bytes: int) -> Tensor:
    """Memory that begins on a page, which a direct read needs: uint8 [num_bytes]."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
