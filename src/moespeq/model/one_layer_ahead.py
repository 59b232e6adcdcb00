"""What a layer's router says of the input of the layer before it: the guess of engines that prefetch one layer ahead.

Such an engine needs no draft: while a layer computes, the next layer's own router is asked what it would do with the
same input. Here the guess is only looked at, to be compared with a draft's. A layer's MoE block (its experts module's
parent) is called with a spy in the place of its experts, so any family's router answers, whatever its arithmetic.

Shapes: T rows, K experts a row, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from moespeq.kernels import ExpertMath
from moespeq.model.quantizer import experts_modules

__all__ = ["OneLayerAhead", "RouteSpy"]


class RouteSpy:
    """Stands for experts in either kind of pass: keeps the routes it is given, int64 [T, K], and answers zeros."""

    def __init__(self) -> None:
        self.routes = torch.empty(0, 0, dtype=torch.int64)

    def experts(self, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        self.routes = routes
        return torch.zeros_like(hidden)

    def __call__(self, layer: int, math: ExpertMath, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, routes, weights)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
        raise AssertionError("a MoE block has no attention")


class OneLayerAhead:
    """Told of each layer's input, tells `on_layer` of the next layer, in order; the first is foretold by nobody.

    spying: lets a spy answer the experts' calls inside its block, and then who answered before.
    """

    def __init__(
        self,
        model: nn.Module,
        spying: Callable[[RouteSpy], AbstractContextManager[None]],
        on_layer: Callable[[int, Sequence[Sequence[int]]], None],
    ) -> None:
        self._blocks = [model.get_submodule(name.rpartition(".")[0]) for name, _ in experts_modules(model)]
        self._spying, self._on_layer = spying, on_layer

    def hear_input(self, layer: int, hidden: Tensor) -> None:
        """The experts of MoE layer `layer` are about to compute with `hidden` [T, H]."""
        if layer + 1 == len(self._blocks):
            return
        spy = RouteSpy()
        with self._spying(spy):
            self._blocks[layer + 1](hidden[None])
        self._on_layer(layer + 1, spy.routes.tolist())
