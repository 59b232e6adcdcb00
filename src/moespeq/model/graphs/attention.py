"""Attention over the one static cache: write the pass's own keys and values, then look over the first B positions.

On a CUDA device one row (a draft step) takes two launches of ours in all, and several rows write in one.

Shapes: T rows of a pass, A query heads, Akv key heads, g = A / Akv, D head size, B length bucket, L stored positions.

A few rows (a round) of grouped heads are laid side by side, [Akv, g * T], so that no key is copied g times; many rows
(a prefill) repeat the keys instead of the mask. A long prompt that sees all before it needs no mask at all, and is
several times faster without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import Cache

__all__ = [
    "KVStorage",
    "PassThroughCache",
    "attend_causal",
    "attend_one_row",
    "attend_plain",
    "attend_side_by_side",
    "attention_of_any_shape",
    "fits_one_row",
    "fits_side_by_side",
]

_MOST_ROWS_SIDE_BY_SIDE = 1024  # g * T
_MOST_ONE_ROW_SIZE = 256  # D


class PassThroughCache(Cache):  # type: ignore[misc]
    """What the forward takes for a cache: gives back the new keys and values; `KVStorage` keeps them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class KVStorage:
    """Keys and values of all layers, full length; a layer's storage is allocated at its first write, as zeros.

    Zeros, because a masked value must be finite for its weight of exactly zero to remove it.
    """

    def __init__(self, length_tok: int) -> None:
        self.length_tok = length_tok
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [1, Akv, L, D], for passes whose own are shaped as `key` and `value`."""
        if layer == len(self._layers):
            self._layers.append((self._empty(key), self._empty(value)))
        return self._layers[layer]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write key and value [1, Akv, T, D] at `places` [T]; returns the layer's whole storage [1, Akv, L, D]."""
        keys, values = self.layer(layer, key, value)
        if key.is_cuda and key.stride(-1) == value.stride(-1) == 1:
            from moespeq.kernels.decode_attention import write_rows

            write_rows(keys, values, places, key, value)
        else:
            keys.index_copy_(2, places, key)
            values.index_copy_(2, places, value)
        return keys, values

    def rows(self, begin: int, end: int) -> list[tuple[Tensor, ...]]:
        """Views of positions `begin` to `end`, [1, Akv, T, D]: keys and values of each layer that was written."""
        return [(keys[:, :, begin:end], values[:, :, begin:end]) for keys, values in self._layers]

    def clear(self) -> None:
        """Zeros again, as at the first write."""
        with torch.inference_mode():
            for keys, values in self._layers:
                keys.zero_()
                values.zero_()

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self.length_tok, like.shape[3])


@contextmanager
def attention_of_any_shape() -> Iterator[None]:
    """Leave cuDNN out, which plans for tens of milliseconds whenever a number of rows or a length is new to it."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def fits_one_row(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_one_row` takes query [1, A, T, D] and value [1, Akv, T, D]."""
    return query.is_cuda and query.shape[2] == 1 and max(query.shape[3], value.shape[3]) <= _MOST_ONE_ROW_SIZE


def attend_one_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    mask: Tensor,
    *,
    bucket_tok: int,
    scaling: float,
) -> Tensor:
    """Write the row's key and value at `place` [1], and attend: mask [1, 1, 1, B or more] -> [1, 1, A, D]."""
    from moespeq.kernels.decode_attention import attend_one_row

    return attend_one_row(query, key, value, keys, values, place, mask, bucket_tok=bucket_tok, scaling=scaling)


def fits_side_by_side(num_heads: int, num_kv_heads: int, num_rows: int) -> bool:
    """Whether rows of grouped heads are few enough to lie side by side."""
    return num_heads > num_kv_heads and num_heads // num_kv_heads * num_rows <= _MOST_ROWS_SIDE_BY_SIDE


def attend_plain(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """query [1, A, T, D], keys and values [1, Akv, B, D], mask [1, 1, T, B] -> [1, T, A, D]."""
    mixed = F.scaled_dot_product_attention(query, *_repeated(query, keys, values), attn_mask=mask, scale=scaling)
    return mixed.transpose(1, 2).contiguous()


def attend_causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The same where the rows are the last T of B positions and each sees all up to its own."""
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    mixed = F.scaled_dot_product_attention(query, *_repeated(query, keys, values), attn_mask=mask, scale=scaling)
    return mixed.transpose(1, 2).contiguous()


def attend_side_by_side(query: Tensor, keys: Tensor, values: Tensor, tall_mask: Tensor, scaling: float) -> Tensor:
    """The same with the g query heads of a key head as rows: tall_mask [1, 1, g * T, B]."""
    _, num_heads, num_rows, head_dim = query.shape
    rows = query.reshape(1, keys.shape[1], -1, head_dim)  # [1, Akv, g * T, D]
    mixed = F.scaled_dot_product_attention(rows, keys, values, attn_mask=tall_mask, scale=scaling)
    return mixed.reshape(1, num_heads, num_rows, -1).transpose(1, 2).contiguous()


def _repeated(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head, [1, A, B, D]."""
    groups = query.shape[1] // keys.shape[1]
    if groups == 1:
        return keys, values
    return keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
