"""One key/value cache for draft and target: full-length static storage, cut back by moving a number.

Shapes: C context length, R row bucket, T rows of a pass, B length bucket, D whatever a layer stores last.

A pass writes its T rows at the places `KVCursor.places` names and attends over the first B positions. Nothing is ever
erased: a row is live when its position is below the live end, which the loop owns, and masks hide the rest. R rows are
allocated past the context because padded rows of a verify pass are written too. Storage starts as zeros, so a masked
value is finite and its weight of exactly zero removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from moespeq.model.recurrent import StateLayer

__all__ = ["KVCursor", "SharedCache", "StaticKVLayer"]


class KVCursor:
    """Where the running pass writes and how far it looks; shared by all layers, set once a pass."""

    def __init__(self, device: torch.device) -> None:
        self.places = torch.zeros(0, dtype=torch.long, device=device)  # [T]
        self.start = 0
        self.bucket = 0

    def move(self, start: int, num_rows: int, bucket: int) -> None:
        """The next pass writes rows start..start+num_rows-1 and attends over `bucket` positions."""
        self.places = torch.arange(start, start + num_rows, device=self.places.device)
        self.start, self.bucket = start, bucket


class StaticKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """Full-length storage of one layer, sliding windows included: the mask applies the window."""

    is_compileable = True
    is_croppable = False

    def __init__(self, length: int, cursor: KVCursor) -> None:
        super().__init__()
        self._length = length
        self._cursor = cursor
        self.indexer_keys: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._zeros(key_states), self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Full-length storage for rows as those of `like` [1, heads, T, D]."""
        return like.new_zeros(1, like.shape[1], self._length, like.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, T, D] at the cursor's places; returns views of the first B positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._cursor.places, key_states)
        self.values.index_copy_(2, self._cursor.places, value_states)
        bucket = self._cursor.bucket
        return self.keys[:, :, :bucket], self.values[:, :, :bucket]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the keys [1, T, D] that sparse attention chooses positions by; returns those of the first B."""
        if self.indexer_keys is None:
            self.indexer_keys = self._zeros(indexer_key_states[None])
        self.indexer_keys.index_copy_(2, self._cursor.places, indexer_key_states[None])
        return self.indexer_keys[0, :, : self._cursor.bucket]

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """What has been allocated."""
        written = (self.keys, self.values, self.indexer_keys)
        return [tensor for tensor in written if tensor is not None] if self.is_initialized else []

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cursor.bucket, 0

    def get_seq_length(self) -> int:
        return self._cursor.start

    def get_max_length(self) -> int:
        return self._length


class SharedCache(Cache):  # type: ignore[misc]
    """A transformers cache of `num_layers` layers: static ones that share one cursor, but for `others` by index, which
    have a state and may have keys and values too.
    """

    def __init__(
        self,
        num_layers: int,
        length: int,
        device: torch.device,
        others: Mapping[int, StateLayer] = MappingProxyType({}),
        new_static: Callable[[int, int, KVCursor], StaticKVLayer] | None = None,
    ) -> None:
        """new_static: makes a layer's storage of (layer, length, cursor), where it is not the usual one."""
        self.cursor = KVCursor(device)
        new_static = new_static or (lambda _, length, cursor: StaticKVLayer(length, cursor))
        self._static = [new_static(layer, length, self.cursor) for layer in range(num_layers)]
        for layer, states in others.items():
            states.keys_beside = self._static[layer]
        Cache.__init__(self, layers=[others.get(layer, static) for layer, static in enumerate(self._static)])

    def clear(self) -> None:
        """Zeros again, as at the first write."""
        with torch.inference_mode():
            for layer in self._static:
                for tensor in layer.storage:
                    tensor.zero_()

    def rows(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        """Of each layer that was written, views of its keys, values and what else it keeps of positions `begin` to
        `end`, [1, heads, T, D] each.
        """
        written = (layer.storage for layer in self._static if layer.is_initialized)
        return [tuple(tensor[..., begin:end, :] for tensor in storage) for storage in written]

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far; storage of a layer is allocated at its first write."""
        return sum(tensor.nbytes for layer in self._static for tensor in layer.storage)
