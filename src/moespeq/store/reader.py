"""A finished store, opened for reading: manifest, bases, records, dense tensors.

Opening checks everything that costs no reading of weights: the schema, file sizes, and the checksums of the
record table and of the model's small files. Dense tensors are checked whenever they are read: once per load.
Records are checked one by one where they are read, if the reader asks for it, and all together by `moespeq
verify`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from moespeq.errors import CheckpointError, StorageError, StoreError
from moespeq.nested import Layout
from moespeq.store.agreement import check_pieces, check_records
from moespeq.store.elsewhere import require_inside
from moespeq.store.manifest import Manifest, StoredFile, Table
from moespeq.store.pieces import ExpertPiece, unpack_pieces
from moespeq.store.record_file import RecordFile
from moespeq.store.records import ROW_BYTES, RecordTable, experts_file_names
from moespeq.store.safetensors_file import Bytes, SafetensorsFile, TensorEntry, parse_header
from moespeq.types import ExpertKey

__all__ = ["DiskSource", "Store"]


class Store:
    """An open store. Reading from several threads is allowed; close it once, after the last read."""

    def __init__(self, path: Path, manifest: Manifest, records: RecordTable) -> None:
        self.path, self.manifest, self.records = path, manifest, records
        self._digests = {file.path: file.sha256 for file in manifest.files}
        self._base_file = RecordFile(path / "base.bin")
        names = experts_file_names(len(manifest.experts_file_bytes))
        self._experts_files = [RecordFile(path / name) for name in names]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and check the store at `path`. Raises StoreError or StorageError."""
        return cls.from_manifest(path, Manifest.load(path))

    @classmethod
    def from_manifest(cls, path: Path, manifest: Manifest) -> Self:
        """The same of a store whose manifest is known, whatever its file says."""
        table = _read_table(path / "records.bin", manifest.records)
        if len(table) != manifest.num_layers * manifest.num_experts * ROW_BYTES:
            raise StoreError(f"{path / 'records.bin'} has not one row for each expert; prepare the store again.")
        records = RecordTable.from_bytes(table, manifest.num_experts)
        check_records(records, manifest, path / "records.bin")
        names = ("base.bin", *experts_file_names(len(manifest.experts_file_bytes)))
        for name, size_bytes in zip(names, (manifest.base_file_bytes, *manifest.experts_file_bytes), strict=True):
            _check_size(path / name, size_bytes, path)
        _check_size(path / "pieces.bin", manifest.pieces.size_bytes, path)
        for file in manifest.files:
            _check_size(path / file.path, file.size_bytes, path)
            if file.folder == "model":
                _check_digest(path / file.path, hashlib.sha256(_read(path / file.path)), file.sha256)
        return cls(path, manifest, records)

    @property
    def model_folder(self) -> Path:
        """Config, tokenizer and the source's other small files."""
        return self.path / "model"

    def keys(self) -> Iterator[ExpertKey]:
        """Every expert, in record order."""
        for layer in range(self.manifest.num_layers):
            for expert in range(self.manifest.num_experts):
                yield ExpertKey(layer, expert)

    def layout(self, key: ExpertKey) -> Layout:
        """How the record of `key` is stored."""
        return self.manifest.layouts[key.layer]

    def max_record_bytes(self) -> int:
        """Length of the largest record: what a slot must hold."""
        return max(row.record.num_bytes for row in self.records.rows)

    def base_bytes(self, key: ExpertKey) -> int:
        """Length of the base record of `key`."""
        return self.records[key].base.num_bytes

    def read_base_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
        """Fill the first `base_bytes(key)` bytes of `buffer`. Raises StorageError or StoreError."""
        self._base_file.read_into(self.records[key].base, buffer, verify=verify)

    def record_bytes(self, key: ExpertKey) -> int:
        """Length of the record of `key`."""
        return self.records[key].record.num_bytes

    def read_record_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
        """Fill the first `record_bytes(key)` bytes of `buffer`. Raises StorageError or StoreError."""
        file = self._experts_files[key.layer % len(self._experts_files)]
        file.read_into(self.records[key].record, buffer, verify=verify)

    def dense_files(self) -> Iterator[SafetensorsFile]:
        """The files of all tensors that are not routed experts, under their source names."""
        for file in self.manifest.files:
            if file.folder == "dense":
                try:
                    yield SafetensorsFile.open(self.path / file.path)
                except CheckpointError as error:
                    raise StoreError(f"{self.path / file.path} is damaged; prepare the store again.") from error

    def dense_tensors(self) -> Iterator[tuple[TensorEntry, Bytes]]:
        """Every dense tensor with its bytes in fresh, page-aligned memory.

        A file's tensors come once all of them match its checksum. Raises StoreError or StorageError.
        """
        for file in self.dense_files():
            tensors = [(entry, file.read(entry.offset, entry.num_bytes)) for entry in file.entries]
            digest = hashlib.sha256(file.header)
            for _, data in tensors:  # In order of offset and without holes: header and tensors are the file.
                digest.update(data.data)
            _check_digest(file.path, digest, self._digests[f"dense/{file.path.name}"])
            yield from tensors

    def pieces(self) -> tuple[ExpertPiece, ...]:
        """Which source tensor holds which rows of which expert."""
        path = self.path / "pieces.bin"
        data = _read_table(path, self.manifest.pieces)
        entries = [self.source_entries(position) for position in range(len(self.manifest.source))]
        try:
            pieces = unpack_pieces(data, entries, [name for name, _, _ in self.manifest.matrices])
        except (ValueError, IndexError) as error:
            raise StoreError(
                f"{path} names tensors or matrices that are not there; prepare the store again."
            ) from error
        check_pieces(pieces, self.manifest, entries, path)
        return pieces

    def file_bytes(self, file: StoredFile) -> bytes:
        """A small file as it is, unchecked. Raises StorageError."""
        return _read(self.path / file.path)

    def source_header(self, position: int) -> bytes:
        """The header of a source file, verbatim; `position` is its place in `manifest.source`."""
        path = f"headers/{self.manifest.source[position].name}"
        if path not in self._digests:
            raise StoreError(f"{self.path} lists no {path}; prepare the store again.")
        header = _read(self.path / path)
        _check_digest(self.path / path, hashlib.sha256(header), self._digests[path])
        return header

    def source_entries(self, position: int) -> tuple[TensorEntry, ...]:
        """The tensors of a source file, in order of offset. Raises StoreError."""
        file, header = self.manifest.source[position], self.source_header(position)
        try:
            return parse_header(header, file.size_bytes, self.path / "headers" / file.name)
        except CheckpointError as error:
            raise StoreError(f"{self.path / 'headers' / file.name} is damaged; prepare the store again.") from error

    def close(self) -> None:
        """Release the files. Calling it twice is allowed."""
        for file in (self._base_file, *self._experts_files):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DiskSource:
    """A RecordSource over a store's expert records; the store stays open as long as this is used.

    with_base: each record has its base record in front, unless it needs none.
    """

    def __init__(self, store: Store, *, verify: bool = False, with_base: bool = False) -> None:
        self._store, self._verify, self._with_base = store, verify, with_base

    def num_bytes(self, key: ExpertKey) -> int:
        """Exact length of the record of `key`."""
        return self.front_bytes(key) + self._store.record_bytes(key)

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        """Fill the front of `buffer` with the record, or with what follows its base.

        Raises StorageError or StoreError.
        """
        base_bytes = self.front_bytes(key)
        assert skip_bytes in (0, base_bytes), f"{key} has no part that begins at {skip_bytes}"
        if skip_bytes < base_bytes:
            self._store.read_base_into(key, buffer, verify=self._verify)
        self._store.read_record_into(key, buffer[base_bytes - skip_bytes :], verify=self._verify)

    def front_bytes(self, key: ExpertKey) -> int:
        """Length of the base in front of the record of `key`."""
        has_front = self._with_base and self._store.layout(key).needs_base
        return self._store.base_bytes(key) if has_front else 0


def _read_table(path: Path, table: Table) -> bytes:
    _check_size(path, table.size_bytes, path.parent)
    data = _read(path)
    if zlib.crc32(data) != table.crc32:
        raise StoreError(f"{path} is damaged: it does not match its checksum; prepare the store again.")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); check the disk.") from error


def _check_digest(path: Path, digest: hashlib._Hash, sha256: str) -> None:
    if digest.hexdigest() != sha256:
        raise StoreError(f"{path} is damaged: it does not match its checksum; prepare the store again.")


def _check_size(path: Path, size_bytes: int, store: Path) -> None:
    require_inside(path, store)
    if path.is_symlink() and not path.exists():
        raise StoreError(
            f"{path} leads to {path.readlink()}, which is not there; mount that disk, or prepare it again."
        )
    if not path.is_file():
        raise StoreError(f"{path} is missing; prepare the store again.")
    found_bytes = path.stat().st_size
    if found_bytes != size_bytes:
        raise StoreError(f"{path} has {found_bytes} bytes and should have {size_bytes}; prepare the store again.")
