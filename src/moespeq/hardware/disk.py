"""How fast a file is read: whole aligned blocks, around the page cache where the file system allows it.

Threads take blocks in turn, as the record readers do, so that the disk sees one sequential stream with several requests
in flight. Where direct reads are refused (tmpfs, some network file systems) the page cache is emptied of the file first
and reads go through it; `is_direct` says so, and such a figure may be the cache's.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

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
    """A file of random bytes on the disk of `folder`, without a name there: whatever ends this process, it is gone.

    The path leads to it through this process's open files. Raises StorageError when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - only making it may fail for want of a folder
    except OSError as error:
        raise StorageError(_unwritable(folder, error)) from error
    with file:
        try:
            _write_random(file, num_bytes)
        except OSError as error:
            raise StorageError(_unwritable(folder, error)) from error
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _write_random(file: IO[bytes], num_bytes: int) -> None:
    block, written_bytes = os.urandom(min(BLOCK_BYTES, num_bytes)), 0
    while written_bytes < num_bytes:
        written_bytes += file.write(block[: num_bytes - written_bytes])
    os.fsync(file.fileno())


def _unwritable(folder: Path, error: OSError) -> str:
    return f"No file can be written in {folder} ({error.strerror}); free some space, or set MOESPEQ_CACHE."


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
        readers = [pool.submit(work) for _ in range(num_threads)]
        try:
            wait(readers, return_when=FIRST_EXCEPTION)
        finally:
            with turn:
                deque(starts, maxlen=0)  # after an error or Ctrl-C no thread takes another block
        for reader in readers:
            reader.result()
