"""Store to checkpoint: the source's files again, byte for byte.

A weight file is its verbatim header, then its tensors in order of offset: dense ones as stored, experts
decoded and cut into pieces. Each file is written beside its name, compared with the SHA-256 of the source,
and renamed; so a file under its name is always right, and a second run only writes what is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from moespeq.errors import StoreError, UsageError
from moespeq.prepare.experts import decode_expert, piece_bytes
from moespeq.prepare.hashing import CHUNK_BYTES, sha256_of
from moespeq.prepare.progress import Meter, ProgressSink
from moespeq.store import ExpertPiece, SafetensorsFile, Store, StoredFile, TensorEntry
from moespeq.store.checkpoint import INDEX_NAME
from moespeq.store.disk_space import require_free, storage_errors
from moespeq.types import ExpertKey

__all__ = ["export_checkpoint"]


def export_checkpoint(path: Path, out: Path, progress: ProgressSink | None = None) -> Path:
    """Rebuild the checkpoint of the store at `path` in the folder `out`; returns `out`.

    Raises UsageError when `out` holds another file under a name to be written, StoreError when the store is
    damaged, StorageError when the disk is full.
    """
    with Store.open(path) as store:
        source = store.manifest.source
        meter = Meter(progress, sum(file.size_bytes for file in source))
        is_done = [_is_there(out / file.name, file.size_bytes, file.sha256) for file in source]
        require_free(out, sum(file.size_bytes for file, done in zip(source, is_done, strict=True) if not done))
        rebuilding = _Rebuilding(store)
        with storage_errors(out, sum(file.size_bytes for file in source)):
            out.mkdir(parents=True, exist_ok=True)
            for position, file in enumerate(source):
                if is_done[position]:
                    meter.add(file.size_bytes, file.name)
                else:
                    _write(out / file.name, rebuilding.chunks(position, meter), file.sha256)
            for kept in store.manifest.files:
                if _is_of_checkpoint(kept) and not _is_there(out / kept.name, kept.size_bytes, kept.sha256):
                    _write(out / kept.name, [(path / kept.path).read_bytes()], kept.sha256)
    return out


class _Rebuilding:
    """Source files from a store. Remembers the last experts: their pieces often lie together."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
        for piece in sorted(store.pieces(), key=lambda piece: piece.index or 0):
            self._pieces[piece.tensor].append(piece)
        self._dense: dict[str, tuple[SafetensorsFile, TensorEntry]] = {
            entry.name: (file, entry) for file in store.dense_files() for entry in file.entries
        }
        self._matrix_names = [name for name, _, _ in store.manifest.matrices]
        self._decode = lru_cache(maxsize=2)(self._decode_expert)

    def chunks(self, position: int, meter: Meter) -> Iterator[bytes | memoryview]:
        """The bytes of one source file, in order."""
        name, header = self._store.manifest.source[position].name, self._store.source_header(position)
        meter.add(len(header), name)
        yield header
        for entry in self._store.source_entries(position):
            yield from self._tensor_chunks(entry.name)
            meter.add(entry.num_bytes, name)

    def _tensor_chunks(self, name: str) -> Iterator[memoryview]:
        if name in self._dense:
            file, entry = self._dense[name]
            yield from file.chunks(entry, CHUNK_BYTES)
        for piece in self._pieces.get(name, ()):
            matrices = self._decode(ExpertKey(piece.layer, piece.expert))
            yield piece_bytes(matrices[self._matrix_names.index(piece.matrix)], piece)

    def _decode_expert(self, key: ExpertKey) -> list[Tensor]:
        return decode_expert(self._store, key)


def _is_of_checkpoint(file: StoredFile) -> bool:
    """Whether a stored file is one of the checkpoint's own small files."""
    return file.folder == "model" or (file.folder == "headers" and file.name == INDEX_NAME)


def _is_there(path: Path, size_bytes: int, sha256: str) -> bool:
    """Whether a file is complete already. Raises UsageError when a different one has its name."""
    if not path.exists():
        return False
    if path.stat().st_size != size_bytes or sha256_of(path) != sha256:
        raise UsageError(f"{path} exists and differs from the file to be written; choose an empty folder.")
    return True


def _write(path: Path, chunks: Iterable[bytes | memoryview], sha256: str) -> None:
    beside = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        with beside.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != sha256:
            raise StoreError(f"{path.name} came out different from its source; run `moespeq verify` on the store.")
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
