"""Building a store: append only, durable unit by unit, visible only when complete.

    OUT.partial/lock       held with flock while one process builds; a second one is told so
    OUT.partial/journal    completed units, see journal.py
    OUT.partial/store/     what becomes OUT by one rename, after everything in it is on disk

Order of durability: a unit's bytes, then its journal line; all files, then the manifest, then the rename. So
whatever moment a kill or a power cut picks, the next run continues from the last journal line whose bytes still
match, and the
finished store is the one that an uninterrupted run writes, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from moespeq.errors import StoreError
from moespeq.nested import Layout
from moespeq.store.build_lock import acquire
from moespeq.store.disk_space import require_free, storage_errors
from moespeq.store.elsewhere import link_elsewhere
from moespeq.store.journal import Durable, Journal
from moespeq.store.manifest import MANIFEST_NAME, Manifest, StoredFile, Table
from moespeq.store.output_path import partial_of, require_new_name
from moespeq.store.records import (
    PAGE_BYTES,
    ROW_BYTES,
    RecordEnds,
    RecordRow,
    RecordTable,
    Span,
    experts_file_names,
    file_of,
    round_up,
)
from moespeq.store.resume import sound_files, sound_records

__all__ = ["StoreWriter"]

_BASE, _RECORDS = "base.bin", "records.bin"


class StoreWriter:
    """One process's hold on an unfinished store. Leaving its context keeps what is journaled."""

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        *,
        num_experts: int,
        needed_bytes: int,
        elsewhere: Sequence[Path] = (),
        needed_elsewhere_bytes: int = 0,
    ) -> None:
        """Begin the store `out`, or go on with it; `needed_bytes` is an estimate of what is written there.

        elsewhere: folders that hold one more file of expert records each, of about `needed_elsewhere_bytes`.
        num_experts: of a layer. Raises UsageError when `out` cannot be made; StoreError when it exists, when another
        process builds it, or when it was begun with another `identity`; StorageError when too little is free.
        """
        require_new_name(out)
        self._out, self._partial = out, partial_of(out)
        self._folder = self._partial / "store"
        self._needed_bytes, self._num_experts = needed_bytes, num_experts
        self._elsewhere, self._needed_elsewhere_bytes = elsewhere, needed_elsewhere_bytes
        self._experts_names = experts_file_names(1 + len(elsewhere))
        self._resources = ExitStack()
        try:
            self._open(identity)
        except BaseException:
            self._resources.close()
            raise

    def _open(self, identity: Mapping[str, Any]) -> None:
        self._refuse_existing()
        if not self._partial.exists():
            require_free(self._partial, self._needed_bytes)
            for folder in self._elsewhere:
                require_free(folder, self._needed_elsewhere_bytes)
        with storage_errors(self._partial, self._needed_bytes):
            self._resources.callback(os.close, acquire(self._partial))
            self._refuse_existing()
            self._journal = Journal(self._partial / "journal", identity)
            self._resources.callback(self._journal.close)
            if self._journal.is_foreign:
                raise StoreError(
                    f"{self._partial} was begun from another checkpoint or with other options; "
                    "remove it to begin again, or choose another output."
                )
            require_free(self._partial, self._remaining_bytes())
            self._num_records = self.durable.num_records
            self._ends = RecordEnds.of_nothing(self._num_experts, len(self._experts_names))
            if self.durable.num_records:
                self._ends.base, self._ends.experts = self.durable.base_end, list(self.durable.experts_ends)
            (self._folder / "dense").mkdir(parents=True, exist_ok=True)
            for name, folder in zip(self._experts_names[1:], self._elsewhere, strict=True):
                link_elsewhere(self._folder / name, folder, self._out.name)
            self._fds = {name: self._open_appending(name) for name in (_BASE, *self._experts_names, _RECORDS)}
            self._cut()
            self._take_back_damaged()

    def _open_appending(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._folder / name, flags, 0o644)
        self._resources.callback(os.close, fd)
        return fd

    @property
    def durable(self) -> Durable:
        """What an interruption would keep."""
        return self._journal.durable

    @property
    def num_records(self) -> int:
        """Records appended so far, durable or not: the next one is for the expert of this position."""
        return self._num_records

    def append(self, base: memoryview, record: memoryview, *, crc32s: tuple[int, int] | None = None) -> None:
        """Append the next expert's base and record. Not durable before `commit`.

        crc32s: their checksums, where the caller has them from threads of its own.
        """
        base_crc32, record_crc32 = crc32s or (zlib.crc32(base), zlib.crc32(record))
        base_start, record_start = self._ends.starts(self._num_records, len(base), len(record))
        row = RecordRow(Span(base_start, len(base), base_crc32), Span(record_start, len(record), record_crc32))
        name = self._experts_names[file_of(self._num_records, self._num_experts, len(self._experts_names))]
        self._write_at(_BASE, base, base_start)
        self._write_at(name, record, record_start)
        with self._writing():
            _write_all(self._fds[_RECORDS], row.to_bytes())
        self._ends.add(self._num_records, row)
        self._num_records += 1

    def commit(self, layer: int, layout: Layout) -> None:
        """Make what was appended durable; the last records belong to `layer`, stored as `layout`."""
        with self._writing():
            for fd in self._fds.values():
                os.fsync(fd)
            self._journal.records_done(self._num_records, self._ends, layer=layer, layout=layout)

    def restart_layer(self, layer: int, layout: Layout) -> None:
        """Take back every record of `layer`, to write them again as `layout`."""
        self._take_back(layer * self._num_experts, layer, layout)

    def rows(self, start: int, stop: int) -> tuple[RecordRow, ...]:
        """The rows of records [start, stop), all appended already."""
        data = os.pread(self._fds[_RECORDS], (stop - start) * ROW_BYTES, start * ROW_BYTES)
        return RecordTable.from_bytes(data, self._num_experts).rows

    def write_dense(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write a file below `dense/`, durable when this returns; skipped when it is there."""
        if f"dense/{name}" not in self._sound_dense:
            stored = self.write_file(f"dense/{name}", chunks)
            with self._writing():
                self._journal.dense_done(stored)

    def write_file(self, path: str, chunks: Iterable[memoryview]) -> StoredFile:
        """Write one whole file of the store, durable when this returns."""
        target = self._folder / path
        digest, size_bytes = hashlib.sha256(), 0
        with self._writing():
            target.parent.mkdir(exist_ok=True)
            with target.open("wb", 0) as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size_bytes += _write_all(file.fileno(), chunk)
                os.fsync(file.fileno())
        return StoredFile(path, size_bytes, digest.hexdigest())

    def table(self, name: str) -> Table:
        """Size and checksum of a table that was written."""
        data = (self._folder / name).read_bytes()
        return Table(len(data), zlib.crc32(data))

    def pad_record_files(self) -> tuple[int, tuple[int, ...]]:
        """End the record files on whole pages, after the last record; returns their sizes (base, experts)."""
        base_bytes, *experts_bytes = (round_up(end, PAGE_BYTES) for end in (self._ends.base, *self._ends.experts))
        sizes = dict(zip((_BASE, *self._experts_names), (base_bytes, *experts_bytes), strict=True))
        for name, size_bytes in sizes.items():
            with self._writing(name):
                os.ftruncate(self._fds[name], size_bytes)
                os.fsync(self._fds[name])
        return base_bytes, tuple(experts_bytes)

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest and make the store visible under its name."""
        self.write_file(MANIFEST_NAME, [memoryview(manifest.to_json().encode())])
        with self._writing():
            for folder in (*(path for path in self._folder.iterdir() if path.is_dir()), self._folder):
                _fsync_folder(folder)
            self._folder.rename(self._out)
            _fsync_folder(self._out.parent)
            shutil.rmtree(self._partial, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the files and the lock. Calling it twice is allowed."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_existing(self) -> None:
        if self._out.exists():
            self._remove_leftover()
            raise StoreError(f"{self._out} exists already; use it, or remove it to prepare it again.")

    def _remove_leftover(self) -> None:
        """What stays when a process is killed after the rename: the partial folder without its store."""
        names = {path.name for path in self._partial.iterdir()} if self._partial.is_dir() else set()
        if "journal" in names and names <= {"journal", "lock"}:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _write_at(self, name: str, data: memoryview, start: int) -> None:
        with self._writing(name):
            os.ftruncate(self._fds[name], start)
            _write_all(self._fds[name], data)

    def _take_back_damaged(self) -> None:
        """Build again what is not what the journal says."""
        self._sound_dense = sound_files(self._folder, self.durable.dense.values())
        experts_fds = [self._fds[name] for name in self._experts_names]
        num_sound = sound_records(self._fds[_BASE], experts_fds, self.rows(0, self._num_records), self._num_experts)
        if num_sound < self._num_records:
            last_layer = max(self.durable.layouts)
            self._take_back(num_sound, last_layer, self.durable.layouts[last_layer])

    def _take_back(self, num_records: int, layer: int, layout: Layout) -> None:
        """Keep the first `num_records` records only; `layer` will be written as `layout`."""
        self._num_records = num_records
        self._ends = RecordEnds.of_nothing(self._num_experts, len(self._experts_names))
        for position, row in enumerate(self.rows(0, num_records)):
            self._ends.add(position, row)
        self.commit(layer, layout)
        self._cut()

    def _cut(self) -> None:
        """Cut the files back to what counts."""
        ends = (self._ends.base, *self._ends.experts, self._num_records * ROW_BYTES)
        for fd, end in zip(self._fds.values(), ends, strict=True):
            if os.fstat(fd).st_size < end:
                raise StoreError(f"{self._partial} lost bytes that were on disk; remove it and prepare again.")
            os.ftruncate(fd, end)

    def _remaining_bytes(self) -> int:
        return max(0, self._needed_bytes - self.durable.num_bytes)

    def _writing(self, name: str = "") -> AbstractContextManager[None]:
        """Around a write to `name`; a file of records may be on another disk."""
        if name in self._experts_names[1:]:
            folder = self._elsewhere[self._experts_names.index(name) - 1]
            return storage_errors(folder, max(0, self._needed_elsewhere_bytes - os.fstat(self._fds[name]).st_size))
        return storage_errors(self._partial, self._remaining_bytes())


def _write_all(fd: int, data: bytes | memoryview) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
