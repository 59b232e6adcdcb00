"""How fast a file is read: whole aligned blocks, around the page cache where the file system allows it.

Threads take blocks in turn, as the record readers do, so that the disk sees one sequential stream with several requests
in flight. Where direct reads are refused (tmpfs, some network file systems) the page cache is emptied of the file first
and reads go through it; `is_direct` says so, and such a figure may be the cache's.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from moespeq.errors import StorageError, UsageError
from moespeq.store.safetensors_file import aligned_empty

__all__ = ["ReadRate", "measure_reads", "scratch_file"]

BLOCK_BYTES = 8 << 20
_PAGE_BYTES = 4096


class ReadRate(NamedTuple):
    """Bytes a second, and whether the page cache was left out."""

    bytes_per_s: float
    is_direct: bool


@contextmanager
def scratch_file(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file of random bytes on disk, gone afterwards. Raises StorageError when it cannot be written."""
    path = folder / f"profile-{os.getpid()}.scratch"
    try:
        _write_random(path, num_bytes)
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def _write_random(path: Path, num_bytes: int) -> None:
    block = os.urandom(min(BLOCK_BYTES, num_bytes))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, num_bytes, BLOCK_BYTES):
                file.write(block[: num_bytes - start])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}); free some space.") from error


def measure_reads(
    path: Path, *, num_threads: int, max_bytes: int, now_s: Callable[[], float] = time.perf_counter
) -> ReadRate:
    """Read the first `max_bytes` of a file, whole blocks only. Raises UsageError for a file shorter than a page."""
    num_bytes = min(max_bytes, path.stat().st_size) // _PAGE_BYTES * _PAGE_BYTES
    if num_bytes == 0:
        raise UsageError(f"{path} is shorter than a page of {_PAGE_BYTES} bytes; give a larger file.")
    fd, is_direct = _open_uncached(path)
    try:
        begin_s = now_s()
        _read_all(fd, num_bytes, num_threads)
        return ReadRate(num_bytes / (now_s() - begin_s), is_direct)
    finally:
        os.close(fd)


def _open_uncached(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
        os.preadv(fd, [aligned_empty(_PAGE_BYTES).data], 0)  # some file systems refuse only now
        return fd, True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise StorageError(f"{path} cannot be read ({error.strerror}); check the disk.") from error
    fd = os.open(path, flags)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd, False


def _read_all(fd: int, num_bytes: int, num_threads: int) -> None:
    starts, turn = iter(range(0, num_bytes, BLOCK_BYTES)), threading.Lock()

    def work() -> None:
        buffer = aligned_empty(BLOCK_BYTES).data
        while True:
            with turn:
                start = next(starts, None)
            if start is None:
                return
            os.preadv(fd, [buffer[: min(BLOCK_BYTES, num_bytes - start)]], start)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="disk-probe") as pool:
        for done in [pool.submit(work) for _ in range(num_threads)]:
            done.result()
