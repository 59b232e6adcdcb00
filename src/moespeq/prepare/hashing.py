"""SHA-256 of files; those of the source are computed by threads beside the encoding, for export to compare with."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from moespeq.errors import StorageError
from moespeq.store import SafetensorsFile

__all__ = ["CHUNK_BYTES", "SourceHasher", "sha256_of"]

CHUNK_BYTES = 8 << 20
_CORES_PER_THREAD = 4  # the others encode; one thread hashes 1 to 2 GB/s


class SourceHasher:
    """Hashes files in order, a few at a time, from the moment it is made. Leaving the context stops it."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._stop = threading.Event()
        num_threads = max(1, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="source-hash")
        self._digests = [self._pool.submit(_digest_of, file, self._stop) for file in files]

    def wait(self) -> list[str]:
        """The digests in hexadecimal, in the order of the files. Raises StorageError when a read fails."""
        return [digest.result() for digest in self._digests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)


def _digest_of(file: SafetensorsFile, stop: threading.Event) -> str:
    """Digest of a file as it is read; one that is read as it lies on the disk is read there, which is faster."""
    if type(file).read is SafetensorsFile.read:
        return sha256_of(file.path, stop)
    digest = hashlib.sha256()
    for offset in range(0, file.size_bytes, CHUNK_BYTES):
        if stop.is_set():
            break
        digest.update(file.read(offset, min(CHUNK_BYTES, file.size_bytes - offset)).data)
    return digest.hexdigest()


def sha256_of(path: Path, stop: threading.Event | None = None) -> str:
    """Digest of a file in hexadecimal; meaningless when `stop` was set meanwhile. Raises StorageError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", 0) as file:
            while (chunk := file.read(CHUNK_BYTES)) and not (stop and stop.is_set()):
                digest.update(chunk)
    except OSError as error:  # of a read, which itself does not know the file's name
        raise StorageError(f"{path} cannot be read ({error.strerror}); check the disk.") from error
    return digest.hexdigest()
