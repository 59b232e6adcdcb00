"""A prompt's experts by the grouped kernels, in waves, against the same experts multiplied one by one."""

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


@pytest.mark.parametrize("wave_size", [1, 2, NUM_EXPERTS])
def test_a_prompt_is_the_weighted_sum_of_its_experts(wave_size: int) -> None:
    layer: Layer = make_layer(((2 * INTER, HIDDEN), (HIDDEN, INTER)), DEFAULT_FORMAT, Layout.FIXED, NUM_EXPERTS)
    experts = DeviceExperts(layer.slots, layer.bank, layer.geometry, [Layout.FIXED], NUM_EXPERTS, "silu")
    released = Released()
    prefill = PrefillExperts(experts, InWaves(wave_size), None, [], top_k=TOP_K, release=released)  # type: ignore[arg-type]
    torch.manual_seed(0)
    hidden = torch.randn(70, HIDDEN).to(torch.bfloat16)
    routes, weights = random_routes(70, TOP_K, NUM_EXPERTS, seed=1), torch.rand(70, TOP_K).to(torch.bfloat16)
    routes[:60, 0], routes[:60, 1] = 3, 1  # more pairs than one group holds
    found = prefill.of(70)(0, hidden, routes, weights)
    exact = exact_products(layer, hidden, routes).view(70, TOP_K, HIDDEN)
    expected = (exact * weights.float()[..., None]).sum(1)
    assert (found.float() - expected).norm() <= 0.03 * expected.norm()  # the interpreter cuts where a GPU rounds
    assert sorted(released.slots) == sorted({NUM_EXPERTS - 1 - expert for expert in routes.reshape(-1).tolist()})
