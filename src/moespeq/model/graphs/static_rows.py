"""Tokens and places of a pass with a fixed number of rows, in tensors that its graphs read.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moespeq.kernels.host_words import copy_from_host

__all__ = ["StaticRows"]


class StaticRows:
    """`tokens`, `seen` (the last place a row looks at) and `written` (where its key and value go), int64 [R] each."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._host = torch.zeros(3, num_rows, dtype=torch.int64, pin_memory=True)
        self._device = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        self.tokens, self.seen, self.written = self._device

    def fill(self, tokens: Sequence[int], position: int, *, spare_place: int | None = None) -> None:
        """`tokens` from `position` on; rows behind them repeat the last one and write to `spare_place`, or behind it.

        The last pass that read the tensors must have been waited for.
        """
        live, rows = len(tokens), self._host.numpy()
        assert live <= rows.shape[1], (live, rows.shape)
        written = np.arange(position, position + rows.shape[1])
        rows[0, :live], rows[0, live:] = tokens, tokens[-1]
        rows[1] = written.clip(max=position + live - 1)
        rows[2] = written
        if spare_place is not None:
            rows[2, live:] = spare_place
        copy_from_host(self._host, self._device)
