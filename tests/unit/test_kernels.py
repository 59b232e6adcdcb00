"""Routed experts: a row's result is the row's own, whatever else is computed beside it and in whatever order.

bf16 products are compared bit by bit. How a product is rounded may depend on how many rows it has; which row counts
differ is a property of the CPU, so the tests of the row tile run a kernel where it certainly does: one that sums a
single row in two halves, as AVX-512 kernels do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from moespeq.kernels import ExpertMath, combine, expert_products, group_by_expert
from row_kernels import sum_one_row_in_halves

HIDDEN, INTERMEDIATE, TILE = 96, 48, 16


def gate(inner: torch.Tensor) -> torch.Tensor:
    first, second = inner.chunk(2, dim=-1)
    return F.silu(first) * second


GATED = ExpertMath(gate, up_bias=None, down_bias=None)


def random_bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def expert_matrices(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return random_bf16(2 * INTERMEDIATE, HIDDEN, seed=seed) * 0.1, random_bf16(HIDDEN, INTERMEDIATE, seed=seed + 1)


@pytest.mark.parametrize("tile", [None, TILE])
def test_a_product_is_gated_up_then_down(tile: int | None) -> None:
    rows, (up, down) = random_bf16(5, HIDDEN, seed=0).float(), (m.float() for m in expert_matrices())
    expected = (F.silu(rows @ up[:INTERMEDIATE].T) * (rows @ up[INTERMEDIATE:].T)) @ down.T
    torch.testing.assert_close(expert_products(rows, (up, down), GATED, 3, row_tile=tile), expected)


def test_biases_are_those_of_the_expert() -> None:
    up_bias, down_bias = torch.randn(4, 2 * INTERMEDIATE), torch.randn(4, HIDDEN)
    rows, (up, down) = torch.randn(3, HIDDEN), (m.float() for m in expert_matrices())
    math = ExpertMath(gate, up_bias, down_bias)
    expected = F.linear(gate(F.linear(rows, up, up_bias[2])), down, down_bias[2])
    torch.testing.assert_close(expert_products(rows, (up, down), math, 2, row_tile=TILE), expected)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_a_row_has_the_same_bits_alone_and_among_any_others(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    sum_one_row_in_halves(monkeypatch)
    rows, matrices = random_bf16(40, HIDDEN, seed=5), expert_matrices()
    alone = torch.cat([expert_products(row, matrices, GATED, 0, row_tile=TILE) for row in rows.split(1)])
    assert torch.equal(expert_products(rows[:count], matrices, GATED, 0, row_tile=TILE), alone[:count])


def test_a_row_has_the_same_bits_at_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_one_row_in_halves(monkeypatch)
    rows, matrices = random_bf16(17, HIDDEN, seed=6), expert_matrices()
    products = expert_products(rows, matrices, GATED, 0, row_tile=TILE)
    for shift in (1, 7, 16):
        moved = expert_products(rows.roll(shift, 0), matrices, GATED, 0, row_tile=TILE)
        assert torch.equal(moved.roll(-shift, 0), products)


def test_without_a_tile_the_row_count_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fixed tile is for: this fails to differ only if the kernel above no longer depends on the rows."""
    sum_one_row_in_halves(monkeypatch)
    rows, matrices = random_bf16(17, HIDDEN, seed=5), expert_matrices()
    alone = torch.cat([expert_products(row, matrices, GATED, 0, row_tile=None) for row in rows.split(1)])
    assert not torch.equal(expert_products(rows, matrices, GATED, 0, row_tile=None), alone)


_ROW_COUNTS = """
import torch
torch.set_num_threads(1)
from torch.nn.functional import linear, pad
differ, agree = False, True
for seed in range(4):
    generator = torch.Generator().manual_seed(seed)
    weight = (0.05 * torch.randn(2048, 1408, generator=generator)).bfloat16()
    rows = torch.randn(17, 1408, generator=generator).bfloat16()
    bucket = linear(rows, weight)
    alone = torch.cat([linear(row, weight) for row in rows.split(1)])
    padded = torch.cat([linear(pad(row, (0, 0, 0, 16)), weight)[:1] for row in rows.split(1)])
    differ, agree = differ or not torch.equal(alone, bucket), agree and torch.equal(padded, bucket)
print(differ, agree, torch.backends.cpu.get_cpu_capability())
"""


