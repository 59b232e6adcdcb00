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
from moespeq.store.records import RecordEnds, RecordRow, Span, file_of

__all__ = ["sound_files", "sound_records"]


def sound_files(folder: Path, files: Iterable[StoredFile]) -> set[str]:
    """The paths of those of `files` whose bytes below `folder` match."""
    return {file.path for file in files if _is_sound(folder / file.path, file)}


def sound_records(base_fd: int, experts_fds: Sequence[int], rows: Sequence[RecordRow], num_experts: int) -> int:
    """How many records, from the first on, lie where they were appended and match their checksums."""
    ends = RecordEnds.of_nothing(num_experts, len(experts_fds))
    for position, row in enumerate(rows):
        experts_fd = experts_fds[file_of(position, num_experts, len(experts_fds))]
        if not (ends.is_next(position, row) and _matches(base_fd, row.base) and _matches(experts_fd, row.record)):
            return position
        ends.add(position, row)
    return len(rows)


def _is_sound(path: Path, file: StoredFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _matches(fd: int, span: Span) -> bool:
    if span.end > os.fstat(fd).st_size:
        return False
    return zlib.crc32(os.pread(fd, span.num_bytes, span.offset)) == span.crc32
