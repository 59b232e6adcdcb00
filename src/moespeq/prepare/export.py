"""Store to checkpoint: the source's files again, byte for byte.

A weight file is its verbatim header, then its tensors in order of offset: dense ones as stored, experts
decoded and cut into pieces. Each file is written beside its name, compared with the SHA-256 of the source,
and renamed; so a file under its name is always right, and a second run only writes what is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path

from moespeq.errors import StoreError, UsageError
from moespeq.prepare.experts import piece_bytes, stored_parts
from moespeq.prepare.export_folder import export_folder
from moespeq.prepare.hashing import CHUNK_BYTES, sha256_of
from moespeq.prepare.workers import ExpertWorkers
from moespeq.progress import Meter, ProgressSink
from moespeq.store import ExpertPiece, SafetensorsFile, SourceFile, Store, StoredFile, TensorEntry
from moespeq.store.disk_space import require_free, storage_errors
from moespeq.types import ExpertKey

__all__ = ["export_checkpoint"]


def export_checkpoint(path: Path, out: Path, progress: ProgressSink | None = None) -> Path:
    """Rebuild the checkpoint of the store at `path` in the folder `out`; returns `out`.

    Raises UsageError when `out` holds another file or is being exported to, StoreError when the store is
    damaged, StorageError when the disk is full.
    """
    with Store.open(path) as store:
        source = store.manifest.source
        kept = [file for file in store.manifest.files if file.is_exported]
        files: list[SourceFile | StoredFile] = [*source, *kept]
        with export_folder(out, {file.name for file in files}):
            is_done = {file.name: _is_there(out / file.name, file.size_bytes, file.sha256) for file in files}
            needed_bytes = sum(file.size_bytes for file in files if not is_done[file.name])
            require_free(out, needed_bytes)
            with storage_errors(out, needed_bytes):
                _write_source(store, out, is_done, Meter(progress, sum(file.size_bytes for file in source)))
                for file in kept:
                    if not is_done[file.name]:
                        _write(out / file.name, [store.file_bytes(file)], file.sha256)
    return out


def _write_source(store: Store, out: Path, is_done: Mapping[str, bool], meter: Meter) -> None:
    with ExpertWorkers() as workers:
        rebuilding = _Rebuilding(store, workers)
        for position, file in enumerate(store.manifest.source):
            if is_done[file.name]:
                meter.add(file.size_bytes, file.name)
            else:
                _write(out / file.name, rebuilding.chunks(position, meter), file.sha256)


class _Rebuilding:
    """Source files from a store."""

    def __init__(self, store: Store, workers: ExpertWorkers) -> None:
        self._store, self._workers = store, workers
        self._pieces: dict[str, list[ExpertPiece]] = defaultdict(list)
        for piece in sorted(store.pieces(), key=lambda piece: piece.index or 0):
            self._pieces[piece.tensor].append(piece)
        self._dense: dict[str, tuple[SafetensorsFile, TensorEntry]] = {
            entry.name: (file, entry) for file in store.dense_files() for entry in file.entries
        }

    def chunks(self, position: int, meter: Meter) -> Iterator[bytes | memoryview]:
        """The bytes of one source file, in order."""
        name, header = self._store.manifest.source[position].name, self._store.source_header(position)
        entries = self._store.source_entries(position)
        cut_pieces = self._cut_pieces(entries)
        meter.add(len(header), name)
        yield header
        for entry in entries:
            if entry.name in self._dense:
                file, stored = self._dense[entry.name]
                yield from file.chunks(stored, CHUNK_BYTES)
            else:
                yield from islice(cut_pieces, len(self._pieces[entry.name]))
            meter.add(entry.num_bytes, name)

    def _cut_pieces(self, entries: Iterable[TensorEntry]) -> Iterator[memoryview]:
        """All pieces of a file in its order; those of one expert that follow each other cost one decoding."""
        pieces = (piece for entry in entries for piece in self._pieces.get(entry.name, ()))
        runs = (list(run) for _, run in groupby(pieces, lambda piece: ExpertKey(piece.layer, piece.expert)))
        return chain.from_iterable(self._workers.in_order(self._cut_run, runs))

    def _cut_run(self, pieces: Sequence[ExpertPiece]) -> list[memoryview]:
        parts = stored_parts(self._store, ExpertKey(pieces[0].layer, pieces[0].expert))
        return [piece_bytes(parts[piece.matrix], piece) for piece in pieces]


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
