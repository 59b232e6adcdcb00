"""Is a store what it was, and is it its checkpoint? Every checksum; with the checkpoint, every bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moespeq.config import format_bytes
from moespeq.errors import StoreError
from moespeq.prepare.conversion import as_prepared, converted_from
from moespeq.prepare.experts import ExpertReader, are_equal, stored_parts, view_of
from moespeq.prepare.hashing import CHUNK_BYTES, sha256_of
from moespeq.prepare.workers import ExpertWorkers
from moespeq.progress import Meter, ProgressSink
from moespeq.store import Checkpoint, Store, open_checkpoint
from moespeq.types import ExpertKey

__all__ = ["VerifyReport", "verify_store"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at. Nothing was wrong, or verify_store had raised.

    converted_from: the dtypes of experts that were rounded to bf16 before they were prepared, None where none were.
    """

    num_records: int
    num_files: int
    checked_bytes: int
    compared_bits: int
    converted_from: str | None = None

    def summary(self) -> str:
        """For people: what was checked and what was compared."""
        checked = (
            f"{self.num_records:,} records and {self.num_files:,} files ({format_bytes(self.checked_bytes)}) "
            "match their checksums"
        )
        rounded = f", its {self.converted_from} experts rounded to bf16" if self.converted_from else ""
        return (
            f"{checked}; {self.compared_bits:,} bits equal the checkpoint's{rounded}" if self.compared_bits else checked
        )


def verify_store(path: Path, against: Path | None = None, progress: ProgressSink | None = None) -> VerifyReport:
    """Check every checksum of a store and, with `against`, every bit of every tensor of that checkpoint.

    Raises StoreError at the first difference, naming the file or tensor.
    """
    checkpoint = open_checkpoint(against) if against is not None else None
    with Store.open(path) as store:
        if checkpoint is not None:
            checkpoint = as_prepared(checkpoint, store)
        keys = list(store.keys())
        checked_bytes = sum(file.size_bytes for file in store.manifest.files)
        checked_bytes += sum(store.base_bytes(key) + store.record_bytes(key) for key in keys)
        meter = Meter(progress, checked_bytes + (checkpoint.size_bytes if checkpoint else 0))
        _check_files(store, meter)
        store.pieces()  # Reading the table checks it.
        _check_records(store, keys, meter)
        compared_bytes = _compare(store, checkpoint, keys, meter) if checkpoint else 0
        num_files = len(store.manifest.files)
        return VerifyReport(len(keys), num_files, checked_bytes, 8 * compared_bytes, converted_from(store))


def _check_files(store: Store, meter: Meter) -> None:
    for file in store.manifest.files:
        if sha256_of(store.path / file.path) != file.sha256:
            raise StoreError(f"{store.path / file.path} does not match its checksum; prepare the store again.")
        meter.add(file.size_bytes, "checking files")


def _check_records(store: Store, keys: Sequence[ExpertKey], meter: Meter) -> None:
    for key in keys:
        num_bytes = store.base_bytes(key), store.record_bytes(key)
        buffer = view_of(torch.empty(max(num_bytes), dtype=torch.uint8))
        store.read_base_into(key, buffer, verify=True)
        store.read_record_into(key, buffer, verify=True)
        meter.add(sum(num_bytes), "checking records")


def _compare(store: Store, checkpoint: Checkpoint, keys: Sequence[ExpertKey], meter: Meter) -> int:
    """Bytes of tensors compared: dense ones as they are, experts as their source rows."""
    _compare_headers(store, checkpoint)
    meter.add(sum(len(file.header) for file in checkpoint.files), "comparing headers")
    compared_bytes = _compare_dense(store, checkpoint, meter)
    return compared_bytes + _compare_experts(store, checkpoint, keys, meter)


def _compare_experts(store: Store, checkpoint: Checkpoint, keys: Sequence[ExpertKey], meter: Meter) -> int:
    reader = ExpertReader(checkpoint, store.pieces(), store.manifest.matrices)

    def is_same(key: ExpertKey) -> bool:
        return are_equal(stored_parts(store, key), reader.read_parts(key))

    with ExpertWorkers() as workers:
        for key, same in zip(keys, workers.in_order(is_same, keys), strict=True):
            if not same:
                raise StoreError(
                    f"Expert {key.expert} of MoE layer {key.layer} of {store.path} differs from "
                    f"{checkpoint.folder}; prepare the store again."
                )
            meter.add(reader.num_bytes(key), "comparing experts")
    return sum(map(reader.num_bytes, keys))


def _compare_headers(store: Store, checkpoint: Checkpoint) -> None:
    theirs = [(file.path.name, file.size_bytes, file.header) for file in checkpoint.files]
    ours = [(file.name, file.size_bytes, store.source_header(i)) for i, file in enumerate(store.manifest.source)]
    if ours != theirs:
        raise StoreError(f"{store.path} was not made from {checkpoint.folder}: their files or headers differ.")


def _compare_dense(store: Store, checkpoint: Checkpoint, meter: Meter) -> int:
    compared_bytes = 0
    for file in store.dense_files():
        for entry in file.entries:
            position, source = checkpoint.tensors[entry.name]
            chunks = file.chunks(entry, CHUNK_BYTES), checkpoint.files[position].chunks(source, CHUNK_BYTES)
            if any(ours != theirs for ours, theirs in zip(*chunks, strict=True)):
                raise StoreError(f"Tensor {entry.name!r} of {store.path} differs from {checkpoint.folder}.")
            compared_bytes += entry.num_bytes
            meter.add(entry.num_bytes, "comparing dense weights")
    return compared_bytes
