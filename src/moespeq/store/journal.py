"""The journal of an unfinished store: what is safely on disk, so that a killed preparation goes on where it
stopped.

One JSON object a line. The first line says which checkpoint and options the store is built from; every other
line is a completed unit, appended and flushed only after the unit's own bytes were. A line torn by a crash is
the last one and is dropped: its unit is done again. What the data files hold beyond the journal is cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moespeq.errors import StoreError
from moespeq.nested import Layout
from moespeq.store.manifest import StoredFile
from moespeq.store.records import RecordEnds

__all__ = ["Durable", "Journal"]


@dataclass(slots=True)
class Durable:
    """What is on disk: dense files by path, records by count (in key order), and where their files end.

    `layouts` holds the layout of every layer that was begun.
    """

    dense: dict[str, StoredFile] = field(default_factory=dict)
    num_records: int = 0
    base_end: int = 0
    experts_ends: tuple[int, ...] = ()
    layouts: dict[int, Layout] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that need not be written again."""
        return self.base_end + sum(self.experts_ends) + sum(file.size_bytes for file in self.dense.values())

    def apply(self, unit: Mapping[str, Any]) -> None:
        """Fold one unit in. Raises KeyError, TypeError or ValueError when it is none."""
        if "path" in unit:
            path = str(unit["path"])
            self.dense[path] = StoredFile(path, int(unit["size_bytes"]), str(unit["sha256"]))
            return
        self.num_records, self.base_end = int(unit["num_records"]), int(unit["base_end"])
        self.experts_ends = tuple(int(end) for end in unit["experts_ends"])
        self.layouts[int(unit["layer"])] = Layout(unit["layout"])


class Journal:
    """Append-only file of units; `durable` is always what a reader of the file would see."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open or begin the journal at `path`; `identity` is what can be written as JSON.

        Raises StoreError when a line is whole and no unit.
        """
        lines, sound_bytes = _read_lines(path)
        # A journal of another checkpoint or of other options must not be added to.
        self.is_foreign = bool(lines) and lines[0] != identity
        self.durable = _fold(lines[1:], path) if not self.is_foreign else Durable()
        self._file = path.open("ab")
        if self.is_foreign:
            return
        self._file.truncate(sound_bytes)
        if not lines:
            self._append(identity)

    def dense_done(self, file: StoredFile) -> None:
        """Record a dense file whose bytes are durable."""
        self._append_unit({"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256})

    def records_done(self, num_records: int, ends: RecordEnds, *, layer: int, layout: Layout) -> None:
        """Record that the first `num_records` records are durable, the last of them in `layer` as `layout`.

        A smaller count than before takes records back: their layer is being written in another layout.
        """
        counts = {"num_records": num_records, "base_end": ends.base, "experts_ends": ends.experts}
        self._append_unit({**counts, "layer": layer, "layout": layout.value})

    def close(self) -> None:
        """Close the file; what was appended is already durable."""
        self._file.close()

    def _append_unit(self, unit: Mapping[str, Any]) -> None:
        self._append(unit)
        self.durable.apply(unit)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _fold(units: Sequence[Mapping[str, Any]], path: Path) -> Durable:
    durable = Durable()
    try:
        for unit in units:
            durable.apply(unit)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is damaged; remove {path.parent} and prepare again.") from error
    return durable


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines before the first torn one, and how many bytes they are."""
    lines: list[dict[str, Any]] = []
    sound_bytes = 0
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except (ValueError, RecursionError):
            line = None
        if line is None:
            break
        lines.append(line)
        sound_bytes += len(text)
    return lines, sound_bytes
