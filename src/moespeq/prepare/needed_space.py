"""What a store will take on its disks, told before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

from moespeq.model.checkpoint_map import CheckpointMap
from moespeq.nested import BaseFormat, Layout, base_record_bytes
from moespeq.prepare.layouts import EXPECTED_BITS
from moespeq.store import Checkpoint

__all__ = ["expected_bytes", "share_bytes"]


def expected_bytes(
    checkpoint: Checkpoint, mapped: CheckpointMap, fmt: BaseFormat, layouts: Sequence[Layout]
) -> tuple[int, int]:
    """(everything else, the files of expert records), of the whole store."""
    shapes = [(rows, cols) for _, rows, cols in mapped.matrices]
    weights = sum(rows * cols for rows, cols in shapes)
    dense_bytes = sum(checkpoint.tensors[name].entry.num_bytes for name in mapped.dense)
    layer_bytes = [mapped.num_experts * int(weights * EXPECTED_BITS[layout] / 8) for layout in layouts]
    bases_bytes = mapped.num_experts * len(layouts) * base_record_bytes(shapes, fmt)
    return dense_bytes + bases_bytes, sum(layer_bytes)


def share_bytes(records_bytes: int, num_layers: int, num_files: int) -> int:
    """Of the largest file: the first, which gets a layer of every round."""
    return records_bytes * -(-num_layers // num_files) // num_layers
