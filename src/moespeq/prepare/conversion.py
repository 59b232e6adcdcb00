"""A checkpoint whose fp32 or fp16 experts are seen as bf16: rounded as they are read, nothing is written.

Only where a person asks for it, since it changes the model. What is prepared, compared and exported is the checkpoint
as it is seen here; its dense weights stay as they are, as transformers rounds those itself where the class wants it.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch

from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.store import Checkpoint, SafetensorsFile, Store, TensorEntry
from moespeq.store.checkpoint import Place
from moespeq.store.safetensors_file import Bytes, aligned_empty, build_header, parse_header

__all__ = ["as_prepared", "converted_from", "with_bf16_experts"]

_log = logging.getLogger(__name__)

_WIDER = {"F32": torch.float32, "F16": torch.float16}
_NOTE = "moespeq.converted_from"  # in the metadata of a header that was rewritten


@dataclass(frozen=True, slots=True)
class RoundedFile(SafetensorsFile):
    """A safetensors file some of whose tensors are bf16 for whoever reads it, and wider in `source`."""

    source: SafetensorsFile

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """As of any such file; the source's numbers are rounded to nearest, half to even, as torch does."""
        buffer, end = aligned_empty(num_bytes), offset + num_bytes
        head = self.header[offset:end]
        buffer[: len(head)] = bytearray(head)
        first = max(0, bisect_right([entry.offset for entry in self.entries], offset) - 1)
        for entry, wide in zip(self.entries[first:], self.source.entries[first:], strict=True):
            start, stop = max(offset, entry.offset), min(end, entry.offset + entry.num_bytes)
            if entry.offset >= end:
                break
            if start < stop:
                part = self._read_part(entry, wide, start - entry.offset, stop - entry.offset)
                buffer[start - offset : stop - offset] = part
        return buffer

    def _read_part(self, entry: TensorEntry, wide: TensorEntry, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of one tensor."""
        if entry.dtype == wide.dtype:
            return self.source.read(wide.offset + start, stop - start)
        first, last = start // 2, -(-stop // 2)
        width = wide.num_bytes // (entry.num_bytes // 2)
        values = torch.from_numpy(self.source.read(wide.offset + first * width, (last - first) * width))
        rounded: Bytes = values.view(_WIDER[wide.dtype]).to(torch.bfloat16).view(torch.uint8).numpy()
        return rounded[start - 2 * first : stop - 2 * first]


def with_bf16_experts(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its fp32 and fp16 experts in bf16, and a warning; itself where it has none.

    Raises as `map_checkpoint`.
    """
    names = {piece.tensor for piece in map_checkpoint(checkpoint).pieces}
    dtypes = sorted({_dtype_of(checkpoint, name) for name in names} & _WIDER.keys())
    if not dtypes:
        return checkpoint
    _log.warning(
        "The experts of %s are %s and are rounded to bf16, as asked for: texts are not those of the checkpoint itself.",
        checkpoint.folder,
        " and ".join(dtypes),
    )
    return _rounded(checkpoint, names)


def as_prepared(checkpoint: Checkpoint, store: Store) -> Checkpoint:
    """The checkpoint as it was seen when `store` was made: rounded where its experts were."""
    if converted_from(store) is None:
        return checkpoint
    return _rounded(checkpoint, {piece.tensor for piece in store.pieces()})


def converted_from(store: Store) -> str | None:
    """The dtypes that a store's experts had before they were rounded to bf16, None where they were not."""
    notes = {_note_of(store.source_header(position)) for position in range(len(store.manifest.source))}
    return " and ".join(sorted(filter(None, notes))) or None


def _note_of(header: bytes) -> str | None:
    metadata = json.loads(header[8:]).get("__metadata__")
    note = metadata.get(_NOTE) if isinstance(metadata, dict) else None
    return note if isinstance(note, str) else None


def _rounded(checkpoint: Checkpoint, names: Set[str]) -> Checkpoint:
    files = tuple(_rounded_file(file, names) for file in checkpoint.files)
    places = {entry.name: Place(i, entry) for i, file in enumerate(files) for entry in file.entries}
    return Checkpoint(checkpoint.folder, files, places)


def _rounded_file(file: SafetensorsFile, names: Set[str]) -> SafetensorsFile:
    wide = {entry.name: entry.dtype for entry in file.entries if entry.name in names and entry.dtype in _WIDER}
    if not wide:
        return file
    entries = [_as_bf16(entry) if entry.name in wide else entry for entry in file.entries]
    header = build_header(entries, {_NOTE: " and ".join(sorted(set(wide.values())))})
    size_bytes = len(header) + sum(entry.num_bytes for entry in entries)
    parsed = parse_header(header, size_bytes, Path(file.path.name))
    return RoundedFile(file.path, size_bytes, header, parsed, file)


def _as_bf16(entry: TensorEntry) -> TensorEntry:
    width = {"F32": 4, "F16": 2}[entry.dtype]
    return TensorEntry(entry.name, "BF16", entry.shape, entry.offset, entry.num_bytes // width * 2)


def _dtype_of(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.tensors[name].entry.dtype
