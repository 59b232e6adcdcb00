"""One cache for draft and target: full-length storage, written where the cursor stands, read up to the bucket."""

from __future__ import annotations

import torch

from moespeq.model.kv_cache import SharedCache

LAYERS, LENGTH, HEADS, WIDTH = 2, 40, 3, 8
CPU = torch.device("cpu")


def states(num_rows: int, *, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(1, HEADS, num_rows, width, generator=torch.Generator().manual_seed(seed))


def write(
    cache: SharedCache, layer: int, start: int, num_rows: int, bucket: int, seed: int
) -> tuple[torch.Tensor, ...]:
    """One pass of one layer; returns what attention sees, keys then values."""
    cache.cursor.move(start, num_rows, bucket)
    seen: tuple[torch.Tensor, ...] = cache.update(states(num_rows, seed=seed), states(num_rows, seed=seed + 1), layer)
    return seen


def test_a_pass_sees_its_rows_at_their_places_and_zeros_where_nothing_was_written() -> None:
    keys, values = write(SharedCache(LAYERS, LENGTH, CPU), 0, 5, 4, 16, seed=1)
    assert keys.shape == values.shape == (1, HEADS, 16, WIDTH)
    assert torch.equal(keys[:, :, 5:9], states(4, seed=1))
    assert torch.equal(values[:, :, 5:9], states(4, seed=2))
    assert not keys[:, :, :5].any()
    assert not keys[:, :, 9:].any()


def test_earlier_rows_stay_and_rewritten_rows_are_the_last_ones_written() -> None:
    cache = SharedCache(LAYERS, LENGTH, CPU)
    write(cache, 0, 0, 8, 16, seed=1)
    write(cache, 0, 6, 1, 16, seed=3)  # a draft step
    keys, _ = write(cache, 0, 6, 4, 16, seed=5)  # the verify pass over the same places
    assert torch.equal(keys[:, :, :6], states(8, seed=1)[:, :, :6])
    assert torch.equal(keys[:, :, 6:10], states(4, seed=5))


def test_layers_share_the_cursor_and_nothing_else() -> None:
    cache = SharedCache(LAYERS, LENGTH, CPU)
    cache.cursor.move(2, 3, 8)
    first, _ = cache.update(states(3, seed=1), states(3, seed=2), 0)
    second, _ = cache.update(states(3, seed=3), states(3, seed=4), 1)
    assert torch.equal(first[:, :, 2:5], states(3, seed=1))
    assert torch.equal(second[:, :, 2:5], states(3, seed=3))


def test_rows_past_the_bucket_are_written_and_not_seen() -> None:
    """Padded rows of a verify pass run past the bucket; a later, longer bucket must find room there."""
    cache = SharedCache(LAYERS, LENGTH, CPU)
    keys, _ = write(cache, 0, 14, 6, 16, seed=1)
    assert keys.shape[2] == 16
    assert torch.equal(keys[:, :, 14:], states(6, seed=1)[:, :, :2])
    keys, _ = write(cache, 0, 20, 1, 32, seed=3)
    assert torch.equal(keys[:, :, 14:20], states(6, seed=1))


def test_the_last_place_can_be_written() -> None:
    keys, _ = write(SharedCache(LAYERS, LENGTH, CPU), 0, LENGTH - 4, 4, LENGTH, seed=1)
    assert torch.equal(keys[:, :, -4:], states(4, seed=1))


def test_keys_and_values_may_have_different_widths() -> None:
    cache = SharedCache(1, LENGTH, CPU)
    cache.cursor.move(0, 2, 8)
    keys, values = cache.update(states(2, seed=1, width=24), states(2, seed=2, width=16), 0)
    assert (keys.shape[-1], values.shape[-1]) == (24, 16)


def test_transformers_is_told_the_bucket_and_the_position() -> None:
    cache = SharedCache(LAYERS, LENGTH, CPU)
    assert cache.get_seq_length() == 0
    cache.cursor.move(7, 2, 16)
    assert cache.get_mask_sizes(2, 0) == (16, 0)
    assert cache.get_seq_length() == 7
    assert cache.layers[0].get_max_length() == LENGTH


def test_bytes_are_counted_once_a_layer_is_written() -> None:
    cache = SharedCache(LAYERS, LENGTH, CPU)
    assert cache.num_bytes == 0
    write(cache, 1, 0, 1, 8, seed=1)
    assert cache.num_bytes == 2 * HEADS * LENGTH * WIDTH * 4


def test_rows_are_views_of_every_layer_that_was_written() -> None:
    cache = SharedCache(LAYERS, LENGTH, CPU)
    assert cache.rows(0, 4) == []
    write(cache, 0, 0, 8, 16, seed=1)
    write(cache, 1, 0, 8, 16, seed=3)
    rows = cache.rows(2, 6)
    assert [tuple(tensor.shape) for layer in rows for tensor in layer] == [(1, HEADS, 4, WIDTH)] * 2 * LAYERS
    rows[-1][-1].zero_()
    assert not cache.layers[1].values[:, :, 2:6].any()
    assert torch.equal(cache.layers[1].values[:, :, 6:8], states(8, seed=4)[:, :, 6:])
