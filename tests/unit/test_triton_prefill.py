"""A prompt's experts in waves, by the kernels of few and of many pairs, against the same experts one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import Layer, exact_products, make_layer, random_routes
from moespeq.kernels.chunk_table import ChunkTable
from moespeq.kernels.verify_table import RoutedPairs
from moespeq.model.graphs import prefill_experts as prefill_module
from moespeq.model.graphs.prefill_experts import PrefillExperts
from moespeq.model.graphs.wave_products import DeviceExperts
from moespeq.nested import DEFAULT_FORMAT, Layout
from moespeq.residency import Wave

NUM_EXPERTS, TOP_K, HIDDEN, INTER = 5, 2, 64, 32


class InWaves:
    """Residency that hands a layer's experts out a few at a time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def approach(self, layer: int) -> None:
        """Nothing is guessed."""

    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[Wave]:
        for begin in range(0, len(experts), self.size):
            wave = experts[begin : begin + self.size]
            is_last = begin + self.size >= len(experts)
            yield Wave(layer, wave, [NUM_EXPERTS - 1 - expert for expert in wave], wave, is_last)

    def pump(self) -> None:
        """Nothing to move."""


class Released:
    """Counts which slots were given back."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def __call__(self, slots: Sequence[int]) -> Any:
        self.slots.extend(slots)
        return torch.Event()


@pytest.mark.parametrize(
    ("wave_size", "num_rows", "layout"),
    [
        (1, 70, Layout.FIXED),
        (NUM_EXPERTS, 70, Layout.FIXED),
        (2, 200, Layout.FIXED),
        (NUM_EXPERTS, 200, Layout.FIXED),
        (2, 200, Layout.PLAIN),
    ],
)
def test_a_prompt_is_the_weighted_sum_of_its_experts(wave_size: int, num_rows: int, layout: Layout) -> None:
    layer: Layer = make_layer(((2 * INTER, HIDDEN), (HIDDEN, INTER)), DEFAULT_FORMAT, layout, NUM_EXPERTS)
    experts = DeviceExperts(layer.slots, layer.bank, layer.geometry, [layout], NUM_EXPERTS, "silu")
    released = Released()
    prefill = PrefillExperts(
        experts,
        InWaves(wave_size),  # type: ignore[arg-type]
        top_k=TOP_K,
        max_rows=200,
        scratch_bytes=layer.geometry.bf16_bytes,
        release=released,
    )
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, HIDDEN).to(torch.bfloat16)
    routes = random_routes(num_rows, TOP_K, NUM_EXPERTS, seed=1)
    weights = torch.rand(num_rows, TOP_K).to(torch.bfloat16)
    routes[:60, 0], routes[:60, 1] = 3, 1  # more pairs than one group holds
    found = prefill.of(num_rows)(0, hidden, routes, weights)
    exact = exact_products(layer, hidden, routes).view(num_rows, TOP_K, HIDDEN)
    expected = (exact * weights.float()[..., None]).sum(1)
    assert (found.float() - expected).norm() <= 0.03 * expected.norm()  # the interpreter cuts where a GPU rounds
    assert sorted(released.slots) == sorted({NUM_EXPERTS - 1 - expert for expert in routes.reshape(-1).tolist()})


def test_long_prompts_take_other_kernels_and_both_are_launched_once_a_layout_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[str, Layout]] = []
    monkeypatch.setattr(prefill_module, "weighted_sum", lambda products, _: products)
    for name in ("verify_experts", "prefill_experts"):
        monkeypatch.setattr(
            prefill_module,
            name,
            lambda *_, name=name, layout, **__: launched.append((name, layout)),
        )
    layer: Layer = make_layer(((2 * INTER, HIDDEN), (HIDDEN, INTER)), DEFAULT_FORMAT, Layout.PLAIN, NUM_EXPERTS)
    layouts = [Layout.FIXED, Layout.PLAIN, Layout.FIXED]
    experts = DeviceExperts(layer.slots, layer.bank, layer.geometry, layouts, NUM_EXPERTS, "silu")
    prefill = PrefillExperts(
        experts,
        InWaves(NUM_EXPERTS),  # type: ignore[arg-type]
        top_k=TOP_K,
        max_rows=161,
        scratch_bytes=layer.geometry.bf16_bytes,
        release=Released(),
    )
    prefill.warm_up()
    wanted = {(name, layout) for name in ("verify_experts", "prefill_experts") for layout in layouts}
    assert sorted(launched, key=str) == sorted(wanted, key=str)
    for num_rows, name in ((160, "verify_experts"), (161, "prefill_experts")):  # 64 pairs an expert, and more
        launched.clear()
        hidden, weights = torch.ones(num_rows, HIDDEN, dtype=torch.bfloat16), torch.ones(num_rows, TOP_K)
        prefill.of(num_rows)(1, hidden, random_routes(num_rows, TOP_K, NUM_EXPERTS, seed=0), weights)
        assert launched == [(name, Layout.PLAIN)]


def test_a_batch_with_no_groups_writes_nothing() -> None:
    layer: Layer = make_layer(((2 * INTER, HIDDEN), (HIDDEN, INTER)), DEFAULT_FORMAT, Layout.FIXED, NUM_EXPERTS)
    table = ChunkTable(NUM_EXPERTS, 10, "cpu", num_waves=1, group_pairs=None)
    pairs = RoutedPairs(np.zeros((10, 1), np.int64))
    table.begin_layer(pairs)
    table.fill(0, pairs, [0], [0], [0])  # what an earlier wave left behind
    table.clear()
    products, inner = torch.full((10, HIDDEN), 7.0).bfloat16(), torch.full((10, INTER), 7.0).bfloat16()
    scratch = torch.full((layer.geometry.bf16_bytes // 2,), 7.0).bfloat16()
    prefill_module.prefill_experts(
        torch.ones(10, HIDDEN).bfloat16(), table, layer.slots, layer.bank, products, inner, scratch,
        geometry=layer.geometry, layout=Layout.FIXED, top_k=1, activation="silu",
    )  # fmt: skip
    assert all((tensor == 7.0).all() for tensor in (products, inner, scratch))
