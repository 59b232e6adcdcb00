"""One forward over static storage: what the operators of a running pass do.

Owns the keys and values, the places that a pass writes, and the count of layers that have called. Holds no graph: the
same pass runs eagerly (prefill, warm-up), under capture, and never again when a graph is replayed.

Shapes: T rows, K experts a row, H hidden, A heads, D head size, C columns of a mask, B length bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moespeq.model.graphs.attention import (
    KVStorage,
    attend_causal,
    attend_one_row,
    attend_plain,
    attend_side_by_side,
    fits_one_row,
    fits_side_by_side,
)

__all__ = ["LayerExperts", "StaticPass"]

_LEAST_CAUSAL_ROWS = 1024  # below, a mask costs nothing beside the link

LayerExperts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(MoE layer, hidden [T, H], routes [T, K], weights [T, K]) -> [T, H]."""


class StaticPass:
    """A RunningPass: `begin` sets up one forward, `end` forgets what it was given."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._experts: LayerExperts | None = None

    def begin(
        self,
        places: Tensor,
        bucket: int,
        experts: LayerExperts,
        *,
        causal_masks: Sequence[Tensor] = (),
        end: int | None = None,
    ) -> None:
        """The next forward writes its rows at `places` int64 [T] and attends over the first `bucket` positions.

        causal_masks: those of its masks that hide nothing but what follows a row, the last of which is at `end` - 1.
        """
        self._places, self._bucket, self._experts, self._end = places, bucket, experts, end
        self._causal_masks = {mask.data_ptr() for mask in causal_masks}
        self._num_attended = self._num_experts = 0
        self._tall_masks: dict[int, Tensor] = {}

    def end(self) -> None:
        """Let go of the experts: they hold whoever runs the pass, and a circle would keep the device's memory."""
        self._experts = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
        """Keep the rows' keys and values, and attend; `mask` may have more columns than the bucket."""
        layer, self._num_attended = self._num_attended, self._num_attended + 1
        if fits_one_row(query, value):
            stored = self._storage.layer(layer, key, value)
            return attend_one_row(
                query, key, value, *stored, self._places, mask, bucket_tok=self._bucket, scaling=scaling
            )
        is_causal = query.shape[2] >= _LEAST_CAUSAL_ROWS and mask.data_ptr() in self._causal_masks
        length_tok = self._end if is_causal else self._bucket
        keys, values = (t[:, :, :length_tok] for t in self._storage.write(layer, self._places, key, value))
        if is_causal:
            return attend_causal(query, keys, values, scaling)
        seen = mask[..., : self._bucket]
        if not fits_side_by_side(query.shape[1], key.shape[1], query.shape[2]):
            return attend_plain(query, keys, values, seen, scaling)
        tall_mask = self._tall_mask(seen, query.shape[1] // key.shape[1])
        return attend_side_by_side(query, keys, values, tall_mask, scaling)

    def experts(self, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        """The next MoE layer's experts."""
        layer, self._num_experts = self._num_experts, self._num_experts + 1
        assert self._experts is not None, "no forward has begun"
        return self._experts(layer, hidden, routes, weights)

    def _tall_mask(self, mask: Tensor, groups: int) -> Tensor:
        """The mask once for each query head of a group; made by the first layer that uses the mask."""
        tall = self._tall_masks.get(mask.data_ptr())
        if tall is None:
            tall = self._tall_masks[mask.data_ptr()] = mask.repeat(1, 1, groups, 1)
        return tall
