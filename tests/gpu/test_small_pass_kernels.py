"""The kernels of a small pass against their torch references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from moespeq.kernels import decode_attention, linears, rms_norm, small_pass, topk  # noqa: E402

DEVICE = torch.device("cuda")
HALF_ULP = 2.0**-8  # bf16's relative rounding, twice: reference and kernel may fall on two sides of a tie


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize(("cols", "rows"), [(2048, (2048, 512, 60, 1)), (1408, (33,)), (5632, (2048, 7)), (48, (5, 1))])
def test_linears_equal_the_reference_with_biases_and_gates(cols: int, rows: tuple[int, ...]) -> None:
    x = normal(cols)
    weights = [normal(n, cols, seed=n) / cols**0.5 for n in (rows[0], *rows)]
    gates = [normal(rows[0], cols, seed=99) / cols**0.5, *[None] * len(rows)]
    biases = [None, *(normal(n, seed=2 * n) if i % 2 else None for i, n in enumerate(rows))]
    arguments = (x, gates, weights, biases, torch.bfloat16)
    torch.testing.assert_close(
        linears.linears(*arguments), small_pass.linears(*arguments), rtol=2 * HALF_ULP, atol=2 * HALF_ULP
    )


def test_a_linear_maps_bits_do_not_depend_on_what_shares_its_launch() -> None:
    x, weights = normal(2048), [normal(n, 2048, seed=n) for n in (512, 60, 1)]
    together = linears.linears(x, [None] * 3, weights, [None] * 3, torch.bfloat16)
    alone = [linears.linears(x, [None], [weight], [None], torch.bfloat16) for weight in weights]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("hidden", [24, 2048, 4096, 7168])
def test_norms_equal_the_reference(hidden: int) -> None:
    x, y, weight = normal(1, 1, hidden), normal(1, 1, hidden, seed=1), normal(hidden, seed=2)
    total, normed = rms_norm.add_rms_norm(x, y, weight, 1e-6)
    expected_total, expected = small_pass.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=2 * HALF_ULP, atol=0.0)
    assert torch.equal(rms_norm.rms_norm(total, weight, 1e-6), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cols", "k"), [(1, 1), (8, 2), (60, 4), (128, 8), (1000, 6), (1024, 32)])
def test_topk_equals_the_reference_with_ties_infinities_and_nans(cols: int, k: int, dtype: torch.dtype) -> None:
    scores = normal(5, cols, dtype=dtype)
    scores[0, cols // 2] = torch.nan
    scores[1] = -torch.inf
    scores[2] = torch.where(torch.arange(cols, device=DEVICE) % 2 == 1, 0.0, -0.0)
    scores[3] = scores[3].round()
    values, indices = topk.topk(scores, k)
    expected_values, expected_indices = small_pass.topk(scores, k)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(values, scores.topk(k).values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("cols", "k"), [(8, 2), (60, 4), (60, 6), (128, 8)])
def test_softmax_topk_equals_the_reference_and_a_row_does_not_depend_on_the_others(
    cols: int, k: int, normalized: bool
) -> None:
    logits = normal(33, cols)
    values, indices = topk.softmax_topk(logits, k, normalized, torch.float32)
    expected_values, _ = small_pass.softmax_topk(logits, k, normalized, torch.float32)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-7)
    assert torch.equal(topk.softmax_topk(logits, k, normalized, torch.bfloat16)[0], values.bfloat16())
    for row in (0, 7, 32):
        alone_values, alone_indices = topk.softmax_topk(logits[row : row + 1].clone(), k, normalized, torch.float32)
        assert torch.equal(alone_values[0], values[row])
        assert torch.equal(alone_indices[0], indices[row])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("place", [0, 63, 64, 200, 255])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_size", "value_size"), [(16, 16, 128, 128), (32, 4, 128, 128), (4, 2, 192, 24)]
)
def test_one_rows_attention_equals_torch_in_every_bucket(
    heads: int, kv_heads: int, key_size: int, value_size: int, place: int, window: int | None
) -> None:
    length = 320
    keys, values = normal(1, kv_heads, length, key_size), normal(1, kv_heads, length, value_size, seed=1)
    keys[:, :, place:], values[:, :, place:] = torch.nan, torch.nan
    query, key = normal(1, heads, 1, key_size, seed=2), normal(1, kv_heads, 1, key_size, seed=3)
    value = normal(1, kv_heads, 1, value_size, seed=4)
    columns = torch.arange(length, device=DEVICE)
    hidden = (columns > place) | ((columns <= place - window) if window else False)
    mask = torch.zeros(length, device=DEVICE, dtype=torch.bfloat16)
    mask = mask.masked_fill(hidden, torch.finfo(torch.bfloat16).min)[None, None, None]
    results = [
        decode_attention.attend_one_row(
            query, key, value, keys, values, torch.tensor([place], device=DEVICE), mask, bucket_tok=bucket, scaling=0.1
        )
        for bucket in (256, length)
    ]
    assert torch.equal(keys[:, :, place], key[:, :, 0])
    assert torch.equal(values[:, :, place], value[:, :, 0])
    assert torch.equal(*results)
    seen_keys, seen_values = (
        stored[:, :, : place + 1].float().repeat_interleave(heads // kv_heads, 1) for stored in (keys, values)
    )
    expected = F.scaled_dot_product_attention(
        query.float(), seen_keys, seen_values, attn_mask=mask[..., : place + 1].float(), scale=0.1
    )
    torch.testing.assert_close(results[0].float(), expected.transpose(1, 2), rtol=0.02, atol=0.01)


def test_rows_are_written_at_their_places_and_nowhere_else() -> None:
    keys, values = normal(1, 3, 32, 128), normal(1, 3, 32, 24, seed=1)
    key, value = normal(1, 5, 3, 128, seed=2).transpose(1, 2), normal(1, 5, 3, 24, seed=3).transpose(1, 2)
    places = torch.tensor([3, 4, 5, 9, 31], device=DEVICE)
    expected = [stored.index_copy(2, places, new) for stored, new in ((keys, key), (values, value))]
    decode_attention.write_rows(keys, values, places, key, value)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
