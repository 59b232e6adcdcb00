"""Experts out of source tensors, and source tensors out of experts: two directions of one table of pieces.

Shapes: a canonical matrix is [out, in] in the dtype of its source; a piece is some of its rows, as they lie in a source
tensor. A call holds one expert in memory, never more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moespeq.nested import Scaled, ScaleGrid, Written, decode_record, split_base, split_record
from moespeq.store import Checkpoint, ExpertPiece, Store
from moespeq.store.pieces import scales_of
from moespeq.types import ExpertKey

__all__ = ["ExpertReader", "are_equal", "decode_expert", "piece_bytes", "stored_parts", "view_of"]

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # others are taken as bytes
_NO_GRIDS: Mapping[str, ScaleGrid] = MappingProxyType({})
Matrices = Sequence[tuple[str, int, int]]


class ExpertReader:
    """Reads any expert's canonical matrices from a checkpoint's files. Safe to use from several threads.

    grids: how scales lie over matrices that have any; `read_parts` does without.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        pieces: Iterable[ExpertPiece],
        matrices: Matrices,
        grids: Mapping[str, ScaleGrid] = _NO_GRIDS,
    ) -> None:
        self._checkpoint, self._matrices, self._grids = checkpoint, matrices, grids
        by_matrix: dict[tuple[ExpertKey, str], list[ExpertPiece]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.row_start):
            by_matrix[ExpertKey(piece.layer, piece.expert), piece.matrix].append(piece)
        self._pieces = dict(by_matrix)
        self._pieces_of = Counter(piece.tensor for of_matrix in by_matrix.values() for piece in of_matrix)

    def read(self, key: ExpertKey) -> list[Written]:
        """The matrices of one expert, [out, in] each, contiguous and in record order."""
        parts, names = self.read_parts(key), [name for name, _, _ in self._matrices]
        return [
            Scaled(parts[name], parts[scales_of(name)], self._grids[name]) if scales_of(name) in parts else parts[name]
            for name in names
        ]

    def read_parts(self, key: ExpertKey) -> dict[str, Tensor]:
        """The same as plain tensors: numbers, or codes under the matrix's name and scales under `scales_of` it."""
        return {name: self._read_matrix(self._pieces[key, name]) for name in self._part_names(key)}

    def num_bytes(self, key: ExpertKey) -> int:
        """Bytes of one expert in the checkpoint."""
        return sum(self._span(piece)[1] for name in self._part_names(key) for piece in self._pieces[key, name])

    def _part_names(self, key: ExpertKey) -> list[str]:
        names = [name for name, _, _ in self._matrices]
        return [name for name in (*names, *map(scales_of, names)) if (key, name) in self._pieces]

    def _read_matrix(self, pieces: Sequence[ExpertPiece]) -> Tensor:
        parts = [self._read_piece(piece) for piece in pieces]
        matrix = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        is_e8m0 = self._checkpoint.tensors[pieces[0].tensor].entry.dtype == "F8_E8M0"
        return matrix.view(torch.float8_e8m0fnu) if is_e8m0 else matrix

    def _read_piece(self, piece: ExpertPiece) -> Tensor:
        file, entry = self._checkpoint.tensors[piece.tensor]
        values = torch.from_numpy(self._checkpoint.files[file].read(*self._span(piece)))
        values = values.view(_DTYPES.get(entry.dtype, torch.uint8))
        return values.view(-1, piece.num_rows).T if piece.is_transposed else values.view(piece.num_rows, -1)

    def _span(self, piece: ExpertPiece) -> tuple[int, int]:
        """Offset and length of a piece in its file; the pieces of one tensor are alike and cover it."""
        entry = self._checkpoint.tensors[piece.tensor].entry
        num_bytes = entry.num_bytes // self._pieces_of[piece.tensor]
        return entry.offset + (piece.index or 0) * num_bytes, num_bytes


def decode_expert(store: Store, key: ExpertKey) -> list[Tensor]:
    """The exact matrices of one expert, as products take them; both of its records are checked. Raises StoreError."""
    base, record = _records(store, key)
    shapes, fmt = store.manifest.shapes, store.manifest.base_format
    return decode_record(record, split_base(base, shapes, fmt), shapes, fmt, store.layout(key))


def stored_parts(store: Store, key: ExpertKey) -> dict[str, Tensor]:
    """One expert of a store as the checkpoint has it, as `ExpertReader.read_parts` gives it. Raises StoreError."""
    names, layout = [name for name, _, _ in store.manifest.matrices], store.layout(key)
    if layout.needs_base:
        return dict(zip(names, decode_expert(store, key), strict=True))
    parts: dict[str, Tensor] = {}
    for name, written in zip(names, split_record(_records(store, key)[1], store.manifest.shapes, layout), strict=True):
        parts[name] = written.codes if isinstance(written, Scaled) else written
        if isinstance(written, Scaled):
            parts[scales_of(name)] = written.scales
    return parts


def _records(store: Store, key: ExpertKey) -> tuple[Tensor, Tensor]:
    """Base and record, checked."""
    base = torch.empty(store.base_bytes(key), dtype=torch.uint8)
    record = torch.empty(store.record_bytes(key), dtype=torch.uint8)
    store.read_base_into(key, view_of(base), verify=True)
    store.read_record_into(key, view_of(record), verify=True)
    return base, record


def are_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether the parts of an expert are the same, bit for bit: a NaN is like itself."""
    same_names = ours.keys() == theirs.keys()
    return same_names and all(torch.equal(_bytes_of(ours[name]), _bytes_of(theirs[name])) for name in ours)


def _bytes_of(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def piece_bytes(matrix: Tensor, piece: ExpertPiece) -> memoryview:
    """The bytes of `piece` as they lie in its source tensor, cut from the canonical matrix that holds it."""
    rows = matrix[piece.row_start : piece.row_start + piece.num_rows]
    source = (rows.T if piece.is_transposed else rows).contiguous()
    return view_of(source.view(torch.uint8).view(-1))


def view_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor, without a copy."""
    view: memoryview = values.numpy().data
    return view
