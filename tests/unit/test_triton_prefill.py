"""A prompt's experts in waves, by the kernels of few and of many pairs, against the same experts one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import Layer, exact_products, make_layer, random_routes
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
            yield Wave(layer, wave, [NUM_EXPERTS - 1 - expert for expert in wave], wave)

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


def test_long_prompts_take_the_kernels_that_decode_an_expert_once_and_both_are_compiled_at_load() -> None:
    layer: Layer = make_layer(((2 * INTER, HIDDEN), (HIDDEN, INTER)), DEFAULT_FORMAT, Layout.PLAIN, NUM_EXPERTS)
    experts = DeviceExperts(layer.slots, layer.bank, layer.geometry, [Layout.PLAIN], NUM_EXPERTS, "silu")
    prefill = PrefillExperts(experts, InWaves(1), top_k=TOP_K, max_rows=1000, scratch_bytes=0, release=Released())  # type: ignore[arg-type]
    assert prefill.of(160) is prefill.of(1)
    assert prefill.of(161) is prefill.of(1000) is not prefill.of(160)
    prefill.warm_up()
