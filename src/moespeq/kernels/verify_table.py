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

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moespeq.kernels.host_words import copy_from_host

__all__ = ["BASE_IN_SLOT", "LaunchTable", "RoutedPairs", "VerifyTable"]

BASE_IN_SLOT = -1  # bank row of an expert whose base is not resident: its slot holds base record, then residual record
GROUPS_AT = 4
GROUP_INTS = 4

_EXPERT_ID = np.uint16  # numpy sorts whole numbers of 16 bits by radix: a tenth of the time for a prompt of 4,000 rows


class LaunchTable(Protocol):
    """What a launch reads of a table: the grid covers `max_groups`, row tiles are unrolled for `max_rows`."""

    device: torch.Tensor
    pairs_at: int
    max_groups: int
    max_rows: int


class RoutedPairs:
    """A layer's routed pairs, those of an expert side by side; made once a layer, used by all its waves.

    count, first [experts]: expert e has the pairs order[first[e] : first[e] + count[e]], ascending.
    """

    __slots__ = ("_order", "_routes", "count", "first")

    def __init__(self, routes: npt.NDArray[np.int64]) -> None:
        """`routes` [live rows, K]."""
        self._routes = routes.reshape(-1)
        self._order: npt.NDArray[np.int64] | None = None
        self.count = np.bincount(self._routes)
        self.first = self.count.cumsum() - self.count

    @property
    def num_pairs(self) -> int:
        return self._routes.size

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Sorted when it is first asked for: the records of `experts` can be asked for before that."""
        if self._order is None:
            self._order = self._routes.astype(_EXPERT_ID).argsort(kind="stable")
        return self._order

    def experts(self) -> list[int]:
        """The experts that have pairs, ascending and distinct."""
        experts: list[int] = self.count.nonzero()[0].tolist()
        return experts


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
        self,
        pairs: RoutedPairs,
        experts: npt.ArrayLike,
        slots: npt.ArrayLike,
        bank_rows: npt.ArrayLike,
    ) -> None:
        """Write the wave's groups: `slots[i]` holds the record of `experts[i]`, which `pairs` has.

        bank_rows: where each expert's base lies in the bank, or BASE_IN_SLOT.
        """
        chosen = np.asarray(experts)
        num_groups = len(chosen)
        groups = self._groups[:num_groups]
        groups[:, 0] = slots
        groups[:, 1] = bank_rows
        groups[:, 2] = pairs.first[chosen]
        groups[:, 3] = pairs.count[chosen]
        self._pairs[: pairs.num_pairs] = pairs.order
        self._num_groups[0] = num_groups

    def upload(self) -> None:
        """Enqueue the one copy to the device on the current stream; capturable."""
        copy_from_host(self._host, self.device)
