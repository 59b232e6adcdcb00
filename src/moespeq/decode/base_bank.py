"""The base bank of a tier: filled from the store, and its rows given to other experts while the engine learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from moespeq.model.weights import BaseBank
from moespeq.progress import Meter
from moespeq.residency import NO_ROW, ResidentBases, first_rows
from moespeq.store import Store
from moespeq.transfer import HostRecords
from moespeq.types import ExpertKey

__all__ = ["BaseOf", "lend_base", "load_bank", "read_base", "resident_bases"]

BaseOf = Callable[[ExpertKey], AbstractContextManager[torch.Tensor]]
"""The base record of an expert in host memory, uint8 [n]; valid inside the context."""
_NUM_LOADERS = 4  # checking a record takes a core; more threads than a disk needs gain nothing
_ROWS_AT_ONCE = 64


def load_bank(store: Store, num_rows: int, *, meter: Meter, device: str = "cpu") -> BaseBank | None:
    """A bank of the first experts of each layer; None where there is no row. Raises StorageError or StoreError."""
    if num_rows == 0:
        return None
    manifest = store.manifest
    rows = _first_rows(store, num_rows)
    records = torch.empty(num_rows, store.base_bytes(ExpertKey(0, 0)), dtype=torch.uint8, device=device)
    _fill(store, [key for key, row in zip(store.keys(), rows, strict=True) if row != NO_ROW], records, meter)
    row_map = None
    if num_rows < len(rows) and device != "cpu":
        row_map = torch.tensor(rows, dtype=torch.int32, device=device).view(manifest.num_layers, manifest.num_experts)
    return BaseBank(records, rows, manifest.num_experts, manifest.shapes, manifest.base_format, row_map=row_map)


def resident_bases(
    store: Store, bank: BaseBank | None, front_bytes: Callable[[ExpertKey], int], base_of: BaseOf
) -> ResidentBases:
    """What residency knows of the bank; where that holds a part of the experts, it may change which."""
    rows = _first_rows(store, 0 if bank is None else len(bank.records))
    if bank is None or NO_ROW not in rows:
        return ResidentBases(rows, front_bytes)

    def replace(row: int, leaves: ExpertKey, comes: ExpertKey) -> None:
        with base_of(comes) as base:
            bank.replace(row, leaves, comes, base)

    return ResidentBases(rows, front_bytes, replace)


@contextmanager
def read_base(store: Store, key: ExpertKey) -> Iterator[torch.Tensor]:
    """A BaseOf that reads the store. Raises StorageError or StoreError."""
    base = torch.empty(store.base_bytes(key), dtype=torch.uint8)
    store.read_base_into(key, base.numpy().data, verify=True)
    yield base


@contextmanager
def lend_base(
    store: Store, records: HostRecords, front_bytes: Callable[[ExpertKey], int], key: ExpertKey
) -> Iterator[torch.Tensor]:
    """A BaseOf: the front of a record in host memory, where the link copies from; where it has none, the store's."""
    num_bytes = front_bytes(key)
    if num_bytes == 0:
        with read_base(store, key) as base:
            yield base
        return
    record = records.borrow(key)
    try:
        yield record[:num_bytes]
    finally:
        records.give_back(key)


def _first_rows(store: Store, num_rows: int) -> list[int]:
    return first_rows(num_rows, num_layers=store.manifest.num_layers, num_experts=store.manifest.num_experts)


def _fill(store: Store, keys: Sequence[ExpertKey], records: torch.Tensor, meter: Meter) -> None:
    """`records` uint8 [N, base bytes], on whatever device, some rows at a time through host memory."""

    def load(begin: int) -> int:
        part = keys[begin : begin + _ROWS_AT_ONCE]
        staging = torch.empty(len(part), records.shape[1], dtype=torch.uint8)
        for key, row in zip(part, staging, strict=True):
            store.read_base_into(key, row.numpy().data, verify=True)
        records[begin : begin + len(part)].copy_(staging)
        return staging.nbytes

    with ThreadPoolExecutor(_NUM_LOADERS) as pool:
        for loaded_bytes in pool.map(load, range(0, len(keys), _ROWS_AT_ONCE)):
            meter.add(loaded_bytes, "loading all weights: the draft's base")
