"""Attention of one row over a static cache, its own key and value written on the way.

The positions are cut into chunks of fixed size that do not know of each other; a second launch puts them together in
order. Chunks behind the row's place do nothing, so the result does not depend on the length bucket. The row's key and
value come from its registers, never from the cache, hence no chunk waits for the write.

Shapes: A query heads, Akv key heads, g = A / Akv (padded to a block that matrix units take), D key size, V value size,
L stored positions, B length bucket, C columns of the mask, S chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moespeq.kernels.early_start import release_successor, starts_early, wait_for_predecessor

__all__ = ["attend_one_row", "write_rows"]

_CHUNK_TOK = 64
_LEAST_DOT_ROWS = 16
_CHUNKS_AT_ONCE = 32


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
    """query [1, A, 1, D], key and value [1, Akv, 1, D or V] -> [1, 1, A, V]; writes at `place` int64 [1] of the cache.

    keys and values: the cache, contiguous [1, Akv, L, D or V]. mask: additive [1, 1, 1, C]; C >= `bucket_tok` > place.
    Place, mask and what is stored are read early: no kernel that was itself launched early may just have written them.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    num_heads, head_dim = query.shape[1], query.shape[3]
    num_kv_heads, value_dim = value.shape[1], value.shape[3]
    groups = num_heads // num_kv_heads
    num_chunks = triton.cdiv(bucket_tok, _CHUNK_TOK)
    parts = query.new_empty(num_heads, num_chunks, value_dim, dtype=torch.float32)
    marks = query.new_empty(num_heads, num_chunks, 2, dtype=torch.float32)  # largest score, sum of weights
    out = query.new_empty(1, 1, num_heads, value_dim)
    early = starts_early(query.device)
    block_value = triton.next_power_of_2(value_dim)
    _attend_chunk[(num_kv_heads, num_chunks)](
        query,
        key,
        value,
        keys,
        values,
        place,
        mask,
        parts,
        marks,
        keys.shape[2],
        num_chunks,
        scaling,
        groups,
        max(triton.next_power_of_2(groups), _LEAST_DOT_ROWS),
        head_dim,
        triton.next_power_of_2(head_dim),
        value_dim,
        block_value,
        _CHUNK_TOK,
        early,
        num_warps=4,
        launch_pdl=early,
    )
    _merge_chunks[(num_heads,)](
        parts,
        marks,
        place,
        out,
        num_chunks,
        value_dim,
        block_value,
        _CHUNK_TOK,
        _CHUNKS_AT_ONCE,
        early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def write_rows(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """key [1, Akv, T, D] and value [1, Akv, T, V] at `places` int64 [T] of the cache, in one launch."""
    _, num_kv_heads, num_rows, head_dim = key.shape
    early = starts_early(key.device)
    _write_rows[(num_rows, num_kv_heads)](
        keys,
        values,
        places,
        key,
        value,
        keys.stride(1),
        values.stride(1),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        head_dim,
        triton.next_power_of_2(head_dim),
        value.shape[3],
        triton.next_power_of_2(value.shape[3]),
        early,
        num_warps=1,
        launch_pdl=early,
    )


@triton.jit
def _attend_chunk(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    place,
    mask,
    parts,
    marks,
    length_tok,
    num_chunks,
    scaling,
    groups: tl.constexpr,
    block_groups: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    chunk_tok: tl.constexpr,
    early: tl.constexpr,
):
    release_successor(early)
    kv_head, chunk = tl.program_id(0), tl.program_id(1)
    own = tl.load(place).to(tl.int32)
    first = chunk * chunk_tok
    if first <= own:
        tokens, dims, sizes = first + tl.arange(0, chunk_tok), tl.arange(0, block_dim), tl.arange(0, block_value)
        rows = tl.arange(0, block_groups)
        heads = kv_head * groups + rows
        is_own, is_stored = tokens == own, tokens < own
        keys += kv_head.to(tl.int64) * length_tok * head_dim
        values += kv_head.to(tl.int64) * length_tok * value_dim
        key_tile = tl.load(
            keys + tokens[:, None] * head_dim + dims[None, :], is_stored[:, None] & (dims < head_dim)[None, :], other=0
        )
        value_tile = tl.load(
            values + tokens[:, None] * value_dim + sizes[None, :],
            is_stored[:, None] & (sizes < value_dim)[None, :],
            other=0,
        )
        masked = tl.load(mask + tokens, tokens <= own, other=0).to(tl.float32)

        wait_for_predecessor(early)
        new_key = tl.load(key + kv_head * head_dim + dims, dims < head_dim, other=0)
        new_value = tl.load(value + kv_head * value_dim + sizes, sizes < value_dim, other=0)
        query_tile = tl.load(
            query + heads[:, None] * head_dim + dims[None, :],
            (rows < groups)[:, None] & (dims < head_dim)[None, :],
            other=0,
        )
        key_tile = tl.where(is_own[:, None], new_key[None, :], key_tile)
        value_tile = tl.where(is_own[:, None], new_value[None, :], value_tile)
        if first + chunk_tok > own:
            tl.store(keys + own * head_dim + dims, new_key, dims < head_dim)
            tl.store(values + own * value_dim + sizes, new_value, sizes < value_dim)

        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scaling  # [g, chunk]
        scores = tl.where((tokens <= own)[None, :], scores + masked[None, :], float("-inf"))
        largest = tl.max(scores, axis=1)
        weights = tl.exp(scores - largest[:, None])
        mixed = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")  # [g, V]

        part = heads * num_chunks + chunk
        is_head = rows < groups
        tl.store(marks + 2 * part, largest, is_head)
        tl.store(marks + 2 * part + 1, tl.sum(weights, axis=1), is_head)
        tl.store(
            parts + part[:, None] * value_dim + sizes[None, :], mixed, is_head[:, None] & (sizes < value_dim)[None, :]
        )


@triton.jit
def _merge_chunks(  # type: ignore[no-untyped-def]
    parts,
    marks,
    place,
    out,
    num_chunks,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    chunk_tok: tl.constexpr,
    chunks_at_once: tl.constexpr,
    early: tl.constexpr,
):
    release_successor(early)
    head = tl.program_id(0)
    num_used = (tl.load(place) // chunk_tok).to(tl.int32) + 1
    sizes = tl.arange(0, block_value)
    wait_for_predecessor(early)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((block_value,), tl.float32)
    for first in range(0, num_used, chunks_at_once):
        chunks = first + tl.arange(0, chunks_at_once)
        part = head * num_chunks + chunks
        is_used = chunks < num_used
        chunk_largest = tl.load(marks + 2 * part, is_used, other=float("-inf"))
        chunk_total = tl.load(marks + 2 * part + 1, is_used, other=0.0)
        tile = tl.load(
            parts + part[:, None] * value_dim + sizes[None, :],
            is_used[:, None] & (sizes < value_dim)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(chunk_largest, axis=0))
        shrink = tl.exp(largest - new_largest)
        scale = tl.exp(chunk_largest - new_largest)
        total = total * shrink + tl.sum(chunk_total * scale, axis=0)
        mixed = mixed * shrink + tl.sum(tile * scale[:, None], axis=0)
        largest = new_largest
    tl.store(out + head * value_dim + sizes, (mixed / total).to(out.dtype.element_ty), sizes < value_dim)


@triton.jit
def _write_rows(  # type: ignore[no-untyped-def]
    keys,
    values,
    places,
    key,
    value,
    keys_stride,
    values_stride,
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_value: tl.constexpr,
    early: tl.constexpr,
):
    release_successor(early)
    wait_for_predecessor(early)
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(places + row)
    dims, sizes = tl.arange(0, block_dim), tl.arange(0, block_value)
    new_key = tl.load(key + head * key_head_stride + row * key_row_stride + dims, dims < head_dim)
    tl.store(keys + head * keys_stride + place * head_dim + dims, new_key, dims < head_dim)
    new_value = tl.load(value + head * value_head_stride + row * value_row_stride + sizes, sizes < value_dim)
    tl.store(values + head * values_stride + place * value_dim + sizes, new_value, sizes < value_dim)