def test_one_row_product_differs_where_the_row_bucket_agrees() -> None:
    """1408 -> 2048 in bf16 with this CPU's own AVX-512 kernels: one row differs from 17, one padded to 17 does not.

    AMX kernels happen to round 1 to 32 rows alike, so they are turned off; a CPU without AVX-512 has no kernel that
    must differ, and there only the agreement is claimed.
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [sys.executable, "-c", _ROW_COUNTS]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout
    differ, agree, capability = output.split()
    assert agree == "True"
    assert differ == "True" or not capability.startswith("AVX512")


@pytest.mark.parametrize(("inputs", "outputs"), [(1408, 2048), (2048, 1408), (64, 96), (48, 64)])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_this_cpus_products_of_a_fixed_row_count_do_not_depend_on_the_place(
    inputs: int, outputs: int, count: int
) -> None:
    weight, rows = random_bf16(outputs, inputs, seed=3) * 0.05, random_bf16(count, inputs, seed=4)
    first = F.linear(F.pad(rows, (0, 0, 0, 17 - count)), weight)[:count]
    last = F.linear(F.pad(rows, (0, 0, 17 - count, 0)), weight)[-count:]
    assert torch.equal(first, last)


def test_pairs_are_grouped_by_expert_in_ascending_order() -> None:
    routes = torch.tensor([[3, 0], [0, 7], [3, 1]])
    groups = {expert: pairs.tolist() for expert, pairs in group_by_expert(routes).items()}
    assert groups == {0: [1, 2], 1: [5], 3: [0, 4], 7: [3]}


def test_grouping_loses_no_pair() -> None:
    routes = torch.randint(0, 9, (33, 4), generator=torch.Generator().manual_seed(0))
    groups = group_by_expert(routes)
    assert sorted(int(pair) for pairs in groups.values() for pair in pairs) == list(range(33 * 4))
    assert all((routes.reshape(-1)[pairs] == expert).all() for expert, pairs in groups.items())


def test_results_are_summed_in_slot_order() -> None:
    """1 + 2^-24 + 2^-24 in float32 is 1 from the left and more from the right."""
    tiny = 2.0**-24
    products = torch.tensor([[[1.0], [tiny], [tiny]], [[tiny], [tiny], [1.0]]])
    total = combine(products, torch.ones(2, 3), torch.float32)
    assert total[0].item() == 1.0
    assert total[1].item() == 1.0 + 2 * tiny


def test_results_are_weighted_in_float32_and_rounded_once() -> None:
    products, weights = random_bf16(6, 4, HIDDEN, seed=8), random_bf16(6, 4, seed=9)
    expected = (products.double() * weights.double()[..., None]).sum(1).to(torch.bfloat16)
    total = combine(products, weights, torch.bfloat16)
    assert total.dtype is torch.bfloat16
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=2**-10)


def test_a_row_is_combined_alone_as_among_others() -> None:
    products, weights = random_bf16(17, 4, HIDDEN, seed=8), random_bf16(17, 4, seed=9)
    together = combine(products, weights, torch.bfloat16)
    for row in (0, 3, 16):
        alone = combine(products[row, None], weights[row, None], torch.bfloat16)
        assert torch.equal(together[row, None], alone)


def test_an_experts_order_of_arrival_cannot_show() -> None:
    """As the target does it: products go to their pair's place, in any order, and only then are summed."""
    routes = torch.tensor([[2, 0, 1], [1, 2, 0]])
    weights, outcome = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)), random_bf16(6, HIDDEN, seed=2)

    def computed(order: Callable[[list[int]], list[int]]) -> torch.Tensor:
        groups, products = group_by_expert(routes), torch.empty(6, HIDDEN, dtype=torch.bfloat16)
        for expert in order(list(groups)):
            products[groups[expert]] = outcome[groups[expert]]
        return combine(products.view(2, 3, -1), weights, torch.bfloat16)

    assert torch.equal(computed(sorted), computed(lambda experts: experts[::-1]))
