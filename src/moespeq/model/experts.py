"""The experts function: transformers' forward calls it at every MoE layer, and it answers for draft or target.

Shapes: T rows of a pass, K experts a row, H hidden.

A module does not know its layer, so each is tagged after loading with its `ExpertsSite`. The site's mode decides:
draft computes with the resident base and reports its routes; target acquires the exact records and computes with those.
Rows past the live ones are padding: their routes are dropped, they move no bytes and their output is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moespeq.errors import UsageError
from moespeq.kernels import ExpertMath, combine, expert_products, group_by_expert
from moespeq.model.weights import ExpertWeights
from moespeq.residency import Residency

__all__ = [
    "IMPLEMENTATION",
    "DraftExperts",
    "Experts",
    "ExpertsSwitch",
    "TargetExperts",
    "experts_function",
    "register",
    "tag",
]

IMPLEMENTATION = "moespeq"


class Experts(Protocol):
    """One way to compute the routed experts of a layer."""

    def __call__(
        self, layer: int, math: ExpertMath, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], routes and weights [T, K] -> [T, H]."""
        ...


@dataclass(slots=True)
class ExpertsSwitch:
    """Which experts the running pass uses; one object shared by all layers."""

    active: Experts | None = None

    @contextmanager
    def using(self, experts: Experts) -> Iterator[None]:
        """Let `experts` answer inside the block, and then who answered before."""
        before, self.active = self.active, experts
        try:
            yield
        finally:
            self.active = before


@dataclass(slots=True)
class DraftExperts:
    """The resident INT4 bases; one row a step, whose routes `take_routes` gives afterwards.

    An expert whose base is not resident adds nothing; the weights of the others stay as they are.
    """

    weights: ExpertWeights
    _routes: list[list[int]] = field(default_factory=list)

    def __call__(
        self, layer: int, math: ExpertMath, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        (experts,) = routes.tolist()
        self._routes.append(experts)
        products = hidden.new_empty(routes.shape[0] * routes.shape[1], hidden.shape[1])  # [T * K, H]
        for expert, pairs in group_by_expert(routes).items():
            if not self.weights.has_base(layer, expert):
                products[pairs] = 0
                continue
            matrices = self.weights.base(layer, expert, hidden.dtype)
            rows = hidden[pairs // routes.shape[1]]
            products[pairs] = expert_products(rows, matrices, math, expert, row_tile=None)
        return combine(products.view(*routes.shape, -1), weights, hidden.dtype)

    def take_routes(self) -> list[list[int]]:
        """The experts of each layer since the last call."""
        routes, self._routes = self._routes, []
        return routes


@dataclass(slots=True)
class TargetExperts:
    """The exact bf16 experts, from whatever slot their record arrives in. `expect` sets up each pass.

    release: told which slots are read by what was launched so far; a device that computes later than it launches needs
    it, so that no copy overtakes.
    """

    weights: ExpertWeights
    residency: Residency
    release: Callable[[Sequence[int]], object] | None = None
    _on_layer: Callable[[int, list[list[int]]], None] | None = None
    _live_rows: int = 0
    _row_tile: int | None = None

    def expect(
        self, *, live_rows: int, row_tile: int | None, on_layer: Callable[[int, list[list[int]]], None] | None
    ) -> None:
        """The next pass has so many live rows; `on_layer` hears the true routes where wanted."""
        self._live_rows, self._row_tile, self._on_layer = live_rows, row_tile, on_layer

    def __call__(
        self, layer: int, math: ExpertMath, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        live, top_k = routes[: self._live_rows], routes.shape[1]
        if self._on_layer is not None:
            self._on_layer(layer, live.tolist())
        pairs_of = group_by_expert(live)
        products = hidden.new_zeros(routes.numel(), hidden.shape[1])  # [T * K, H]
        for wave in self.residency.acquire(layer, list(pairs_of)):
            for expert, slot, base_row in zip(wave.experts, wave.slots, wave.base_rows, strict=True):
                self.residency.pump()
                matrices = self.weights.exact(layer, slot, base_row, hidden.dtype)
                pairs = pairs_of[expert]
                rows = hidden[pairs // top_k]
                products[pairs] = expert_products(rows, matrices, math, expert, row_tile=self._row_tile)
            if self.release is not None:
                self.release(wave.slots)
        return combine(products.view(*routes.shape, -1), weights, hidden.dtype)


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """What a tagged module knows: its MoE layer, its arithmetic, and the switch."""

    layer: int
    math: ExpertMath
    switch: ExpertsSwitch


def experts_function(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What a tagged module computes, in the form transformers calls it in."""
    site: ExpertsSite = module.moespeq_site  # type: ignore[assignment]
    if site.switch.active is None:
        raise UsageError(
            "The experts are on the other side of the link: call generate, a bare forward cannot fetch them."
        )
    return site.switch.active(site.layer, site.math, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Make the experts function known to transformers under IMPLEMENTATION; calling it again changes nothing."""
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_function)


def tag(modules: Sequence[nn.Module], switch: ExpertsSwitch) -> None:
    """Tell each experts module, in layer order, its layer and arithmetic."""
    for layer, module in enumerate(modules):
        module.moespeq_site = ExpertsSite(layer, _math_of(module), switch)  # type: ignore[assignment]


def _math_of(module: nn.Module) -> ExpertMath:
    """The arithmetic of an experts module besides its two products."""
    activate = module._apply_gate if module.has_gate else module.act_fn
    up_name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
    return ExpertMath(
        activate=activate,  # type: ignore[arg-type]
        up_bias=getattr(module, up_name) if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,  # type: ignore[arg-type]
    )
