"""Which source tensor holds which rows of which expert: the table that makes a checkpoint readable and
rebuildable.

A piece is a whole 2-D tensor, or one entry along the first dimension of a 3-D one. As [rows, in] (transposed
when `is_transposed`) it is rows [row_start, row_start + num_rows) of an expert's canonical [out, in] matrix.
The pieces of one tensor cover it exactly, so the same table reads experts from shards and writes shards from
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moespeq.store.safetensors_file import TensorEntry

__all__ = ["ExpertPiece", "pack_pieces", "scales_of", "unpack_pieces"]

_WHOLE = -1
_PIECE = np.dtype(
    [
        ("file", "<u4"),
        ("tensor", "<u4"),
        ("layer", "<u4"),
        ("expert", "<u4"),
        ("matrix", "<u4"),
        ("row_start", "<u4"),
        ("num_rows", "<u4"),
        ("index", "<i4"),
        ("is_transposed", "<u4"),
    ]
)
Files = Sequence[Sequence[TensorEntry]]


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """Rows of one expert's matrix in one source tensor; `index` is the entry of a 3-D one, else None."""

    tensor: str
    layer: int
    expert: int
    matrix: str
    row_start: int
    num_rows: int
    index: int | None
    is_transposed: bool


def scales_of(matrix: str) -> str:
    """What a piece of the scales of `matrix` names as its matrix; its rows are those of the scales."""
    return f"{matrix}.scales"


def _parts(matrices: Sequence[str]) -> list[str]:
    return [*matrices, *map(scales_of, matrices)]


def pack_pieces(pieces: Sequence[ExpertPiece], files: Files, matrices: Sequence[str]) -> bytes:
    """The table as bytes; a tensor is stored as (file, position by offset), a matrix as its position, scales behind."""
    parts = _parts(matrices)
    places = {entry.name: (file, i) for file, entries in enumerate(files) for i, entry in enumerate(entries)}
    rows = [
        (
            *places[piece.tensor],
            piece.layer,
            piece.expert,
            parts.index(piece.matrix),
            piece.row_start,
            piece.num_rows,
            _WHOLE if piece.index is None else piece.index,
            piece.is_transposed,
        )
        for piece in pieces
    ]
    return np.array(rows, dtype=_PIECE).tobytes()


def unpack_pieces(data: bytes, files: Files, matrices: Sequence[str]) -> tuple[ExpertPiece, ...]:
    """Inverse of `pack_pieces`. Raises ValueError or IndexError for what that never writes."""
    parts = _parts(matrices)
    table: npt.NDArray[np.void] = np.frombuffer(data, dtype=_PIECE)
    return tuple(
        ExpertPiece(
            tensor=files[file][tensor].name,
            layer=layer,
            expert=expert,
            matrix=parts[matrix],
            row_start=row_start,
            num_rows=num_rows,
            index=None if index == _WHOLE else index,
            is_transposed=bool(is_transposed),
        )
        for file, tensor, layer, expert, matrix, row_start, num_rows, index, is_transposed in table.tolist()
    )
