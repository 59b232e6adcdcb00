"""Keys of DeepSeek-V4: one tensor for keys and values, and beside it one entry for every window of a layer's rows.

Its own cache collects rows until a window is full and forgets them, which cannot be cut back. Here what an entry is
made of is kept for every position, as keys are, so a pass makes the entries of all windows that end in it anew, and
rejected rows leave nothing: a window that a padded or a rejected row reached ends past the live end, where the model's
own masks hide its entry. An entry lies in the places of its window's positions, so bytes grow with positions alone.

Shapes: T rows of a pass, D whatever a row or an entry has, W rows of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from moespeq.model.kv_cache import KVCursor, StaticKVLayer

__all__ = ["CompressedKVLayer", "OneTensorLayer"]


class OneTensorLayer(StaticKVLayer):
    """A layer whose values are its keys."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self.values = self._zeros(key_states)
        self.is_initialized = True

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        return [self.keys] if self.is_initialized else []


class CompressedKVLayer(OneTensorLayer):
    """In the form that the model's compressors call: each has a name, and hands in the rows of a pass once.

    window: W. overlaps: an entry is made of the rows of the window before it too.
    """

    def __init__(self, length: int, cursor: KVCursor, *, window: int, overlaps: bool) -> None:
        super().__init__(length, cursor)
        self._window, self._overlaps = window, overlaps
        self._stored: dict[str, torch.Tensor] = {}  # [1, 1, length, D]
        self._num_repeated = 0  # windows handed out once more, for the one that follows

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        return [*super().storage, *self._stored.values()]

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keep the rows [1, T, D] of the pass; returns those of all windows that end in it, and where they begin."""
        start, end = self._cursor.start, self._cursor.start + kv.shape[1]
        first, last = start // self._window, end // self._window
        self._num_repeated = int(self._overlaps and 0 < first < last)
        begin = (first - self._num_repeated) * self._window
        parts = []
        for part, rows in (("kv", kv), ("gate", gate)):
            stored = self._stored_as(f"{name} {part}", rows[:, None])
            stored.index_copy_(2, self._cursor.places, rows[:, None])
            parts.append(stored[0, :, begin : last * self._window])
        return parts[0], parts[1], begin

    def update_overlap_state(self, *args: Any) -> tuple[None, None]:
        """The window before the first is among those handed out."""
        return None, None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Keep the entries [1, N, D] of the windows handed out; returns all that a row of the pass may see, or more."""
        size, start = compressed.shape[2], self._cursor.start
        first = start // self._window
        places = compressed.new_empty(1, 1, 0, math.ceil(size / self._window), dtype=self.keys.dtype)
        stored = self._stored_as(f"{name} entries", places).view(-1)
        entries = stored[: stored.numel() // size * size].view(1, -1, size)
        new = compressed[:, self._num_repeated :]
        entries[:, first : first + new.shape[1]] = new
        is_one_row = self._cursor.places.numel() == 1  # of which the model hides nothing
        end = start + 1 if is_one_row else self._cursor.bucket
        return entries[:, : end // self._window]

    def _stored_as(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self._stored:
            self._stored[name] = self._zeros(like)
        return self._stored[name]
