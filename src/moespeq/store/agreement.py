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
        if manifest.layouts[layer] is Layout.PLAIN:
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
    """Raise StoreError unless the pieces of the table at `path` are all rows of all experts, each once, and each inside
    its tensor.
    """
    shapes = {name: (rows, cols) for name, rows, cols in manifest.matrices}
    by_name = {entry.name: entry for file in entries for entry in file}
    spans: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        in_tensor, in_piece = math.prod(by_name[piece.tensor].shape), piece.num_rows * shapes[piece.matrix][1]
        is_inside = in_piece == in_tensor if piece.index is None else 0 <= piece.index < in_tensor // max(1, in_piece)
        if not is_inside:
            raise StoreError(
                f"{path} looks for {piece.num_rows} rows of {piece.matrix} of expert {piece.expert} of MoE layer "
                f"{piece.layer} in a tensor that does not hold them; prepare the store again."
            )
        spans[piece.layer, piece.expert, piece.matrix].append((piece.row_start, piece.num_rows))
    for layer in range(manifest.num_layers):
        for expert in range(manifest.num_experts):
            for name, (rows, _) in shapes.items():
                end = 0
                for row_start, num_rows in sorted(spans.pop((layer, expert, name), [])):
                    end = end + num_rows if row_start == end else -1
                if end != rows:
                    raise StoreError(
                        f"{path} does not hold {name} of expert {expert} of MoE layer {layer} exactly once; prepare "
                        "the store again."
                    )
    if spans:
        raise StoreError(f"{path} holds experts that the manifest does not count; prepare the store again.")
