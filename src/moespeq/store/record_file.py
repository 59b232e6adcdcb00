"""Reads of one record file: straight from the disk where the file system allows it, through the page cache
otherwise.

Experts are cached by our own policy, so a second copy in the page cache only takes memory from it: O_DIRECT
reads avoid that. They need offset, length and address on page boundaries. A record that begins on a page
meets the first; its whole pages go into an aligned buffer as they are, its last partial page through a page
of the thread's own, so that no byte past the record is ever written. Packed records and unaligned buffers
take the buffered way, which is always right.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from pathlib import Path
from typing import Self

import numpy as np

from moespeq.errors import StorageError, StoreError
from moespeq.store.records import PAGE_BYTES, Span
from moespeq.store.safetensors_file import aligned_empty

__all__ = ["RecordFile"]


class RecordFile:
    """An open file of records. Safe to read from several threads; close it once, after the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened ({error.strerror}); prepare the store again.") from error
        self._direct_fd = _open_direct(path)
        self._takes_direct_reads = self._direct_fd is not None
        self._threads = threading.local()

    @property
    def is_direct(self) -> bool:
        """Whether page-aligned reads go around the page cache."""
        return self._takes_direct_reads

    def read_into(self, span: Span, buffer: memoryview, *, verify: bool) -> None:
        """Fill the first `span.num_bytes` bytes of `buffer`, none after them; `verify` checks the CRC.

        Raises StorageError when the disk fails, StoreError when the file is truncated or the CRC differs.
        """
        target = buffer.cast("B")[: span.num_bytes]
        assert len(target) == span.num_bytes, (len(target), span.num_bytes)
        try:
            done_bytes = self._read_direct(span, target)
            self._read_buffered(span, target, done_bytes)
        except OSError as error:
            raise StorageError(
                f"Reading {self.path} at byte {span.offset} failed ({error.strerror}); check the disk."
            ) from error
        if verify and zlib.crc32(target) != span.crc32:
            raise StoreError(
                f"{self.path} is damaged: its {span.num_bytes} bytes at {span.offset} do not match "
                "their checksum; run `moespeq verify`, or prepare the store again."
            )

    def close(self) -> None:
        """Release the file. Calling it twice is allowed."""
        for fd in (self._fd, self._direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct_fd, self._takes_direct_reads = -1, None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_direct(self, span: Span, target: memoryview) -> int:
        """Read around the page cache; returns how many bytes were, 0 where that cannot be done."""
        fd = self._direct_fd
        if fd is None or not self._takes_direct_reads or span.offset % PAGE_BYTES or _address(target) % PAGE_BYTES:
            return 0
        whole_bytes = span.num_bytes // PAGE_BYTES * PAGE_BYTES
        page = self._own_page()
        try:
            got_bytes = os.preadv(fd, [target[:whole_bytes], page], span.offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._takes_direct_reads = False  # Some file systems open for direct reads and then refuse them.
            return 0
        if got_bytes < span.num_bytes:
            return min(got_bytes, whole_bytes)
        target[whole_bytes:] = page[: span.num_bytes - whole_bytes]
        return span.num_bytes

    def _read_buffered(self, span: Span, target: memoryview, done_bytes: int) -> None:
        while done_bytes < span.num_bytes:
            got_bytes = os.preadv(self._fd, [target[done_bytes:]], span.offset + done_bytes)
            if got_bytes == 0:
                raise StoreError(
                    f"{self.path} ends at byte {span.offset + done_bytes}, inside the record of "
                    f"{span.num_bytes} bytes at {span.offset}: it is truncated; prepare the store again."
                )
            done_bytes += got_bytes

    def _own_page(self) -> memoryview:
        if not hasattr(self._threads, "page"):
            self._threads.page = aligned_empty(PAGE_BYTES).data
        page: memoryview = self._threads.page
        return page


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
