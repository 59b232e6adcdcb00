"""What one launch of the verify kernels computes: groups of routed pairs, one for each expert of a wave.

Shapes: T rows, K experts a row, P = T * K routed pairs, E experts. Owns the int32 layout that the kernels read:

    [0]          number of groups
    [1 ..]       groups [max_groups, 4]: slot, bank row, first pair, number of pairs
    then         pairs [P]: pair ids t * K + k, those of one expert side by side, ascending

Filling is on the critical path (once a layer and wave), so the host side is numpy on one pinned buffer and one copy.
The copy may be captured in a graph: it always reads the same host buffer. So `fill` may be called again only when the
copy of the last `upload` has run, which is so once later results of that layer were read back; a layer of several
waves takes one table for each wave in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BASE_IN_SLOT", "VerifyTable"]

BASE_IN_SLOT = -1  # bank row of an expert whose base is not resident: its slot holds base record, then residual record
GROUPS_AT = 4
GROUP_INTS = 4


class VerifyTable:
    """A table for at most `max_experts` groups over passes of `max_rows` rows, each with `top_k` experts."""

    def __init__(self, max_experts: int, max_rows: int, top_k: int, device: torch.device | str) -> None:
        self.max_rows = max_rows
        self.max_groups = min(max_experts, max_rows * top_k)
        self.pairs_at = GROUPS_AT + GROUP_INTS * self.max_groups
        length = self.pairs_at + max_rows * top_k
        on_gpu = torch.device(device).type == "cuda"
        self._host = torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu)
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        values = self._host.numpy()
        self._num_groups = values[:1]
        self._groups = values[GROUPS_AT : self.pairs_at].reshape(-1, GROUP_INTS)
        self._pairs = values[self.pairs_at :]

    def fill(
        self, routes: npt.NDArray[np.int64], slots: npt.NDArray[np.int32], bank_rows: npt.NDArray[np.int32]
    ) -> int:
        """Write the groups of the wave's experts and return how many there are.

        routes [live rows, K]; slots [E]: the slot of each expert of this wave, -1 for all others; bank_rows [E]: where
        each expert's base lies in the bank, or BASE_IN_SLOT.
        """
        flat = routes.reshape(-1)
        order = flat.argsort(kind="stable")
        experts = flat[order]
        first = np.flatnonzero(np.concatenate((_TRUE, experts[1:] != experts[:-1])))
        ends = np.append(first[1:], flat.size)
        experts = experts[first]
        chosen = slots[experts] >= 0
        experts, first, ends = experts[chosen], first[chosen], ends[chosen]
        groups = self._groups[: experts.size]
        groups[:, 0] = slots[experts]
        groups[:, 1] = bank_rows[experts]
        groups[:, 2] = first
        groups[:, 3] = ends - first
        self._pairs[: flat.size] = order
        self._num_groups[0] = experts.size
        return int(experts.size)

    def upload(self) -> None:
        """Enqueue the one copy to the device on the current stream; capturable."""
        self.device.copy_(self._host, non_blocking=True)


_TRUE = np.array([True])
