"""The frame that both nested layouts share: a table of tiles, one or two planes, the escapes.

    table    int32 [num_tiles + 1, 2]   running (units, escapes) before each tile; last the totals
    planes   uint8                      what the layout defines; its variable part is counted in units
    escapes  int32 [escapes]            position inside the tile | bf16 bits << 16, in element order

Every section starts on 16 bytes. A table row is 8 bytes, so a kernel reads a tile's two begins and two ends
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moespeq.errors import StoreError
from moespeq.nested.tiles import TileGrid

__all__ = [
    "ALIGN_BYTES",
    "Reader",
    "align",
    "escape_entries",
    "join_sections",
    "read_table",
    "restore_escapes",
]

ALIGN_BYTES = 16


def align(num_bytes: int) -> int:
    """Round up to the next section boundary."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def join_sections(sections: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors as bytes, each padded with zeros to a section boundary."""
    parts = [section.contiguous().view(-1).view(torch.uint8) for section in sections]
    return torch.cat([pad(part, (0, -part.numel() % ALIGN_BYTES)) for part in parts])


def escape_entries(bits: Tensor, positions: Tensor, grid: TileGrid) -> Tensor:
    """Entries of the escapes at these ascending element positions; `bits` int16 [R*C] are the weights'."""
    inside = positions - grid.first_element(grid.tile_of(positions))
    return (inside | bits[positions].to(torch.int64) << 16).to(torch.int32)


def restore_escapes(bits: Tensor, table: Tensor, entries: Tensor, grid: TileGrid) -> None:
    """Overwrite `bits` int16 [R*C] where `entries` int32 say so."""
    counts = table[1:, 1] - table[:-1, 1]
    tiles = torch.repeat_interleave(counts.to(torch.int64), output_size=entries.numel())
    bits[grid.first_element(tiles) + (entries & 0xFFFF)] = (entries >> 16).to(torch.int16)


@dataclass(slots=True)
class Reader:
    """Takes section after section from a record's bytes (uint8 [n], possibly longer than the record)."""

    record: Tensor
    offset: int = 0

    def take(self, num_bytes: int) -> Tensor:
        """View of the next section. Raises StoreError when the record ends before it."""
        end = self.offset + num_bytes
        if num_bytes < 0 or end > self.record.numel():
            raise StoreError(
                f"A record ends at byte {self.record.numel()} but its tables ask for {end}; "
                "the store is damaged, prepare it again."
            )
        section = self.record[self.offset : end]
        self.offset = align(end)
        return section


def read_table(reader: Reader, grid: TileGrid) -> tuple[Tensor, int, int]:
    """Return the table, the number of units and the number of escapes of the residual that is next."""
    table = reader.take(8 * (grid.num_tiles + 1)).view(torch.int32).view(-1, 2)
    num_units, num_escapes = table[-1].tolist()
    return table, num_units, num_escapes
