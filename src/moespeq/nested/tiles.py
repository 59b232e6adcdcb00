"""The tiling of a matrix: the units that a kernel decodes independently, and the running counts between them.

Owns the map between row-major element positions and tiles. Elements keep row-major order in every plane of a
record; a tile is at most 1,024 consecutive elements, whole rows of a narrow matrix or part of one row of a
wide one, so it never crosses a row unless it holds whole rows. Tables say where each tile's variable parts
begin; a reader of the whole matrix needs only their last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["TILE", "TileGrid"]

TILE = 1024


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tiles of a [rows, cols] matrix. No tile crosses a line: a wide matrix's row, all of a narrow matrix."""

    rows: int
    cols: int

    @property
    def size(self) -> int:
        """Elements in a full tile."""
        return TILE if self.cols >= TILE else TILE // self.cols * self.cols

    @property
    def line(self) -> int:
        """Elements in a line; its last tile may be short."""
        return self.cols if self.cols >= TILE else self.rows * self.cols

    @property
    def tiles_per_line(self) -> int:
        """Tiles in a line."""
        return -(-self.line // self.size)

    @property
    def num_elements(self) -> int:
        """Elements in the matrix."""
        return self.rows * self.cols

    @property
    def num_tiles(self) -> int:
        """Tiles in the matrix, in row-major order."""
        return self.num_elements // self.line * self.tiles_per_line

    def first_element(self, tiles: Tensor) -> Tensor:
        """Row-major position of each tile's first element."""
        return tiles // self.tiles_per_line * self.line + tiles % self.tiles_per_line * self.size

    def tile_of(self, positions: Tensor) -> Tensor:
        """Tile of each row-major element position."""
        return positions // self.line * self.tiles_per_line + positions % self.line // self.size

    def to_tiles(self, elements: Tensor) -> Tensor:
        """[rows*cols] -> [num_tiles, size], zeros after a short tile."""
        missing = self.tiles_per_line * self.size - self.line
        lines = elements.view(-1, self.line)
        return (pad(lines, (0, missing)) if missing else lines).view(-1, self.size)

    def from_tiles(self, tiled: Tensor) -> Tensor:
        """[num_tiles, size] -> [rows*cols]: the inverse of `to_tiles`."""
        lines = tiled.view(-1, self.tiles_per_line * self.size)
        return lines[:, : self.line].reshape(-1)

    def running_count(self, positions: Tensor) -> Tensor:
        """How many of these ascending positions lie before each tile, and in all: int64 [num_tiles + 1]."""
        tiles = torch.arange(self.num_tiles + 1, device=positions.device)
        return torch.searchsorted(positions, self.first_element(tiles))
