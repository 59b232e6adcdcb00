"""Experts out of source tensors, and source tensors out of experts: two directions of one table of pieces.

Shapes: a canonical matrix is [out, in] in the dtype of its source; a piece is some of its rows, as they lie in a source
tensor. A call holds one expert in memory, never more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moespeq.nested import decode_record, split_base
from moespeq.store import Checkpoint, ExpertPiece, Store
from moespeq.types import ExpertKey

__all__ = ["ExpertReader", "decode_expert", "piece_bytes", "view_of"]

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
Matrices = Sequence[tuple[str, int, int]]


class ExpertReader:
    """Reads any expert's canonical matrices from a checkpoint's files. Safe to use from several threads."""

    def __init__(self, checkpoint: Checkpoint, pieces: Iterable[ExpertPiece], matrices: Matrices) -> None:
        self._checkpoint, self._matrices = checkpoint, matrices
        by_matrix: dict[tuple[ExpertKey, str], list[ExpertPiece]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.row_start):
            by_matrix[ExpertKey(piece.layer, piece.expert), piece.matrix].append(piece)
        self._pieces = dict(by_matrix)
        self._pieces_of = Counter(piece.tensor for of_matrix in by_matrix.values() for piece in of_matrix)

    def read(self, key: ExpertKey) -> list[Tensor]:
        """The matrices of one expert, [out, in] each, contiguous and in record order."""
        return [self._read_matrix(self._pieces[key, name]) for name, _, _ in self._matrices]

    def num_bytes(self, key: ExpertKey) -> int:
        """Bytes of one expert in the checkpoint."""
        return sum(self._span(piece)[1] for name, _, _ in self._matrices for piece in self._pieces[key, name])

    def _read_matrix(self, pieces: Sequence[ExpertPiece]) -> Tensor:
        parts = [self._read_piece(piece) for piece in pieces]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _read_piece(self, piece: ExpertPiece) -> Tensor:
        file, entry = self._checkpoint.tensors[piece.tensor]
        values = torch.from_numpy(self._checkpoint.files[file].read(*self._span(piece))).view(_DTYPES[entry.dtype])
        return values.view(-1, piece.num_rows).T if piece.is_transposed else values.view(piece.num_rows, -1)

    def _span(self, piece: ExpertPiece) -> tuple[int, int]:
        """Offset and length of a piece in its file; the pieces of one tensor are alike and cover it."""
        entry = self._checkpoint.tensors[piece.tensor].entry
        num_bytes = entry.num_bytes // self._pieces_of[piece.tensor]
        return entry.offset + (piece.index or 0) * num_bytes, num_bytes


def decode_expert(store: Store, key: ExpertKey) -> list[Tensor]:
    """The canonical matrices of one expert of a store; both of its records are checked. Raises StoreError."""
    base = torch.empty(store.base_bytes(key), dtype=torch.uint8)
    record = torch.empty(store.record_bytes(key), dtype=torch.uint8)
    store.read_base_into(key, view_of(base), verify=True)
    store.read_record_into(key, view_of(record), verify=True)
    shapes, fmt = store.manifest.shapes, store.manifest.base_format
    return decode_record(record, split_base(base, shapes, fmt), shapes, fmt, store.layout(key))


def piece_bytes(matrix: Tensor, piece: ExpertPiece) -> memoryview:
    """The bytes of `piece` as they lie in its source tensor, cut from the canonical matrix that holds it."""
    rows = matrix[piece.row_start : piece.row_start + piece.num_rows]
    source = (rows.T if piece.is_transposed else rows).contiguous()
    return view_of(source.view(torch.uint8).view(-1))


def view_of(values: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor, without a copy."""
    view: memoryview = values.numpy().data
    return view
