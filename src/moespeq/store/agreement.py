"""Do a store's tables say what its manifest says? Checked when they are read, for a store may come from anywhere.

Checksums tell damage, not intent: whoever writes a manifest writes them too. So a record must have the length and the
place that follow from the manifest, and the pieces must be every row of every expert once, in tensors that are there;
then no reader looks where it was not meant to. What cannot be told before it is decoded is a nested record's inside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from moespeq.errors import StoreError
from moespeq.nested import Layout, base_record_bytes
from moespeq.nested.sections import align
from moespeq.store.manifest import Manifest
from moespeq.store.pieces import ExpertPiece
from moespeq.store.records import PAGE_BYTES, RecordEnds, RecordTable, round_up
from moespeq.store.safetensors_file import TensorEntry

__all__ = ["check_pieces", "check_records"]

_NUMBERS = frozenset(("BF16", "F16", "F32"))  # of other dtypes, several weights may share an element


def check_records(table: RecordTable, manifest: Manifest, path: Path) -> None:
    """Raise StoreError unless every record of the table at `path` lies where it was appended and is as long as it
    must be, and the files end behind the last.
    """
    ends = RecordEnds.of_nothing(manifest.num_experts, len(manifest.experts_file_bytes))
    base_bytes = base_record_bytes(manifest.shapes, manifest.base_format)
    plain_bytes = sum(align(2 * rows * cols) for rows, cols in manifest.shapes)
    for position, row in enumerate(table.rows):
        layer, expert = divmod(position, manifest.num_experts)
        is_long_enough = row.record.num_bytes > 0
        if manifest.layouts[layer] in (Layout.PLAIN, Layout.FP16):
            is_long_enough = row.record.num_bytes == plain_bytes
        if row.base.num_bytes != base_bytes or not is_long_enough or not ends.is_next(position, row):
            raise StoreError(
                f"{path} gives expert {expert} of MoE layer {layer} a place or a length that the manifest rules out; "
                "prepare the store again."
            )
        ends.add(position, row)
    sizes = (manifest.base_file_bytes, *manifest.experts_file_bytes)
    if sizes != tuple(round_up(end, PAGE_BYTES) for end in (ends.base, *ends.experts)):
        raise StoreError(f"{path} and the manifest disagree on where the records end; prepare the store again.")


def check_pieces(
    pieces: Sequence[ExpertPiece], manifest: Manifest, entries: Sequence[Sequence[TensorEntry]], path: Path
) -> None:
    """Raise StoreError unless the pieces of the table at `path` are all rows of all experts, each once, and those of a
    tensor its equal parts.

    What a matrix has beside its numbers, such as scales, is a part of a name and a number of rows of its own.
    """
    shapes = {name: (rows, cols) for name, rows, cols in manifest.matrices}
    by_name = {entry.name: entry for file in entries for entry in file}
    parts: dict[str, list[int | None]] = defaultdict(list)
    spans: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        parts[piece.tensor].append(piece.index)
        spans[piece.layer, piece.expert, piece.matrix].append((piece.row_start, piece.num_rows))
    uncovered = {tensor for tensor, indices in parts.items() if indices != _all_parts(indices)}
    for piece in pieces:
        elements, rest = divmod(math.prod(by_name[piece.tensor].shape), len(parts[piece.tensor]))
        is_number = piece.matrix in shapes and by_name[piece.tensor].dtype in _NUMBERS
        is_wrong_size = is_number and elements != piece.num_rows * shapes[piece.matrix][1]
        if rest or is_wrong_size or piece.num_rows < 1 or piece.tensor in uncovered:
            raise StoreError(
                f"{path} looks for {piece.num_rows} rows of {piece.matrix} of expert {piece.expert} of MoE layer "
                f"{piece.layer} in a tensor that does not hold them; prepare the store again."
            )
    for (layer, expert, name), found in spans.items():
        end = 0
        for row_start, num_rows in sorted(found):
            end = end + num_rows if row_start == end else -1
        is_counted = layer < manifest.num_layers and expert < manifest.num_experts
        if not is_counted or end != (shapes[name][0] if name in shapes else max(end, 1)):
            raise StoreError(
                f"{path} does not hold {name} of expert {expert} of MoE layer {layer} exactly once; prepare the store "
                "again."
            )
    if sum(name in shapes for _, _, name in spans) != manifest.num_layers * manifest.num_experts * len(shapes):
        raise StoreError(f"{path} does not hold every matrix of every expert; prepare the store again.")


def _all_parts(indices: Sequence[int | None]) -> list[int | None]:
    """The indices of a tensor's parts in the order in which a table lists them."""
    return [None] if len(indices) == 1 and indices[0] is None else [*range(len(indices))]
