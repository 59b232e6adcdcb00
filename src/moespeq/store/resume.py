"""What of an unfinished store is still what its journal says.

A power cut or a bad disk can change bytes that were durable, so going on trusts none of them unread. What does
not match is built again; records are only kept up to the first that does not, for they are appended in order.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from moespeq.store.manifest import StoredFile
from moespeq.store.records import RecordRow, Span, start_of_record

__all__ = ["sound_files", "sound_records"]


def sound_files(folder: Path, files: Iterable[StoredFile]) -> set[str]:
    """The paths of those of `files` whose bytes below `folder` match."""
    return {file.path for file in files if _is_sound(folder / file.path, file)}


def sound_records(base_fd: int, experts_fd: int, rows: Sequence[RecordRow]) -> int:
    """How many records, from the first on, lie where they were appended and match their checksums."""
    base_end = experts_end = 0
    for position, row in enumerate(rows):
        if not (_matches(base_fd, row.base, base_end) and _matches(experts_fd, row.record, experts_end)):
            return position
        base_end, experts_end = row.base.end, row.record.end
    return len(rows)


def _is_sound(path: Path, file: StoredFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _matches(fd: int, span: Span, end: int) -> bool:
    if span.offset != start_of_record(end, span.num_bytes) or span.end > os.fstat(fd).st_size:
        return False
    return zlib.crc32(os.pread(fd, span.num_bytes, span.offset)) == span.crc32
