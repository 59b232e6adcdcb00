"""What launches over a prefill's wave compute: many rows, so an expert may have many routed pairs.

The kernels take a table as they find it (see verify_table). This one's pairs are written once a layer, its groups once
a wave, by copies in the order of the stream: one table on the device is enough, and only the pinned buffers that copies
still read must be left alone. For the verify kernels an expert's pairs are cut into groups of GROUP_PAIRS, each of
which decodes the expert again; the prefill kernels, which decode it once, take a group of all its pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moespeq.kernels.host_words import copy_from_host
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT, RoutedPairs

__all__ = ["GROUP_PAIRS", "ChunkTable"]

GROUP_PAIRS = 48  # six row tiles share a decoded block


class ChunkTable:
    """A table for passes of up to `max_pairs` routed pairs over `num_experts` experts a layer, in groups of at most
    `group_pairs`, or of an expert's whole pairs where that is None.

    counts: the pairs of each group of the wave last filled; max_groups and max_rows are what the verify kernels' grid
    and unrolling follow.
    """

    def __init__(
        self,
        num_experts: int,
        max_pairs: int,
        device: torch.device | str,
        *,
        num_waves: int,
        group_pairs: int | None = GROUP_PAIRS,
    ) -> None:
        self.max_rows = group_pairs or max_pairs
        self.pairs_at = GROUPS_AT + GROUP_INTS * (num_experts + max_pairs // self.max_rows)
        self.counts: list[int] = []
        self.device = torch.zeros(self.pairs_at + max_pairs, dtype=torch.int32, device=device)
        is_pinned = torch.device(device).type == "cuda"
        self._pairs = torch.zeros(max_pairs, dtype=torch.int32, pin_memory=is_pinned)
        self._waves = torch.zeros(num_waves, self.pairs_at, dtype=torch.int32, pin_memory=is_pinned)
        self._values = self._waves.numpy()

    @property
    def max_groups(self) -> int:
        """Groups of the wave last filled."""
        return len(self.counts)

    def clear(self) -> None:
        """A table of no groups, over which a launch does nothing."""
        self.counts = [1]  # a grid is never empty
        self.device[0] = 0

    def begin_layer(self, pairs: RoutedPairs) -> None:
        """Write the layer's pairs. What earlier layers launched has run."""
        num_pairs = pairs.num_pairs
        self._pairs.numpy()[:num_pairs] = pairs.order
        copy_from_host(self._pairs[:num_pairs], self.device[self.pairs_at : self.pairs_at + num_pairs])

    def fill(
        self, wave: int, pairs: RoutedPairs, experts: Sequence[int], slots: Sequence[int], bank_rows: Sequence[int]
    ) -> None:
        """Write the groups of a wave through buffer `wave`, which no copy still reads; see VerifyTable.fill."""
        first, count = pairs.first[experts], pairs.count[experts]
        num_groups = -(-count // self.max_rows)
        expert = np.repeat(np.arange(len(experts)), num_groups)
        begin = self.max_rows * (np.arange(len(expert)) - np.repeat(num_groups.cumsum() - num_groups, num_groups))
        buffer, values = self._waves[wave], self._values[wave]
        values[0] = len(expert)
        groups = values[GROUPS_AT : GROUPS_AT + GROUP_INTS * len(expert)].reshape(-1, GROUP_INTS)
        groups[:, 0] = np.asarray(slots)[expert]
        groups[:, 1] = np.asarray(bank_rows)[expert]
        groups[:, 2] = first[expert] + begin
        groups[:, 3] = np.minimum(count[expert] - begin, self.max_rows)
        self.counts = groups[:, 3].tolist()
        end = GROUPS_AT + GROUP_INTS * len(expert)
        copy_from_host(buffer[:end], self.device[:end])
